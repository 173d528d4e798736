"""Compiles the attention kernels alone for a TPU, and prints their cycles by the machine's own schedule:

    python3 -m scripts.bench kernels --accelerator=v6e-1 --max_seq_len=2048 --window=1024

It needs no TPU, and takes seconds, not minutes like tpu_preflight. Beside the cycles it prints the bound (the products
of all pairs of a query and a key that it sees, at the peak rate of the matrix units) and the fraction of each unit's
slots in use. A batch and heads multiply the cycles.
"""
import tempfile
from dataclasses import dataclass

from nanochat.common import BadInput, flag, read_flags
from nanochat.kernels.attention_tiles import HEAD_DIM, MAX_SEQ_LEN, MAX_WHOLE, SEGMENT, is_length
from nanochat.preflight.compile import require_packages
from nanochat.preflight.jax_programs import parse_one_chip, schedule_of

LAYERS = 16
PRODUCTS = {"forward": 2, "backward": 5}  # of each pair of a query and a key with 128 numbers
UNITS = "matrix", "vector", "load", "store", "transcendental", "across lanes"
KERNEL = """
from functools import partial
from nanochat.device.xla_ops import import_jax
jax = import_jax()
from nanochat.kernels import pallas_attention, pallas_parts
name, (batch, length, width, window, matrix_unit) = sys.argv[1], map(int, sys.argv[2:])
def array(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)
rows = [array(2, batch, length, width)] * 3
tables = [array(128, length, dtype="float32")] * 2
sums = array(2, *pallas_parts.log_sums_shape(batch, length, width), dtype="float32")
others = [sums, array(batch, length, width)] if name == "backward" else []
kernel = jax.jit(partial(getattr(pallas_attention, name), windows=(window,), matrix_unit=matrix_unit))
lowered = kernel.trace(array(2, dtype="int32"), *rows, *others, *tables).lower(lowering_platforms=("tpu",))
"""


@dataclass(frozen=True)
class Flags:
    accelerator: str = flag("", "the TPU to compile for: v5litepod-1 or v6e-1", required=True)
    max_seq_len: int = flag(2048, f"positions of a sequence, in steps of 128, and beyond {MAX_WHOLE} of {SEGMENT}",
                            at_least=128, at_most=MAX_SEQ_LEN)
    window: int = flag(-1, "positions that a query sees, itself included; -1: all before it", at_least=1, unset=-1)
    device_batch_size: int = flag(8, "sequences", at_least=1, at_most=2**10)
    num_heads: int = flag(8, "heads of 128", at_least=1, at_most=2**10)
    timeout_s: int = flag(1800, "the longest time that one kernel may take to compile", at_least=1)


@dataclass(frozen=True)
class Cycles:
    """Of one layer."""
    scheduled: float
    bound: float  # what its products need at the peak rate
    tiles: float  # what its tiles of scores need


def measure(flags, tpu_slice, folder):
    """Compiles the kernels. Yields the name of each, its Cycles, and its Schedule. Raises Failure."""
    window = flags.max_seq_len if flags.window == -1 else flags.window
    sizes = (flags.device_batch_size, flags.max_seq_len, flags.num_heads * HEAD_DIM, window, tpu_slice.tpu.matrix_unit)
    # A query sees itself and all positions before it, but no more than its window.
    pairs = sum(min(position, window) for position in range(1, flags.max_seq_len + 1))
    for name, products in PRODUCTS.items():
        schedule, declared = schedule_of(f"{name} kernel", KERNEL, (name, *sizes), tpu_slice, folder, flags.timeout_s)
        flops = 2 * products * HEAD_DIM * pairs * flags.device_batch_size * flags.num_heads
        # The bound counts the pairs that are seen. The tiles also compute the masked scores beside them.
        bound = flops / tpu_slice.tpu.flops_per_cycle
        tiles = declared["flops"] / tpu_slice.tpu.flops_per_cycle
        yield name, Cycles(schedule.cycles_with(tiles, declared["transcendentals"]), bound, tiles), schedule


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    tpu_slice = parse_one_chip(flags.accelerator)
    if not is_length(flags.max_seq_len, 128):
        step = 128 if flags.max_seq_len <= MAX_WHOLE else SEGMENT
        raise BadInput(f"--max_seq_len={flags.max_seq_len} is not a multiple of {step}: give one")
    require_packages()
    print(f"Mcycles of {LAYERS} layers, and the fraction of each unit's slots in use")
    print(f"{'':>10} {'schedule':>9} {'bound':>8} {'÷ bound':>8} {'tiles':>8} {'empty':>6}  " + "  ".join(UNITS))
    with tempfile.TemporaryDirectory(prefix="bench_kernels_") as folder:
        for name, cycles, schedule in measure(flags, tpu_slice, folder):
            mega = LAYERS / 1e6
            uses = "  ".join(f"{schedule.use(unit):{len(unit)}.0%}" for unit in UNITS)
            print(f"{name:>10} {cycles.scheduled * mega:9.2f} {cycles.bound * mega:8.2f} "
                  f"{cycles.scheduled / cycles.bound:8.2f} {cycles.tiles * mega:8.2f} "
                  f"{schedule.empty_cycles / schedule.cycles:6.1%}  {uses}", flush=True)
