"""Chooses the kernels by name: how the layers are run, attention, and the loss.

| name      | layers            | attention             | cross-entropy                               | runs on      |
|-----------|-------------------|-----------------------|---------------------------------------------|--------------|
| `current` | one after another | PyTorch's             | PyTorch's                                   | everywhere   |
| `chunked` | a loop (on XLA)   | PyTorch's; own on cpu | in chunks of tokens: never holds all logits | everywhere   |
| `flash`   | a loop            | one Pallas kernel     | in chunks of tokens                         | TPU with jax |
| `cce`     | one after another | PyTorch's             | cut cross-entropy, from its package         | CUDA         |

`auto` is `flash` on a TPU where jax is installed, `chunked` on cpu, and else `current`.
"""
import importlib.util
from functools import partial

from nanochat.common import BadInput
from nanochat.kernels import distillation, on_cpu, plain
from nanochat.kernels.sharded import WHOLE
from nanochat.model.layers import Kernels


def available_kernels(device_type):
    """Names of the kernels that run on `device_type` on this machine."""
    names = ["current", "chunked"]
    if device_type in ("tpu", "xla") and importlib.util.find_spec("jax"):
        names.append("flash")
    if device_type == "cuda" and importlib.util.find_spec("cut_cross_entropy"):
        names.append("cce")
    return names


def get_kernels(name, device_type, sharding=WHOLE):
    """The Kernels called `name`. sharding: how the ranks divide the model's weights. Raises BadInput if `device_type`
    cannot run them."""
    available = available_kernels(device_type)
    if name == "auto":
        best = {"tpu": "flash", "cpu": "chunked"}.get(device_type)
        name = best if best in available else "current"
    if name not in available:
        raise BadInput(f"--kernel={name} does not run here (device type {device_type}): "
                       f"choose {' or '.join(available)}")
    if device_type in ("tpu", "xla") and name in ("chunked", "flash"):
        from nanochat.kernels import xla
        return xla.get_kernels(name, device_type == "xla", sharding)
    if sharding != WHOLE:
        raise BadInput(f"--mesh_fsdp and --mesh_tensor (or TPU_MESH_CONFIG) need layers that run as a loop on XLA, and "
                       f"--kernel={name} has none here (device type {device_type}): use 1 chip along both, or "
                       "--kernel=flash or chunked on tpu or xla")
    cross_entropy = {"chunked": plain.chunked_cross_entropy, "cce": plain.cut_cross_entropy}.get(
        name, plain.full_cross_entropy)
    recompute = plain.recompute_on_xla if device_type in ("tpu", "xla") else plain.recompute
    mean_distillation = distillation.mean_loss if name == "current" else plain.mean_distillation
    attention, mean_cross_entropy = plain.attention, partial(_mean, cross_entropy)
    if device_type == "cpu" and name == "chunked":
        attention, mean_cross_entropy = on_cpu.attention, on_cpu.mean_cross_entropy
    return Kernels(name, attention, cross_entropy, mean_cross_entropy, mean_distillation, plain.embedding, recompute)


def _mean(cross_entropy, *arguments):
    return cross_entropy(*arguments).mean()
