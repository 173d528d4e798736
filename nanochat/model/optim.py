"""The optimizer: Muon for the matrices, AdamW for the other weights. rates.py has their learning rates.

Everything that changes from step to step (learning rates, momentum, bias corrections) reaches the device as one small
tensor. No such number is part of the compiled program, so no schedule makes it compile again.
"""
from contextlib import contextmanager
from typing import NamedTuple

import torch

from nanochat.device.collectives import all_reduce_sum
from nanochat.device.mesh import Mesh
from nanochat.device.programs import one_program
from nanochat.model.muon import cautious_weight_decay, normalise_neurons, orthogonalised
from nanochat.model.rates import muon_momentum
from nanochat.model.weights import UNDIVIDED

MUON_BETA2 = 0.95


class Scheduled(NamedTuple):
    """The numbers of one step. They reach the device as one tensor."""
    lr_multiplier: torch.Tensor
    momentum: torch.Tensor  # Muon's
    bias1: torch.Tensor  # Adam's corrections of its two averages
    bias2: torch.Tensor


def adamw(p, exp_avg, exp_avg_sq, gradient, rule, betas, scheduled):
    """Returns parameter p and its two averages after an update by `rule`, an AdamW."""
    beta1, beta2 = betas
    lr = rule.lr * scheduled.lr_multiplier
    exp_avg = exp_avg.lerp(gradient, 1 - beta1)
    exp_avg_sq = exp_avg_sq.lerp(gradient.square(), 1 - beta2)
    if rule.weight_decay:
        p = p * (1 - lr * rule.weight_decay)
    step = rule.step(lr, exp_avg / scheduled.bias1, (exp_avg_sq / scheduled.bias2).sqrt())
    return p - step, exp_avg, exp_avg_sq


def muon(p, second_moment, direction, lr, weight_decay):
    """Returns matrices p and the second moment of their neurons after an update along an orthogonal `direction`, with
    NorMuon's normalisation."""
    update, second_moment = normalise_neurons(direction, second_moment, MUON_BETA2)
    update = update * max(1.0, p.size(-2) / p.size(-1)) ** 0.5  # the same root-mean-square for every shape
    decay = weight_decay * cautious_weight_decay(p, update)
    return p - lr * (update + decay), second_moment


# -----------------------------------------------------------------------------
# The optimizer


class Measured(NamedTuple):
    """Named numbers of one step. They stay on the device, as one tensor, until they are fetched together."""
    names: tuple
    values: torch.Tensor  # (names,)

    def fetch(self):
        """Returns {name: number}. It waits for the device."""
        return dict(zip(self.names, self.values.tolist(), strict=True))


class MuonAdamW:
    """Updates a model in place from the `main_grad` of its parameters.

    All state exists from the start, so the first step is the same program as the last. `masters` are the weights that
    are updated, in fp32; the model may compute with copies of them in its training_dtype. With `parts`, each rank holds
    and updates only its part of masters and state (ZeRO-1, arXiv 1910.02054), and on a mesh that divides the weights
    the model computes with parts, too: see parts.py. What is in weights.UNDIVIDED is whole on every rank.
    """

    def __init__(self, model, rules, dist=None, parts=None, weights=None):
        """
        model: with whole weights on the device, of which it keeps this rank's parts; or `weights` has them.
        rules: Rules. dist: this rank's Dist, or None if there is one rank.
        parts: this rank's Parts; None: every rank holds and updates all weights.
        weights: an iterable of (name, index, tensor), see Parts.collect, for models that no device has room for.
        """
        self.rules = rules
        self.dist = dist
        self.parts = parts
        self.mesh = parts.mesh if parts else Mesh(data=dist.world_size if dist else 1)
        shapes = {name: p.shape for name, p in model.named_parameters()}
        self.lengths = {name: shape[0] for name, shape in shapes.items()}
        self.sharded = frozenset(name for name, shape in shapes.items()
                                 if parts and len(shape) > 1 and name not in UNDIVIDED)
        self.masters = {}
        placed = self._place(model, weights, shapes) if weights is not None else {}
        self.parameters = dict(model.named_parameters())
        self.state = {}
        for name, p in self.parameters.items():
            self.masters[name] = placed[name] if name in placed else self._take_master(name, p, model.training_dtype)
            self._create_state(name)
        model.create_main_grads()
        self.clear()  # so that the first step's programs are those of every other step

    def _place(self, model, weights, shapes):
        """Puts the model on the device, with this rank's parts of `weights`, and returns those of the optimizer."""
        found, masters = self.parts.collect(weights, {name: shapes[name] for name in self.sharded},
                                            model.training_dtype)
        for name, tensor in found.items():
            setattr(model, name, torch.nn.Parameter(tensor.to(self.dist.device)))
        model.to(self.dist.device)  # its buffers
        return {name: master.to(self.dist.device) for name, master in masters.items()}

    def _take_master(self, name, p, training_dtype):
        """Returns the master of a parameter: itself, or a copy if the model computes with something else."""
        if name not in self.sharded and training_dtype == torch.float32:
            return p
        master = self._part_of(name, p.detach()).clone()
        weight = p.detach()
        if name in self.sharded and self.mesh.divides_weights:
            weight = self.parts.of_model(name, weight).clone()
        p.data = weight.to(training_dtype)
        return master

    def _create_state(self, name):
        master = self.masters[name]
        of_second_moment = master if name in self.rules.adam else master[:, :, :1]
        self.state[f"{name}.momentum"] = torch.zeros_like(master)
        self.state[f"{name}.second_moment"] = torch.zeros_like(of_second_moment)
        if self.rules.average_decay:
            self.state[f"{name}.average"] = master.detach().clone()

    def scheduled(self, step, batch_growth=1.0):
        """Returns the numbers of `step` as a CPU tensor (4,), see Scheduled. batch_growth: this step's batch over that
        of the first step."""
        beta1, beta2 = self.rules.betas
        return torch.tensor([self.rules.lr_multiplier(step, batch_growth), muon_momentum(step),
                             1 - beta1 ** (step + 1), 1 - beta2 ** (step + 1)], dtype=torch.float32)

    @torch.no_grad()
    def update(self, scheduled, sums):
        """Sums gradients and `sums` over the ranks, updates the weights, and sets the sums to zero.

        scheduled: the result of scheduled(step), on the parameters' device. sums: {name: scalar}.
        Returns Measured, there too: the sums, and what is measured of the gradient. If one of these numbers is not
        finite, weights and state stay as they are; the device decides that, and the host does not wait for it.
        """
        gradients = self._sum_over_ranks(sums)
        # These numbers are the same on every rank, so all decide alike.
        measured = {**sums, "grad_norm": self._norm(gradients)}
        values = torch.stack(list(measured.values()))
        is_good = values.isfinite().all()
        new_weights = {}  # of those that the model has a copy of
        for name, new in self._updated(gradients, Scheduled(*scheduled.unbind())):
            for held, tensor in zip(self._held(name), new, strict=True):
                held.copy_(torch.where(is_good, tensor, held))
            p = self.parameters[name]
            if self.masters[name] is not p:
                new_weights[name] = self.masters[name].to(p.dtype)
        if self.parts:
            of_parts = {name: weight for name, weight in new_weights.items() if name in self.sharded}
            new_weights |= self.parts.new_weights(of_parts, self.lengths)
        for name, weight in new_weights.items():
            self.parameters[name].copy_(weight)
        self.clear(sums.values())
        return Measured(tuple(measured), values)

    def _held(self, name):
        """Returns what an update changes of a parameter: its master and its state, in the order of _create_state."""
        state = [self.state[f"{name}.momentum"], self.state[f"{name}.second_moment"]]
        if self.rules.average_decay:
            state.append(self.state[f"{name}.average"])
        return [self.masters[name], *state]

    def _updated(self, gradients, scheduled):
        """Yields (name, new tensors as of _held) of each parameter."""
        rules, momentum = self.rules, scheduled.momentum
        # Nesterov's momentum. The matrices of all stacks are orthogonalised together: see muon.py.
        averages, nesterov = {}, {}
        for name, gradient in gradients.items():
            if name not in rules.adam:
                averages[name] = momentum * self.state[f"{name}.momentum"] + (1 - momentum) * gradient
                nesterov[name] = momentum * averages[name] + (1 - momentum) * gradient
        directions = orthogonalised(nesterov, rules.matrix_dtype)
        for name in self.parameters:
            master, average, second_moment, *weight_average = self._held(name)
            if name in rules.adam:
                new = adamw(master, average, second_moment, gradients[name], rules.adam[name], rules.betas, scheduled)
            else:
                lr = rules.matrix_lr * scheduled.lr_multiplier
                master, second_moment = muon(master, second_moment, directions[name], lr, rules.matrix_weight_decay)
                new = master, averages[name], second_moment
            if weight_average:
                new = *new, weight_average[0].lerp(new[0], 1 - rules.average_decay)
            yield name, new

    def clear(self, sums=()):
        """Sets the sums of gradients and `sums` to zero, as every update does at its end. The results of an XLA program
        are in the order in which they were last written, so another order here would make another program of the next
        micro-step.
        """
        # XLA assigns the memory of arguments to results of the same size: the results in the order of these lines, the
        # arguments in the order in which the program uses them. In reverse, each gradient stays where it is. Otherwise
        # they would all be copied: a micro-step at depth 16 on v5e took 156.3 Mcycles instead of 151.6, and 2.4 GB more
        # went through HBM.
        for p in reversed(list(self.parameters.values())):
            p.main_grad.zero_()
        for total in sums:
            total.zero_()

    # The parts of the ranks

    def _sum_over_ranks(self, sums):
        """Sums over the ranks: `sums` in place, and the gradients, which it returns as {name: gradient}; of a sharded
        weight it returns this rank's part."""
        gradients = {name: p.main_grad for name, p in self.parameters.items()}
        if self.dist:
            whole = [gradient for name, gradient in gradients.items() if name not in self.sharded]
            whole += sums.values()
            all_reduce_sum(whole, self.dist)
            if self.mesh.tensor > 1:  # ranks along it have computed the same
                for total in whole:
                    total /= self.mesh.tensor
        for name in gradients:
            if name in self.sharded:
                gradients[name] = self.parts.sum_gradient(name, gradients[name])
        return gradients

    def _norm(self, gradients):
        """Returns the norm of these gradients together, {name: gradient or this rank's part of it}."""
        parts, whole = [], []
        for name, gradient in gradients.items():
            squares = parts if name in self.sharded else whole
            squares.append(gradient.square().sum())
        if not parts:
            return torch.stack(whole).sum().sqrt()
        # The ranks' parts have nothing in common, and their padding is 0, so their squares add up. What is whole counts
        # once.
        total = sum(parts)
        all_reduce_sum([total], self.dist)
        return (total + sum(whole)).sqrt()

    def _part_of(self, name, tensor):
        """Returns this rank's part of a tensor that belongs to parameter `name`."""
        return self.parts.of_optimizer(tensor) if name in self.sharded else tensor

    @contextmanager
    def whole_weights(self):
        """Within the block, the model has its whole weights, for what cannot compute with parts of them. Every rank
        must come here."""
        # Sorted, because a set of names has another order in each process, and the ranks must gather in the same one.
        parts = {name: self.parameters[name].data for name in sorted(self.sharded) if self.mesh.divides_weights}
        for name, part in parts.items():
            with torch.no_grad(), one_program(self.dist, f"whole {tuple(part.shape)}", collective=True):
                self.parameters[name].data = self.parts.whole(
                    self.masters[name].to(part.dtype), self.lengths[name])
        yield
        for name, part in parts.items():
            self.parameters[name].data = part

    @contextmanager
    def averaged_weights(self):
        """Inside the block, the model's weights are their running averages. Every rank must call it."""
        with torch.no_grad():
            with one_program(self.dist, "average weights", collective=True):
                kept = {name: p.detach().clone() for name, p in self.parameters.items()}
                for name, p in self.parameters.items():
                    average = self.state[f"{name}.average"].to(p.dtype)
                    if name in self.sharded:
                        average = self.parts.new_weight(name, average, self.lengths[name])
                    p.copy_(average)
            yield
            with one_program(self.dist, "weights again"):
                for name, p in self.parameters.items():
                    p.copy_(kept[name])

    # Checkpoints

    def sizes(self):
        """Returns ({name: bytes}, {name: bytes}) of the weights and the state that host_state returns."""
        def size(name, tensor):
            return tensor.nbytes // tensor.size(0) * self.lengths[_parameter_of(name)]

        return ({name: size(name, tensor) for name, tensor in self.masters.items()},
                {name: size(name, tensor) for name, tensor in self.state.items()})

    @torch.no_grad()
    def host_state(self, names=None):
        """Returns ({name: weight}, {name: state}): whole fp32 copies in host memory of the tensors in `names`, or of
        all. Every rank must call it, because the ranks' parts are gathered, whoever needs them."""
        return self._on_host(self.masters, names), self._on_host(self.state, names)

    def _on_host(self, tensors, names):
        copies = {}
        for name, tensor in tensors.items():
            parameter = _parameter_of(name)
            is_wanted = names is None or name in names
            if parameter in self.sharded:
                copy = self.parts.whole_on_host(tensor, self.lengths[parameter], is_wanted)
            elif is_wanted:
                copy = tensor.detach().to("cpu", copy=True)
            if is_wanted:
                copies[name] = copy
        return copies

    @torch.no_grad()
    def load_state_dict(self, state):
        """Restores the state, the second result of host_state. __init__ has taken the weights from the model."""
        for name, tensor in self.state.items():
            tensor.copy_(self._part_of(_parameter_of(name), state[name]))


def _parameter_of(name):
    """Returns the name of the parameter that a master or a tensor of the state belongs to."""
    return name.partition(".")[0]
