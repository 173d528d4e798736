"""The flags of scripts that load a model. Nothing here imports torch, so --help comes at once."""
from dataclasses import dataclass

from nanochat.common import flag, not_empty
from nanochat.data.tokenizer import TokenizerFlags
from nanochat.device.ranks import DEVICE_TYPES, has_gpu, resolve_device_type
from nanochat.device.tpu import count_tpu_chips


@dataclass(frozen=True)
class CheckpointFlags(TokenizerFlags):
    """Which model a script loads, and the device."""
    checkpoint: str = flag("", "a run (its newest checkpoint), RUN/step_000100 or a path; default: the newest of all",
                           of=not_empty)
    device_type: str = flag("auto", "one of " + ", ".join(DEVICE_TYPES))


@dataclass(frozen=True)
class ModelFlags(CheckpointFlags):
    """Which model a script completes text with, and the device."""
    quantize: str = flag("none", "int8: on a CPU, a GPT takes less than half the memory and is several times as fast",
                         choices=("none", "int8"))


def resolve_inference_device_type(requested):
    """Returns the device type for `--device_type`, like resolve_device_type, but `auto` is "cpu" without a TPU or GPU:
    XLA's CPU devices imitate a TPU, and are slower."""
    if requested == "auto" and not count_tpu_chips() and not has_gpu():
        return "cpu"
    return resolve_device_type(requested)
