"""A state in a third of its bytes, for the seconds between the notice of a preemption and the end of the VM.

The state of a depth-16 model is 4.0 GB. At 100 MB/s, a notice of 30 s is too short for it, and long enough for the
1.4 GB of its rounded form:

    weights                  bfloat16, with which the model computes anyway
    averages of gradients    8 bits (float8_e4m3fn); each row is divided by its largest value over 448
    averages of squares      their roots in the same way, never rounded to 0, because updates are divided by them
    everything else          unchanged

A run that resumes from it continues at the step of the notice with the same batches, but not bit for bit.
"""
import torch

LARGEST = 448.0  # of float8_e4m3fn
SMALLEST = 2.0**-9  # above 0
PIECE_BYTES = 2**28  # of fp32: small files, so that all ranks write and several uploads run at the same time
MOMENTUM = ".momentum"  # ends the names of averages of gradients
SECOND_MOMENT = ".second_moment"  # … of squares
SCALE = ".row_scale"  # follows the name of a rounded average: the fp32 scales of its rows


def round_state(model_state, optimizer_state):
    """Returns the rounded forms of {name: fp32 weight} and {name: state}, as in the optimizer's host_state."""
    weights = {name: weight.bfloat16() for name, weight in model_state.items()}
    state = {}
    for name, tensor in optimizer_state.items():
        if name.endswith(MOMENTUM):
            state[name], state[name + SCALE] = _to_8_bits(tensor, 0.0)
        elif name.endswith(SECOND_MOMENT):
            state[name], state[name + SCALE] = _to_8_bits(tensor.sqrt(), SMALLEST)
        else:
            state[name] = tensor
    return weights, state


def rounded_sizes(sizes, of_weights):
    """Returns {name: bytes} of the rounded form of fp32 tensors with these, {name: bytes}. The scales count nothing.
    of_weights: these are the model's weights, not the optimizer's state."""
    found = {}
    for name, size in sizes.items():
        if name.endswith((MOMENTUM, SECOND_MOMENT)):
            found[name] = size // 4
            found[name + SCALE] = 0
        elif of_weights:
            found[name] = size // 2
        else:
            found[name] = size
    return found


def restored(tensors):
    """Returns {name: tensor} with what round_state has rounded in fp32 again, and all other tensors as they are."""
    found = {}
    for name, tensor in tensors.items():
        scale = tensors.get(name + SCALE)
        if scale is not None:
            values = tensor.float() * scale
            found[name] = values.square() if name.endswith(SECOND_MOMENT) else values
        elif tensor.dtype == torch.bfloat16 and not name.endswith((MOMENTUM, SECOND_MOMENT)):
            found[name] = tensor.float()
        elif not name.endswith(SCALE):
            found[name] = tensor
    return found


def _to_8_bits(tensor, smallest):
    """Returns the tensor in 8 bits and the fp32 scales (…, 1) of its rows. A value above 0 becomes at least `smallest`
    times its scale."""
    # A row's largest value becomes 448, the largest of float8_e4m3fn, which has no infinity: what is too large for it
    # becomes NaN. A row of zeros has the scale 0, and is divided by the smallest normal fp32 number instead.
    scale = tensor.abs().amax(-1, keepdim=True) / LARGEST
    values = tensor / scale.clamp_min(torch.finfo(torch.float32).tiny)
    if smallest:
        values = torch.where(tensor > 0, values.clamp_min(smallest), values)
    return values.to(torch.float8_e4m3fn), scale
