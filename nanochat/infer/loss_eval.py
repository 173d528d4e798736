"""Bits per byte: a loss that does not depend on the tokenizer, so models with different tokenizers can be compared."""
import math
from dataclasses import dataclass

import torch

from nanochat.data.lanes import PADDING
from nanochat.device.collectives import all_reduce_sum
from nanochat.device.programs import one_program
from nanochat.model.layers import IGNORE_INDEX


@dataclass(frozen=True)
class Evaluation:
    bits_per_byte: float
    num_bytes: int
    is_whole_text: bool  # the text ended before the requested rows


def never():
    """Returns whether to cut an evaluation short: no."""
    return False


def all_text(rows):
    """Returns rows as they are, and which of their tokens count: all text."""
    return rows, rows != PADDING


# Bits per byte = sum of the tokens' losses / (ln 2 × sum of the tokens' bytes). Special tokens stand for no text and
# count in neither sum.
@torch.no_grad()
def bits_per_byte(model, loader, token_bytes, dist, is_cut_short=never, view=all_text, copies=1):
    """Returns the Evaluation of the rows of `loader`, the same text for every world size.

    model: called as model(ids, targets) -> losses, in nats
    loader: a new DataLoader of this rank, with `num_rows`
    token_bytes: int32 (vocabulary,), on the CPU, the bytes of each token
    is_cut_short(): called for each batch; once it returns True, on all ranks before the same batch, the result is None
    view(rows): returns the rows that the model sees, and which of their tokens count, bool; all (B, T + 1)
    copies: how many ranks read each row
    """
    nats = torch.zeros((), device=dist.device)
    num_bytes = 0
    for batch in loader:
        if is_cut_short():
            return None
        rows, counts = view(torch.as_tensor(batch.rows))  # (B, T + 1)
        rows = rows.clamp(min=0)
        targets = rows[:, 1:].clone()
        sizes = token_bytes[targets] * counts[:, 1:]
        targets[sizes == 0] = IGNORE_INDEX
        num_bytes += int(sizes.sum())
        # A rank whose lanes have ended goes on with padding, because others may need its part of the weights.
        with one_program(dist, "evaluate", collective=True):
            nats += model(rows[:, :-1].contiguous().to(dist.device), targets.to(dist.device)).sum()
    if dist.rank % copies:  # of the neighbours that read the same rows one counts: int32 would overflow soon
        num_bytes = 0
    totals = [nats, torch.tensor([num_bytes, len(loader.unfinished_lanes)], dtype=torch.int32).to(dist.device)]
    with one_program(dist, "evaluate_reduce", collective=True):
        all_reduce_sum(totals, dist)
    nats = totals[0].item() / copies
    num_bytes, unfinished_lanes = totals[1].tolist()
    value = nats / (math.log(2) * num_bytes) if num_bytes else float("nan")
    return Evaluation(value, num_bytes, is_whole_text=unfinished_lanes == 0)


def with_suffixes(tokenizer, rows):
    """A view of rows from a loader with --fim_rate, in which only middles count. Returns rows, int (B, T + 1), as they
    are, and which tokens belong to a middle, bool (B, T + 1)."""
    return rows, is_between(rows, tokenizer.special("<|fim_middle|>"), tokenizer.special("<|file_sep|>"))


def is_between(rows, first, last):
    """Returns which tokens follow a token `first` and precede the next token `last`, bool (B, T + 1)."""
    # A document has both, in this order, or neither; only one that is cropped at the end of a row lacks `last`.
    return ((rows == first).int().cumsum(1) > (rows == last).int().cumsum(1)) & (rows != first)
