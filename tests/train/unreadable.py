"""base_train whose validation text cannot be read for a while, in a warm process (tests/warm.py)."""
import os
import shutil
from unittest import mock

from nanochat.common import BadInput
from nanochat.data.loader import DataLoader
from nanochat.train.language import LanguageTask
from scripts import base_train

open_rows = LanguageTask.open_rows


class EndsEarly(DataLoader):
    """Cannot read more than a batch."""

    def __next__(self):
        if self._next_row >= self.readers:
            raise BadInput("shard_00000.parquet cannot be read")
        return super().__next__()


def main(argv):
    """base_train.main(argv). The rank $FAILING_RANK cannot open the text of its first evaluation, and cannot read the
    second one to its end. $VANISHING, a folder, is deleted before the third one."""
    evaluations = 0

    def open_text(task, split, data, rows, *args, **options):
        nonlocal evaluations
        is_failing = split == "val" and rows.reader == int(os.environ["FAILING_RANK"])
        if is_failing:
            evaluations += 1
            if evaluations == 1:
                raise BadInput("shard_00000.parquet cannot be opened")
            if evaluations == 3:
                shutil.rmtree(os.environ["VANISHING"])
        loader = open_rows(task, split, data, rows, *args, **options)
        if is_failing and evaluations == 2:
            loader.__class__ = EndsEarly
        return loader

    with mock.patch.object(LanguageTask, "open_rows", open_text):
        return base_train.main(argv)
