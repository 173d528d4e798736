"""What base_eval measures beside plain text: middles of documents by what stands around them, and files and middles by
what stands before them of their project."""
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from nanochat.common import BadInput
from nanochat.data.fim import KINDS, SAMPLE, choose_middle, draws, last_files
from nanochat.data.lanes import PADDING
from nanochat.data.projects import FILE_SEP, SEPARATOR
from nanochat.data.shards import CONTEXT, read_columns, whole_texts
from nanochat.data.tokenizer import FIM_TOKENS, Infill, Tokenizer
from nanochat.infer.loss_eval import is_between, with_suffixes

# Views of rows for bits_per_byte, as loss_eval.with_suffixes


def without_suffixes(tokenizer, rows):
    """Returns the same rows with empty suffixes. What follows a suffix moves up; PADDING fills the end."""
    return _keep(~_is_suffix(tokenizer, rows), *with_suffixes(tokenizer, rows))


def from_left_to_right(tokenizer, rows):
    """Returns the same rows as text from left to right: prefix and middle, without suffixes and FIM_TOKENS. A middle
    has the same tokens as with a suffix."""
    special = torch.tensor([tokenizer.special(name) for name in FIM_TOKENS])
    return _keep(~_is_suffix(tokenizer, rows) & ~torch.isin(rows, special), *with_suffixes(tokenizer, rows))


def _is_suffix(tokenizer, rows):
    return is_between(rows, tokenizer.special("<|fim_suffix|>"), tokenizer.special("<|fim_middle|>"))


def _keep(chosen, rows, counts):
    """Moves the chosen tokens of each row, and their counts, to its beginning, and drops the others."""
    # A stable sort by "not chosen" moves the chosen ones to the front, in their order.
    order = (~chosen).int().argsort(dim=1, stable=True)
    is_chosen = chosen.gather(1, order)
    return rows.gather(1, order).where(is_chosen, PADDING), counts.gather(1, order) & is_chosen


# Projects: shards of prepare_data --pack=project


def require_packed(shards, how):
    """Raises BadInput unless all shards are of prepare_data --pack=`how`, project or context."""
    for shard in shards:
        if not (shard.is_packed if how == "project" else CONTEXT in shard.columns):
            raise BadInput(f"--{how}: {shard.file} holds other documents: give a --data_dir of --pack={how}")


@dataclass
class FileRows:
    """Rows for bits_per_byte, one for each file. `given` says what stands before it. num_tokens: the rows end after
    about so many tokens that count, whatever stands before them."""
    shards: list
    tokenizer: Tokenizer
    seq_len: int
    batch_size: int
    num_tokens: int
    given: str
    num_files = 0  # so far
    unfinished_lanes = ()  # for bits_per_byte
    problem = None  # likewise
    _counts = None  # of the last batch

    def view(self, rows):
        """Returns the rows of the last batch as they are, and which of their tokens count."""
        return rows, self._counts

    def __iter__(self):
        """Yields batches of rows: <|bos|>, the end of the project before a file as far as it fits, and the file."""
        rows = []
        left = self.num_tokens
        self.num_files = 0
        for before, file, counts in self._files():
            before = before[max(0, len(before) + len(file) - self.seq_len):]
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


class ProjectRows(FileRows):
    """Rows of each file except the first of a document: the text before the file if `given` is "project", and the file,
    whose text counts. A file takes at most half of the row, and its surplus is cut; the text before it is cut at its
    beginning."""

    def _files(self):
        """Yields for each file: the tokens before it, its own tokens, and which of these belong to its text, not its
        path."""
        separator = self.tokenizer.special(FILE_SEP)
        sizes = self.tokenizer.token_bytes().numpy()
        for text in whole_texts(self.shards):  # a text in pieces is one very long file
            before = np.empty(0, np.int64)
            for number, part in enumerate(text.split(SEPARATOR)[1:]):
                own = self.tokenizer.encode_to_numpy(part).astype(np.int64)
                file = np.concatenate([[separator], own[:self.seq_len // 2]])
                path_bytes = len(part.partition("\n")[0].encode()) + 1
                counts = sizes[file].cumsum() > path_bytes
                if number and counts.any():
                    yield before if self.given == "project" else before[:0], file, counts
                before = np.concatenate([before, [separator], own])


# Contexts: shards of prepare_data --pack=context


class GapRows(FileRows):
    """Rows of one gap for each file that has a context, in at most half of the row: before it, the context that `given`
    names, and the gap, whose middle counts. given: "own" context, that of an "other" project, or "none"."""

    def _files(self):
        half = self.seq_len // 2
        chars = half * len(SAMPLE) // len(self.tokenizer.encode(SAMPLE))
        latest = {}  # {project: context of its latest file}, in the order of reading
        for shard in self.shards:
            for number, (text, project, own) in enumerate(read_columns(shard, "source", CONTEXT)):
                other = next((latest[name] for name in reversed(latest) if name != project), None)
                if own:
                    latest.pop(project, None)
                    latest[project] = own
                if not (own and other):
                    continue
                gap = self._gap(text.decode(errors="replace"), chars * 4 // 5, draws(f"{shard.file.name},{number}"))
                if len(gap) <= half:
                    before = self._tokens(last_files({"own": own, "other": other, "none": ""}[self.given], chars))
                    is_middle = np.cumsum(gap == self.tokenizer.special("<|fim_middle|>")) > 0
                    yield before, gap, is_middle

    def _gap(self, text, chars, below):
        """Returns the tokens of a gap in a random part of `text` with so many characters, without BOS."""
        begin = text.rfind("\n", 0, below(max(1, len(text) - chars))) + 1
        part = text[begin:begin + chars]
        first, last = choose_middle(part, KINDS, below)
        return np.array(self.tokenizer.encode_infills([Infill(part[:first], part[last:], part[first:last])])[0][0][1:])

    def _tokens(self, files):
        """Returns the tokens of the texts of other files."""
        found = []
        for text in files:
            found += [self.tokenizer.special(FILE_SEP), *self.tokenizer.encode(text)]
        return np.array(found, np.int64)
