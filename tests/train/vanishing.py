"""base_train whose first validation set is out of reach of rank 1, and of that rank alone, after step 3. It runs in the
warm processes of warm.py."""
from dataclasses import replace
from unittest import mock

from nanochat.train.language import LanguageTask
from scripts import base_train

GONE = "/nowhere/val"
_read_rows = LanguageTask._read_rows


def read_rows(task, dist, step, data, *others, **options):
    if step == 3 and dist.rank == 1 and data is next(iter(task.validation_sets.values())):
        data = replace(data, val_dir=GONE)
    return _read_rows(task, dist, step, data, *others, **options)


def main(argv):
    with mock.patch.object(LanguageTask, "_read_rows", read_rows):
        return base_train.main(argv)
