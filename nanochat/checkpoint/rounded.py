"""A state in a third of its bytes, for the seconds between the notice of a preemption and the end of the VM.

The state of a depth-16 model is 4.0 GB. At 100 MB/s a notice of 30 s is too short for it, and long enough for the
1.4 GB of its rounded form:

    weights                  bfloat16, with which the model computes anyway
    averages of gradients    8 bits (float8_e4m3fn), each row divided by its largest value over 448
    averages of squares      their roots, in the same way and never rounded to 0, because updates are divided by them
    everything else          unchanged: one number per row, counters, the carry

A run that resumes from it goes on at the step of the notice with the same batches, and not bit for bit as if it had
not been disturbed.
"""
import torch

LARGEST = 448.0  # of float8_e4m3fn
SMALLEST = 2.0**-9  # above 0
SCALE = ".scale"  # follows the name of a tensor; the scales of its rows are float32
MOMENTUM, SECOND_MOMENT = ".momentum", ".second_moment"


def round_state(model_state, optimizer_state):
    """Returns the rounded forms of {name: fp32 weight} and {name: state}, as in the optimizer's host_state."""
    weights = {name: weight.bfloat16() for name, weight in model_state.items()}
    rounded = {}
    for name, tensor in optimizer_state.items():
        if tensor.size(-1) == 1 or not name.endswith((MOMENTUM, SECOND_MOMENT)):
            rounded[name] = tensor
        elif name.endswith(MOMENTUM):
            rounded[name], rounded[name + SCALE] = _to_8_bits(tensor)
        else:
            rounded[name], rounded[name + SCALE] = _to_8_bits(tensor.sqrt(), smallest=SMALLEST)
    return weights, rounded


def restored(tensors):
    """Returns {name: tensor} as round_state was given it, as far as it can be told from its rounded form. Tensors that
    are not rounded stay as they are."""
    found = {}
    for name, tensor in tensors.items():
        scale = tensors.get(name + SCALE)
        if scale is not None:
            values = tensor.float() * scale
            found[name] = values.square() if name.endswith(SECOND_MOMENT) else values
        elif tensor.dtype == torch.bfloat16:
            found[name] = tensor.float()
        elif not name.endswith(SCALE):
            found[name] = tensor
    return found


def _to_8_bits(tensor, smallest=0.0):
    """Returns the tensor in 8 bits and the fp32 scales (…, 1) of its rows. smallest: the least that a value above 0
    becomes."""
    scale = tensor.abs().amax(-1, keepdim=True) / LARGEST
    values = tensor / scale.clamp_min(torch.finfo(torch.float32).tiny)
    if smallest:
        values = torch.where(tensor > 0, values.clamp_min(smallest), values)
    return values.to(torch.float8_e4m3fn), scale
