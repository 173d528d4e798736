"""Estimates what waits for what in a compiled program, and for how long. A transfer from an operation X-start to its
X-done overlaps with the operations between the two. Transfers of the same kind, copies by HBM or collectives by the
interconnect, follow one another."""
import math
from dataclasses import dataclass

from nanochat.preflight import hlo

# What a transfer uses: HBM, or the interconnect.
COPIES = "copies"
ICI = "ici"


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
        """Waits for a transfer; not at all if `seconds` is negative."""
        seconds = max(seconds, 0.0)
        self.seconds += seconds
        if resource == ICI:
            self.ici_waited_s += seconds
        else:
            self.copies_waited_s += seconds

    @property
    def low_s(self):
        """The time if everything that can overlap does."""
        return max(self.busy_s, self.traffic_s + self.copies_s, self.ici_s)

    @property
    def high_s(self):
        """The time if nothing overlaps."""
        return self.busy_s + self.traffic_s + self.copies_s + self.ici_s


@dataclass
class _Transfer:
    resource: str
    end_s: float  # when it ends, if nothing disturbs it


# The clock is Timeline.seconds. An operation advances it by the longer of its cycles and its traffic. The start of a
# transfer does not; its end advances it to the end of the transfer, if that is later. Each transfer begins when the one
# before it on the same resource has ended.
def run(ops, busy_s, tpu_slice):
    """Returns the Timeline of a list of Op in their order. busy_s: function of an Op, the seconds of one run without
    waiting for memory. The runs of a loop's body count as one run, whose operations take so many times as long."""
    line = Timeline()
    transfers = {}  # name -> _Transfer, of those that have begun and that nothing has waited for
    free_at = {COPIES: 0.0, ICI: 0.0}  # when the last transfer on this resource ends
    for op in ops:
        is_collective = bool(collective_of(op))
        traffic_s = op.times * op.hbm_bytes / tpu_slice.tpu.hbm_bytes_per_s
        ici_s = op.times * collective_s(op, tpu_slice)
        line.ici_s += ici_s
        if op.ends:
            transfer = transfers.pop(op.ends, None)
            if transfer:
                line.wait(transfer.resource, transfer.end_s - line.seconds)
        elif op.begins:
            resource = ICI if is_collective else COPIES
            free_at[resource] = max(free_at[resource], line.seconds) + (ici_s if is_collective else traffic_s)
            transfers[op.begins] = _Transfer(resource, free_at[resource])
            if resource == COPIES:
                line.copies_s += traffic_s
        elif is_collective:
            line.wait(ICI, max(ici_s, traffic_s))
        else:
            _delay_copies(transfers, free_at, line.seconds, traffic_s)
            seconds = op.times * busy_s(op)
            line.busy_s += seconds
            line.traffic_s += traffic_s
            line.seconds += max(seconds, traffic_s)
    # A copy that overlaps with an operation does not slow it down here, though both use HBM. So the sum of all traffic
    # is a bound of its own.
    line.seconds = max(line.seconds, line.low_s)
    return line


def _delay_copies(transfers, free_at, now_s, traffic_s):
    """Delays the copies that are in flight: HBM serves the traffic of an operation before them."""
    for transfer in transfers.values():
        if transfer.resource == COPIES and transfer.end_s > now_s:
            transfer.end_s += traffic_s
    if free_at[COPIES] > now_s:
        free_at[COPIES] += traffic_s


# Collectives


def count_collectives(ops, chips):
    """Returns {opcode: [runs, bytes of the whole arrays, bytes that move during other work]} of the collectives among
    `ops`, in which so many chips take part."""
    found = {}
    for op in ops:
        kind = collective_of(op)
        if kind:
            size = op.times * collective_bytes(op, chips)
            counts = found.setdefault(kind, [0, 0, 0])
            counts[0] += op.times
            counts[1] += size
            if op.begins:
                counts[2] += size
    return found


def collective_of(op):
    """Returns the opcode of the collective that an Op is or begins, "" if it is none."""
    kind = op.instruction.opcode.removesuffix("-start")
    if op.ends or kind not in hlo.COLLECTIVES:
        return ""
    return kind


def collective_bytes(op, chips):
    """Returns the bytes of the whole arrays that one run of a collective reduces, gathers or exchanges."""
    instruction = op.instruction
    sizes = sorted((array.bytes for array in instruction.shape), reverse=True)
    if instruction.opcode.endswith("-start"):  # (operands, results, …): results are as large as operands, or larger
        sizes = sizes[:len(instruction.operands)]
    if instruction.opcode.startswith("reduce-scatter"):  # its result is a part of what it reduces
        return sum(sizes) * (instruction.group_size or chips)
    return sum(sizes)


def collective_s(op, tpu_slice):
    """Returns the estimated seconds of one run of an Op's collective, 0 if it has none."""
    kind = collective_of(op)
    if not kind:
        return 0.0
    chips = op.instruction.group_size or tpu_slice.chips
    return transfer_s(kind, collective_bytes(op, tpu_slice.chips), chips, tpu_slice.tpu)


def transfer_s(kind, num_bytes, chips, tpu):
    """Returns the estimated seconds of a collective of a kind, as collective_of says it, over whole arrays of so many
    bytes. tpu: a TpuType.

    Assumes rings: each chip sends along one dimension of the torus, in both directions. In an exchange (all-to-all),
    half of what each chip sends crosses the middle of the box of chips, where a row of chips shares a link:
    bytes × length of the longest side / 4 per link. A torus with closed sides would take half of that.
    """
    dimensions = tpu.torus_dims
    # A chip has two links along each dimension of the torus, and the table's rate is that of all of them in both
    # directions.
    link_bytes_per_s = tpu.ici_bytes_per_s / (4 * dimensions)  # in one direction
    if kind == "all-to-all":
        longest_side = 2 ** math.ceil(math.log2(chips) / dimensions)
        return num_bytes * longest_side / 4 / link_bytes_per_s
    # Each chip passes on all but its own share of the bytes. An all-reduce is a reduce-scatter and then an all-gather.
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * (chips - 1) / chips * num_bytes / (2 * link_bytes_per_s)
