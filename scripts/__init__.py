"""A module for each thing that a person runs. Ctrl-C is one line also while their imports take seconds."""
import sys


def _say_ctrl_c(kind, error, traceback):
    if issubclass(kind, KeyboardInterrupt):
        print("stopped by Ctrl-C", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = _say_ctrl_c
