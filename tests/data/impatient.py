"""base_train that waits for half a second for a bucket. It runs in the warm processes of warm.py."""
from unittest import mock

from nanochat.data.bucket import BucketFile
from scripts import base_train


def main(argv):
    with mock.patch.object(BucketFile.open_row_group, "__defaults__", (0.5,)):
        return base_train.main(argv)
