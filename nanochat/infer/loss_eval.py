"""Bits per byte: a loss that does not depend on the tokenizer, so models with different tokenizers can be compared."""
import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from nanochat.common import BadInput
from nanochat.data.lanes import PADDING
from nanochat.data.projects import FILE_SEP, SEPARATOR
from nanochat.data.shards import whole_texts
from nanochat.data.tokenizer import FIM_TOKENS, Tokenizer
from nanochat.device.collectives import all_reduce_sum
from nanochat.device.programs import one_program
from nanochat.model.layers import IGNORE_INDEX


@dataclass(frozen=True)
class Evaluation:
    bits_per_byte: float
    num_bytes: int
    is_whole_text: bool  # it came to its end before the rows that were asked for


def never():
    """Asked whether an evaluation is cut short."""
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
    is_cut_short(): called for each batch; once it returns True, on all ranks before the same batch, the evaluation
        ends and the result is None
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
        # Also where the lanes of this rank have ended before those of others, who may need its part of the weights.
        with one_program(dist, "evaluate", collective=True):
            nats += model(rows[:, :-1].contiguous().to(dist.device), targets.to(dist.device)).sum()
    if dist.rank % copies:  # of the neighbours that read the same rows one counts: int32 is soon full
        num_bytes = 0
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
    # A stable sort by whether a token is left out moves the chosen ones to the front, in their order.
    order = (~chosen).int().argsort(dim=1, stable=True)
    is_chosen = chosen.gather(1, order)
    return rows.gather(1, order).where(is_chosen, PADDING), counts.gather(1, order) & is_chosen


# -----------------------------------------------------------------------------
# What a project is worth: files of prepare_data --pack=project, given what stands before them in it, and alone


def require_packed(shards):
    """Raises BadInput if there is a shard without projects."""
    for shard in shards:
        if not shard.is_packed:
            raise BadInput(f"--project: {shard.file} holds single files: name a corpus of prepare_data --pack=project "
                           "with --data_dir")


@dataclass
class ProjectRows:
    """Rows for bits_per_byte, one for each file but the first of a document: BOS, what stands before the file, and the
    file, of which its text counts. A file takes half of the row at most, the rest of it is left out; of what stands
    before it, the end fits in. Without `with_project` the file stands alone.

    num_tokens: after about so many tokens of files it ends, whether they stand alone or not.
    """
    shards: list
    tokenizer: Tokenizer
    seq_len: int
    batch_size: int
    num_tokens: int
    with_project: bool
    num_files = 0  # so far
    unfinished_lanes = ()  # for bits_per_byte
    _counts = None  # of the last batch

    def view(self, rows):
        """Returns the rows of the last batch as they are, and which of their tokens count."""
        return rows, self._counts

    def __iter__(self):
        rows = []
        left = self.num_tokens
        self.num_files = 0
        for before, file, counts in self._files():
            num_before = self.seq_len - len(file) if self.with_project else 0
            before = before[max(0, len(before) - num_before):]
            rows.append((np.concatenate([[self.tokenizer.bos_id], before, file]), counts))
            self.num_files += 1
            left -= int(counts.sum())
            if len(rows) == self.batch_size or left <= 0:
                yield self._batch(rows)
                rows = []
            if left <= 0:
                return
        if rows:
            yield self._batch(rows)

    def _batch(self, found):
        rows = torch.full((self.batch_size, self.seq_len + 1), PADDING, dtype=torch.int32)
        self._counts = torch.zeros(rows.shape, dtype=torch.bool)
        for i, (ids, counts) in enumerate(found):
            rows[i, :len(ids)] = torch.from_numpy(ids.astype(np.int32))
            self._counts[i, len(ids) - len(counts):len(ids)] = torch.from_numpy(counts)
        return SimpleNamespace(rows=rows)

    def _files(self):
        """Yields for each file the tokens before it in its document, its own, and which of these are of its text and
        not of its path."""
        separator = self.tokenizer.special(FILE_SEP)
        sizes = self.tokenizer.token_bytes().numpy()
        for text in whole_texts(self.shards):  # others are one very long file
            before = np.empty(0, np.int64)
            for number, part in enumerate(text.split(SEPARATOR)[1:]):
                own = self.tokenizer.encode_to_numpy(part).astype(np.int64)
                file = np.concatenate([[separator], own[:self.seq_len // 2]])
                path_bytes = len(part.partition("\n")[0].encode()) + 1
                counts = sizes[file].cumsum() > path_bytes
                if number and counts.any():
                    yield before, file, counts
                before = np.concatenate([before, [separator], own])
