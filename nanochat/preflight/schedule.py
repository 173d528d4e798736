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
LIBTPU_OPTIONS_WITH_BUNDLES = {"xla_jf_dump_llo_text": "true",
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
    """A schedule is cut off or in another notation. The message is the name of the operation."""


@dataclass
class Loop:
    """A loop of an operation: the bundles from `begin` to before `end`. The operation itself counts as one, too."""
    begin: int
    end: int
    times: int | None  # the runs of its body each time that the loop is entered; None where this is not a constant
    is_pipelined: bool = False  # whether it copies in, computes and copies out at the same time
    runs: int = 1  # of its body in one run of the operation
    own_cycles: int = 0  # the bundles that are in no inner loop, times their runs
    units: dict = field(default_factory=dict)  # of these bundles: unit -> instructions per bundle


@dataclass
class Branch:
    """Bundles of an operation that run only if a condition holds, from `begin` to before `end`."""
    begin: int = 0
    end: int = 0
    matmuls: int = 0  # matrix instructions in it and in no inner branch


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
        exponentials = self.units.get("transcendental", 0) * _REGISTER_NUMBERS
        taken = min(1, max(matrix_cycles / self.matrix_cycles, transcendentals / max(exponentials, 1)))
        return int(max(self.cycles - (1 - taken) * self.branch_cycles, taken * self.matrix_cycles))

    def use(self, unit):
        """Returns the fraction of a unit's slots that are used."""
        return self.units[unit] / (self.slots[unit] * self.cycles) if self.cycles and self.slots.get(unit) else 0.0


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
                raise Unreadable(name) from None
        if _BUNDLES in paths and schedules[name].critical:
            with paths[_BUNDLES].open(errors="replace") as bundles:
                schedules[name].bundles = _bundles_of(bundles, schedules[name].critical)
    return schedules


def read_schedule(program, use):
    """Returns the Schedule of an operation from the lines of two of libtpu's files: its program, which says where loops
    begin, end and how often they run, and the use of each unit by each bundle.

    Bundles that a branch may skip are counted as if they were always issued, see Schedule.cycles_with.
    """
    loops, matmuls, branches = _read_program(program)
    slots, rows = _read_use(use)
    schedule = Schedule(slots=slots, uncounted_loops=sum(loop.times is None for loop in loops))
    innermost = [Loop(0, len(rows), 1)] * len(rows)
    for loop in loops:  # an inner loop comes after those around it
        loop.runs = innermost[loop.begin].runs * (loop.times or 1)
        innermost[loop.begin:loop.end] = [loop] * (loop.end - loop.begin)
    totals = {}
    for loop, row in zip(innermost, rows, strict=True):
        counts, _ = totals.setdefault(id(loop), (Counter(), loop))
        counts.update(row)
        loop.own_cycles += loop.runs
        schedule.empty_cycles += loop.runs * (not any(row.values()))
    units = Counter()
    for counts, loop in totals.values():
        bundles = loop.own_cycles // loop.runs
        loop.units = {unit: counts[unit] / bundles for unit in slots}
        units.update({unit: loop.runs * count for unit, count in counts.items()})
    schedule.units = {unit: units[unit] for unit in slots}
    schedule.cycles = sum(loop.own_cycles for _, loop in totals.values())
    busy = Counter()
    for loop, unit, cycles in matmuls:
        busy[unit] += cycles * (loop.runs if loop else 1)
    schedule.matrix_cycles = max(busy.values(), default=0)
    if len(branches) > 1:
        schedule.branch_cycles = sum((branch.end - branch.begin) * innermost[branch.begin].runs for branch in branches)
    schedule.critical = max((loop for _, loop in totals.values()), key=lambda loop: loop.own_cycles, default=None)
    return schedule


def _read_program(lines):
    """Returns the Loops of a program; of each matrix instruction (its innermost Loop or None, the matrix unit, the
    cycles for which the unit works); and the innermost Branches with matrix instructions. The depth of a line's
    indentation says which loops and branches it is in."""
    loops, matmuls, branches, around, inside, trips = [], [], [], [], [], {}
    begun = None  # a Loop or Branch whose bundles are not known yet
    for line in lines:
        if found := _LOOP.match(line):
            start, step, limit = (int(found[number]) for number in (2, 3, 4))
            trips[len(found[1])] = math.ceil((limit - start) / step)
        elif found := _REGION.match(line):
            depth = len(found[1])
            for stack in (around, inside):
                while stack and stack[-1][0] >= depth:
                    stack.pop()
            begun = None
            if "// loop_body" in line:
                loops.append(begun := Loop(0, 0, trips.pop(depth, None)))
                around.append((depth, begun))
            elif "// pred_region" in line:
                branches.append(begun := Branch())
                inside.append((depth, begun))
        elif begun and (found := _RANGE.search(line)):
            begun.begin, begun.end, begun = int(found[1]), int(found[2]), None
        elif found := _MATMUL.search(line):
            matmuls.append((around[-1][1] if around else None, found[2], _matrix_cycles(found[1] + found[3])))
            if inside:
                inside[-1][1].matmuls += 1
        elif around and _PIPELINED.search(line):
            around[-1][1].is_pipelined = True
    for loop in loops:
        if loop.times and loop.is_pipelined:
            loop.times = max(loop.times - _EXTRA_RUNS, 1)
    return loops, matmuls, [branch for branch in branches if branch.matmuls]


def _matrix_cycles(instruction):
    """Returns the cycles for which a matrix unit works on one instruction, measured on products of known size: a row
    takes a cycle on v5e, and half a cycle on v6e (`mubr`). A register has 16 rows of bfloat16 or 8 of float32; with
    `lmr`, half a register is used."""
    rows = 8 if ".lmr" in instruction or ".bf16" not in instruction else 16
    return rows // 2 if ".mubr" in instruction else rows


def _read_use(lines):
    """Returns {unit: slots of a bundle}, and of each bundle {unit: slots in use}. Columns such as VLOAD:FILL, a part of
    VLOAD, are left out."""
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
