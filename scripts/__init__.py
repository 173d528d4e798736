"""A module for each thing that a person runs. Ctrl-C is one line also while their imports take seconds."""
import sys

from nanochat.common import work


def _say_ctrl_c(kind, error, traceback):
    if issubclass(kind, KeyboardInterrupt):
        print("stopped by Ctrl-C", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = _say_ctrl_c
if sys.argv[0] == "-m":  # python3 -m scripts.NAME begins to import
    work.begin("starting")
