"""Chooses the kernels by name: how the layers run, attention, and the loss.

| name      | runs on                | layers            | attention         | the loss holds the logits of     |
|-----------|------------------------|-------------------|-------------------|----------------------------------|
| `current` | everywhere             | one after another | PyTorch's         | all tokens (loss.py)             |
| `chunked` | TPU, XLA               | a loop            | PyTorch's         | up to 8,192 tokens (xla_loss.py) |
| `chunked` | CPU, CUDA              | one after another | PyTorch's         | 1,024 tokens (loss.py)           |
| `flash`   | TPU with jax           | a loop            | Pallas kernels    | up to 8,192 tokens (xla_loss.py) |

With a teacher, the loss of `current` holds the logits of all tokens, the others those of a chunk; loss.py has the
mathematics. `auto` is `flash` on a TPU with jax installed, `chunked` on a TPU without it, and otherwise
`current`.
"""
import importlib.util
from functools import partial

from nanochat.common import BadInput
from nanochat.kernels import int8, loss, plain, xla, xla_loss
from nanochat.kernels.products import Int8, Plain
from nanochat.kernels.sharded import WHOLE
from nanochat.model.layers import PLAIN, Kernels, Products


def available_kernels(device_type):
    """Returns the names of the kernels that run on `device_type` on this machine."""
    names = ["current", "chunked"]
    if device_type in ("tpu", "xla") and importlib.util.find_spec("jax"):
        names.append("flash")
    return names


def get_kernels(name, device_type, sharding=WHOLE, chunk_tokens=None, products="bfloat16"):
    """Returns the Kernels called `name`. sharding: how the ranks divide the model's weights; chunk_tokens: tokens whose
    logits a chunked loss holds at a time; None: the device's default; products: bfloat16 or int8, of the layers
    and the loss in training. Raises BadInput if `device_type` cannot run them.
    """
    available = available_kernels(device_type)
    if name == "auto":
        name = "current"
        if device_type == "tpu":
            name = "flash" if "flash" in available else "chunked"
    if name not in available:
        raise BadInput(f"--kernel={name} does not run here (device type {device_type}): "
                       f"choose {' or '.join(available)}")
    on_xla = device_type in ("tpu", "xla")
    if on_xla and name != "current":
        return xla.get_kernels(name, device_type == "xla", sharding, chunk_tokens or xla_loss.CHUNK_TOKENS,
                               Int8() if products == "int8" else Plain())
    if sharding != WHOLE:
        raise BadInput(f"--mesh_fsdp and --mesh_tensor need layers that run as a loop on XLA, and --kernel={name} has "
                       f"none here (device type {device_type}): use 1 chip along both, or --kernel=flash or chunked on "
                       "tpu or xla")
    recompute = plain.recompute_on_xla if on_xla else plain.recompute
    if name == "current":
        cross_entropy = loss.full_cross_entropy
        mean_loss = loss.full_mean_loss
    else:
        chunk_tokens = chunk_tokens or loss.CHUNK_TOKENS
        cross_entropy = partial(loss.chunked_cross_entropy, chunk_tokens)
        mean_loss = partial(loss.chunked_mean_loss, chunk_tokens)
    in_layer = PLAIN
    if products == "int8":
        in_layer = Products(int8.Linear.apply, int8.LinearOfSquare.apply)
        mean_loss = partial(xla_loss.mean_loss, chunk_tokens or loss.CHUNK_TOKENS, WHOLE, Int8())
    return Kernels(name, plain.attention, cross_entropy, mean_loss, plain.embedding, recompute, products=in_layer)
