"""Reads the HLO text of a program, before or after the TPU compiler has optimised it. ops.py says what it costs."""
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "f16": 16, "bf16": 16, "s32": 32,
         "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64}
# An array is written bf16[8,1024]{1,0:T(8,128)(2,1)S(1)}: type, sides, and a layout that ends with the memory space. No
# space means HBM, S(1) VMEM. The length of a side <=8 is only bounded.
_ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*[a-z0-9]*)\[(?P<dims>[\d,<=]*)\](?:\{(?P<layout>[^}]*)\})?")
_INSTRUCTION = re.compile(r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.-]+) = (?P<rest>.*)", re.DOTALL)
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$", re.DOTALL)
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
PALLAS_CALL = "tpu_custom_call"

# A line of Python on its way into the table of operations. It begins in a call stack. compiler_process.py moves it into
# the name of the operation, which is all that survives the TPU compiler, and Instruction.source reads it from there.
# Each pattern finds one spelling: its first group is the path from the repository's root, its second the line.
REPOSITORY = Path(__file__).resolve().parents[2]
_PATH = r"(?:nanochat|scripts)/[\w/]+\.py"
_ROOT = re.escape(str(REPOSITORY))
LINE_IN_TRACEBACK = re.compile(rf'File "{_ROOT}/({_PATH})", line (\d+)')  # File "/…/nanochat/model/gpt.py", line 166
# A location in MLIR: "/…/nanochat/model/gpt.py":166. Files that only trace or wrap the model are left out, so that a
# line of the model is found instead.
_WRAPPERS = "nanochat/preflight/|nanochat/device/(?!xla_ops)"
LINE_IN_MLIR = re.compile(rf'"{_ROOT}/(?!{_WRAPPERS})({_PATH})":(\d+)')
# In the name of a traced operation: nanochat/model/gpt.py_166, or nanochat/model/gpt.py_166 backward
LINE_IN_SCOPE = re.compile(rf"({_PATH})_(\d+)( backward)?")
LINE_IN_NAME = re.compile(rf"({_PATH}):(\d+)")  # in that of a compiled one: nanochat/model/gpt.py:166 aten__mm


@dataclass(frozen=True)
class Array:
    """One array of a shape; a shape may be a tuple of several."""
    dtype: str
    dims: tuple
    in_hbm: bool

    @property
    def bytes(self):
        # A type that is not in the table, such as token[], holds no data.
        return math.prod(self.dims) * _BITS.get(self.dtype, 0) / 8

    def placed_as(self, other):
        """Returns this Array in the memory of another one, of which it is a part."""
        return Array(self.dtype, self.dims, other.in_hbm)


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
        return self._find(rf"\b{key}=%?([\w.-]+)")

    def _find(self, pattern):
        """Returns the first group of a pattern in the attributes, or None."""
        found = re.search(pattern, self.attributes)
        return found and found[1]

    @property
    def tuple_index(self):
        """Which element of its operand a get-tuple-element is."""
        return int(self._find(r"index=(\d+)"))

    @property
    def custom_call_target(self):
        return self._find(r'custom_call_target="([^"]*)"') or ""

    @property
    def declared_cost(self):
        """The cost that a Pallas kernel declares, {"flops": …, "bytes_accessed": …, …}, or None."""
        cost = self._find(r'"cost_estimate": ?(\{[^}]*\})')
        return cost and {key: int(value) for key, value in json.loads(cost).items()}

    @property
    def cycles(self):
        """The compiler's own estimate, 0 if it makes none."""
        return int(self._find(r'"estimated_cycles":"(\d+)"') or 0)

    @property
    def group_size(self):
        """The chips in each group of a collective; None if all chips are one group."""
        # Groups are listed, {{0,1},{2,3}}, or counted: [2,4]<=[8] is two groups of four among eight chips.
        first_group = self._find(r"replica_groups=\{\{([\d,]+)\}")
        if first_group:
            return first_group.count(",") + 1
        size = self._find(r"replica_groups=\[\d+,(\d+)\]<=")
        return size and int(size)

    @property
    def shape_text(self):
        """The shapes of its results without layouts: "bf16[8,1024]", or several separated by commas."""
        return ", ".join(f"{array.dtype}[{','.join(map(str, array.dims))}]" for array in self.shape)

    @property
    def source(self):
        """Its innermost source line and its name: "nanochat/model/gpt.py:166 backward aten__mm"; "" if unknown."""
        name = self._find(r'op_name="([^"]*)"')
        if name is None:
            return ""
        words = ["{}:{}".format(*line) for line in LINE_IN_NAME.findall(name)[-1:]]
        if " backward " in name:
            words.append("backward")
        return " ".join([*words, name.rsplit("/", 1)[-1].split()[-1]])


@dataclass
class Module:
    computations: dict = field(default_factory=dict)  # name -> {name of instruction -> Instruction}
    entry: str = ""

    def inside(self, instruction):
        """Returns the computation of a fusion, {name of instruction -> Instruction}."""
        return self.computations[instruction.called("calls")]


# Parsing


def parse(text):
    """Returns the Module of an HLO text."""
    module = Module()
    current = None  # the computation of the instructions that follow its header
    for statement in _statements(text):
        header = _COMPUTATION.match(statement.partition("\n")[0])
        if header:
            current = {}
            module.computations[header["name"]] = current
            if header["entry"]:
                module.entry = header["name"]
            continue
        found = _INSTRUCTION.match(statement)
        if found and current is not None:
            instruction = _parse_instruction(found)
            current[instruction.name] = instruction
    return module


# Nothing marks the end of an instruction, and one may span lines, some of which begin with `}`. It ends where the next
# instruction or computation begins. A computation's closing brace ends up in the attributes of its last instruction,
# where no pattern looks for it.
def _statements(text):
    """Yields the header of each computation and its instructions, each a text of one or several lines."""
    lines = []
    for line in text.splitlines():
        if _COMPUTATION.match(line) or _INSTRUCTION.match(line):
            yield "\n".join(lines)
            lines = []
        lines.append(line)
    yield "\n".join(lines)


def _parse_instruction(found):
    # `rest` is the shape, the opcode with its operands, and attributes, with comments in between: (f32[8]{0}, s32[])
    # fusion(%a, /*index=1*/%b), kind=kLoop, calls=%c
    rest = re.sub(r"/\*.*?\*/", "", found["rest"])
    shape_end = rest.index(" ")
    if rest.startswith("("):
        shape_end = _closing(rest, 0) + 1
    operands_start = rest.index("(", shape_end)
    operands_end = _closing(rest, operands_start)
    opcode = rest[shape_end:operands_start].strip()
    inside = rest[operands_start + 1:operands_end]
    operands = re.findall(r"%([\w.-]+)", inside)
    if opcode in ("constant", "parameter"):
        operands = [inside]
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
    """Returns the list of the Arrays in a shape's text: one, or those of a tuple."""
    arrays = []
    for found in _ARRAY.finditer(text):
        dims = tuple(int(side.lstrip("<=")) for side in found["dims"].split(",") if side)
        in_hbm = not re.search(r"S\([1-9]", found["layout"] or "")
        arrays.append(Array(found["dtype"], dims, in_hbm))
    return arrays
