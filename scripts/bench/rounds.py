"""Measures contenders in turns, round after round, so that other work on the machine slows down all of them. A ratio is
the median of the rounds' ratios."""
import statistics
import time
from dataclasses import dataclass
from os import times


@dataclass(frozen=True)
class Spent:
    """Seconds that a piece of work took: wall time, and CPU time, which other work on the machine changes less."""
    wall_s: float
    cpu_s: float

    def __str__(self):
        return f"{1000 * self.wall_s:,.3f} ({1000 * self.cpu_s:,.3f})"


class Clock:
    """Runs from the moment it is made."""

    def __init__(self):
        self._wall_s = time.perf_counter()
        self._cpu_s = cpu_seconds()

    def spent(self, pieces=1):
        """Returns the Spent of one of the `pieces` of work since."""
        return Spent((time.perf_counter() - self._wall_s) / pieces, (cpu_seconds() - self._cpu_s) / pieces)


def cpu_seconds():
    """Returns the CPU seconds of this process, all threads, and of all processes that it has waited for."""
    return time.process_time() + times().children_user + times().children_system


def compare(piece, contenders, rounds, reference):
    """Measures each contender in every round, and prints the rounds and the medians. piece: the unit of the work, such
    as "a token". contenders: {name: function that works, and returns the Spent of a piece}. The first round warms up
    (compilation, first touch of memory) and does not count."""
    print(f"{piece}, ms (of CPU time):")
    found = {name: [] for name in contenders}
    for number in range(1 + rounds):
        now = {name: work() for name, work in contenders.items()}
        if number == 0:
            continue
        for name, spent in now.items():
            found[name].append(spent)
        print(f"round {number}: " + "   ".join(f"{name} {spent}" for name, spent in now.items()), flush=True)
    for name, of_rounds in found.items():
        wall_s = statistics.median(spent.wall_s for spent in of_rounds)
        line = f"{name}: {1000 * wall_s:,.3f} ms, {1 / wall_s:,.1f} a second"
        if name != reference:
            pairs = list(zip(found[reference], of_rounds, strict=True))
            # Not the ratio of the medians: other work slows down all contenders of a round.
            wall = statistics.median(first.wall_s / spent.wall_s for first, spent in pairs)
            cpu = statistics.median(first.cpu_s / spent.cpu_s for first, spent in pairs)
            line += f", {wall:.2f} times as fast as {reference} ({cpu:.2f} by CPU time)"
        print(line, flush=True)
