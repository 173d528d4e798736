"""Bits per byte: a loss that does not depend on the tokenizer, so models with different tokenizers can be compared."""
import math
from dataclasses import dataclass

import torch

from nanochat.data.lanes import PADDING
from nanochat.data.tokenizer import FIM_TOKENS
from nanochat.device.collectives import all_reduce_sum
from nanochat.device.programs import one_program
from nanochat.model.layers import IGNORE_INDEX


@dataclass(frozen=True)
class Evaluation:
    bits_per_byte: float
    num_bytes: int
    is_whole_text: bool  # it came to its end before the rows that were asked for


@torch.no_grad()
def bits_per_byte(model, loader, token_bytes, dist, is_cut_short=lambda: False, mark=lambda rows: rows != PADDING):
    """Returns the Evaluation of the rows of `loader`, the same text for every world size.

    Bits per byte = sum of the tokens' losses / (ln 2 × sum of the tokens' bytes). Special tokens stand for no text and
    count in neither sum.

    model: called as model(ids, targets) -> losses, in nats
    loader: a new DataLoader of this rank, with `num_rows`
    token_bytes: int32 (vocabulary,), on the CPU, the bytes of each token
    is_cut_short(): called for each batch; once it returns True, on all ranks before the same batch, the evaluation
        ends and the result is None
    mark(rows): returns which tokens of the rows count, bool (B, T + 1); by default all that are text
    """
    nats = torch.zeros((), device=dist.device)
    num_bytes = 0
    for batch in loader:
        if is_cut_short():
            return None
        rows = torch.as_tensor(batch.rows)  # (B, T + 1)
        is_text, counts = rows != PADDING, mark(rows)
        rows = rows.clamp(min=0)
        targets = rows[:, 1:].clone()
        sizes = token_bytes[targets] * counts[:, 1:]
        targets[sizes == 0] = IGNORE_INDEX
        num_bytes += int(sizes.sum())
        if not is_text.any():
            continue  # the lanes of this rank have ended before those of others
        with one_program(dist, "evaluate"):
            nats += model(rows[:, :-1].contiguous().to(dist.device), targets.to(dist.device)).sum()
    totals = [nats, torch.tensor([num_bytes, loader.short_rows], dtype=torch.int32).to(dist.device)]
    with one_program(dist, "evaluate_reduce", collective=True):
        all_reduce_sum(totals, dist)
    nats, (num_bytes, short_rows) = totals[0].item(), totals[1].tolist()
    value = nats / (math.log(2) * num_bytes) if num_bytes else float("nan")
    return Evaluation(value, num_bytes, is_whole_text=short_rows > 0)


# -----------------------------------------------------------------------------
# Rows with middles in them


def mark_middles(tokenizer, rows):
    """Returns which tokens of `rows`, int (B, T + 1), are of a middle: bool of the same shape."""
    return _is_between(rows, tokenizer.special("<|fim_middle|>"), tokenizer.special("<|file_sep|>"))


def without_suffixes(tokenizer, rows):
    """Returns rows without the suffixes in them, of the same shape: what is behind moves up, PADDING comes after."""
    keep = ~_is_between(rows, tokenizer.special("<|fim_suffix|>"), tokenizer.special("<|fim_middle|>"))
    return _keep_only(rows, keep)


def as_plain_text(tokenizer, rows):
    """Returns rows with prefix and middle as if they were text from left to right: without suffixes and FIM_TOKENS. The
    tokens of the middles stay as they are. Also returns which of them are of a middle, bool of the same shape."""
    keep = ~_is_between(rows, tokenizer.special("<|fim_suffix|>"), tokenizer.special("<|fim_middle|>"))
    for name in FIM_TOKENS:
        keep &= rows != tokenizer.special(name)
    return _keep_only(rows, keep), _keep_only(mark_middles(tokenizer, rows).int(), keep) == 1


def _is_between(rows, first, last):
    """Returns which tokens are after a token `first` and before the next token `last`, in rows (B, T + 1)."""
    begun, ended = (rows == first).int().cumsum(1), (rows == last).int().cumsum(1)
    # A document has both tokens, in this order, or neither; only one that is cropped at the end of a row lacks `last`.
    return (begun > ended) & (rows != first)


def _keep_only(rows, keep):
    kept = rows.new_full(rows.shape, PADDING)
    for new, row, chosen in zip(kept, rows, keep, strict=True):
        new[:int(chosen.sum())] = row[chosen]
    return kept
