"""Projects as documents: their files one after the other, headers before the files that include them.

    text:    "\\0" path "\\n" file "\\0" path "\\n" file …
    tokens:  BOS <|file_sep|> path "\\n" file <|file_sep|> path "\\n" file …

No file of a corpus contains the separator, the character 0. Only shards that say so are read like this
(Shard.is_packed). corpus/packing.py writes these documents.
"""
import numpy as np

SEPARATOR = "\0"
FILE_SEP = "<|file_sep|>"


def encode_documents(pieces, tokenizer):
    """Returns what tokenizer.encode_documents returns for the texts of a list of TextPieces. In those of packed shards
    <|file_sep|> replaces each separator."""
    files = []
    counts = []  # files of each piece
    for piece in pieces:
        # A project's text begins with a separator. So its first file is empty and encodes to BOS alone.
        separator = SEPARATOR if isinstance(piece.text, str) else SEPARATOR.encode()
        own = piece.text.split(separator) if piece.is_packed else [piece.text]
        files += own
        counts.append(len(own))
    encoded = tokenizer.encode_documents(files)
    if len(files) == len(pieces):
        return encoded
    separator = tokenizer.special(FILE_SEP)
    documents = []
    left = iter(encoded)
    for count in counts:
        own = [np.array(next(left)) for _ in range(count)]  # each of them begins with BOS
        for later in own[1:]:
            later[0] = separator
        documents.append(np.concatenate(own).data)
    return documents
