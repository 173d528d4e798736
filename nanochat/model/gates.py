"""Gates of the layers (--layer_gates): attention's values, what attention adds to the residual stream and what the MLP
adds are multiplied by a number each that depends on the token.

A gate is a × 2 × sigmoid(map · norm(x)), where x is what the layer's attention or MLP reads, and a a number and map a
vector that are learnt. It is 1 at first, so a model begins as the plain one. These are hyper-connections (arXiv
2409.19606, 2512.24880) of one stream: more streams were dearer, and no better in the runs of dev/LOG.md.
"""
import torch

VALUES, ATTENTION, MLP = range(3)  # the gates in a layer's gate_map, (3, C), and gate_scale, (3, 1)
NUM_GATES = 3


def gate_of(options, weights, which, x, scale=None):
    """Returns a gate (B, T, 1) of x (B, T, C), fp32, or None where a layer with these LayerOptions has none. scale:
    what makes norm(x) of x, (B, T, 1); None: x is norm(x)."""
    if not options.layer_gates:
        return None
    return weights.gate_scale[which].float() * 2 * torch.sigmoid(_logit(weights, which, x, scale))


def gated(gate, x):
    """Returns x (B, T, width) as it goes through the gate."""
    return x if gate is None else (gate * x).to(x.dtype)


def gate_backward(weights, which, x, scale, change):
    """Returns the gradients of map · norm(x), times scale, (B, T, 1), and of the gate's scale, (1,).

    change: the gate × its gradient, (B, T, 1), fp32: the sum over the width of what leaves the gate × its gradient.
    """
    # With z = map · norm(x), the gate's derivative is gate × sigmoid(-z) by z, and gate / a by a. So what went through
    # the gate is needed in `change` alone.
    d_logit = change * torch.sigmoid(-_logit(weights, which, x, scale))
    return scale * d_logit, change.sum().reshape(1) / weights.gate_scale[which].float()


def _logit(weights, which, x, scale):
    product = (x.float() * weights.gate_map[which].float()).sum(-1, keepdim=True)
    if scale is None:
        return product
    return scale * product
