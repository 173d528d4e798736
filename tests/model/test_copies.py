"""Code with its own copy of the model's mathematics refuses to run when the model was changed elsewhere."""
from types import SimpleNamespace

import pytest
import torch.nn.functional as F

from nanochat.common import BadInput
from nanochat.export import export
from nanochat.infer import quantize
from nanochat.infer.quantize import require_same_model
from nanochat.kernels import gpt_layer, same_layer, xla
from nanochat.kernels.choose import get_kernels
from nanochat.kernels.same_layer import require_same_layer
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


@pytest.mark.parametrize("module, check", [(same_layer, lambda: require_same_layer(xla._attend)),
                                           (quantize, require_same_model)])
def test_an_option_that_a_copy_does_not_know_leaves_it_usable(module, check, monkeypatch):
    require_same_layer.cache_clear()
    require_same_model.cache_clear()
    monkeypatch.setattr(module, "KNOWN", {"head_dim", "layer_gates"})
    check()


def test_a_wrong_backward_pass_by_hand_is_refused(monkeypatch):
    require_same_layer.cache_clear()
    monkeypatch.setattr(layers, "shift_keys_backward", lambda d_k, head_dim: d_k)
    with pytest.raises(BadInput, match="--kernel=chunked and flash compute another layer .*use --kernel=current"):
        require_same_layer(xla._attend)


def test_one_wrong_gradient_among_many_is_refused(monkeypatch):
    require_same_layer.cache_clear()
    backward = gpt_layer._backward

    def with_another_scale(*args):
        *gradients, of_weights = backward(*args)
        return (*gradients, of_weights._replace(x0_scale=1.05 * of_weights.x0_scale))

    monkeypatch.setattr(gpt_layer, "_backward", with_another_scale)
    with pytest.raises(BadInput, match="another layer"):
        require_same_layer(xla._attend)
