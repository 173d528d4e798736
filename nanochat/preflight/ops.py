"""Counts what a compiled program does: which operations run, how often, and how many bytes each of them moves.

The compiler writes `estimated_cycles` on each operation that it schedules, but its own sums count a loop's body once.
Here a program is a list of Op, each with the number of times that it runs. Three things are counted:
- cycles: the compiler's estimate for each scheduled operation. It makes none for Pallas kernels.
- hbm_bytes: operands and results in HBM. If an operation reads or writes only a slice of an array, the slice counts, as
  in XLA's HloCostAnalysis. Arrays that the compiler placed in VMEM (memory space S(1) and others) do not count.
- asynchronous transfers, from an operation X-start to its X-done. The compiler also cuts collectives into steps, which
  it fuses with other operations. Such a collective is one Op, made of its first step; the other steps pass its arrays
  on untouched, and it ends with the last.
"""
import math
import re
from dataclasses import dataclass

from nanochat.preflight.hlo import COLLECTIVES, PALLAS_CALL, Array, Instruction
from nanochat.preflight.schedule import Schedule

# These move no data: the compiler generates no code for them, or they share the memory of their operand.
_FREE = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier",
                   "partition-id", "replica-id", "async-update", "domain", "add-dependency"})
_FREE_CUSTOM_CALLS = frozenset({"ConcatBitcast", "AllocateBuffer", "AssumeGatherIndicesInBound"})
_UPDATED_BY = {"dynamic-update-slice": 1, "scatter": 2}  # which operand is written into the first, in place


@dataclass(frozen=True)
class Op:
    """An instruction that runs `times` times, with the costs of one time."""
    instruction: Instruction
    times: int
    cycles: int = 0  # the compiler's estimate, until estimate.py knows better
    hbm_bytes: float = 0.0
    begins: str = ""  # the name of the asynchronous transfer that it starts
    ends: str = ""  # the name of the transfer whose end it waits for
    kernel: Instruction | None = None  # the Pallas kernel that it is, or that its fusion contains
    schedule: Schedule | None = None  # the machine's own, once estimate.py has found it


def ops_of(module, branch_shares=None):
    """Returns a list of Op of all scheduled instructions of a Module: of the entry computation and of its loops.

    branch_shares: the share of a conditional's runs that each of its branches gets, a list of Fractions, for those that
    choose by a number, {"branch_computations": …}, or by a truth value, {"true_computation": …}. All branches of
    others, and of those with another number of branches, count as if they always ran.
    """
    return list(_walk(module, module.entry, 1, branch_shares or {}))


# `times` multiplies on the way down: a loop in a loop runs trips × trips times, and a branch a share of that. The
# shares come from the model, because the program chooses by numbers that only a run has: of 16 layers, 12 have a short
# window, so the branch of the attention kernel for it counts 12 times in a loop of 16.
def _walk(module, name, times, branch_shares):
    """Yields the Ops of a computation that runs `times` times."""
    computation = module.computations[name]
    for instruction in computation.values():
        opcode = instruction.opcode
        if opcode == "while":
            trips = times * trip_count(module, instruction, computation)
            yield from _walk(module, instruction.called("condition"), trips, branch_shares)
            yield from _walk(module, instruction.called("body"), trips, branch_shares)
        elif opcode == "call":
            yield from _walk(module, instruction.called("to_apply"), times, branch_shares)
        elif opcode == "conditional":
            for branch, share in _branches(instruction, branch_shares):
                yield from _walk(module, branch, round(times * share), branch_shares)
        elif opcode.endswith("-done"):
            yield Op(instruction, times, ends=_start_of(instruction, computation))
        elif opcode not in _FREE and instruction.custom_call_target not in _FREE_CUSTOM_CALLS:
            if opcode == "fusion":
                yield from _collective_steps(module.inside(instruction), times)
            kernel = _kernel_in(module, instruction)
            begins = instruction.name if opcode.endswith("-start") else ""
            yield _op(instruction, times, _touched(module, instruction, computation, kernel), begins, kernel)


def _op(instruction, times, touched, begins="", kernel=None):
    hbm_bytes = sum(array.bytes for array in touched if array.in_hbm)
    return Op(instruction, times, instruction.cycles, hbm_bytes, begins, kernel=kernel)


def _kernel_in(module, instruction):
    """Returns the Pallas kernel that an instruction is, or that its fusion contains, or None."""
    if instruction.custom_call_target == PALLAS_CALL:
        return instruction
    if instruction.opcode == "fusion":
        for inner in module.inside(instruction).values():
            kernel = _kernel_in(module, inner)
            if kernel:
                return kernel
    return None


def _branches(conditional, branch_shares):
    """Returns (name of the computation, share of the runs) of each branch."""
    listed = re.search(r"branch_computations=\{([^}]*)\}", conditional.attributes)
    if listed:
        branches = re.findall(r"[\w.-]+", listed[1])
        shares = branch_shares.get("branch_computations", ())
    else:
        branches = [conditional.called("true_computation"), conditional.called("false_computation")]
        shares = branch_shares.get("true_computation", ())
    if len(shares) != len(branches):
        shares = [1] * len(branches)
    return zip(branches, shares, strict=True)


# Transfers


def _start_of(done, computation):
    """Returns the name of the operation that began the transfer that `done` waits for."""
    name = done.operands[0]
    while name in computation and computation[name].opcode in ("async-update", "get-tuple-element", "bitcast"):
        name = computation[name].operands[0]
    return name


def _collective_steps(fused, times):
    """Yields the Op that begins a collective and the one that waits for its end, if their steps are in a fusion."""
    targets = {inner.custom_call_target for inner in fused.values()}
    is_last = "AsyncCollectiveDone" in targets
    for inner in fused.values():
        if inner.opcode not in COLLECTIVES:
            continue
        chain = re.search(r'chain_id="(\w+)"', inner.attributes)
        name = f"chain {chain and chain[1]}"
        if '"async_collective_fusion_config":{"flag_start":"-1"' in inner.attributes:  # the first step
            yield _op(inner, times, [*fused[inner.operands[0]].shape, *inner.shape], begins=name)
        elif is_last:
            yield Op(inner, times, ends=name)


# Loops


def trip_count(module, loop, computation):
    """Returns the number of times that the body of a `while` runs. The loops here count up to a bound, or down from
    one. The bound is a constant in the condition or among the initial values. Returns 1 without one."""
    condition = module.computations[loop.called("condition")]
    bound = max(_constants(module, condition.values()), default=0)
    if bound > 0:
        return math.ceil(bound / _step(module, loop))
    # A loop that counts down compares with 0, the greatest constant of its condition. Its length is then among its
    # initial values.
    initial = filter(None, map(computation.get, computation[loop.operands[0]].operands))
    return max(_constants(module, initial), default=1) or 1


def _step(module, loop):
    """Returns by how much a loop counts: not by 1 if XLA's partitioner has unrolled it, as it does with products whose
    operands travel between the chips."""
    condition, body = (module.computations[loop.called(each)] for each in ("condition", "body"))
    compare, end = (next(each for each in each_of.values() if each.is_root) for each_of in (condition, body))
    counter = condition.get(compare.operands[0])
    if counter is None or counter.opcode != "get-tuple-element":
        return 1
    following = body.get(end.operands[counter.tuple_index])
    if following is None or following.opcode != "add":
        return 1
    return max(_constants(module, filter(None, map(body.get, following.operands))), default=1)


def _constants(module, instructions):
    """Yields the integer constants among `instructions`, including those inside the fusions that they call."""
    for instruction in instructions:
        if instruction.called("calls"):
            yield from _constants(module, module.inside(instruction).values())
        elif instruction.opcode == "constant" and instruction.shape[0].dtype in ("s32", "u32", "s64", "u64"):
            if instruction.operands and re.fullmatch(r"-?\d+", instruction.operands[0]):
                yield int(instruction.operands[0])


# Bytes


def _touched(module, instruction, computation, kernel):
    """Returns the arrays that an instruction reads or writes, or the slices of them. kernel: see Op."""
    opcode = instruction.opcode
    shape = instruction.shape
    if kernel and kernel.declared_cost:  # a kernel may read only a slice of an operand
        return [Array("u8", (kernel.declared_cost["bytes_accessed"],), True)]
    operands = [computation[name].shape for name in instruction.operands if name in computation]
    # From here on a slice is in the memory, HBM or VMEM, of the array that it is taken from.
    if opcode == "slice-start":  # ((source), slice, …)
        return [shape[1].placed_as(shape[0]), shape[1]]
    if opcode.endswith("-start"):  # (source, destination, …) in either order, each touched once
        return sorted(shape, key=lambda array: array.bytes, reverse=True)[:2]
    if opcode == "fusion":
        return _touched_by_fusion(module, module.inside(instruction), operands, shape)
    if opcode in ("dynamic-slice", "slice", "gather"):
        return [shape[0].placed_as(operands[0][0]), *sum(operands[1:], []), *shape]
    if opcode == "dynamic-update-slice":
        update = operands[1][0]
        return [update, update.placed_as(shape[0])]
    if opcode == "scatter":  # it adds to rows, so it reads and writes them
        updates = operands[2][0]
        return [*operands[1], updates, updates.placed_as(shape[0]), updates.placed_as(shape[0])]
    return [*sum(operands, []), *shape]


def _touched_by_fusion(module, fused, operands, shape):
    """Returns the same of a fusion of the instructions `fused`."""
    root = _root(fused)
    # The collective in it is an Op of its own and has these bytes (_collective_steps).
    if root.custom_call_target in ("AsyncCollectiveStart", "AsyncCollectiveDone"):
        return []
    touched = []
    for number, arrays in enumerate(operands):
        parts = _parts_read(module, _parameter(fused, number), fused)
        if parts is None:
            touched += arrays
        else:
            touched += [part.placed_as(arrays[0]) for part in parts]
    results = [root]
    if root.opcode == "tuple":
        results = [fused[name] for name in root.operands]
    # `shape` lists the arrays of a tuple in a tuple one after the other. They do not match the root's operands then, so
    # all count whole, rather too much than too little.
    if len(results) != len(shape):
        return touched + shape
    for result, array in zip(results, shape, strict=True):
        if result.opcode == "parameter" or result.opcode in COLLECTIVES:
            continue  # passed on untouched
        part = _part_written(module, result, fused)
        touched.append(part.placed_as(array) if part else array)
    return touched


def _root(fused):
    return next(instruction for instruction in fused.values() if instruction.is_root)


def _parameter(fused, number):
    return next(i for i in fused.values() if i.opcode == "parameter" and int(i.operands[0]) == number)


def _part_written(module, result, fused):
    """Returns the Array that a fusion writes in place into a larger one; None if it writes all of its result."""
    while result.opcode in ("bitcast", "copy", "reshape") and result.operands[0] in fused:
        result = fused[result.operands[0]]
    if result.opcode in _UPDATED_BY:
        return fused[result.operands[_UPDATED_BY[result.opcode]]].shape[0]
    if result.opcode == "fusion":
        inner = module.inside(result)
        return _part_written(module, _root(inner), inner)
    return None


# A fusion's parameter is often a whole stack of layers, of which it reads one. So its users are followed, through
# bitcasts and inner fusions, to what each reads of it. If one of them reads all of it, the whole operand counts.


def _parts_read(module, instruction, fused):
    """Returns the parts that a fusion reads of its parameter `instruction`, as Arrays; None if it reads all of it."""
    parts = []
    for user in fused.values():
        for position, name in enumerate(user.operands):
            if name == instruction.name:
                read = _parts_read_by(module, user, position, fused)
                if read is None:
                    return None
                parts += read
    return parts


def _is_view(module, instruction):
    """Returns whether an inner fusion only reads its operand in another tiling. Integers of 8 bits have several."""
    if instruction.opcode != "fusion" or "output_to_operand_aliasing" not in instruction.attributes:
        return False
    inner = module.inside(instruction)
    root = _root(inner)
    return root.opcode == "copy" and inner[root.operands[0]].opcode == "parameter"


def _parts_read_by(module, user, position, fused):
    """Returns the parts that one instruction of a fusion reads of its operand at `position`; None if all of it."""
    if user.opcode == "bitcast" or _is_view(module, user):
        return _parts_read(module, user, fused)
    if user.opcode == "fusion":
        inner = module.inside(user)
        return _parts_read(module, _parameter(inner, position), inner)
    if position == 0 and user.opcode in ("dynamic-slice", "slice", "gather"):
        return user.shape
    if position == 0 and user.opcode == "dynamic-update-slice":
        return []  # written in place: counted with the results
    if position == 0 and user.opcode == "scatter":  # the same, and read, because it adds
        return fused[user.operands[_UPDATED_BY["scatter"]]].shape
    if user.opcode in COLLECTIVES or user.opcode == "tuple" and user.is_root:
        return []  # passed on untouched
    return None
