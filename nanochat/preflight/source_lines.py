"""How a line of this repository is written on its way into the preflight's table of expensive operations.

A line of Python begins in a call stack. trace.py and compiler_process.py carry it into the name of an operation, which
is all that survives the TPU compiler, and hlo.py reads it from there. Each pattern finds one spelling. Its first group
is the path from the repository's root, its second the number of the line.
"""
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
_PATH = r"(?:nanochat|scripts)/[\w/]+\.py"
_ROOT = re.escape(str(REPOSITORY))

# Python's call stack: File "/…/nanochat/model/gpt.py", line 166
IN_TRACEBACK = re.compile(rf'File "{_ROOT}/({_PATH})", line (\d+)')
# A scope in the name of a traced operation: nanochat/model/gpt.py_166, or nanochat/model/gpt.py_166 backward
IN_SCOPE = re.compile(rf"({_PATH})_(\d+)( backward)?")
# A location in MLIR: "/…/nanochat/model/gpt.py":166. Files that only trace or wrap the model are left out, so that a
# line of the model is found instead.
_WRAPPERS = "nanochat/preflight/|scripts/puzzle_preflight|nanochat/device/(?!xla_ops)"
IN_MLIR = re.compile(rf'"{_ROOT}/(?!{_WRAPPERS})({_PATH})":(\d+)')
# The name of a compiled operation: nanochat/model/gpt.py:166 aten__mm
IN_NAME = re.compile(rf"({_PATH}):(\d+)")
