"""The judge, which compiles all headers once for all tests of a process."""
import pytest

from nanochat.judge.judge import Judge
from tests.judge.test_sandbox import require_sandbox


@pytest.fixture(scope="session")
def judge():
    require_sandbox()
    with Judge() as judge:
        yield judge
