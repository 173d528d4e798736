"""The collectives of a compiled program: which there are, and how many bytes they move."""
from nanochat.preflight import hlo


def count(ops, chips):
    """Returns {opcode: [number of runs, bytes, overlapped bytes]} of the collectives among `ops`.

    The bytes are those of the whole arrays that are reduced or gathered; the overlapped ones move concurrently with
    other work. chips: the number of chips that take part.
    """
    found = {}
    for op in ops:
        kind = kind_of(op)
        if kind:
            line = found.setdefault(kind, [0, 0, 0])
            size = op.times * bytes_of(op, chips)
            line[0] += op.times
            line[1] += size
            line[2] += size * bool(op.begins)
    return found


def kind_of(op):
    """Returns the opcode of the collective that an Op is or begins, "" if it is none."""
    kind = op.instruction.opcode.removesuffix("-start")
    return kind if kind in hlo.COLLECTIVES and not op.ends else ""


def bytes_of(op, chips):
    """Returns the bytes of the whole arrays that one run of a collective reduces, gathers or exchanges."""
    instruction = op.instruction
    sizes = sorted((array.bytes for array in instruction.shape), reverse=True)
    if instruction.opcode.endswith("-start"):  # (operands, results, …): results are as large as operands, or larger
        sizes = sizes[:len(instruction.operands)]
    return sum(sizes) * ((instruction.group_size or chips) if instruction.opcode.startswith("reduce-scatter") else 1)
