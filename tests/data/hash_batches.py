"""base_train, with the hash of every row of its training batches appended to the file $HASHES: `row number, CRC-32`.
Once it takes row number $STOP_AT_ROW, it is asked to stop through the file $REQUESTS.

It runs in the warm processes of warm.py, whose ranks are threads: what main replaces is replaced for all of them.
"""
import os
import zlib
from unittest import mock

from nanochat.data import loader as dataloader
from nanochat.run.agreement import Requests
from nanochat.train import language
from scripts import base_train


class HashingLoader(dataloader.DataLoader):
    def __next__(self):
        first, step = self._next_row, self.readers
        batch = super().__next__()
        numbers = range(first, first + step * len(batch.rows), step)
        lines = "".join(f"{number} {zlib.crc32(row.numpy())}\n"
                        for number, row in zip(numbers, batch.rows, strict=True))
        file = os.open(os.environ["HASHES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, lines.encode())
        os.close(file)
        if int(os.environ.get("STOP_AT_ROW", -1)) in numbers:
            Requests(os.environ["REQUESTS"]).ask_to_stop()
        return batch


def main(argv):
    with mock.patch.object(language, "DataLoader", HashingLoader):  # validation is off
        return base_train.main(argv)
