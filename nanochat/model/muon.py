"""What Muon (Jordan et al. 2024) does to stacks of matrices: it makes the direction of an update orthogonal, evens out
its neurons, and lets only those weights decay that the update shrinks, too."""
import torch

from nanochat.device.xla_ops import repeat


def newton_schulz(matrices, dtype, steps=5):
    """Orthogonalises every matrix of a stack (L, m, n): all singular values go to about 1 (Muon, Jordan et al. 2024).

    The quintic iteration X <- aX + (bA + cA²)X with A = XXᵀ; baddbmm rather than addmm, which torch_xla runs on the
    host. Returns a stack of the same shape in `dtype`.
    """
    x = _wide(matrices.to(dtype))
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # the largest singular value is at most 1
    if x.device.type == "xla":
        x = repeat(_newton_schulz_step, x, steps)
    else:
        for _ in range(steps):
            x = _newton_schulz_step(x)
    return x.mT if matrices.size(-2) > matrices.size(-1) else x


def _newton_schulz_step(x):
    a, b, c = 3.4445, -4.7750, 2.0315
    gram = torch.bmm(x, x.mT)
    return torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)


def _wide(matrices):
    """Returns the matrices, transposed if they have more rows than columns."""
    return matrices.mT if matrices.size(-2) > matrices.size(-1) else matrices


def newton_schulz_of_all(stacks, dtype):
    """Returns newton_schulz of each stack of matrices, {name: (L, m, n)}.

    Matrices of one shape, transposed or not, go through it as one stack: a third of the products, and a program that
    compiles in two thirds of the time.
    """
    groups = {}
    for name, stack in stacks.items():
        groups.setdefault(_wide(stack).shape[1:], []).append(name)
    results = {}
    for names in groups.values():
        together = newton_schulz(torch.cat([_wide(stacks[name].to(dtype)) for name in names]), dtype)
        for name, x in zip(names, together.split([stacks[name].size(0) for name in names]), strict=True):
            results[name] = x if x.shape == stacks[name].shape else x.mT
    return results


def normalise_neurons(update, second_moment, beta2):
    """Divides each neuron (output) of the update by the running root mean square of its updates, keeping the update's
    norm (NorMuon, arXiv 2510.05491). Returns the update and the new `second_moment` (L, m, 1)."""
    update = update.float()
    second_moment = second_moment.lerp(update.square().mean(dim=-1, keepdim=True), 1 - beta2)
    norm_before = update.norm(dim=(-2, -1), keepdim=True)
    update = update * second_moment.clamp(min=1e-10).rsqrt()
    return update * (norm_before / update.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-10)), second_moment


def cautious_weight_decay(weights, update):
    """Returns the weights that decay, and 0 where the update does not shrink them, too (arXiv 2510.12402)."""
    return weights * (weights * update > 0)
