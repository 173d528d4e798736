"""The machine's own schedule, of products whose cycles are known: the real compiler, no TPU."""
import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest

from nanochat.device import tpu
from nanochat.preflight.compile import compile_programs
from nanochat.preflight.schedule import read_schedule

needs_compiler = pytest.mark.skipif(not (importlib.util.find_spec("libtpu") and importlib.util.find_spec("jax")),
                                    reason="needs libtpu and jax: pip install '.[tpu]'")
PRODUCT = """
import sys, jax
rows, inner, columns = map(int, sys.argv[1:])
arguments = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((rows, inner), (inner, columns))]
product = jax.jit(lambda a, b: jax.numpy.dot(a, b, preferred_element_type="bfloat16")).lower(*arguments)
sys.stdout.buffer.write(product.compiler_ir("hlo").as_serialized_hlo_module_proto())
"""


@needs_compiler
@pytest.mark.parametrize("accelerator", ["v5litepod-1", "v6e-1"])
def test_the_matrix_units_work_for_as_long_as_a_product_has_operations(accelerator, tmp_path):
    shape = 8192, 1024, 4096
    proto = subprocess.run([sys.executable, "-c", PRODUCT, *map(str, shape)], capture_output=True, timeout=120,
                           check=True, env={"JAX_PLATFORMS": "cpu"}).stdout
    slice_ = tpu.parse_accelerator(accelerator)
    program = SimpleNamespace(name="product", hlo_proto=proto, donated=set())
    (_, compiled), = compile_programs([program], slice_, tmp_path, with_schedules=True)
    schedule = max(compiled.schedules.values(), key=lambda schedule: schedule.bound_cycles)
    bound = 2 * shape[0] * shape[1] * shape[2] / slice_.tpu.flops_per_cycle
    assert schedule.uncounted_loops == 0
    assert schedule.matrix_cycles == pytest.approx(bound, rel=0.02)
    assert 0.7 * bound < schedule.cycles < 1.5 * bound
    assert not (tmp_path / "product" / "schedules").exists()


def test_loops_within_loops_are_multiplied_and_a_loop_of_unknown_length_is_said():
    lines = """
     0   :  { %s1_s0 = smov 0 }
   0x1 LB: > { %s2_s1 = sphi 0, %s4_s1  ;;  %v1_v0 = vld [vmem:[%s2_s1] sm:$0xff] }
   0x2 LB: >> { %v2_v1 = vadd.f32 %v1_v0, %v1_v0  ;;  %v3_v1 = vmul.f32 %v1_v0, %v1_v0 }
   0x3   : >> { %p1_p0 = scmp.ge.s32.totalorder %s3_s2, 5 /* loop exit test */ }
   0x4   : >> { %9 = sbr.rel (!%p1_p0) target bundleno = 2 (0x2), region = 7 }
   0x5   : > { %p2_p1 = scmp.ge.s32.totalorder %s4_s1, 3 /* loop exit test */ }
   0x6   : > { %8 = sbr.rel (!%p2_p1) target bundleno = 1 (0x1), region = 6 }
   0x7   :  { %7 = sbr.rel (!%p3_p1) target bundleno = 7 (0x7), region = 8 }
""".splitlines()
    schedule = read_schedule(lines)
    assert schedule.cycles == 1 + 3 * (1 + 5 * 3 + 2) + 1
    assert schedule.units["vector"] == 3 * 5 * 2 and schedule.units["load"] == 3
    assert schedule.uncounted_loops == 1
