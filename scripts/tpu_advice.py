"""Reads a run's metrics.jsonl and advises what would make the run faster, the largest loss of time first.

    python3 -m scripts.tpu_advice RUN

RUN is the name of a run, its directory, or its metrics.jsonl. The fractions of time are medians since the newest
process started, or fractions of the whole wall time. The flags come from the run's newest checkpoint.
"""
from dataclasses import dataclass

from nanochat.analysis.advice import advise, describe, flags_of
from nanochat.common import flag, read_flags, run_script
from nanochat.record.history import read_run


@dataclass(frozen=True)
class Flags:
    run: str = flag("", "name of a run, its directory, or its metrics.jsonl", positional=True, metavar="RUN")


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    run = read_run(flags.run)
    known = flags_of(run)
    print(describe(run))
    advice = advise(run, known)
    for number, item in enumerate(advice, start=1):
        print(f"{number}. {item.text}")
    if not advice:
        print("nothing to advise: the measurements show nothing wrong")
    elif not known:
        print("(no checkpoint next to the metrics, so the values of its flags are unknown)")


if __name__ == "__main__":
    run_script(main)
