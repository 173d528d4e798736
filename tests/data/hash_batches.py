"""base_train, with the hash of every row of its training batches appended to a file: `row number, CRC-32`.

    python3 -m tests.data.hash_batches OUT FLAG…

Every rank appends; lines are whole. Ranks are spawned, so they import this module and with it the loader that hashes.
"""
import os
import sys
import zlib

from nanochat.common import run_script
from nanochat.data import loader as dataloader
from nanochat.train import trainer
from scripts import base_train


class HashingLoader(dataloader.DataLoader):
    def __next__(self):
        first, step = self._next_row, self.world_size
        batch = super().__next__()
        lines = "".join(f"{first + i * step} {zlib.crc32(row.numpy())}\n" for i, row in enumerate(batch.rows))
        file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, lines.encode())
        os.close(file)
        return batch


trainer.DataLoader = HashingLoader  # validation is off

if __name__ == "__main__":
    run_script(lambda: base_train.main(sys.argv[2:]))
