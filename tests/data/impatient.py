"""base_train that waits for half a second for a bucket. It runs in the warm processes of warm.py."""
from unittest import mock

from nanochat.data import cache, remote
from scripts import base_train


def main(argv):
    cache._remote_files.cache_clear()
    with mock.patch.object(remote, "OUTAGE_S", 0.5):
        return base_train.main(argv)
