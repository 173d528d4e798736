"""What a project is worth to a model: bits per byte of files given what stands before them in it, and of the same files
alone. The documents are those of prepare_data --pack=project."""
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from nanochat.common import BadInput
from nanochat.data.lanes import PADDING
from nanochat.data.projects import FILE_SEP, SEPARATOR
from nanochat.data.shards import whole_texts
from nanochat.data.tokenizer import Tokenizer


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
        rows, self.num_files, left = [], 0, self.num_tokens
        for before, file, counts in self._files():
            before = before[max(0, len(before) - (self.seq_len - len(file))):] if self.with_project else []
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
        separator, sizes = self.tokenizer.special(FILE_SEP), self.tokenizer.token_bytes().numpy()
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
