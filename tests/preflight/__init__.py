import importlib.util

import pytest

needs_compiler = pytest.mark.skipif(not (importlib.util.find_spec("libtpu") and importlib.util.find_spec("jax")),
                                    reason="needs libtpu and jax: pip install '.[tpu]'")
