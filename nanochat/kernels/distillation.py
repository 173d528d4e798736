"""The loss of a student that learns from a teacher as well as from the text (Hinton et al. 2015, arXiv 1503.02531):

    loss = (1 - weight) × cross-entropy + weight × temperature² × KL(teacher ‖ student)

Both distributions of the KL divergence are those at `temperature`; its square keeps the gradients of the two terms
comparable. Neither model's logits of all tokens are ever in memory, except with the kernel `current`.
"""
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanochat.kernels.sharded import WHOLE, Sharding
from nanochat.model.layers import IGNORE_INDEX, softcapped


class Teaching(NamedTuple):
    """What the loss needs of the teacher, for one micro-batch."""
    hidden: torch.Tensor  # its final hidden states (N, C_teacher)
    head: torch.Tensor  # (V, C_teacher)
    softcap: float
    weight: float  # of the teacher in the loss, 0 to 1
    temperature: float


@dataclass(frozen=True)
class Terms:
    """The numbers of the loss; the gradient of the logits is that of the mean over `num_tokens`."""
    softcap: float
    teacher_softcap: float
    weight: float
    temperature: float
    num_tokens: int
    sharding: Sharding = WHOLE

    def losses(self, hidden, head, targets, teacher_hidden, teacher_head, first_row=0):
        """Returns the losses (N,) in nats, and the gradient of their mean with respect to the logits (N, rows of the
        heads). Along tensor, both heads are this rank's rows, which begin with `first_row`."""
        log_softmax = self.sharding.log_softmax
        logits = softcapped(F.linear(hidden, head).float(), self.softcap)
        taught = softcapped(F.linear(teacher_hidden, teacher_head).float(), self.teacher_softcap)
        by_text = log_softmax(logits)
        by_student = by_text if self.temperature == 1 else log_softmax(logits / self.temperature)
        by_teacher = log_softmax(taught / self.temperature)
        rows = self.sharding.count_from(first_row, targets)
        is_target = torch.arange(head.size(0), device=head.device) == rows[:, None]
        cross_entropy = -torch.where(is_target, by_text, 0.0).sum(dim=-1)
        divergence = (by_teacher.exp() * (by_teacher - by_student)).sum(dim=-1)
        cross_entropy, divergence = self.sharding.sums(cross_entropy, divergence)
        losses = (1 - self.weight) * cross_entropy + self.weight * self.temperature**2 * divergence
        d_logits = (1 - self.weight) * (by_text.exp() - is_target.float()) \
            + self.weight * self.temperature * (by_student.exp() - by_teacher.exp())
        if self.softcap:
            d_logits = d_logits * (1 - (logits / self.softcap).square())
        counts = targets != IGNORE_INDEX
        return torch.where(counts, losses, 0.0), d_logits * torch.where(counts, 1 / self.num_tokens, 0.0)[:, None]


def mean_loss(hidden, head, targets, softcap, teaching):
    """Returns the mean loss of hidden (N, C) and targets (N,), a scalar, which autograd differentiates. It holds the
    logits of all tokens."""
    terms = _terms(hidden, softcap, teaching)
    head, targets = head.to(hidden.dtype), targets.long()
    return terms.losses(hidden, head, targets, teaching.hidden, teaching.head.to(hidden.dtype))[0].sum() / len(hidden)


class MeanLoss(torch.autograd.Function):
    """The same with the logits of one chunk of tokens in memory at a time. The gradients are computed in the forward
    pass, while they are there.

    chunks(tensor): its chunks, all of one size on XLA. run(body, carry, read, write): as xla_ops.loop. in_place: the
    backward pass adds to the head's main_grad itself (see GPT.create_main_grads). sharding: how the ranks divide both
    heads.
    """

    @staticmethod
    def forward(ctx, hidden, head, targets, softcap, teaching, chunks, run, in_place, sharding):
        body = _ChunkBody(_terms(hidden, softcap, teaching, sharding))
        head_here, *first_row = sharding.head(head, hidden.dtype)
        teacher_head = sharding.gather(teaching.head.to(hidden.dtype))
        read = [chunks(x) for x in (hidden, targets.long(), teaching.hidden)]
        sums = torch.zeros((), device=hidden.device), torch.zeros_like(head_here, dtype=torch.float32)
        (loss, d_head), (d_hidden,) = run(body, sums, read, [chunks(torch.zeros_like(hidden))],
                                          [head_here, teacher_head, *first_row])
        if sharding.groups:
            d_head = sharding.scatter(d_head.to(hidden.dtype))
        ctx.save_for_backward(sharding.sum(torch.cat([*d_hidden]).view_as(hidden)), d_head)
        ctx.head_for_main_grad = head if in_place else None
        return loss

    @staticmethod
    def backward(ctx, d_loss):
        d_hidden, d_head = ctx.saved_tensors
        d_head = d_head * d_loss
        if ctx.head_for_main_grad is not None:
            ctx.head_for_main_grad.main_grad.add_(d_head)
            d_head = None
        return d_hidden * d_loss.to(d_hidden.dtype), d_head, *[None] * 7


def run_chunks(body, carry, read, write, constants):
    """Runs `body` for one chunk after the other, as xla_ops.loop does on XLA, which needs it as a loop of the
    program."""
    results = []
    for parts in zip(*read, strict=True):
        carry, (result,) = body(None, carry, parts, None, constants)
        results.append(result)
    return carry, (results,)


@dataclass(frozen=True)
class _ChunkBody:
    terms: Terms

    def __call__(self, index, carry, read, write, constants):
        (loss, d_head), (hidden, targets, teacher_hidden), (head, *others) = carry, read, constants
        losses, d_logits = self.terms.losses(hidden, head, targets, teacher_hidden, *others)
        d_logits = d_logits.to(hidden.dtype)
        return (loss + losses.sum() / self.terms.num_tokens, d_head + (d_logits.t() @ hidden).float()), \
            (d_logits @ head,)


def _terms(hidden, softcap, teaching, sharding=WHOLE):
    return Terms(softcap, teaching.softcap, teaching.weight, teaching.temperature, hidden.size(0), sharding)
