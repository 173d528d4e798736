from tests.data.conftest import as_nobody  # noqa: F401  a fixture
