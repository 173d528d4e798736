"""What Muon (Jordan et al. 2024) does to stacks of matrices: it makes the direction of an update orthogonal, evens out
its neurons, and lets only those weights decay that the update shrinks, too."""
import torch

# Factors a, b, c of each step of Polar Express (arXiv 2505.16932), for matrices whose largest singular value is at most
# 1, with a margin of 2% for rounding; computed by nanochat.
POLAR_EXPRESS = ((8.156554524902461, -22.48329292557795, 15.878769915207462),
                 (4.042929935166739, -2.808917465908714, 0.5000178451051316),
                 (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
                 (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
                 (2.3465413258596377, -1.7097828382687081, 0.42323551169305323))


def orthogonalised(stacks, dtype):
    """Returns stacks of matrices, {name: (L, m, n)}, in `dtype`, with rows of equal length and then all singular values
    near 1 (Muon, Jordan et al. 2024): a step in which every direction counts the same.

    Matrices of one shape, transposed or not, go through it as one stack: a third of the products, and a program that
    compiles in two thirds of the time.
    """
    groups = {}
    for name, stack in stacks.items():
        groups.setdefault(_wide(stack).shape[1:], []).append(name)
    results = {}
    for names in groups.values():
        together = polar_express(torch.cat([_wide(equal_rows(stacks[name]).to(dtype)) for name in names]))
        for name, x in zip(names, together.split([stacks[name].size(0) for name in names]), strict=True):
            results[name] = x if x.shape == stacks[name].shape else x.mT
    return results


def equal_rows(matrices):
    """Returns matrices (L, m, n) with rows of equal length, fp32, and a norm of at most 1 / 1.01, so that no singular
    value is above 1.

    A row below a hundredth of the usual length stays as much shorter: a neuron that gets no gradient any more comes to
    rest, instead of following what is left of its momentum. So does a matrix whose rows are below 1e-8.
    """
    matrices = matrices.float()
    lengths = matrices.norm(dim=-1, keepdim=True)
    shortest = 0.01 * lengths.square().mean(dim=-2, keepdim=True).sqrt() + 1e-8
    return matrices / (torch.maximum(lengths, shortest) * (1.01 * matrices.size(-2) ** 0.5))


def polar_express(x):
    """Returns matrices (L, m, n), m ≤ n, with all singular values near 1, of those whose singular values are at most 1:
    X <- aX + (bA + cA²)X with A = XXᵀ, and in each step the a, b and c that are best there."""
    # The smallest singular values grow by the product of all a, 990. So does what rounding left in their place.
    for a, b, c in POLAR_EXPRESS:
        gram = torch.bmm(x, x.mT)  # (L, m, m), of the shorter side
        polynomial = (b * gram.float() + c * torch.bmm(gram, gram).float()).to(x.dtype)
        x = (a * x.float() + torch.bmm(polynomial, x).float()).to(x.dtype)
    return x


def _wide(matrices):
    """Returns the matrices, transposed if they have more rows than columns."""
    return matrices.mT if matrices.size(-2) > matrices.size(-1) else matrices


def normalise_neurons(update, second_moment, beta2):
    """Divides each neuron (output) of the update by the running root mean square of its updates (NorMuon, arXiv
    2510.05491). Returns the update, with the norm of an orthogonal matrix unless next to nothing is left of it, and the
    new `second_moment` (L, m, 1)."""
    update = update.float()
    second_moment = second_moment.lerp(update.square().mean(dim=-1, keepdim=True), 1 - beta2)
    update = update * second_moment.clamp(min=1e-10).rsqrt()
    norm = min(update.shape[-2:]) ** 0.5
    return update * (norm / update.norm(dim=(-2, -1), keepdim=True).clamp(min=0.1)), second_moment


def cautious_weight_decay(weights, update):
    """Returns the weights that decay, and 0 where the update does not shrink them, too (arXiv 2510.12402)."""
    return weights * (weights * update > 0)
