"""Checks that source lines of every file that computes reach the preflight's table of operations."""
import re

import pytest

from nanochat.preflight import hlo
from nanochat.preflight.compiler_process import with_source_lines
from nanochat.preflight.hlo import REPOSITORY

FOLDERS = ("train", "kernels", "model")
FILES = sorted(str(path.relative_to(REPOSITORY)) for path in [
    *(path for folder in FOLDERS for path in (REPOSITORY / "nanochat" / folder).glob("*.py")),
    REPOSITORY / "nanochat/device/xla_ops.py", *(REPOSITORY / "scripts").glob("base_*.py")])

# Locations as JAX prints them: a product in PyTorch, called by line 7, which line 9 called, which the tracer called.
MLIR = '''
#loc1 = loc("{repository}/{path}":7:0)
#loc2 = loc("{repository}/{path}":9:0)
#loc3 = loc("{repository}/nanochat/preflight/trace.py":100:0)
#loc4 = loc("/usr/lib/python3/site-packages/torch/nn/functional.py":5:0)
#loc5 = loc(callsite(#loc2 at #loc3))
#loc6 = loc(callsite(#loc1 at #loc5))
#loc7 = loc(callsite(#loc4 at #loc6))
#loc8 = loc("aten__mm"(#loc7))
#loc9 = loc("{path}_12 backward/aten__mul"(#loc3))
#loc10 = loc("aten__add"(#loc3))
'''


@pytest.mark.parametrize("path", FILES)
def test_the_innermost_line_of_this_repository_names_an_operation(path):
    names = re.findall(r'loc\("([^"]*)"\(', with_source_lines(MLIR.format(repository=REPOSITORY, path=path)))
    assert names == [f"{path}:7 aten__mm", f"{path}:12 backward aten__mul", "aten__add"]
    for name in names:  # as a compiled operation has it
        module = hlo.parse('ENTRY %main (a: f32[8]) -> f32[8] {\n'
                           f'  ROOT %sum = f32[8]{{0}} add(%a, %a), metadata={{op_name="{name}"}}\n}}\n')
        assert module.computations["main"]["sum"].source == name
