"""The stages of a run: rows become longer at certain steps.

A schedule is ((step, positions per row), …): the length from that step on. The first step is 0, and steps rise.
"""
import math
import re
from itertools import pairwise

from nanochat.common import BadInput


def length_at(schedule, step):
    """Returns the positions per row at `step`."""
    return next(length for first, length in reversed(schedule) if first <= step)


# Of the schedule ((0, 1024), (4000, 2048)), the spans of steps 3000 to 4999 are (3000, 4000, 1024) and
# (4000, 5000, 2048).
def spans(schedule, begin, end):
    """Yields (first, last, length) for each length in turn, of steps `begin` to `end` - 1. `last` is excluded, too."""
    for (first, length), (last, _) in pairwise([*schedule, (math.inf, None)]):
        first = max(first, begin)
        last = min(last, end)
        if first < last:
            yield first, last, length


def length_schedule(ramp, max_seq_len):
    """Returns ((step, positions per row), …) for --seq_len_ramp=STEP:LENGTH,…; "" is `max_seq_len` throughout. Raises
    BadInput unless each length is a multiple of the one before, and the last is `max_seq_len`."""
    schedule = [(-1, 0)]  # one before the first
    for entry in (ramp or f"0:{max_seq_len}").split(","):
        last = schedule[-1][1]
        match = re.fullmatch(r"([0-9]{1,9}):([1-9][0-9]{0,6})", entry)
        if not match or int(match[1]) <= schedule[-1][0] or int(match[2]) <= last:
            raise BadInput(f"--seq_len_ramp={ramp}: {entry} is not STEP:LENGTH with steps and lengths that rise: give "
                           "for example 0:1024,4000:2048,8000:4096")
        step = int(match[1])
        length = int(match[2])
        if not last and step:
            raise BadInput(f"--seq_len_ramp={ramp} does not say how long rows are before step {step}: begin with 0:")
        if last and length % last:
            raise BadInput(f"--seq_len_ramp={ramp}: rows of {length} are not whole rows of {last}, which would change "
                           f"the batch: give a multiple of {last}")
        schedule.append((step, length))
    if length != max_seq_len:
        raise BadInput(f"--seq_len_ramp={ramp} ends with rows of {length}, and the model has "
                       f"--max_seq_len={max_seq_len}: make them equal")
    return tuple(schedule[1:])
