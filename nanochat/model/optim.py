"""The optimizer: Muon for the matrices, AdamW for the other weights. rates.py has their rates. A step (train/step.py)
ends with its update.

Numbers that change with the step (learning rates, momentum, bias corrections) reach the device as one small tensor. The
compiled program contains none of them, so no schedule makes it compile again.
"""
from contextlib import contextmanager
from typing import NamedTuple

import torch

from nanochat.device.collectives import all_reduce_sum
from nanochat.device.mesh import Mesh
from nanochat.device.programs import one_program
from nanochat.model.models import UNDIVIDED
from nanochat.model.rates import ADAM_EPS, AdamW, muon_momentum

MUON_BETA2 = 0.95
# Factors a, b, c of each step of Polar Express (arXiv 2505.16932), for matrices whose largest singular value is at most
# 1, with a margin of 2% for rounding; computed by karpathy/nanochat.
POLAR_EXPRESS = ((8.156554524902461, -22.48329292557795, 15.878769915207462),
                 (4.042929935166739, -2.808917465908714, 0.5000178451051316),
                 (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
                 (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
                 (2.3465413258596377, -1.7097828382687081, 0.42323551169305323))


class Scheduled(NamedTuple):
    """The numbers of one step. They reach the device as one tensor."""
    lr_multiplier: torch.Tensor
    momentum: torch.Tensor  # Muon's
    bias1: torch.Tensor  # Adam's corrections of its two averages
    bias2: torch.Tensor


# A rule updates a weight. Its state is {kind: tensor}, which checkpoints name WEIGHT.KIND.
class ByAdamW(NamedTuple):
    """AdamW (arXiv 1711.05101)."""
    rates: AdamW
    betas: tuple

    def new_state(self, weight):
        return {"momentum": torch.zeros_like(weight), "second_moment": torch.zeros_like(weight)}

    def update(self, weight, state, gradient, scheduled):
        """Returns the weight and its state after an update."""
        beta1, beta2 = self.betas
        lr = self.rates.lr * scheduled.lr_multiplier
        average = state["momentum"].lerp(gradient, 1 - beta1)
        average_square = state["second_moment"].lerp(gradient.square(), 1 - beta2)
        if self.rates.weight_decay:
            weight = weight * (1 - lr * self.rates.weight_decay)
        step = lr * (average / scheduled.bias1) / ((average_square / scheduled.bias2).sqrt() + ADAM_EPS)
        return weight - step, {"momentum": average, "second_moment": average_square}


class ByMuon(NamedTuple):
    """Muon (Jordan et al. 2024) makes the direction of an update orthogonal, evens out its neurons (NorMuon), and
    decays only weights that the update shrinks as well. For stacks of matrices (L, m, n)."""
    lr: float
    weight_decay: float

    def new_state(self, weight):
        return {"momentum": torch.zeros_like(weight), "second_moment": torch.zeros_like(weight[..., :1])}

    def update(self, weight, state, momentum_and_direction, scheduled):
        """Returns the weights and their state after an update. momentum_and_direction: the new momentum, and the
        orthogonal direction that follows from it."""
        momentum, direction = momentum_and_direction
        lr = self.lr * scheduled.lr_multiplier
        update, second_moment = normalise_neurons(direction, state["second_moment"], MUON_BETA2)
        # The same root-mean-square for every shape
        update = update * max(1.0, weight.size(-2) / weight.size(-1)) ** 0.5
        decay = self.weight_decay * cautious_weight_decay(weight, update)
        return weight - lr * (update + decay), {"momentum": momentum, "second_moment": second_moment}


def orthogonalised(stacks, dtype):
    """Returns stacks of matrices, {name: (L, m, n)}, in `dtype`, with rows of equal length and then all singular values
    near 1, so that every direction counts the same."""
    # Matrices of one shape, or transposed to it, form one stack: a third of the products, two thirds of the time to
    # compile.
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
    value exceeds 1.

    A row below a hundredth of the usual length stays proportionally shorter: a neuron without gradients comes to rest
    instead of following its old momentum. So does a matrix whose rows are below 1e-8.
    """
    matrices = matrices.float()
    lengths = matrices.norm(dim=-1, keepdim=True)
    shortest = 0.01 * lengths.square().mean(dim=-2, keepdim=True).sqrt() + 1e-8
    return matrices / (torch.maximum(lengths, shortest) * (1.01 * matrices.size(-2) ** 0.5))


def polar_express(x):
    """Returns matrices (L, m, n), m ≤ n, whose singular values are at most 1, with all of them near 1:
    X <- aX + (bA + cA²)X with A = XXᵀ, and in each step the best a, b and c."""
    # The smallest singular values grow by the product of all a, 990. So do rounding errors in their place.
    # The steps are unrolled, because each has factors of its own. A loop over equal steps (Newton and Schulz's) is no
    # faster: the update of depth 16 is estimated at 23.3 ms with it on v5e, and at 23.0 with these.
    for a, b, c in POLAR_EXPRESS:
        gram = torch.bmm(x, x.mT)  # (L, m, m), of the shorter side
        polynomial = (b * gram.float() + c * torch.bmm(gram, gram).float()).to(x.dtype)
        x = (a * x.float() + torch.bmm(polynomial, x).float()).to(x.dtype)
    return x


def _wide(matrices):
    return matrices.mT if matrices.size(-2) > matrices.size(-1) else matrices


def normalise_neurons(update, second_moment, beta2):
    """Divides each neuron (output) of the update by the running root mean square of its updates (NorMuon, arXiv
    2510.05491). Returns the update, scaled to the norm of an orthogonal matrix unless it almost vanishes, and the new
    `second_moment` (L, m, 1)."""
    update = update.float()
    second_moment = second_moment.lerp(update.square().mean(dim=-1, keepdim=True), 1 - beta2)
    update = update * second_moment.clamp(min=1e-10).rsqrt()
    norm = min(update.shape[-2:]) ** 0.5
    return update * (norm / update.norm(dim=(-2, -1), keepdim=True).clamp(min=0.1)), second_moment


def cautious_weight_decay(weights, update):
    """Returns the weights that the update shrinks, and 0 for the others (arXiv 2510.12402)."""
    return weights * (weights * update > 0)


class Measured(NamedTuple):
    """Named numbers of one step. They stay on the device, as one tensor, until they are fetched together."""
    names: tuple
    values: torch.Tensor  # (names,)

    def fetch(self):
        """Returns {name: number}. Waits for the device."""
        return dict(zip(self.names, self.values.tolist(), strict=True))


class MuonAdamW:
    """Updates a model in place from the `main_grad` of its parameters.

    All state exists from the start, so the first step is the same program as the last. `masters` are the fp32 weights
    that are updated; the model may compute with copies in its training_dtype. With `parts`, each rank holds and updates
    only its part of masters and state (ZeRO-1, arXiv 1910.02054): as many slices of the first dimension, layers or
    tokens, as every other rank, padded with 0. It reduce-scatters gradients, and all-gathers new weights (parts.py).
    The weights in models.UNDIVIDED (weights.py: divides="nothing") are whole.
    """

    def __init__(self, model, rules, dist=None, parts=None, weights=None):
        """model: with whole weights on the device, of which it keeps this rank's parts; or `weights` has them. rules:
        Rules. dist: this rank's Dist, or None for a single rank. parts: this rank's Parts; None: every rank holds and
        updates all weights. weights: see Parts.collect, for models that outgrow a device."""
        self.rules = rules
        self.dist = dist
        self.parts = parts
        if parts:
            self.mesh = parts.mesh
        else:
            self.mesh = Mesh(data=dist.world_size if dist else 1)
        shapes = {name: p.shape for name, p in model.named_parameters()}
        self.lengths = {name: shape[0] for name, shape in shapes.items()}
        self.in_parts = set()  # names of the weights of which each rank updates a part
        for name, shape in shapes.items():
            if parts and len(shape) > 1 and name not in UNDIVIDED:
                self.in_parts.add(name)
        self.masters = {}
        self.state = {}
        self.rule_of = {}
        placed = {}
        if weights is not None:
            placed = self._place(model, weights, shapes)
        self.parameters = dict(model.named_parameters())
        for name, p in self.parameters.items():
            self.masters[name] = placed[name] if name in placed else self._take_master(name, p, model.training_dtype)
            self._create_state(name)
        model.create_main_grads()
        self.clear()  # so that the first step's programs are those of every other step

    # Weights come to the device in two ways. Those of a model that fits are there, whole, and are cut there
    # (_take_master). Those of a larger one come in slices through host memory, and only parts of them reach the device.
    def _place(self, model, weights, shapes):
        """Puts the model on the device, with this rank's parts of `weights`. Returns the optimizer's parts."""
        found, masters = self.parts.collect(weights, {name: shapes[name] for name in self.in_parts},
                                            model.training_dtype)
        for name, tensor in found.items():
            setattr(model, name, torch.nn.Parameter(tensor.to(self.dist.device)))
        model.to(self.dist.device)  # its buffers
        return {name: master.to(self.dist.device) for name, master in masters.items()}

    def _take_master(self, name, p, training_dtype):
        """Returns the master of a parameter: itself, or a copy if the model computes with something else."""
        if name not in self.in_parts and training_dtype == torch.float32:
            return p
        master = self._part_of(name, p.detach()).clone()
        weight = p.detach()
        if name in self.in_parts and self.mesh.divides_weights:
            weight = self.parts.of_model(name, weight).clone()
        p.data = weight.to(training_dtype)
        return master

    def _create_state(self, name):
        adam = self.rules.adam.get(name)
        rule = ByMuon(self.rules.matrix_lr, self.rules.matrix_weight_decay)
        if adam:
            rule = ByAdamW(adam, self.rules.betas)
        self.rule_of[name] = rule
        state = rule.new_state(self.masters[name])
        if self.rules.average_decay:
            state["average"] = self.masters[name].detach().clone()
        self.state |= {f"{name}.{kind}": tensor for kind, tensor in state.items()}

    def _state_of(self, name):
        """Returns {kind: tensor} of a parameter."""
        kinds = "momentum", "second_moment", "average"
        return {kind: self.state[f"{name}.{kind}"] for kind in kinds if f"{name}.{kind}" in self.state}

    def scheduled(self, step):
        """Returns the numbers of `step` as a CPU tensor (4,), see Scheduled."""
        beta1, beta2 = self.rules.betas
        age = self.rules.earlier_steps + step  # of the momenta
        return torch.tensor([self.rules.lr_multiplier(step), muon_momentum(age),
                             1 - beta1 ** (age + 1), 1 - beta2 ** (age + 1)], dtype=torch.float32)

    # A step whose loss or gradient is not finite must change nothing, and the host must not wait to find out. So the
    # device computes the new weights and state in any case, and `is_good` chooses between them and the old ones, tensor
    # by tensor. The sums are cleared either way: a bad step's gradients do not reach the next one. All of it is one
    # program for good and bad steps.
    @torch.no_grad()
    def update(self, scheduled, sums):
        """All-reduces gradients and `sums`, updates the weights, and sets the sums to zero.

        scheduled: the result of scheduled(step), on the parameters' device. sums: {name: scalar}.
        Returns Measured, on the device: the sums and the gradient's norm. If one of them is not finite, weights and
        state stay as they are; the device decides that, and the host does not wait for it.
        """
        gradients = self._sum_over_ranks(sums)
        measured = {**sums, "grad_norm": self._norm(gradients)}
        if self.rules.clip_norm > 0:
            scale = (self.rules.clip_norm / measured["grad_norm"]).clamp(max=1)
            gradients = {name: scale * gradient for name, gradient in gradients.items()}
        values = torch.stack(list(measured.values()))
        is_good = values.isfinite().all()  # the same on every rank, because the numbers are
        new_weights = {}  # of weights with a separate master
        for name, new, new_state in self._updated(gradients, Scheduled(*scheduled.unbind())):
            p, master, state = self.parameters[name], self.masters[name], self._state_of(name)
            for held, tensor in [(master, new), *((state[kind], new_state[kind]) for kind in state)]:
                held.copy_(torch.where(is_good, tensor, held))
            if master is not p:
                new_weights[name] = master.to(p.dtype)
        if self.parts:
            of_parts = {name: weight for name, weight in new_weights.items() if name in self.in_parts}
            new_weights |= self.parts.new_weights(of_parts, self.lengths)
        for name, weight in new_weights.items():
            self.parameters[name].copy_(weight)
        self.clear(sums.values())
        return Measured(tuple(measured), values)

    def _updated(self, gradients, scheduled):
        """Yields (name, new master, new state) of each parameter, so that `update` can choose between them and the old
        ones."""
        of_muon = self._momenta_and_directions(
            {name: gradient for name, gradient in gradients.items() if name not in self.rules.adam}, scheduled.momentum)
        for name in self.parameters:
            master, state = self.masters[name], self._state_of(name)
            change = of_muon.get(name, gradients[name])  # AdamW gets the gradient
            new, new_state = self.rule_of[name].update(master, state, change, scheduled)
            if self.rules.average_decay:
                new_state["average"] = state["average"].lerp(new, 1 - self.rules.average_decay)
            yield name, new, new_state

    def _momenta_and_directions(self, gradients, momentum):
        """Returns {name: (momentum, direction)} for ByMuon, of gradients {name: (L, m, n)}: all matrices at once,
        because stacks of one shape are orthogonalised together."""
        momenta = {}
        nesterov = {}  # Nesterov's momentum
        for name, gradient in gradients.items():
            momenta[name] = momentum * self.state[f"{name}.momentum"] + (1 - momentum) * gradient
            nesterov[name] = momentum * momenta[name] + (1 - momentum) * gradient
        directions = orthogonalised(nesterov, self.rules.matrix_dtype or torch.float32)
        return {name: (momenta[name], directions[name]) for name in momenta}

    def clear(self, sums=()):
        """Sets the sums of gradients and `sums` to zero, as every update does at its end."""
        # The order is part of the next program: XLA assigns the memory of arguments to results of the same size, the
        # results in the order of these lines, the arguments in the order of use. In reverse, each gradient stays in
        # place. Otherwise all would be copied: on v5e, a micro-step at depth 16 would take 156.3 Mcycles instead of
        # 151.6, and move 2.4 GB more through HBM.
        for p in reversed(list(self.parameters.values())):
            p.main_grad.zero_()
        for total in sums:
            total.zero_()

    # The parts of the ranks

    def _sum_over_ranks(self, sums):
        """All-reduces `sums` in place. Returns the reduced gradients, {name: gradient}; of a weight in parts, this
        rank's."""
        gradients = {name: p.main_grad for name, p in self.parameters.items()}
        if self.dist:
            whole = [gradient for name, gradient in gradients.items() if name not in self.in_parts]
            whole += sums.values()
            all_reduce_sum(whole, self.dist)
            if self.mesh.tensor > 1:  # ranks along it have computed the same
                for total in whole:
                    total /= self.mesh.tensor
        for name in gradients:
            if name in self.in_parts:
                gradients[name] = self.parts.sum_gradient(name, gradients[name])
        return gradients

    def _norm(self, gradients):
        """Returns the norm of all gradients together, {name: gradient or this rank's part of it}."""
        squares_of_parts = []
        whole = []
        for name, gradient in gradients.items():
            squares = squares_of_parts if name in self.in_parts else whole
            squares.append(gradient.square().sum())
        if not squares_of_parts:
            return torch.stack(whole).sum().sqrt()
        # The ranks' parts do not overlap, and their padding is 0, so their squares add up. Whole gradients count once.
        total = sum(squares_of_parts)
        all_reduce_sum([total], self.dist)
        return (total + sum(whole)).sqrt()

    def _part_of(self, name, tensor):
        return self.parts.of_optimizer(tensor) if name in self.in_parts else tensor

    @contextmanager
    def averaged_weights(self):
        """Within the block, the model's weights are their running averages. Every rank must enter it."""
        with torch.no_grad():
            with one_program(self.dist, "average weights", collective=True):
                kept = {name: p.detach().clone() for name, p in self.parameters.items()}
                for name, p in self.parameters.items():
                    average = self.state[f"{name}.average"].to(p.dtype)
                    if name in self.in_parts:
                        average = self.parts.new_weight(name, average, self.lengths[name])
                    p.copy_(average)
            yield
            with one_program(self.dist, "weights again"):
                for name, p in self.parameters.items():
                    p.copy_(kept[name])

    # Checkpoints

    def sizes(self):
        """Returns ({name: bytes}, {name: bytes}) of the weights and the state that host_state returns."""
        return self._sizes(self.masters), self._sizes(self.state)

    def _sizes(self, tensors):
        sizes = {}
        for name, tensor in tensors.items():
            bytes_per_slice = tensor.nbytes // tensor.size(0)
            sizes[name] = bytes_per_slice * self.lengths[_parameter_of(name)]
        return sizes

    @torch.no_grad()
    def host_state(self, names=None):
        """Returns ({name: weight}, {name: state}): whole fp32 copies in host memory of the tensors in `names`, or of
        all. Every rank must call it, because it gathers the ranks' parts."""
        return self._on_host(self.masters, names), self._on_host(self.state, names)

    def _on_host(self, tensors, names):
        copies = {}
        for name, tensor in tensors.items():
            parameter = _parameter_of(name)
            is_needed = names is None or name in names
            copy = None
            if parameter in self.in_parts:
                copy = self.parts.whole_on_host(tensor, self.lengths[parameter], is_needed)
            elif is_needed:
                copy = tensor.detach().to("cpu", copy=True)
            if copy is not None:
                copies[name] = copy
        return copies

    @torch.no_grad()
    def load_state_dict(self, state):
        """Restores the state, the second result of host_state. (__init__ takes the weights from the model.)"""
        for name, tensor in self.state.items():
            tensor.copy_(self._part_of(_parameter_of(name), state[name]))


def _parameter_of(name):
    return name.partition(".")[0]
