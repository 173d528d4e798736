"""Code with its own copy of the model's mathematics refuses to run when the model was changed elsewhere."""
from types import SimpleNamespace

import pytest
import torch.nn.functional as F

from nanochat.common import BadInput
from nanochat.export import export
from nanochat.infer.quantize import require_same_model
from nanochat.kernels.choose import get_kernels
from nanochat.kernels.xla import require_same_layer
from nanochat.model import layers
from nanochat.model.logit_cap import LogitCap


def flash():
    pytest.importorskip("jax")
    return get_kernels("flash", "xla")


COPIES = {"chunked": lambda: get_kernels("chunked", "xla"), "flash": flash, "int8": require_same_model,
          "transformers": export.check_copy}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("changed", [{"relu": F.gelu}, {"rms_norm": lambda x, *args, eps: 1.01 * F.rms_norm(x, *args)}])
def test_a_copy_of_the_model_refuses_a_model_that_was_changed(name, changed, monkeypatch):
    COPIES[name]()
    require_same_layer.cache_clear()
    require_same_model.cache_clear()
    monkeypatch.setattr(layers, "F", SimpleNamespace(**{**vars(F), **changed}))
    with pytest.raises(BadInput, match="another layer|another model|something else"):
        COPIES[name]()


def test_an_export_refuses_another_cap_of_the_logits(monkeypatch):
    export.check_copy()
    monkeypatch.setattr(LogitCap, "__call__", lambda self, logits: logits)
    with pytest.raises(BadInput, match="something else"):
        export.check_copy()
