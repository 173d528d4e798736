"""The loss: cross-entropy, or that of a student who learns from a teacher, too (Hinton et al. 2015, arXiv 1503.02531):

    loss = (1 - weight) × cross-entropy + weight × temperature² × KL(teacher ‖ student)

Both distributions of the KL divergence are at `temperature`; its square keeps the gradients of the two terms
comparable.

This file has the losses in PyTorch's own operations, for every device, and ChunkedLoss, with which xla_loss.py
differentiates its own. choose.py chooses, and a model (model/decoder.py) calls what was chosen. hidden is (N, C), head
(V, C), targets (N,); a target of IGNORE_INDEX has neither loss nor gradient, but counts in the mean.
"""
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from nanochat.device.xla_ops import loop, wait_for
from nanochat.kernels.sharded import WHOLE, Sharding
from nanochat.model.layers import IGNORE_INDEX
from nanochat.model.logit_cap import LogitCap

CHUNK_TOKENS = 1024  # tokens whose logits are held at a time: 1024 × 65,536 × 4 bytes = 256 MiB


@dataclass(frozen=True)
class TeacherTerms:
    """The teacher's part in the loss."""
    cap: LogitCap  # of its logits
    weight: float  # 0 to 1
    temperature: float


class Teaching(NamedTuple):
    """The teacher's results for one micro-batch."""
    hidden: torch.Tensor  # its final hidden states (N, C_teacher)
    head: torch.Tensor  # (V, C_teacher)
    terms: TeacherTerms


# With all logits in memory, differentiated by autograd; see layers.Kernels


def full_cross_entropy(hidden, head, targets, cap):
    """Returns the losses (N,)."""
    logits = cap(F.linear(hidden, head.to(hidden.dtype)).float())  # (N, V)
    return F.cross_entropy(logits, targets.long(), ignore_index=IGNORE_INDEX, reduction="none")


def full_mean_loss(hidden, head, targets, cap, teaching=None):
    """Returns the mean loss, a scalar."""
    if teaching is None:
        return full_cross_entropy(hidden, head, targets, cap).mean()
    return chunked_mean_loss(len(hidden), hidden, head, targets, cap, teaching)  # in one chunk


# With the logits of one chunk of tokens in memory at a time


def chunked_cross_entropy(chunk_tokens, hidden, head, targets, cap):
    """Returns the losses (N,), for evaluation: autograd would keep the logits of all chunks."""
    chunks = zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    return torch.cat([full_cross_entropy(chunk, head, chunk_targets, cap) for chunk, chunk_targets in chunks])


def chunked_mean_loss(chunk_tokens, hidden, head, targets, cap, teaching=None):
    """Returns the mean loss, a scalar."""
    body = ChunkBody(cap, WHOLE, len(hidden), teaching and teaching.terms)
    return ChunkedLoss.apply(hidden, head, targets, teaching, body, chunk_tokens)


@dataclass(frozen=True)
class ChunkBody:
    """The body of ChunkedLoss's loop. Here by definition, on any device; those of xla_loss.py have another of_chunk.
    Its arguments are those of device/xla_ops.py, loop. With tensor groups it always has a teacher: those of xla_loss.py
    serve without one. So `others` are none, the teacher's hidden states and head, or these and the first row."""
    cap: LogitCap
    sharding: Sharding
    num_tokens: int  # of all chunks
    teacher: TeacherTerms | None = None

    def __call__(self, index, carry, read, write, constants):
        loss, d_head = carry
        hidden, targets, *teacher_hidden = read
        head, *others = constants
        scale = torch.where(targets == IGNORE_INDEX, 0.0, 1 / self.num_tokens)[:, None]
        losses, d_hidden, d_head_here = self.of_chunk(index, scale, hidden, head, targets, *teacher_hidden, *others)
        return (loss + losses.sum() / self.num_tokens, d_head + d_head_here), (d_hidden,)

    def of_chunk(self, index, scale, hidden, head, targets, *others):
        """Returns the losses (N,) of the tokens of chunk `index`; and of their sum times `scale` (N, 1), the gradients
        with respect to the hidden states, and to the head in fp32. others: as in token_losses."""
        losses, d_logits = self.token_losses(hidden, head, targets, *others)
        d_logits = (d_logits * scale).to(hidden.dtype)
        return losses, d_logits @ head, (d_logits.t() @ hidden).float()

    def token_losses(self, hidden, head, targets, teacher_hidden=None, teacher_head=None, first_row=0):
        """Returns the losses (N,) in nats, and the gradient of each with respect to its logits, (N, rows of the heads),
        which is undefined for targets without a loss. Along tensor, both heads are this rank's rows, from `first_row`
        on."""
        logits = self.sharding.of_tokens(self.cap(F.linear(hidden, head).float()), first_row)
        by_text = self.sharding.log_softmax(logits)
        rows = self.sharding.count_from(first_row, targets)
        # (N, rows of the head). A target in another rank's rows, or an ignored one, equals no number here and adds 0.
        # The rank with the target's row adds it to the sum.
        is_target = torch.arange(head.size(0), device=head.device) == rows[:, None]
        losses = -torch.where(is_target, by_text, 0.0).sum(dim=-1)
        d_capped = by_text.exp() - is_target.float()
        if self.teacher is None:
            losses = self.sharding.sum(losses)
        else:
            taught = self.teacher.cap(F.linear(teacher_hidden, teacher_head).float())
            taught = self.sharding.of_tokens(taught, first_row)
            losses, d_capped = self._with_teacher(logits, by_text, taught, losses, d_capped)
        losses = torch.where(targets == IGNORE_INDEX, 0.0, losses)
        return losses, d_capped * self.cap.slope_at(logits)

    def _with_teacher(self, logits, by_text, taught, cross_entropy, d_cross_entropy):
        """Adds the teacher's part to the losses and to their gradient. Returns both."""
        weight = self.teacher.weight
        temperature = self.teacher.temperature
        by_student = by_text
        if temperature != 1:
            by_student = self.sharding.log_softmax(logits / temperature)
        by_teacher = self.sharding.log_softmax(taught / temperature)
        # The KL divergence's gradient is (student - teacher) / temperature, because logits are divided by it. Times
        # temperature², one factor is left.
        divergence = (by_teacher.exp() * (by_teacher - by_student)).sum(dim=-1)
        cross_entropy, divergence = self.sharding.sums(cross_entropy, divergence)
        losses = (1 - weight) * cross_entropy + weight * temperature**2 * divergence
        d_divergence = by_student.exp() - by_teacher.exp()
        return losses, (1 - weight) * d_cross_entropy + weight * temperature * d_divergence


class ChunkedLoss(torch.autograd.Function):
    """A loss that is summed chunk by chunk.

    body: a ChunkBody. With a teacher, its of_chunk also gets the teacher's hidden states and head; along tensor, the
        number of the heads' first row is the last argument
    chunk_tokens: the tokens of a chunk; in a loop at most, because all chunks have one size there

    On XLA, more than two chunks are a loop of the program, and the backward pass adds to the head's main_grad (see
    Decoder.create_main_grads).
    """

    # The forward pass computes the gradients, while a chunk's logits are in memory: three products with the head, where
    # a backward pass that computes the logits again has four. Memory: gradients as large as hidden and head.

    @staticmethod
    def forward(ctx, hidden, head, targets, teaching, body, chunk_tokens):
        sharding = body.sharding
        tensors = [hidden, targets.long()]
        constants = sharding.head(head, hidden.dtype)
        if teaching is not None:
            tensors.append(teaching.hidden)
            constants.insert(1, sharding.gather(teaching.head.to(hidden.dtype)))
        sums = torch.zeros((), device=hidden.device), torch.zeros_like(constants[0], dtype=torch.float32)
        ctx.is_on_xla = hidden.device.type == "xla"
        run = _run_in_loop if ctx.is_on_xla and len(hidden) > 2 * chunk_tokens else _run
        (loss, d_head), d_hidden = run(body, sums, tensors, constants, chunk_tokens)
        d_head = sharding.scatter(d_head, hidden.dtype)
        # Along tensor, d_hidden covers only this rank's rows of the head: the ranks add it up. d_head needs no sum,
        # because they have the same tokens.
        ctx.save_for_backward(sharding.sum(d_hidden.view_as(hidden)), d_head)
        ctx.head = head
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss):
        d_hidden, d_head = ctx.saved_tensors
        d_hidden = d_hidden * d_loss.to(d_hidden.dtype)
        d_head = d_head * d_loss
        if ctx.is_on_xla:
            ctx.head.main_grad.add_(d_head)
            d_head = None
        return d_hidden, d_head, None, None, None, None


def _run(body, sums, tensors, constants, chunk_tokens):
    d_hidden = []
    chunks = zip(*(tensor.split(chunk_tokens) for tensor in tensors), strict=True)
    for index, read in enumerate(chunks):
        if d_hidden and read[0].device.type == "xla":
            # Else XLA may hold the logits of both chunks at a time. Clones, because parts of a tensor are views.
            read = [x.clone() for x in read]
            wait_for(d_hidden[-1], [*read, sums[1]])
        sums, (d_chunk,) = body(index, sums, read, None, constants)
        d_hidden.append(d_chunk)
    return sums, torch.cat(d_hidden)


def _run_in_loop(body, sums, tensors, constants, chunk_tokens):
    chunks = [equal_chunks(tensor, chunk_tokens) for tensor in tensors]
    sums, (d_hidden,) = loop(body, sums, chunks, [torch.zeros_like(chunks[0])], constants)
    return sums, d_hidden


def equal_chunks(x, chunk_tokens):
    """Returns x (N, …) as a stack of equal chunks, (N / size, size, …), of at most `chunk_tokens` tokens."""
    tokens = x.size(0)
    size = min(tokens, chunk_tokens)
    while tokens % size:
        size -= 1
    return x.view(-1, size, *x.shape[1:])
