"""N-grams of tokens (--ngram_rows): a table whose rows belong to pairs and triples of tokens by hash. Each position
adds the row of the pair that ends there, and that of the triple, to its token's embedding. Different n-grams may share
a row. The idea is from arXiv 2501.16975 and modded-nanogpt; dev/log has its gain on C++."""
import torch
import torch.nn.functional as F

BEFORE = 2  # tokens before a position that its row depends on
LARGEST = 2**31 - 1
PAIRS = 0x2C1B3C6D, 0x297A2D39
TRIPLES = 0x165667B1, 0x27D4EB2F, 0x1B56C4E9


def rows_of(ids, num_rows, cache=None, positions=None):
    """Returns the rows of ids (B, T), int32 (B, 2 × T): of the pairs that end there, and then of the triples. num_rows:
    a power of two. cache, positions: as in GPT.hidden; without them, the text begins with the ids."""
    if cache is None:
        ids = F.pad(ids, (BEFORE, 0))
    else:
        ids = cache.after_previous(ids, positions)
    ids = ids.int()  # products wrap around, alike on every device
    last = ids[:, 2:]
    before = ids[:, 1:-1]
    pairs = last * PAIRS[0] + before * PAIRS[1]
    triples = last * TRIPLES[0] + before * TRIPLES[1] + ids[:, :-2] * TRIPLES[2]
    number = torch.cat([pairs, triples], dim=1)
    # The lower bits of a product depend on lower bits only: these mix the upper ones into them. Without the sign,
    # because torch_xla 2.9 shifts negative numbers otherwise than PyTorch.
    number = number & LARGEST
    number = ((number ^ (number >> 15)) * 0x2545F491) & LARGEST
    return (number ^ (number >> 13)) & (num_rows - 1)


def added_by(vectors):
    """Returns what each position adds, (B, T, C), from the vectors (B, 2 × T, C) of its rows."""
    pairs, triples = vectors.chunk(2, dim=1)
    return pairs + triples
