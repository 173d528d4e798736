"""Measures contenders in turns, round after round, so that other work on the machine slows down all of them."""
import statistics


def compare(piece, contenders, rounds):
    """Prints how long a piece of work takes each contender, the median of the rounds, and how many times as fast it is
    as the last one. piece: such as "a token". contenders: {name: function that works, and returns the seconds of a
    piece}. The first round warms up (compilation, first touch of memory) and does not count."""
    found = {name: [] for name in contenders}
    for _ in range(1 + rounds):
        for name, work in contenders.items():
            found[name].append(work())
    reference = list(found)[-1]
    for name, seconds in found.items():
        line = f"{name}: {piece} in {1000 * statistics.median(seconds[1:]):,.3f} ms"
        if name != reference:
            # Not the ratio of the medians: other work slows down all contenders of a round.
            ratio = statistics.median(map(float.__truediv__, found[reference][1:], seconds[1:]))
            line += f", {ratio:.2f} times as fast as {reference}"
        print(line, flush=True)
