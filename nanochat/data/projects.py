"""Files of a project that stand together: as one document, or as the context of a file with a gap.

    text:    "\\0" path "\\n" file "\\0" path "\\n" file …
    tokens:  BOS <|file_sep|> path "\\n" file <|file_sep|> path "\\n" file …

A project as a document has its files one after the other, headers before the files that include them
(Shard.is_packed). The context of a file has a column of its own: condensed files, the nearest last. It stands before
the gap in training (fim.py) and in the prompt of an editor (infer/prompt.py).

No file of a corpus contains the separator, the character 0, and only shards that say so are read like this.
corpus/packing.py writes both.
"""
from os.path import commonprefix

import numpy as np

from nanochat.common import BadInput

SEPARATOR = "\0"
FILE_SEP = "<|file_sep|>"
SUFFIXES = (".c", ".cc", ".cpp", ".cxx", ".c++", ".h", ".hh", ".hpp", ".hxx", ".h++", ".inl", ".ipp", ".tcc", ".tpp",
            ".txx", ".ixx", ".cppm", ".cu", ".cuh")  # of C and C++


def encode_document(piece, tokenizer):
    """Returns the tokens of a TextPiece, a memoryview of uint32 that begins with BOS. In one of a packed shard
    <|file_sep|> replaces each separator."""
    if not piece.is_packed:
        return tokenizer.encode_documents([piece.text])[0]
    separator = SEPARATOR if isinstance(piece.text, str) else SEPARATOR.encode()
    # A project's text begins with a separator. So its first file is empty and encodes to BOS alone.
    files = []
    for file in tokenizer.encode_documents(piece.text.split(separator)):
        file = np.array(file)  # it begins with BOS
        if files:
            file[0] = tokenizer.special(FILE_SEP)
        files.append(file)
    return np.concatenate(files).data


def files_of(context):
    """Returns the (path, text) of each file of a context, as an editor sends them."""
    return tuple(file.partition("\n")[::2] for file in context.split(SEPARATOR)[1:])


def alike_first(paths, path):
    """Returns `paths` sorted: the more of its beginning one shares with `path`, the earlier it comes."""
    return sorted(paths, key=lambda other: (-len(commonprefix([path, other])), other))


def require_files(shards, what):
    """Raises BadInput, which names `what`, if a shard holds projects."""
    if packed := [shard.file for shard in shards if shard.is_packed]:
        raise BadInput(f"{packed[0]} holds whole projects (prepare_data --pack=project), and {what} needs single "
                       "files: name a corpus without --pack, or of --pack=context")
