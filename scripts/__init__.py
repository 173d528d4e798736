"""A module for each thing that a person runs. Most import torch, and what needs it, only once their flags are read: it
takes seconds, for which --help need not wait. Ctrl-C is one line also during these imports."""
import os
import sys

from nanochat.common import say, work


def _say_ctrl_c(kind, error, traceback):
    if issubclass(kind, KeyboardInterrupt):
        print("stopped by Ctrl-C", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = _say_ctrl_c
if sys.argv[0] == "-m":  # python3 -m scripts.NAME begins to import
    work.begin("starting")
    # Before PyTorch reads it. Threads of OpenMP wait by spinning, which on a busy machine takes the cores from those
    # that they wait for: products took 5 to 35 s instead of 1.7 (dev/log). The threads stay, so no bit changes.
    load = os.getloadavg()[0]
    if load > os.cpu_count() / 2 and not {"OMP_NUM_THREADS", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        say(f"this machine is busy (load {load:.1f} on {os.cpu_count()} cores), so threads wait without spinning: "
            "OMP_WAIT_POLICY=PASSIVE; OMP_NUM_THREADS=1 takes one thread", sys.stderr)
