"""base_train in a warm process of warm.py, as a new process sees the Hub of a test."""
import os
from unittest import mock

from huggingface_hub import constants

from nanochat.data import cache, hub_files
from scripts import base_train


def forget():
    """Forgets what a process knows of the Hub."""
    hub_files.commit_of.cache_clear()
    cache._remote_files.cache_clear()


def main(argv):
    forget()
    with mock.patch.object(constants, "ENDPOINT", os.environ["HF_ENDPOINT"]):
        return base_train.main(argv)
