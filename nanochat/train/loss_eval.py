"""Bits per byte: a loss that does not depend on the tokenizer, so models with different tokenizers can be compared."""
import math

import torch

from nanochat.device.collectives import all_reduce_sum
from nanochat.device.programs import one_program
from nanochat.model.layers import IGNORE_INDEX


@torch.no_grad()
def bits_per_byte(model, loader, num_rows, token_bytes, dist, is_cut_short=lambda: False):
    """Returns (bits per byte, number of bytes) over rows 0 to `num_rows` - 1 of `loader`, the same text for every world
    size.

    Bits per byte = sum of the tokens' losses / (ln 2 × sum of the tokens' bytes). Special tokens stand for no text and
    count in neither sum.

    model: called as model(ids, targets) -> losses, in nats
    loader: a new DataLoader of this rank
    token_bytes: int32 (vocabulary,), on the CPU, the bytes of each token
    is_cut_short(): called before each batch; once it returns True, on all ranks before the same batch, the evaluation
        ends and the result is None
    """
    nats = torch.zeros((), device=dist.device)
    num_bytes = 0
    row_number = torch.arange(loader.batch_size) * dist.world_size + dist.rank  # of this rank's rows in a batch
    for _ in range(math.ceil(num_rows / (loader.batch_size * dist.world_size))):
        if is_cut_short():
            return None
        rows = torch.as_tensor(next(loader).rows)  # (B, T + 1)
        targets = rows[:, 1:].clone()
        sizes = token_bytes[targets]
        sizes[row_number >= num_rows] = 0
        targets[sizes == 0] = IGNORE_INDEX
        num_bytes += int(sizes.sum())
        row_number += loader.batch_size * dist.world_size
        with one_program(dist, "evaluate"):
            nats += model(rows[:, :-1].contiguous().to(dist.device), targets.to(dist.device)).sum()
    totals = [nats, torch.tensor(num_bytes, dtype=torch.int32).to(dist.device)]
    with one_program(dist, "evaluate_reduce", collective=True):
        all_reduce_sum(totals, dist)
    nats, num_bytes = totals[0].item(), totals[1].item()
    if num_bytes == 0:
        return float("nan"), 0
    return nats / (math.log(2) * num_bytes), num_bytes
