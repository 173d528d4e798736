"""Reads the machine's own schedule: the program of bundles that libtpu writes for every operation, kernels included.
A bundle holds the instructions of all units of the core that begin together. The core issues one bundle per cycle.
docs/preflight.md says how the estimate uses it."""
import math
import re
from collections import Counter
from dataclasses import dataclass, field

from nanochat.common import Failure

_PROGRAM = "post-delay-converter"
_USE = "pre-delay_hlo-static-per-bundle-utilization"
# The schedule is read before the compiler removes empty bundles, in which the core waits for the results of earlier
# instructions: the chip waits for these results anyway. Without a filter libtpu schedules every operation three times
# to write the differences, which doubles the time of compiling. These categories need only the program's own schedule.
LIBTPU_OPTIONS = {"xla_jf_dump_llo_text": "true", "xla_jf_dump_category_filter": "utilization,original",
                  "xla_jf_dump_llo_pass_label_regex": f"^({_PROGRAM}|{_USE})$"}
_FILE = re.compile(rf"\d+-(.+)-\d+-({_PROGRAM}|{_USE})\.txt")
_ADVICE = "is the disk full? If not, this is another version of libtpu: install the one that pyproject.toml names"
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


@dataclass
class Loop:
    """A loop of an operation: the bundles from `begin` to before `end`. The whole operation counts as one, too."""
    begin: int = 0
    end: int = 0
    times: int | None = 1  # the runs of its body each time that the loop is entered; None if this is not a constant
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

    @property
    def bound_cycles(self):
        """The cycles that the operation takes if it never waits for memory."""
        return max(self.cycles, self.matrix_cycles)

    def cycles_with(self, matrix_cycles, transcendentals):
        """Returns the bound cycles of an operation that skips some branches with products. The work that it really
        does says how many: the cycles of the matrix units at their full width, and the number of exponentials.

        Matrix units that are not used at their full width make the first too few, and other transcendental functions
        the second, so the larger share counts. For the attention kernels at 8,192 positions, where each branch's runs
        are known, the result is 0.4 to 2.2% too high.
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
    """Returns {name of an HLO operation: Schedule} from libtpu's files in `folder`, of each operation the last
    schedule. Raises Failure."""
    files = {}  # name -> {kind: path}
    for path in sorted(folder.iterdir()):  # their names begin with the time
        if found := _FILE.fullmatch(path.name):
            files.setdefault(found[1], {})[found[2]] = path
    schedules = {}
    for name, paths in files.items():
        if name == _TOP_LEVEL or not {_PROGRAM, _USE} <= paths.keys():
            continue
        with paths[_PROGRAM].open(errors="replace") as program, paths[_USE].open(errors="replace") as use:
            try:
                schedules[name] = read_schedule(program, use)
            except (ValueError, IndexError, ZeroDivisionError):
                raise Failure(f"libtpu's schedule of {name} cannot be read: {_ADVICE}") from None
    if not schedules:
        raise Failure(f"libtpu wrote no schedules: {_ADVICE}")
    return schedules


def read_schedule(program, use):
    """Returns the Schedule of an operation from the lines of two of libtpu's files: its program, and the use of each
    unit by each bundle. Bundles that a branch may skip count, see Schedule.cycles_with."""
    program = _read_program(program)
    slots, rows = _read_use(use)
    # Each bundle belongs to the innermost loop around it and counts as often as that runs. An inner loop comes after
    # those around it, so that it takes its bundles from them.
    whole = Loop(0, len(rows))
    innermost = [whole] * len(rows)
    for loop in program.loops:
        loop.runs = innermost[loop.begin].runs * (loop.times or 1)
        innermost[loop.begin:loop.end] = [loop] * (loop.end - loop.begin)
    empty_cycles = 0
    units = Counter()
    for loop, row in zip(innermost, rows, strict=True):
        loop.own_bundles += 1
        loop.instructions.update(row)
        if not any(row.values()):
            empty_cycles += loop.runs
        for unit, count in row.items():
            units[unit] += loop.runs * count
    busy = Counter()  # matrix unit -> cycles
    for loop, unit, cycles in program.matmuls:
        busy[unit] += cycles * (loop or whole).runs
    # A run takes some of several branches with products. Their cycles are counted apart, and cycles_with leaves out
    # those that the declared work does not need. A single such branch has all products, and counts as if it always ran.
    branches = [branch for branch in program.branches if branch.has_matmuls]
    branch_cycles = 0
    if len(branches) > 1:
        for branch in branches:
            branch_cycles += (branch.end - branch.begin) * innermost[branch.begin].runs
    with_bundles = [loop for loop in (whole, *program.loops) if loop.own_bundles]
    return Schedule(
        cycles=sum(loop.own_cycles for loop in with_bundles), matrix_cycles=max(busy.values(), default=0),
        branch_cycles=branch_cycles, empty_cycles=empty_cycles, units={unit: units[unit] for unit in slots},
        slots=slots, uncounted_loops=sum(loop.times is None for loop in program.loops),
        critical=max(with_bundles, key=lambda loop: loop.own_cycles, default=None))


class _Program:
    """The loops, branches and matrix instructions of a program whose lines are read one after the other."""

    def __init__(self):
        self.loops = []
        self.branches = []  # of those with matrix instructions the innermost have `has_matmuls`
        self.matmuls = []  # (innermost Loop or None, matrix unit, cycles for which it works)
        self._around = []  # (depth, Loop or Branch) around the line, the innermost last: its indentation says it
        self._trips = {}  # depth -> the runs of the loop whose body begins next at this depth
        self._begun = None  # a Loop or Branch whose bundles are not known yet

    def innermost(self, kind):
        """Returns the innermost part of this kind, Loop or Branch, around the line, or None."""
        for _, part in reversed(self._around):
            if isinstance(part, kind):
                return part
        return None

    def read_line(self, line):
        """Reads the next line. What it begins or contains belongs to the parts in `_around`."""
        if found := _LOOP.match(line):
            start, step, limit = map(int, found.groups()[1:])
            self._trips[len(found[1])] = math.ceil((limit - start) / step)
        elif found := _REGION.match(line):
            self._enter_region(len(found[1]), line)
        elif self._begun and (found := _RANGE.search(line)):
            self._begun.begin = int(found[1])
            self._begun.end = int(found[2])
            self._begun = None
        elif found := _MATMUL.search(line):
            self.matmuls.append((self.innermost(Loop), found[2], _matrix_cycles(found[1] + found[3])))
            branch = self.innermost(Branch)
            if branch:
                branch.has_matmuls = True
        elif self._around and _PIPELINED.search(line):
            loop = self.innermost(Loop)
            if loop:
                loop.is_pipelined = True

    # Indentation nests the regions: a region ends the open ones that are as deep or deeper. Only loops and branches are
    # kept. Which bundles they have says the next line with a range.
    def _enter_region(self, depth, line):
        while self._around and self._around[-1][0] >= depth:
            self._around.pop()
        self._begun = None
        if "// loop_body" in line:
            self._begun = Loop(times=self._trips.pop(depth, None))
            self.loops.append(self._begun)
        elif "// pred_region" in line:
            self._begun = Branch()
            self.branches.append(self._begun)
        if self._begun:
            self._around.append((depth, self._begun))


# A program looks like this; "loop:" comes before the region that is its body, at the same depth:
#   $region0: #{fusion}
#     // region range: [0, 8)
#     loop: start=0, step=2, limit=6
#     $region1: #{fusion} parent=0 // loop_body
#       // region range: [1, 7)
#       %2 = vmatmul.bf16.gmra.mxu0 %v1
def _read_program(lines):
    program = _Program()
    for line in lines:
        program.read_line(line)
    # The exit test of a pipelined loop counts two runs more, which fill and empty the pipeline. With two fewer, every
    # product of the micro-step has exactly its FLOPs.
    for loop in program.loops:
        if loop.times and loop.is_pipelined:
            loop.times = max(loop.times - _EXTRA_RUNS, 1)
    return program


def _matrix_cycles(instruction):
    """Returns the cycles for which a matrix unit works on one instruction, measured on products of known size: a row
    takes a cycle on v5e, and half a cycle on v6e (`mubr`). A register has 16 rows of bfloat16, 8 of float32, or 32 of
    8-bit integers, of which two take as long as another row; `lmr` uses half a register."""
    rows = 8 if ".lmr" in instruction or ".f32" in instruction else 16
    return rows // 2 if ".mubr" in instruction else rows


# The use looks like this: the names of the units, the slots that a bundle has of each, and then the slots in use, a
# line for each bundle of the program:
#       MXU|  XLU| VALU|  EUP| LOAD|STORE| SALU
#         4     3     4     1     3     1     2
#     1 0 0 0 0 0 0
#     0 0 0 0 0 0 0
def _read_use(lines):
    """Returns {unit: slots of a bundle}, and of each bundle {unit: slots in use}, without columns such as VLOAD:FILL, a
    part of VLOAD."""
    names = []
    rows = []  # the first row of numbers is the slots that a bundle has, and every further one is a bundle
    for line in lines:
        words = re.split(r"[\s|,]+", line.strip())
        if words[0] in _UNITS:
            names = words
        elif words[0].isdigit():
            row = {}
            for name, word in zip(names, words, strict=True):
                if ":" not in name:
                    row[_UNITS.get(name, name)] = int(word)
            rows.append(row)
    if not rows:
        return {}, []
    return rows[0], rows[1:]
