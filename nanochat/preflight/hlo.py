"""Reads the optimised HLO text of the TPU compiler and adds up the costs of a program.

The compiler writes `estimated_cycles` on each operation that it schedules, but its own sums count a loop's body once.
Here a program is a list of Op, each with the number of times that it runs. Three things are counted:
- cycles: the compiler's estimate for each scheduled operation. It makes none for Pallas kernels.
- bytes: operands and results. If an operation reads or writes only a slice of an array, the slice counts, as in XLA's
  HloCostAnalysis. `hbm_bytes` leaves out arrays that the compiler placed in VMEM (memory space S(1) and others).
- transfers that run beside other operations, from an operation X-start to its X-done. The compiler also cuts
  collectives into steps, which it fuses with other operations. Such a collective is one Op, made of its first step; the
  other steps hand its arrays on untouched, and it ends with the last.
"""
import hashlib
import json
import math
import re
from dataclasses import dataclass, field

from nanochat.preflight.source_lines import IN_NAME

_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "f16": 16, "bf16": 16, "s32": 32,
         "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64}
_ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*[a-z0-9]*)\[(?P<dims>[\d,<=]*)\](?:\{(?P<layout>[^}]*)\})?")
_INSTRUCTION = re.compile(r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.-]+) = (?P<rest>.*)", re.DOTALL)
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$", re.DOTALL)
# These move no data: the compiler makes no code for them, or lets them share the memory of their operand.
_FREE = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier",
                   "partition-id", "replica-id", "async-update", "domain", "add-dependency"})
_FREE_CUSTOM_CALLS = frozenset({"ConcatBitcast", "AllocateBuffer", "AssumeGatherIndicesInBound"})
UPDATED_BY = {"dynamic-update-slice": 1, "scatter": 2}  # which operand is written into the first, in place
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
PALLAS_CALL = "tpu_custom_call"


@dataclass(frozen=True)
class Array:
    """One array of a shape; a shape may be a tuple of several."""
    dtype: str
    dims: tuple
    in_hbm: bool

    @property
    def bytes(self):
        return math.prod(self.dims) * _BITS.get(self.dtype, 0) / 8


@dataclass
class Instruction:
    name: str
    opcode: str
    shape: list  # of Array: one, or several if it is a tuple
    operands: list  # names
    attributes: str  # the text after the operands
    is_root: bool

    def called(self, key):
        """Returns the name of the computation that the attribute `key` names, or None."""
        found = re.search(rf"\b{key}=%?([\w.-]+)", self.attributes)
        return found and found[1]

    @property
    def custom_call_target(self):
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def declared_cost(self):
        """The cost that a Pallas kernel declares, {"flops": …, "bytes_accessed": …, …}, or None."""
        found = re.search(r'"cost_estimate": ?(\{[^}]*\})', self.attributes)
        return {key: int(value) for key, value in json.loads(found[1]).items()} if found else None

    @property
    def cycles(self):
        found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(found[1]) if found else 0

    @property
    def group_size(self):
        """The number of chips in each group of a collective, or None if all chips are one group."""
        listed = re.search(r"replica_groups=\{\{([\d,]+)\}", self.attributes)
        if listed:
            return listed[1].count(",") + 1
        counted = re.search(r"replica_groups=\[\d+,(\d+)\]<=", self.attributes)
        return int(counted[1]) if counted else None

    @property
    def shape_text(self):
        """The shapes of its results without layouts: "bf16[8,1024]", or several separated by commas."""
        return ", ".join(f"{array.dtype}[{','.join(map(str, array.dims))}]" for array in self.shape)

    @property
    def source(self):
        """Its innermost source line and its name: "nanochat/model/gpt.py:166 backward aten__mm"; "" if unknown."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        if not found:
            return ""
        lines = [line[0] for line in IN_NAME.finditer(found[1])]
        parts = [*lines[-1:], "backward" if " backward " in found[1] else "", found[1].rsplit("/", 1)[-1].split()[-1]]
        return " ".join(filter(None, parts))


@dataclass(frozen=True)
class Op:
    """An instruction that runs `times` times, with the costs of one time."""
    instruction: Instruction
    times: int
    cycles: int
    bytes: float
    hbm_bytes: float
    begins: str = ""  # the name of the transfer that it begins, which goes on beside the following operations
    ends: str = ""  # the name of the transfer whose end it waits for
    kernel: Instruction | None = None  # the Pallas kernel that it is, or that is in its fusion


@dataclass
class Module:
    computations: dict = field(default_factory=dict)  # name -> {name of instruction -> Instruction}
    entry: str = ""

    def instruction_count(self):
        """Returns the number of instructions, including those inside fusions and loops, each counted once."""
        return sum(map(len, self.computations.values()))

    def ops(self, branch_shares=None):
        """Returns a list of Op of all scheduled instructions: those of the entry computation and of its loops.

        branch_shares: the fraction of a conditional's runs that each of its branches gets, as Fractions, of
        conditionals that choose by a number, {"branch_computations": …}, or by a truth value, {"true_computation": …}.
        All branches of others, and of those that have another number of branches, are counted as if they always ran.
        """
        return list(self._ops_of(self.entry, 1, branch_shares or {}))

    def _ops_of(self, name, times, branch_shares):
        computation = self.computations[name]
        for instruction in computation.values():
            if instruction.opcode == "while":
                trips = times * self.trip_count(instruction, computation)
                yield from self._ops_of(instruction.called("condition"), trips, branch_shares)
                yield from self._ops_of(instruction.called("body"), trips, branch_shares)
            elif instruction.opcode == "call":
                yield from self._ops_of(instruction.called("to_apply"), times, branch_shares)
            elif instruction.opcode == "conditional":
                chosen_by, branches = self._branches(instruction)
                shares = branch_shares.get(chosen_by, ())
                shares = shares if len(branches) == len(shares) else [1] * len(branches)
                for branch, share in zip(branches, shares, strict=True):
                    yield from self._ops_of(branch, round(times * share), branch_shares)
            elif instruction.opcode.endswith("-done"):
                yield Op(instruction, times, 0, 0.0, 0.0, ends=self._start_of(instruction, computation))
            elif instruction.opcode not in _FREE and instruction.custom_call_target not in _FREE_CUSTOM_CALLS:
                if instruction.opcode == "fusion":
                    yield from self._collective_steps(self.computations[instruction.called("calls")], times)
                kernel = self._kernel(instruction)
                yield _op(instruction, times, self._touched(instruction, computation, kernel),
                          begins=instruction.name if instruction.opcode.endswith("-start") else "", kernel=kernel)

    def _kernel(self, instruction):
        """Returns the Pallas kernel that an instruction is, or that its fusion has, or None."""
        if instruction.custom_call_target == PALLAS_CALL:
            return instruction
        inside = self.computations[instruction.called("calls")] if instruction.opcode == "fusion" else {}
        return next(filter(None, map(self._kernel, inside.values())), None)

    @staticmethod
    def _start_of(done, computation):
        """Returns the name of the operation that began the transfer that `done` waits for."""
        name = done.operands[0]
        while name in computation and computation[name].opcode in ("async-update", "get-tuple-element", "bitcast"):
            name = computation[name].operands[0]
        return name

    @staticmethod
    def _collective_steps(fused, times):
        """Yields the Op that begins a collective and the one that waits for its end, if their steps are in a fusion."""
        is_last = any(inner.custom_call_target == "AsyncCollectiveDone" for inner in fused.values())
        for inner in fused.values():
            if inner.opcode in COLLECTIVES:
                chain = re.search(r'chain_id="(\w+)"', inner.attributes)
                if _is_first_step(inner):
                    yield _op(inner, times, [*fused[inner.operands[0]].shape, *inner.shape],
                              begins=f"chain {chain and chain[1]}")
                elif is_last:
                    yield Op(inner, times, 0, 0.0, 0.0, ends=f"chain {chain and chain[1]}")

    @staticmethod
    def _branches(instruction):
        listed = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
        if listed:
            return "branch_computations", re.findall(r"[\w.-]+", listed[1])
        return "true_computation", [instruction.called("true_computation"), instruction.called("false_computation")]

    def trip_count(self, loop, computation):
        """Returns the number of times that the body of a `while` runs.

        The loops here count up to a bound, or down from one. The bound is a constant in the condition or among the
        initial values. Returns 1 if neither is found.
        """
        condition = self.computations[loop.called("condition")]
        bound = max(self._constants(condition.values()), default=0)
        if bound > 0:
            return bound
        start = computation[loop.operands[0]]
        return max(self._constants(computation[name] for name in start.operands if name in computation), default=1) or 1

    def _constants(self, instructions):
        """Yields the integer constants among `instructions`, including those inside the fusions that they call."""
        for instruction in instructions:
            called = instruction.called("calls")
            if called:
                yield from self._constants(self.computations[called].values())
            elif instruction.opcode == "copy":
                pass
            elif instruction.opcode == "constant" and instruction.shape[0].dtype in ("s32", "u32", "s64", "u64"):
                if re.fullmatch(r"-?\d+", instruction.operands[0] if instruction.operands else ""):
                    yield int(instruction.operands[0])

    def _touched(self, instruction, computation, kernel):
        """Returns the arrays that an instruction reads or writes, or the slices of them. kernel: see Op."""
        opcode, shape = instruction.opcode, instruction.shape
        if kernel and kernel.declared_cost:  # a kernel may read only a slice of an operand
            return [Array("u8", (kernel.declared_cost["bytes_accessed"],), True)]
        operands = [computation[name].shape for name in instruction.operands if name in computation]
        if opcode.endswith("-start"):  # (source, destination, …) in either order, each touched once
            moved = sorted(shape, key=lambda array: array.bytes, reverse=True)
            if opcode == "slice-start":  # ((source), slice, …)
                return [Array(shape[0].dtype, shape[1].dims, shape[0].in_hbm), shape[1]]
            return moved[:2]
        if opcode == "fusion":
            return self._touched_by_fusion(self.computations[instruction.called("calls")], operands, shape)
        return self._touched_by_slicing(opcode, operands, shape) or [*sum(operands, []), *shape]

    @staticmethod
    def _touched_by_slicing(opcode, operands, shape):
        """Returns the touched arrays of an opcode that reads or writes only a part of its first operand, else None."""
        if opcode in ("dynamic-slice", "slice", "gather"):
            return [Array(shape[0].dtype, shape[0].dims, operands[0][0].in_hbm), *sum(operands[1:], []), *shape]
        if opcode == "dynamic-update-slice":
            update = operands[1][0]
            return [update, Array(update.dtype, update.dims, shape[0].in_hbm)]
        if opcode == "scatter":
            updates = operands[2][0]
            return [*operands[1], updates] + 2 * [Array(updates.dtype, updates.dims, shape[0].in_hbm)]
        return None

    def _touched_by_fusion(self, fused, operands, shape):
        root = next(instruction for instruction in fused.values() if instruction.is_root)
        if root.custom_call_target in ("AsyncCollectiveStart", "AsyncCollectiveDone"):
            return []
        touched = []
        for number, arrays in enumerate(operands):
            parts = self._parts_read(_parameter(fused, number), fused)
            if parts is None:
                touched += arrays
            else:
                touched += [Array(part.dtype, part.dims, arrays[0].in_hbm) for part in parts]
        results = [fused[name] for name in root.operands] if root.opcode == "tuple" else [root]
        if len(results) != len(shape):
            return touched + shape
        for result, array in zip(results, shape, strict=True):
            if result.opcode == "parameter" or result.opcode in COLLECTIVES:
                continue  # handed on untouched
            part = self._part_written(result, fused)
            touched.append(Array(part.dtype, part.dims, array.in_hbm) if part else array)
        return touched

    def _part_written(self, result, fused):
        """Returns the Array that a fusion writes in place into a larger one, None if it writes all of its result."""
        while result.opcode in ("bitcast", "copy", "reshape") and result.operands[0] in fused:
            result = fused[result.operands[0]]
        if result.opcode in UPDATED_BY:
            return fused[result.operands[UPDATED_BY[result.opcode]]].shape[0]
        if result.opcode == "fusion":
            inner = self.computations[result.called("calls")]
            return self._part_written(next(i for i in inner.values() if i.is_root), inner)
        return None

    def _parts_read(self, instruction, fused):
        """Returns the parts that a fusion reads of its parameter `instruction`, as Arrays; None if it reads all of
        it."""
        parts = []
        for user in fused.values():
            for position in (number for number, name in enumerate(user.operands) if name == instruction.name):
                below = None
                if user.opcode == "bitcast":
                    below = self._parts_read(user, fused)
                elif user.opcode == "fusion":
                    inner = self.computations[user.called("calls")]
                    below = self._parts_read(_parameter(inner, position), inner)
                elif position == 0 and user.opcode in ("dynamic-slice", "slice", "gather"):
                    below = user.shape
                elif position == 0 and user.opcode == "dynamic-update-slice":
                    below = []  # written in place: counted with the results
                elif position == 0 and user.opcode == "scatter":  # the same, and read, because it adds
                    below = fused[user.operands[UPDATED_BY["scatter"]]].shape
                elif user.opcode in COLLECTIVES or user.opcode == "tuple" and user.is_root:
                    below = []  # handed on untouched
                if below is None:
                    return None
                parts += below
        return parts


def _op(instruction, times, touched, begins="", kernel=None):
    return Op(instruction, times, instruction.cycles, sum(array.bytes for array in touched),
              sum(array.bytes for array in touched if array.in_hbm), begins, kernel=kernel)


def _is_first_step(collective):
    """Returns whether this is the first step of a collective that the compiler has cut into steps."""
    return '"async_collective_fusion_config":{"flag_start":"-1"' in collective.attributes


def _parameter(computation, number):
    return next(i for i in computation.values() if i.opcode == "parameter" and int(i.operands[0]) == number)


# -----------------------------------------------------------------------------
# Parsing


def parse(text):
    """Returns the Module of an HLO text. An instruction may span lines, some of which may begin with `}`."""
    module, current, statement = Module(), None, []

    def finish():
        found = _INSTRUCTION.match("\n".join(statement)) if statement else None
        if found:
            instruction = _parse_instruction(found)
            current[instruction.name] = instruction
        statement.clear()

    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            finish()
            current = module.computations[header["name"]] = {}
            if header["entry"]:
                module.entry = header["name"]
        elif _INSTRUCTION.match(line) and current is not None:
            finish()
            statement = [line]
        elif statement:
            statement.append(line)
    finish()
    return module


def _parse_instruction(found):
    rest = re.sub(r"/\*.*?\*/", "", found["rest"])
    shape_end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode, _, _ = rest[shape_end:].strip().partition("(")
    operands_start = rest.index("(", shape_end)
    operands_end = _closing(rest, operands_start)
    inside = rest[operands_start + 1:operands_end]
    operands = [inside] if opcode in ("constant", "parameter") else re.findall(r"%([\w.-]+)", inside)
    return Instruction(found["name"], opcode, parse_shape(rest[:shape_end]), operands, rest[operands_end + 1:],
                       bool(found["root"]))


def _closing(text, start):
    """Returns the index of the parenthesis that closes the one at `start`. Raises ValueError if none does."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"unbalanced HLO: {text[:200]}")


def parse_shape(text):
    """Returns the list of the Arrays in a shape's text, one or the several of a tuple."""
    return [Array(found["dtype"], tuple(int(side.lstrip("<=")) for side in found["dims"].split(",") if side),
                  not re.search(r"S\([1-9]", found["layout"] or ""))
            for found in _ARRAY.finditer(text)]


def hash_of_program(text):
    """Returns a hash of a module that is not optimised yet.

    It is equal for the same program, whatever the module's name, its source lines and the way of printing. Only Pallas
    kernels contain paths of source files, so that their hash depends on the folder of the repository.
    """
    digest = hashlib.sha256()
    for computation in parse(text).computations.values():
        for i in computation.values():
            attributes = re.sub(r", metadata=\{[^}]*\}", "", i.attributes).strip()
            digest.update(repr((i.name, i.opcode, i.shape, i.operands, i.is_root, attributes)).encode())
    return digest.hexdigest()[:32]
