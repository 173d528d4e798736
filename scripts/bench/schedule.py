"""Checks the cycles that tpu_preflight reads from the machine's own schedule, on products of known size:

    python3 -m scripts.bench schedule --accelerator=v5litepod-1

It compiles matrix products of bfloat16 for one chip, and needs no TPU. No schedule can be faster than the matrix units
at their peak rate, and plain products come close. It prints both, and their ratio.
"""
import tempfile
from dataclasses import dataclass

from nanochat.common import flag, read_flags
from nanochat.preflight.compile import require_packages
from nanochat.preflight.jax_programs import parse_one_chip, schedule_of
from nanochat.preflight.schedule import LIBTPU_OPTIONS

SHAPES = ((1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 1024, 1024), (8192, 1024, 4096),
          (8192, 4096, 1024), (1024, 8192, 4096), (16384, 1024, 4096), (8192, 1024, 16384))
PRODUCT = """
import jax
rows, inner, columns = map(int, sys.argv[1:])
arguments = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((rows, inner), (inner, columns))]
lowered = jax.jit(lambda a, b: jax.numpy.dot(a, b, preferred_element_type="bfloat16")).lower(*arguments)
"""
COLUMNS = "{:>22} {:>10} {:>10} {:>8} {:>6} {:>13} {:>20}"


@dataclass(frozen=True)
class Flags:
    accelerator: str = flag("", "the TPU to compile for: v5litepod-1 or v6e-1", required=True)
    timeout_s: int = flag(600, "the longest time that one product may take to compile", at_least=1)


def measure(tpu_slice, shape, folder, timeout_s=600, libtpu_options=LIBTPU_OPTIONS):
    """Compiles the product of a `shape` (rows, inner, columns). Returns its cycles at the matrix units' peak rate, and
    the Schedule of its dearest operation. Raises Failure."""
    schedule, _ = schedule_of("product", PRODUCT, shape, tpu_slice, folder, timeout_s, libtpu_options)
    rows, inner, columns = shape
    return 2 * rows * inner * columns / tpu_slice.tpu.flops_per_cycle, schedule


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    tpu_slice = parse_one_chip(flags.accelerator)
    require_packages()
    print(COLUMNS.format("product", "bound", "schedule", "÷ bound", "empty", "matrix slots", "matrix work ÷ bound"))
    with tempfile.TemporaryDirectory(prefix="bench_schedule_") as folder:
        for shape in SHAPES:
            bound, schedule = measure(tpu_slice, shape, folder, flags.timeout_s)
            print(COLUMNS.format(" × ".join(map(str, shape)), f"{bound:,.0f}", f"{schedule.cycles:,}",
                                 f"{schedule.cycles / bound:.3f}",
                                 f"{schedule.empty_cycles / schedule.cycles:.1%}", f"{schedule.use('matrix'):.1%}",
                                 f"{schedule.matrix_cycles / bound:.3f}"), flush=True)
