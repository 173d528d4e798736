"""The optimizer: Muon for the matrices, AdamW for the other weights, and the schedules of both.

Everything that changes from step to step (learning rates, momentum, bias corrections) reaches the device as one small
tensor. No such number is part of the compiled program, so no schedule makes it compile again.
"""
import math
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from nanochat.common import flag
from nanochat.device.collectives import all_reduce_sum
from nanochat.device.mesh import Mesh
from nanochat.device.programs import one_program
from nanochat.model.muon import cautious_weight_decay, normalise_neurons, orthogonalised
from nanochat.model.parts import UNDIVIDED, Parts

ADAM_BETAS = (0.8, 0.95)
ADAM_EPS = 1e-10
MUON_BETA2 = 0.95
REFERENCE_WIDTH = 768  # the width at which the learning rates of AdamW were tuned
REFERENCE_BATCH_TOKENS = 2**19  # the batch at which all learning rates were tuned
WARMUP_STEPS = 40
REFERENCE_RUN_TOKENS, SHORTEST_RUN_TOKENS = 2**32, 2**18  # longer runs have the tuned rates; no shorter was tried


@dataclass(frozen=True)
class OptimConfig:
    """Each field is a flag of base_train. Learning rates are those of a batch of 2^19 tokens in a run of 2^32 tokens or
    more (see batch_lr_scale and run_lr_scale)."""
    matrix_lr: float = flag(0.02, "learning rate of Muon, for the matrices of the layers", at_least=0)
    embedding_lr: float = flag(0.3, "learning rate of AdamW for the embedding, at width 768", at_least=0)
    unembedding_lr: float = flag(0.004, "learning rate of AdamW for the head, at width 768", at_least=0)
    scalar_lr: float = flag(0.05, "learning rate of AdamW for the scales of the embedding that each layer adds; those "
                             "of the residual stream get a hundredth of it", at_least=0)
    weight_decay: float = flag(4.0, "in a run, the matrices decay by exp(-weight_decay) at most: at the full learning "
                               "rate, and where updates shrink the weights, too", at_least=0)
    warmup_steps: int = flag(-1, f"steps in which the learning rates rise; -1: {WARMUP_STEPS}, or a fifth of the run "
                             "if that is less", at_least=0, unset=-1)
    warmdown_ratio: float = flag(0.5, "fraction of the run in which the learning rates fall", at_least=0, at_most=1)
    final_lr_frac: float = flag(0.05, "fraction of the learning rates that is left at the end", at_least=0, at_most=1)


# -----------------------------------------------------------------------------
# Schedules. Steps count from 0.


def lr_multiplier(step, num_iterations, config):
    """Returns the factor of all learning rates, 0 to 1: warm-up, flat, then linear to `final_lr_frac` (the trapezoid of
    arXiv 2405.18392), where it stays."""
    step = min(step, num_iterations)
    warmup, fall = lr_stages(num_iterations, config)
    if step < warmup:
        return (step + 1) / warmup
    if step <= fall:
        return 1.0
    progress = (num_iterations - step) / (num_iterations - fall)
    return progress + (1 - progress) * config.final_lr_frac


def lr_stages(num_iterations, config):
    """Returns the number of steps in which the learning rates rise, and the step after which they fall."""
    warmup = config.warmup_steps if config.warmup_steps >= 0 else min(WARMUP_STEPS, max(num_iterations // 5, 1))
    return min(warmup, num_iterations), num_iterations - round(config.warmdown_ratio * num_iterations)


def muon_momentum(step):
    """0.85 rising to 0.95 over the first 300 steps: early gradients go out of date sooner (modded-nanogpt)."""
    return 0.85 + 0.10 * min(step / 300, 1)


def batch_lr_scale(total_batch_size):
    """Learning rates scale with the square root of the batch (arXiv 2006.08517), measured against 2^19 tokens."""
    return math.sqrt(total_batch_size / REFERENCE_BATCH_TOKENS)


def run_lr_scale(run_tokens):
    """Shorter runs need higher learning rates: (2^32 / tokens)^0.32, from 22.3 at 2^18 tokens to 1 at 2^32 (the form
    and the exponent of arXiv 2409.19913; how near the best it is: dev/LOG.md)."""
    tokens = min(max(run_tokens, SHORTEST_RUN_TOKENS), REFERENCE_RUN_TOKENS)
    return (REFERENCE_RUN_TOKENS / tokens) ** 0.32


def width_lr_scale(width):
    """AdamW learning rates scale with (width / 768)^-0.5 (nanochat)."""
    return (width / REFERENCE_WIDTH) ** -0.5


def decay_rate(weight_decay, matrix_lr, num_steps):
    """Returns what AdamW and Muon call weight decay, with which weights are multiplied by exp(-weight_decay) in
    `num_steps` steps at the learning rate `matrix_lr`: they forget what is older than 1 / weight_decay of the run,
    whatever its batch, width and length (arXiv 2405.13698; dev/LOG.md). 0 if there is no learning rate, or one for
    which fp32 has no such rate."""
    return -math.expm1(-weight_decay / num_steps) / matrix_lr if matrix_lr > 1e-30 else 0.0


# -----------------------------------------------------------------------------
# The optimizer


@dataclass(frozen=True)
class AdamW:
    """How one parameter is updated by AdamW."""
    lr: float
    weight_decay: float = 0.0
    is_atan2: bool = False  # lr × atan2(average, root) in place of lr × average / root (arXiv 2407.05872)


@dataclass(frozen=True)
class Rules:
    """How each parameter is updated."""
    adam: dict  # name of a parameter -> AdamW; Muon updates the others, stacks of matrices (L, m, n)
    matrix_lr: float
    matrix_weight_decay: float
    betas: tuple = ADAM_BETAS
    ema_decay: float = 0.0  # of the running average of the weights; 0: none is kept


def gpt_rules(config, total_batch_size, run_tokens, width):
    """Returns a GPT's Rules. config: OptimConfig; total_batch_size: tokens of the first step; run_tokens: in all."""
    scale = batch_lr_scale(total_batch_size) * run_lr_scale(run_tokens)
    matrix_lr = config.matrix_lr * scale
    adam_scale = scale * width_lr_scale(width)
    return Rules({
        "wte": AdamW(config.embedding_lr * adam_scale),
        "lm_head": AdamW(config.unembedding_lr * adam_scale),
        "resid_scale": AdamW(config.scalar_lr * 0.01 * scale),  # it multiplies the residual stream once per layer
        "x0_scale": AdamW(config.scalar_lr * scale),
        "value_table": AdamW(config.embedding_lr / 2 * adam_scale),  # nanochat
        "gate_map": AdamW(0.001 * adam_scale), "gate_scale": AdamW(0.035 * scale),  # other rates were not tried
    }, matrix_lr, decay_rate(config.weight_decay, matrix_lr, run_tokens / total_batch_size))


class MuonAdamW:
    """Updates a model in place from the `main_grad` of its parameters.

    All state exists from the start, so the first step is the same program as the last. `masters` are the weights that
    are updated, in fp32; the model may compute with copies of them in its training_dtype. With `is_sharded`, each rank
    holds and updates only its part of masters and state (ZeRO-1, arXiv 1910.02054), and on a mesh that divides the
    weights the model computes with parts, too: see parts.py. Tensors of one dimension, and those in parts.UNDIVIDED,
    are whole on every rank.
    """

    def __init__(self, model, config, total_batch_size, num_iterations, dtype=torch.float32, dist=None,
                 is_sharded=False, rules=None, mesh=None, weights=None, gradient_sums=torch.float32):
        """
        model: with whole weights on the device, of which it keeps this rank's parts; or `weights` has them.
        config: OptimConfig; total_batch_size: tokens of the first step; dtype: that in which Muon orthogonalises.
        dist: this rank's Dist, or None if there is one rank. rules: Rules; None: those of a GPT. With rules, config
        only has the schedule of the learning rates, and total_batch_size is not read.
        mesh: of the ranks, by default one of data only. weights: an iterable of (name, index, tensor), see
        Parts.collect, for models that no device has room for. gradient_sums: the dtype in which gradients travel when
        sharded ranks sum them.
        """
        self.config, self.num_iterations, self.dtype, self.dist = config, num_iterations, dtype, dist
        self.rules = rules = rules or gpt_rules(
            config, total_batch_size, total_batch_size * num_iterations, model.config.n_embd)
        is_sharded = is_sharded and dist is not None and dist.world_size > 1
        shapes = {name: p.shape for name, p in model.named_parameters()}
        self.sharded = frozenset(name for name, shape in shapes.items()
                                 if is_sharded and len(shape) > 1 and name not in UNDIVIDED)
        self.mesh = mesh or Mesh(data=dist.world_size if dist else 1)
        self.parts = Parts(dist, self.mesh, gradient_sums) if is_sharded else None
        self.lengths = {name: shape[0] for name, shape in shapes.items()}
        masters = {} if weights is None else self._place(model, weights, shapes)
        self.parameters = dict(model.named_parameters())
        self.masters, self.state = {}, {}
        for name, p in self.parameters.items():
            is_copy = name in self.sharded or model.training_dtype != torch.float32
            if name not in masters:
                masters[name] = self._part_of(name, p.detach()).clone() if is_copy else p
                if is_copy:
                    p.data = self._model_part(name, p.detach()).to(model.training_dtype)
            self.masters[name] = master = masters[name]
            self.state[f"{name}.momentum"] = torch.zeros_like(master)
            self.state[f"{name}.second_moment"] = torch.zeros_like(
                master if name in rules.adam else master[:, :, :1])
            if rules.ema_decay:
                self.state[f"{name}.ema"] = master.detach().clone()
        model.create_main_grads()
        self.clear()  # so that the first step's programs are those of every other step

    def scheduled(self, step, batch_growth=1.0):
        """Returns the numbers of `step` as a CPU tensor (4,): the multiplier of the learning rates, Muon's momentum and
        Adam's two bias corrections. batch_growth: this step's batch over that of the first step."""
        beta1, beta2 = self.rules.betas
        multiplier = lr_multiplier(step, self.num_iterations, self.config) * math.sqrt(batch_growth)
        return torch.tensor([multiplier, muon_momentum(step), 1 - beta1 ** (step + 1), 1 - beta2 ** (step + 1)],
                            dtype=torch.float32)

    @torch.no_grad()
    def update(self, scheduled, *sums):
        """Sums gradients and `sums` over the ranks, updates the weights, and sets the sums to zero.

        scheduled: the result of scheduled(step), on the parameters' device. sums: scalars, the first is the loss.
        Returns a tensor (number of sums + 1,), there too: the sums and the norm of the gradient. If one of them is not
        finite, weights and state stay as they are; the device decides that, and the host does not wait for it.
        """
        gradients = self._sum_over_ranks(sums)
        result = torch.stack([*sums, self._norm(gradients)])
        is_good = result.isfinite().all()
        lr_multiplier, momentum, bias1, bias2 = scheduled.unbind()
        averages = {name: momentum * self.state[f"{name}.momentum"] + (1 - momentum) * gradient
                    for name, gradient in gradients.items() if name not in self.rules.adam}
        nesterov = {name: momentum * average + (1 - momentum) * gradients[name] for name, average in averages.items()}
        directions = orthogonalised(nesterov, self.dtype)
        new_weights = {}  # of those that the model has a copy of
        for name, p in self.parameters.items():
            old = self.masters[name], self.state[f"{name}.momentum"], self.state[f"{name}.second_moment"]
            if rule := self.rules.adam.get(name):
                new = self._adamw(*old, gradients[name], rule, rule.lr * lr_multiplier, bias1, bias2)
            else:
                lr = self.rules.matrix_lr * lr_multiplier
                new = self._muon(old[0], averages[name], old[2], directions[name], lr)
            if self.rules.ema_decay:
                ema = self.state[f"{name}.ema"]
                old, new = (*old, ema), (*new, ema.lerp(new[0], 1 - self.rules.ema_decay))
            for old_tensor, new_tensor in zip(old, new, strict=True):
                old_tensor.copy_(torch.where(is_good, new_tensor, old_tensor))
            if self.masters[name] is not p:
                new_weights[name] = self.masters[name].to(p.dtype)
        if self.parts:
            new_weights |= self.parts.new_weights(
                {name: new_weights[name] for name in new_weights if name in self.sharded}, self.lengths)
        for name, weight in new_weights.items():
            self.parameters[name].copy_(weight)
        self.clear(sums)
        return result

    def clear(self, sums=()):
        """Sets the sums of gradients and `sums` to zero, as every update does at its end. The results of an XLA program
        are in the order in which they were last written, so another order here would make another program of the next
        micro-step.

        XLA assigns the memory of arguments to results of the same size: the results in the order of these lines, the
        arguments in the order in which the program uses them. In reverse, each gradient stays where it is; otherwise
        they would all be copied.
        """
        for p in reversed(list(self.parameters.values())):
            p.main_grad.zero_()
        for total in sums:
            total.zero_()

    def _adamw(self, p, exp_avg, exp_avg_sq, grad, rule, lr, bias1, bias2):
        """AdamW (arXiv 1711.05101). Returns p and its two averages, updated."""
        beta1, beta2 = self.rules.betas
        exp_avg = exp_avg.lerp(grad, 1 - beta1)
        exp_avg_sq = exp_avg_sq.lerp(grad.square(), 1 - beta2)
        if rule.weight_decay:
            p = p * (1 - lr * rule.weight_decay)
        if rule.is_atan2:
            return p - lr * torch.atan2(exp_avg / bias1, (exp_avg_sq / bias2).sqrt()), exp_avg, exp_avg_sq
        return p - lr * (exp_avg / bias1) / ((exp_avg_sq / bias2).sqrt() + ADAM_EPS), exp_avg, exp_avg_sq

    def _muon(self, p, average, second_moment, direction, lr):
        """Muon with NorMuon's normalisation of the orthogonal `direction`. Returns p, its momentum and its second
        moment, updated."""
        update, second_moment = normalise_neurons(direction, second_moment, MUON_BETA2)
        update = update * max(1.0, p.size(-2) / p.size(-1)) ** 0.5  # the same root-mean-square for every shape
        decay = self.rules.matrix_weight_decay * cautious_weight_decay(p, update)
        return p - lr * (update + decay), average, second_moment

    # The parts of the ranks

    def _sum_over_ranks(self, sums):
        """Sums over the ranks: `sums` in place, and the gradients, which it returns as {name: gradient}; of a sharded
        weight it returns this rank's part."""
        gradients = {name: p.main_grad for name, p in self.parameters.items()}
        if self.dist:
            whole = [gradient for name, gradient in gradients.items() if name not in self.sharded]
            all_reduce_sum([*whole, *sums], self.dist)
            if self.mesh.tensor > 1:  # ranks along it have computed the same
                for total in (*whole, *sums):
                    total /= self.mesh.tensor
        return {name: self.parts.sum_gradient(name, gradient) if name in self.sharded else gradient
                for name, gradient in gradients.items()}

    def _norm(self, gradients):
        squares = {name: gradient.square().sum() for name, gradient in gradients.items()}
        if self.sharded:
            parts = sum(square for name, square in squares.items() if name in self.sharded)
            all_reduce_sum([parts], self.dist)
            return (parts + sum(square for name, square in squares.items() if name not in self.sharded)).sqrt()
        return torch.stack(list(squares.values())).sum().sqrt()

    def _place(self, model, weights, shapes):
        """Puts the model on the device, with this rank's parts of `weights`, and returns those of the optimizer."""
        found, masters = self.parts.collect(weights, {name: shapes[name] for name in self.sharded},
                                            model.training_dtype)
        for name, tensor in found.items():
            setattr(model, name, torch.nn.Parameter(tensor.to(self.dist.device)))
        model.to(self.dist.device)  # its buffers
        return {name: master.to(self.dist.device) for name, master in masters.items()}

    def _part_of(self, name, tensor):
        """Returns this rank's part of a tensor that belongs to parameter `name`."""
        return self.parts.of_optimizer(tensor) if name in self.sharded else tensor

    def _model_part(self, name, weight):
        """Returns the part of a weight that the model computes with, in memory of its own."""
        is_divided = name in self.sharded and self.mesh.divides_weights
        return self.parts.of_model(name, weight).clone() if is_divided else weight

    def _new_weight(self, name, part):
        return self.parts.new_weight(name, part, self.lengths[name]) if name in self.sharded else part

    def _gathered(self, name, part):
        """Returns the whole tensor from the ranks' parts. Every rank must call it."""
        return self.parts.whole(part, self.lengths[name]) if name in self.sharded else part

    @contextmanager
    def whole_weights(self):
        """Within the block, the model has its whole weights, for what cannot compute with parts of them. Every rank
        must come here."""
        parts = {name: self.parameters[name].data for name in sorted(self.sharded) if self.mesh.divides_weights}
        for name, part in parts.items():
            with torch.no_grad(), one_program(self.dist, f"whole {tuple(part.shape)}", collective=True):
                self.parameters[name].data = self._gathered(name, self.masters[name].to(part.dtype))
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
                    p.copy_(self._new_weight(name, self.state[f"{name}.ema"].to(p.dtype)))
            yield
            with one_program(self.dist, "weights again"):
                for name, p in self.parameters.items():
                    p.copy_(kept[name])

    # Checkpoints

    def sizes(self):
        """Returns ({name: bytes}, {name: bytes}) of the weights and the state that host_state returns."""
        return tuple({name: tensor.nbytes // tensor.size(0) * self.lengths[name.partition(".")[0]]
                      for name, tensor in tensors.items()} for tensors in (self.masters, self.state))

    @torch.no_grad()
    def host_state(self, names=None):
        """Returns ({name: weight}, {name: state}): whole fp32 copies in host memory of the tensors in `names`, or of
        all. Every rank must call it, because the ranks' parts are gathered, whoever needs them."""
        return tuple({name: copy for name, tensor in tensors.items()
                      if (copy := self._host_copy(name, tensor, names is None or name in names)) is not None}
                     for tensors in (self.masters, self.state))

    def _host_copy(self, name, tensor, is_wanted):
        parameter = name.partition(".")[0]
        if parameter in self.sharded:
            return self.parts.whole_on_host(tensor, self.lengths[parameter], is_wanted)
        return tensor.detach().to("cpu", copy=True) if is_wanted else None

    @torch.no_grad()
    def load_state_dict(self, state):
        """Restores the state, the second result of host_state. __init__ has taken the weights from the model."""
        for name, tensor in self.state.items():
            tensor.copy_(self._part_of(name.partition(".")[0], state[name]))
