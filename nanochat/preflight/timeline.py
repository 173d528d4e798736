"""Runs the operations of a compiled program one after the other, on paper: what waits for what, and for how long.

A transfer between an operation X-start and its X-done goes on beside the operations between the two, which hide that
much of it. Transfers of the same kind, copies by HBM or collectives by the interconnect, follow one another.
"""
import math
from dataclasses import dataclass

from nanochat.preflight import collectives


@dataclass
class Timeline:
    """Seconds of one run of a program."""
    seconds: float = 0.0
    busy_s: float = 0.0  # of the operations alone, if memory were infinitely fast
    traffic_s: float = 0.0  # of their own traffic with HBM
    copies_s: float = 0.0
    copies_waited_s: float = 0.0
    ici_s: float = 0.0  # of collectives
    ici_waited_s: float = 0.0

    def wait(self, resource, seconds):
        """Waits for "ici" or "copies"; not at all if `seconds` is negative."""
        self.seconds += max(seconds, 0.0)
        if resource == "ici":
            self.ici_waited_s += max(seconds, 0.0)
        else:
            self.copies_waited_s += max(seconds, 0.0)

    @property
    def low_s(self):
        """The time if everything that can run at the same time did."""
        return max(self.busy_s, self.traffic_s + self.copies_s, self.ici_s)

    @property
    def high_s(self):
        """The time if nothing ran at the same time."""
        return self.busy_s + self.traffic_s + self.copies_s + self.ici_s


def run(ops, busy_s, tpu_slice):
    """Returns the Timeline of a list of hlo.Op in their order.

    busy_s: function of an Op, the seconds of one run without waiting for memory. The runs of a loop's body are alike,
    so that they are counted as one run whose operations and transfers take so many times as long.
    """
    line, ends, free_at = Timeline(), {}, {"copies": 0.0, "ici": 0.0}
    for op in ops:
        kind, now = collectives.kind_of(op), line.seconds
        traffic_s = op.times * op.hbm_bytes / tpu_slice.tpu.hbm_bytes_per_s
        ici_s = op.times * collective_s(op, tpu_slice)
        if op.ends:
            resource, end = ends.pop(op.ends, ("copies", 0.0))
            line.wait(resource, end - now)
        elif op.begins:
            resource = "ici" if kind else "copies"
            free_at[resource] = max(free_at[resource], now) + (ici_s if kind else traffic_s)
            ends[op.begins] = resource, free_at[resource]
            line.copies_s += 0.0 if kind else traffic_s
        elif kind:
            line.wait("ici", max(ici_s, traffic_s))
        else:
            seconds = op.times * busy_s(op)
            line.busy_s += seconds
            line.traffic_s += traffic_s
            line.seconds += max(seconds, traffic_s)
            # HBM serves the operation before the copies that go on beside it.
            ends = {name: (resource, end + traffic_s * (resource == "copies" and end > now))
                    for name, (resource, end) in ends.items()}
            free_at["copies"] += traffic_s * (free_at["copies"] > now)
        line.ici_s += ici_s
    line.seconds = max(line.seconds, line.low_s)
    return line


def collective_s(op, tpu_slice):
    """Returns the estimated seconds of one run of an Op's collective, 0 if it has none.

    Assumes rings: each chip sends along one dimension of the torus, in both directions. In an exchange (all-to-all),
    half of what each chip sends crosses the middle of the box of chips, of which a row sends through one link each:
    bytes × length of the longest side / 4 per link. A torus whose sides are closed would take half of that.
    """
    kind = collectives.kind_of(op)
    if not kind:
        return 0.0
    num_bytes, chips = collectives.bytes_of(op, tpu_slice.chips), op.instruction.group_size or tpu_slice.chips
    dimensions = tpu_slice.tpu.torus_dims
    link_bytes_per_s = tpu_slice.tpu.ici_bytes_per_s / (4 * dimensions)  # in one direction
    if kind == "all-to-all":
        longest_side = 2 ** math.ceil(math.log2(chips) / dimensions)
        return num_bytes * longest_side / 4 / link_bytes_per_s
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * (chips - 1) / chips * num_bytes / (2 * link_bytes_per_s)
