"""Bits per byte: a loss that does not depend on the tokenizer, so models with different tokenizers can be compared."""
import math
import time
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from nanochat.common import BadInput, Failure
from nanochat.data.hub_tokenizer import ID_BITS
from nanochat.data.lanes import PADDING
from nanochat.data.loader import Batch
from nanochat.device.collectives import all_reduce_sum
from nanochat.device.programs import one_program
from nanochat.device.ranks import print0
from nanochat.model.layers import IGNORE_INDEX

PROGRESS_S = 20  # between two lines about a long evaluation


@dataclass(frozen=True)
class Evaluation:
    """The loss of a model on a text."""
    bits_per_byte: float
    num_bytes: int
    is_whole_text: bool  # the text ended before the requested rows


class NotRead(Exception):
    """A rank cannot read the rows of an evaluation: all ranks raise this, at the same point of their programs."""


class HeldOutRows:
    """The batches of an evaluation within a run, for bits_per_byte. A rank that cannot read them has a `problem`, and
    goes on with padding: otherwise others would wait for it in a collective."""

    def __init__(self, open_loader, padding, num_batches, what=""):
        """open_loader(): makes the DataLoader; padding: rows of a batch, int (B, T + 1); num_batches: at most;
        what: the end of the lines about progress."""
        self.problem = None  # its text
        self.unfinished_lanes = ()
        self._loader = None
        self._padding = Batch(padding, {}, {})
        self._num_batches = num_batches
        self._what = what
        with self._noting_a_problem():
            self._loader = open_loader()
            self.unfinished_lanes = self._loader.unfinished_lanes
            # Only whoever can read a small text knows its last batch. So it is read before the ranks agree.
            self._batches = iter(list(self._loader) if self._loader.is_small else self._loader)

    @contextmanager
    def _noting_a_problem(self):
        try:
            yield
        except (BadInput, Failure) as error:
            self.problem = str(error)

    def require_all(self, dist):
        """Raises NotRead if a rank could not open the text. Every rank must call it."""
        failed = torch.tensor([self.problem is not None], dtype=torch.int32).to(dist.device)
        if dist.world_size > 1:
            with one_program(dist, "evaluate_begin", collective=True):
                all_reduce_sum([failed], dist)
        _require_none(failed.item(), self)

    def __iter__(self):
        said_at = time.monotonic()
        for done in range(self._num_batches):
            batch = self._padding
            if self.problem is None:
                with self._noting_a_problem():
                    batch = next(self._batches, None)
            if batch is None:
                return
            if time.monotonic() - said_at > PROGRESS_S:
                said_at = time.monotonic()
                print0(f"evaluated {done} of {self._num_batches} batches{self._what}")
            yield batch

    def close(self):
        if self._loader:
            self._loader.close()


def _require_none(num_failed, loader):
    if num_failed:
        raise NotRead(loader.problem or "another rank cannot read the text")


# Bits per byte = sum of the tokens' losses / (ln 2 × sum of the text's bytes). Special tokens stand for no text and
# count in neither sum.
@torch.no_grad()
def bits_per_byte(model, loader, token_bytes, dist, is_cut_short=None, view=None, copies=1):
    """Returns the Evaluation of the rows of `loader`, the same text for every world size.

    model: called as model(ids, targets) -> losses, in nats
    loader: a new DataLoader of this rank, with `num_rows`, or HeldOutRows
    token_bytes: int32 (vocabulary,), on the CPU, the bytes of each token
    is_cut_short(), if given: once it returns True, on all ranks before the same batch, the result is None
    view(rows), if given: returns the rows that the model sees, and which of their tokens count, bool; all (B, T + 1)
    copies: how many ranks read each row

    Raises NotRead, on all ranks, if one of them has HeldOutRows with a problem.
    """
    nats = torch.zeros((), device=dist.device)
    num_bytes = 0
    for batch in loader:
        if is_cut_short and is_cut_short():
            return None
        rows = torch.as_tensor(batch.rows)  # (B, T + 1)
        counts = rows != PADDING
        if view:
            rows, counts = view(rows)
        rows = rows.where(rows != PADDING, 0)
        lost_bytes = rows >> ID_BITS  # see HubTokenizer.with_lost_bytes
        rows = rows & (1 << ID_BITS) - 1
        targets = rows[:, 1:].clone()
        sizes = token_bytes[targets] * counts[:, 1:]
        targets[sizes == 0] = IGNORE_INDEX
        num_bytes += int((sizes + lost_bytes[:, 1:] * counts[:, 1:]).sum())
        # A rank whose lanes have ended goes on with padding, because others may need its part of the weights.
        with one_program(dist, "evaluate", collective=True):
            nats += model(rows[:, :-1].contiguous().to(dist.device), targets.to(dist.device)).sum()
    if dist.rank % copies:  # of the neighbours that read the same rows one counts: int32 would overflow soon
        num_bytes = 0
    counts = num_bytes, len(loader.unfinished_lanes), loader.problem is not None
    totals = [nats, torch.tensor(counts, dtype=torch.int32).to(dist.device)]
    with one_program(dist, "evaluate_reduce", collective=True):
        all_reduce_sum(totals, dist)
    nats = totals[0].item() / copies
    num_bytes, unfinished_lanes, num_failed = totals[1].tolist()
    _require_none(num_failed, loader)
    value = nats / (math.log(2) * num_bytes) if num_bytes else float("nan")
    return Evaluation(value, num_bytes, is_whole_text=unfinished_lanes == 0)


# Views of rows, for bits_per_byte


def with_suffixes(tokenizer, rows):
    """A view of rows from a loader with --fim_rate, in which only middles count. Returns rows, int (B, T + 1), as they
    are, and which tokens belong to a middle, bool (B, T + 1)."""
    return rows, is_between(rows, tokenizer.special("<|fim_middle|>"), tokenizer.middle_end)


def without_suffixes(tokenizer, rows):
    """The same view with empty suffixes. What follows a suffix moves up; PADDING fills the end."""
    return _keep(~_is_suffix(tokenizer, rows), *with_suffixes(tokenizer, rows))


def _is_suffix(tokenizer, rows):
    following = "<|fim_prefix|>" if tokenizer.suffix_first else "<|fim_middle|>"
    return is_between(rows, tokenizer.special("<|fim_suffix|>"), tokenizer.special(following))


def _keep(chosen, rows, counts):
    """Moves the chosen tokens of each row, and their counts, to its beginning, and drops the others."""
    # A stable sort by "not chosen" moves the chosen ones to the front, in their order.
    order = (~chosen).int().argsort(dim=1, stable=True)
    is_chosen = chosen.gather(1, order)
    return rows.gather(1, order).where(is_chosen, PADDING), counts.gather(1, order) & is_chosen


def is_between(rows, first, last):
    """Returns which tokens follow a token `first` and precede the next token `last`, bool (B, T + 1)."""
    # Of the two, `first` was the later one. (`last` may also begin each document.)
    places = torch.arange(rows.shape[1]).expand_as(rows)
    latest = [(places + 1).where(rows == token, 0).cummax(1).values for token in (first, last)]
    return (latest[0] > latest[1]) & (rows != first)
