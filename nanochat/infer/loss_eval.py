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
def bits_per_byte(model, loader, token_bytes, dist, is_cut_short=lambda: False,
                  view=lambda rows: (rows, rows != PADDING), copies=1):
    """Returns the Evaluation of the rows of `loader`, the same text for every world size.

    Bits per byte = sum of the tokens' losses / (ln 2 × sum of the tokens' bytes). Special tokens stand for no text and
    count in neither sum.

    model: called as model(ids, targets) -> losses, in nats
    loader: a new DataLoader of this rank, with `num_rows`
    token_bytes: int32 (vocabulary,), on the CPU, the bytes of each token
    is_cut_short(): called for each batch; once it returns True, on all ranks before the same batch, the evaluation
        ends and the result is None
    view(rows): returns the rows that the model sees, and which of their tokens count, bool; all (B, T + 1). By default
        the model sees them as they are, and all text counts
    copies: how many ranks read each row
    """
    nats = torch.zeros((), device=dist.device)
    num_bytes = 0
    for batch in loader:
        if is_cut_short():
            return None
        rows = torch.as_tensor(batch.rows)  # (B, T + 1)
        rows, counts = view(rows)
        rows = rows.clamp(min=0)
        targets = rows[:, 1:].clone()
        sizes = token_bytes[targets] * counts[:, 1:]
        targets[sizes == 0] = IGNORE_INDEX
        num_bytes += int(sizes.sum())
        # Also where the lanes of this rank have ended before those of others, who may need its part of the weights.
        with one_program(dist, "evaluate", collective=True):
            nats += model(rows[:, :-1].contiguous().to(dist.device), targets.to(dist.device)).sum()
    num_bytes *= dist.rank % copies == 0  # of the neighbours that read the same rows one counts: int32 is soon full
    totals = [nats, torch.tensor([num_bytes, len(loader.unfinished_lanes)], dtype=torch.int32).to(dist.device)]
    with one_program(dist, "evaluate_reduce", collective=True):
        all_reduce_sum(totals, dist)
    nats, (num_bytes, unfinished_lanes) = totals[0].item() / copies, totals[1].tolist()
    value = nats / (math.log(2) * num_bytes) if num_bytes else float("nan")
    return Evaluation(value, num_bytes, is_whole_text=unfinished_lanes == 0)


# -----------------------------------------------------------------------------
# Views of rows from a loader with --fim_rate, in which only middles count


def with_suffixes(tokenizer, rows):
    """Returns rows, int (B, T + 1), as they are, and which tokens are of a middle, bool (B, T + 1)."""
    return rows, _is_between(rows, tokenizer.special("<|fim_middle|>"), tokenizer.special("<|file_sep|>"))


def without_suffixes(tokenizer, rows):
    """Returns the same with empty suffixes. What is behind them moves up, and PADDING comes after it."""
    return _keep(~_is_suffix(tokenizer, rows), *with_suffixes(tokenizer, rows))


def from_left_to_right(tokenizer, rows):
    """Returns the same as text from left to right: prefix and middle, without suffixes and FIM_TOKENS. A middle has the
    same tokens as with a suffix."""
    special = torch.tensor([tokenizer.special(name) for name in FIM_TOKENS])
    return _keep(~_is_suffix(tokenizer, rows) & ~torch.isin(rows, special), *with_suffixes(tokenizer, rows))


def _is_suffix(tokenizer, rows):
    return _is_between(rows, tokenizer.special("<|fim_suffix|>"), tokenizer.special("<|fim_middle|>"))


def _is_between(rows, first, last):
    """Returns which tokens are after a token `first` and before the next token `last`, bool (B, T + 1)."""
    # A document has both, in this order, or none of them; only one that is cropped at the end of a row lacks `last`.
    return ((rows == first).int().cumsum(1) > (rows == last).int().cumsum(1)) & (rows != first)


def _keep(chosen, rows, counts):
    """Returns rows and counts with only the chosen tokens of each row, at its beginning."""
    order = (~chosen).int().argsort(dim=1, stable=True)
    is_chosen = chosen.gather(1, order)
    return rows.gather(1, order).where(is_chosen, PADDING), counts.gather(1, order) & is_chosen
