"""Reads the machine's own schedule: the program of bundles that libtpu writes for every operation, kernels included.

A bundle holds the instructions of all units of the core that begin together. The core issues one bundle per cycle. A
schedule does not say how long the core waits for memory, nor for the matrix units, which take a row per cycle.
docs/preflight.md says how the estimate uses it.
"""
import re
from collections import Counter
from dataclasses import dataclass, field

LIBTPU_OPTIONS = {"xla_jf_dump_llo_text": "true", "xla_jf_dump_llo_pass_label_regex": "^final_bundles$"}
_FILE = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")
_BUNDLE = re.compile(r" *(0x[0-9a-f]+|0) +(?:[A-Z]{2})? *: *>* *\{(.*)")
_INSTRUCTION = re.compile(r"(?:^|;; ) *(?:%\S+ = )?([a-z]\w*)(\S*)")
_BRANCH = re.compile(r"sbr\.rel \S+ target bundleno = (\d+)")
_LOOP_EXIT = re.compile(r"scmp\.ge\.s32\.totalorder %\S+, (\d+) /\* loop exit test")
_PIPELINED = re.compile(r"pipeline-emitter|iteration index, stage = 1")
_PIPELINE_STAGES = 3  # copy in, compute, copy out
_MATRIX_UNIT = re.compile(r"\.mxu\d")
_UNITS = (  # the first pattern that the instruction's name begins with counts
    ("matrix", "vmatmul"), ("load", "vld"), ("store", "vst"),
    ("transcendental", "vpow2|vlog2|vrcp|vrsqrt|vtanh|vsin|vcos|verf"),
    ("across lanes", r"vrot|vperm|vxpose|vset|vadd\.xlane|vmax\.xlane|vmin\.xlane"),
    ("results", "vpop"), ("matrix weights", "vmatpush|vdwg|vlgmr"), ("vector", "v"), ("scalar", "s|p"))


@dataclass
class Schedule:
    """The schedule of one operation. Cycles are of one run of the operation on one core."""
    cycles: int = 0  # bundles, each as often as the loops around it run
    matrix_cycles: int = 0  # the cycles for which the busiest matrix unit works
    units: dict = field(default_factory=dict)  # unit -> instructions, counted like `cycles`
    uncounted_loops: int = 0  # loops whose number of runs is not a constant; they are counted as if they ran once

    @property
    def bound_cycles(self):
        """The cycles that the operation takes if it never waits for memory."""
        return max(self.cycles, self.matrix_cycles)


def read_folder(folder):
    """Returns {name of an HLO operation: Schedule} from libtpu's files in `folder`. An operation that libtpu scheduled
    more than once has the last schedule."""
    schedules = {}
    for path in sorted(folder.iterdir()):  # their names begin with the time
        found = _FILE.fullmatch(path.name)
        if found:
            with path.open(encoding="utf-8", errors="replace") as file:
                schedules[found[1]] = read_schedule(file)
    return schedules


def read_schedule(lines):
    """Returns the Schedule in the lines of one of libtpu's files.

    A loop is a branch back to an earlier bundle. Its runs are the constant of its exit test; a software pipeline runs
    twice more than it works, to fill and to empty. Bundles that a branch may skip are counted as if they were always
    issued.
    """
    addresses, instructions, matmuls, pipelined, loops, exits = {}, [], [], [], [], []
    for line in lines:
        bundle = _BUNDLE.match(line)
        if not bundle:
            continue
        at, text = len(instructions), bundle[2]
        addresses[int(bundle[1], 16)] = at
        names = _INSTRUCTION.findall(text)
        instructions.append(Counter(_unit(name + rest) for name, rest in names))
        matmuls.append([(_MATRIX_UNIT.search(rest)[0], _matrix_cycles(rest)) for name, rest in names
                        if name == "vmatmul" and _MATRIX_UNIT.search(rest)])
        pipelined.append(bool(_PIPELINED.search(text)))
        if found := _LOOP_EXIT.search(text):
            exits.append((at, int(found[1])))
        if found := _BRANCH.search(text):
            begin = addresses.get(int(found[1]))
            if begin is not None:
                own = [entry for entry in exits if entry[0] >= begin]  # those of inner loops are gone
                exits = [entry for entry in exits if entry[0] < begin]
                times = own[-1][1] - (_PIPELINE_STAGES - 1) * any(pipelined[begin:at]) if own else None
                loops.append((begin, at, times))
    runs = [1] * len(instructions)
    for begin, end, times in loops:
        for at in range(begin, end + 1):
            runs[at] *= times or 1
    units, busy = Counter(), Counter()
    for times, counts, products in zip(runs, instructions, matmuls, strict=True):
        for unit, count in counts.items():
            units[unit] += times * count
        for unit, cycles in products:
            busy[unit] += times * cycles
    return Schedule(sum(runs), max(busy.values(), default=0), dict(units), sum(times is None for *_, times in loops))


def _unit(instruction):
    return next((unit for unit, pattern in _UNITS if re.match(pattern, instruction)), "other")


def _matrix_cycles(instruction):
    """Returns the cycles for which a matrix unit works on one instruction, measured on products of known size: a
    register of 16 rows of bfloat16 takes 16 on v5e, half a register 8; v6e (`mubr`) takes two rows per cycle."""
    return 8 if ".lmr" in instruction or ".mubr" in instruction or ".bf16" not in instruction else 16
