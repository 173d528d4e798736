"""Reads the machine's own schedule: the program of bundles that libtpu writes for every operation, kernels included.

A bundle holds the instructions of all units of the core that begin together. The core issues one bundle per cycle. The
schedule is read as it is before the compiler removes empty bundles, in which the core waits for the results of earlier
instructions: the chip waits for these results anyway. docs/preflight.md says how the estimate uses it.
"""
import math
import re
from collections import Counter
from dataclasses import dataclass, field

_PROGRAM, _USE = "post-delay-converter", "pre-delay_hlo-static-per-bundle-utilization"
_BUNDLES = "packed-bundles-post-ra"
# Without a filter libtpu schedules every operation three times in order to write the differences, which doubles the
# time of compiling. These two categories need no schedule but the one that the program gets.
LIBTPU_OPTIONS = {"xla_jf_dump_llo_text": "true", "xla_jf_dump_category_filter": "utilization,original",
                  "xla_jf_dump_llo_pass_label_regex": f"^({_PROGRAM}|{_USE})$"}
LIBTPU_OPTIONS_WITH_BUNDLES = LIBTPU_OPTIONS | {
    "xla_jf_dump_category_filter": "utilization,original,codegen",
    "xla_jf_dump_llo_pass_label_regex": f"^({_PROGRAM}|{_USE}|{_BUNDLES})$"}
_FILE = re.compile(rf"(\d+-(.+)-)\d+-({_PROGRAM}|{_USE}|{_BUNDLES})\.txt")
_TOP_LEVEL = "TLP"  # the name that libtpu gives to the program that calls the operations

_REGION = re.compile(r"( *)\$region\d+: ")
_RANGE = re.compile(r"// region range: \[(\d+), (\d+)\)")
_LOOP = re.compile(r"( *)loop: start=(-?\d+), step=(-?\d+), limit=(-?\d+)")
_PIPELINED = re.compile(r"pipeline-emitter|iteration index, stage = 1")
_REGISTER_NUMBERS = 1024  # in fp32
_EXTRA_RUNS = 2  # of a pipelined loop, to fill and to empty the pipeline
_MATMUL = re.compile(r"= (vmatmul\S*)(\.mxu\d)(\S*)")
_UNITS = {"MXU": "matrix", "XLU": "across lanes", "VALU": "vector", "EUP": "transcendental", "LOAD": "load",
          "STORE": "store", "SALU": "scalar", "VLOAD": "load", "VSTORE": "store"}  # the last two since libtpu 0.0.22
_BUNDLE = re.compile(r" *(0x[0-9a-f]+|0) .*?\{(.*)")


class Unreadable(Exception):
    """There are no schedules, or one is cut off or in another notation. The message says which."""


@dataclass
class Loop:
    """A loop of an operation: the bundles from `begin` to before `end`. The operation itself counts as one, too."""
    begin: int = 0
    end: int = 0
    times: int | None = 1  # the runs of its body each time that the loop is entered; None where this is not a constant
    is_pipelined: bool = False  # whether it copies in, computes and copies out at the same time
    runs: int = 1  # of its body in one run of the operation
    own_bundles: int = 0  # those in no inner loop
    instructions: Counter = field(default_factory=Counter)  # of these bundles: unit -> number

    @property
    def own_cycles(self):
        return self.own_bundles * self.runs

    @property
    def units(self):
        """Unit -> instructions per bundle."""
        return {unit: count / self.own_bundles for unit, count in self.instructions.items()}


@dataclass
class Branch:
    """Bundles of an operation that run only if a condition holds, from `begin` to before `end`."""
    begin: int = 0
    end: int = 0
    has_matmuls: bool = False  # in it and in no inner branch


@dataclass
class Schedule:
    """The schedule of one operation. Cycles are of one run of the operation on one core."""
    cycles: int = 0  # bundles, each as often as the loops around it run
    matrix_cycles: int = 0  # the cycles for which the busiest matrix unit works
    branch_cycles: int = 0  # the part of `cycles` in branches with products, if there are several
    empty_cycles: int = 0  # the part of `cycles` in which nothing begins
    units: dict = field(default_factory=dict)  # unit -> instructions, counted like `cycles`
    slots: dict = field(default_factory=dict)  # unit -> the most instructions that a bundle holds
    uncounted_loops: int = 0  # loops whose number of runs is not a constant; they are counted as if they ran once
    critical: Loop | None = None  # the loop with the most own cycles
    bundles: list = field(default_factory=list)  # of the critical loop, one text each, where they were asked for

    @property
    def bound_cycles(self):
        """The cycles that the operation takes if it never waits for memory."""
        return max(self.cycles, self.matrix_cycles)

    def cycles_with(self, matrix_cycles, transcendentals):
        """Returns the bound cycles if not all branches with products are taken each time, as the work that is really
        done shows: the cycles of the matrix units at their full width, and the numbers whose exponential is taken.

        Matrix units that are not used at their full width make the first too few, and other transcendental functions
        the second; the larger share counts. For the attention kernels at 8,192 positions, where each branch's runs are
        known, the result was 0.4 to 2.2% too high.
        """
        if not self.branch_cycles:
            return self.bound_cycles
        exponentials = self.units.get("transcendental", 0) * _REGISTER_NUMBERS  # if every branch were taken
        taken = min(1, max(matrix_cycles / self.matrix_cycles, transcendentals / max(exponentials, 1)))
        return int(max(self.cycles - (1 - taken) * self.branch_cycles, taken * self.matrix_cycles))

    def use(self, unit):
        """Returns the fraction of a unit's slots that are used."""
        if not self.cycles or not self.slots.get(unit):
            return 0.0
        return self.units[unit] / (self.slots[unit] * self.cycles)


def read_folder(folder):
    """Returns {name of an HLO operation: Schedule} from libtpu's files in `folder`. An operation that libtpu scheduled
    more than once has the last schedule. Raises Unreadable."""
    files = {}  # name -> {kind: path}
    for path in sorted(folder.iterdir()):  # their names begin with the time
        if found := _FILE.fullmatch(path.name):
            files.setdefault(found[2], {})[found[3]] = path
    schedules = {}
    for name, paths in files.items():
        if name == _TOP_LEVEL or not {_PROGRAM, _USE} <= paths.keys():
            continue
        with paths[_PROGRAM].open(errors="replace") as program, paths[_USE].open(errors="replace") as use:
            try:
                schedules[name] = read_schedule(program, use)
            except (ValueError, IndexError, ZeroDivisionError):
                raise Unreadable(f"libtpu's schedule of {name} cannot be read") from None
        if _BUNDLES in paths and schedules[name].critical:
            with paths[_BUNDLES].open(errors="replace") as bundles:
                schedules[name].bundles = _bundles_of(bundles, schedules[name].critical)
    if not schedules:
        raise Unreadable("libtpu wrote no schedules")
    return schedules


def read_schedule(program, use):
    """Returns the Schedule of an operation from the lines of two of libtpu's files: its program, which says where loops
    begin, end and how often they run, and the use of each unit by each bundle.

    Bundles that a branch may skip are counted as if they were always issued, see Schedule.cycles_with.
    """
    loops, branches, matmuls = _read_program(program)
    slots, rows = _read_use(use)
    # Each bundle belongs to the innermost loop around it and counts as often as that runs. An inner loop comes after
    # those around it, so that it takes its bundles from them.
    whole = Loop(0, len(rows))
    innermost = [whole] * len(rows)
    for loop in loops:
        loop.runs = innermost[loop.begin].runs * (loop.times or 1)
        innermost[loop.begin:loop.end] = [loop] * (loop.end - loop.begin)
    empty_cycles = 0
    for loop, row in zip(innermost, rows, strict=True):
        loop.own_bundles += 1
        loop.instructions.update(row)
        if not any(row.values()):
            empty_cycles += loop.runs
    with_bundles = [loop for loop in (whole, *loops) if loop.own_bundles]
    units = Counter()
    for loop in with_bundles:
        units.update({unit: loop.runs * count for unit, count in loop.instructions.items()})
    busy = Counter()  # matrix unit -> cycles
    for matmul in matmuls:
        busy[matmul.unit] += matmul.cycles * (matmul.loop.runs if matmul.loop else 1)
    branch_cycles = 0
    if len(branches) > 1:
        branch_cycles = sum((branch.end - branch.begin) * innermost[branch.begin].runs for branch in branches)
    return Schedule(
        cycles=sum(loop.own_cycles for loop in with_bundles), matrix_cycles=max(busy.values(), default=0),
        branch_cycles=branch_cycles, empty_cycles=empty_cycles, units={unit: units[unit] for unit in slots},
        slots=slots, uncounted_loops=sum(loop.times is None for loop in loops),
        critical=max(with_bundles, key=lambda loop: loop.own_cycles, default=None))


@dataclass
class _Matmul:
    """A matrix instruction."""
    loop: Loop | None  # the innermost around it
    unit: str
    cycles: int  # for which the unit works


# A program looks like this; "loop:" comes before the region that is its body, at the same depth:
#   $region0: #{fusion}
#     // region range: [0, 8)
#     loop: start=0, step=2, limit=6
#     $region1: #{fusion} parent=0 // loop_body
#       // region range: [1, 7)
#       %2 = vmatmul.bf16.gmra.mxu0 %v1
def _read_program(lines):
    """Returns the Loops of a program, the innermost Branches with matrix instructions, and the _Matmuls."""
    loops = []
    branches = []
    matmuls = []
    around = []  # (depth, Loop or Branch) of what the line is in, the innermost last: its indentation says it
    trips = {}  # depth -> the runs of the loop whose body begins next at this depth
    begun = None  # a Loop or Branch whose bundles are not known yet
    for line in lines:
        if found := _LOOP.match(line):
            start, step, limit = (int(found[number]) for number in (2, 3, 4))
            trips[len(found[1])] = math.ceil((limit - start) / step)
        elif found := _REGION.match(line):
            depth = len(found[1])
            around = [(outer, part) for outer, part in around if outer < depth]
            begun = None
            if "// loop_body" in line:
                begun = Loop(times=trips.pop(depth, None))
                loops.append(begun)
            elif "// pred_region" in line:
                begun = Branch()
                branches.append(begun)
            if begun:
                around.append((depth, begun))
        elif begun and (found := _RANGE.search(line)):
            begun.begin = int(found[1])
            begun.end = int(found[2])
            begun = None
        elif found := _MATMUL.search(line):
            matmuls.append(_Matmul(_innermost(around, Loop), found[2], _matrix_cycles(found[1] + found[3])))
            branch = _innermost(around, Branch)
            if branch:
                branch.has_matmuls = True
        elif around and _PIPELINED.search(line) and (loop := _innermost(around, Loop)):
            loop.is_pipelined = True
    # The exit test of a pipelined loop counts two runs more, which fill and empty the pipeline. With two less, every
    # product of the micro-step has exactly its FLOPs.
    for loop in loops:
        if loop.times and loop.is_pipelined:
            loop.times = max(loop.times - _EXTRA_RUNS, 1)
    return loops, [branch for branch in branches if branch.has_matmuls], matmuls


def _innermost(around, kind):
    """Returns the innermost part of this kind, Loop or Branch, or None."""
    for _, part in reversed(around):
        if isinstance(part, kind):
            return part
    return None


def _matrix_cycles(instruction):
    """Returns the cycles for which a matrix unit works on one instruction, measured on products of known size: a row
    takes a cycle on v5e, and half a cycle on v6e (`mubr`). A register has 16 rows of bfloat16 or 8 of float32; with
    `lmr`, half a register is used."""
    rows = 8 if ".lmr" in instruction or ".bf16" not in instruction else 16
    return rows // 2 if ".mubr" in instruction else rows


def _read_use(lines):
    """Returns {unit: slots of a bundle}, and of each bundle {unit: slots in use}. Columns such as VLOAD:FILL, a part of
    VLOAD, are left out."""
    # The first row of numbers is the slots that a bundle has, and every further one is a bundle.
    names, slots, rows = [], {}, []
    for line in lines:
        words = re.split(r"[\s|,]+", line.strip())
        if words[0] in _UNITS:
            names = [_UNITS.get(word, word) for word in words]
        elif words[0].isdigit():
            row = {name: int(word) for name, word in zip(names, words, strict=True) if ":" not in name}
            if slots:
                rows.append(row)
            else:
                slots = row
    return slots, rows


def _bundles_of(lines, loop):
    """Returns the text of each bundle of a loop."""
    texts = []
    for line in lines:
        found = _BUNDLE.match(line)
        if found and loop.begin <= int(found[1], 16) < loop.end:
            texts.append(found[2].rsplit("}", 1)[0].strip())
    return texts
