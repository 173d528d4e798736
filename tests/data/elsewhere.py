"""base_train in a warm process of warm.py, as a new process sees the bucket and the Hub of a test, for which it waits
$OUTAGE_S seconds."""
import os
from unittest import mock

from huggingface_hub import constants

from nanochat.data import cache, hub_files, remote
from scripts import base_train


def forget():
    """Forgets what a process knows of a bucket and the Hub."""
    hub_files.commit_of.cache_clear()
    cache._remote_files.cache_clear()


def main(argv):
    forget()
    endpoint = os.environ.get("HF_ENDPOINT", constants.ENDPOINT)
    outage_s = float(os.environ.get("OUTAGE_S", remote.OUTAGE_S))
    with mock.patch.object(constants, "ENDPOINT", endpoint), mock.patch.object(remote, "OUTAGE_S", outage_s):
        return base_train.main(argv)
