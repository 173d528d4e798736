"""The machine's own schedule: products whose cycles are known, by the real compiler without a TPU, and what is read."""
import importlib.util

import pytest

from nanochat.common import Failure, run_script
from nanochat.device import tpu
from nanochat.preflight import hlo, timeline
from nanochat.preflight.jax_programs import schedule_of
from nanochat.preflight.ops import Op
from nanochat.preflight.schedule import read_folder, read_schedule
from scripts.bench import kernels as bench_kernels

needs_compiler = pytest.mark.skipif(not (importlib.util.find_spec("libtpu") and importlib.util.find_spec("jax")),
                                    reason="needs libtpu and jax: pip install '.[tpu]'")
PRODUCT = """
import jax
size = int(sys.argv[1])
matrix = jax.ShapeDtypeStruct((size, size), "bfloat16")
lowered = jax.jit(lambda a, b: jax.numpy.dot(a, b, preferred_element_type="bfloat16")).lower(matrix, matrix)
"""


@needs_compiler
@pytest.mark.parametrize("accelerator", ["v5litepod-1", pytest.param("v6e-1", marks=pytest.mark.slow)])
def test_a_product_takes_as_long_as_its_operations_at_the_peak_rate(accelerator, tmp_path):
    size, tpu_slice = 2048, tpu.parse_accelerator(accelerator)
    schedule, _ = schedule_of("product", PRODUCT, (size,), tpu_slice, tmp_path / "a name with spaces", 600)
    bound = 2 * size**3 / tpu_slice.tpu.flops_per_cycle
    assert schedule.uncounted_loops == 0
    assert schedule.matrix_cycles == pytest.approx(bound, rel=0.02)
    assert bound < schedule.cycles < 1.1 * bound
    assert schedule.use("matrix") > 0.9 and schedule.critical.own_cycles > 0.9 * schedule.cycles
    assert not list(tmp_path.rglob("*-post-delay-converter.txt"))


@pytest.mark.parametrize("code, timeout_s, words", [
    ("raise RuntimeError('no such thing')", 100, "the thing cannot be traced: RuntimeError: no such thing"),
    ("import time; time.sleep(100)", 0.2, "tracing the thing took more than --timeout_s=0.2: give it more time"),
])
def test_a_program_that_cannot_be_traced_is_one_line_and_status_1(tmp_path, capsys, code, timeout_s, words):
    with pytest.raises(SystemExit) as ended:
        run_script(lambda: schedule_of("thing", code, (), tpu.parse_accelerator("v5litepod-1"), tmp_path, timeout_s))
    assert ended.value.code == 1 and capsys.readouterr().err == f"error: {words}\n"


@needs_compiler
@pytest.mark.slow
def test_a_kernel_with_branches_counts_as_often_as_its_declared_work_says(tmp_path):
    """Three segments are three pairs of a segment with itself, half visible, and three that are wholly visible: each of
    the six steps would count one and a half."""
    flags = bench_kernels.Flags(accelerator="v5litepod-1", max_seq_len=6144, device_batch_size=1, num_heads=1)
    name, cycles, schedule = next(bench_kernels.measure(
        flags, tpu.parse_accelerator(flags.accelerator), tmp_path))
    assert name == "forward" and 1.8 * cycles.bound < schedule.matrix_cycles < 2.2 * cycles.bound
    assert cycles.bound < cycles.tiles < 1.15 * cycles.bound
    assert cycles.bound < cycles.scheduled < 1.5 * cycles.bound


PROGRAM = """
$region0: #{fusion}
  // region range: [0, 8)
  %1 = vmatmul.bf16.gmra.mxu0 %v1
  loop: start=0, step=2, limit=6
  $region9: #{fusion} parent=0 // loop_pre_header
    // region range: [0, 1)
  $region1: #{fusion} parent=0 // loop_body
    #allocation4_spill [shape = 'u32[1]{0}', space=smem]
    // region range: [1, 7)
    loop: start=0, step=1, limit=7
    $region2: #{fusion} parent=1 // loop_body
      // region range: [2, 5)
      %2 = sphi /* iteration index, stage = 1 iter bound = 0 */
      %3 = vmatmul.bf16.gmra.mxu1 %v1
    $region3: #{fusion} parent=1 // loop_footer
      // region range: [5, 6)
    $region4: #{fusion} parent=1 // loop_body
      // region range: [6, 7)
""".splitlines()
USE = """== CAPACTIY:
  MXU|  XLU| VALU|  EUP| LOAD|STORE| SALU
    4     3     4     1     3     1     2
== UTILIZATION:
1 0 0 0 0 0 0
0 0 0 0 0 0 0
1 0 2 0 0 0 0
0 0 0 0 0 0 0
0 0 0 0 1 0 0
0 0 0 0 0 0 1
0 0 0 0 0 0 1
0 0 0 0 0 0 0
""".splitlines()


def test_loops_within_loops_are_multiplied_and_a_loop_of_unknown_length_is_said():
    schedule = read_schedule(PROGRAM, USE)
    inner = 3 * 5  # the pipeline's seven runs work five times
    assert schedule.cycles == 1 + 3 * 3 + inner * 3 + 1
    assert schedule.empty_cycles == 3 + inner + 1
    assert schedule.uncounted_loops == 1
    assert schedule.units["vector"] == 2 * inner and schedule.units["matrix"] == 1 + inner
    assert schedule.matrix_cycles == inner * 16
    assert (schedule.critical.begin, schedule.critical.end, schedule.critical.runs) == (2, 5, inner)
    assert schedule.critical.units["load"] == pytest.approx(1 / 3)


def test_columns_of_newer_compilers_are_read_too():
    """Since libtpu 0.0.22 there are commas, and two more columns, of what is a part of the loads and stores."""
    use = ["MXU, XLU, VALU, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU", "4 3 4 1 3 3 1 1 2"]
    for line in USE[4:]:
        matrix, across, vector, special, load, store, scalar = line.split()
        use.append(" ".join([matrix, across, vector, special, load, load, store, store, scalar]))
    assert read_schedule(PROGRAM, use) == read_schedule(PROGRAM, USE)


BRANCHES = """
$region0: #{kernel}
  // region range: [0, 8)
  $region1: #{kernel} parent=0 // pred_region
    // region range: [1, 4)
    %1 = vmatmul.bf16.lmr.mxu0 %v1
    $region2: #{kernel} parent=1 // pred_region
      // region range: [2, 3)
  $region3: #{kernel} parent=0 // pred_region
    // region range: [4, 7)
    %2 = vmatmul.bf16.lmr.mxu1 %v1
    %3 = vmatmul.bf16.lmr.mxu1 %v1
""".splitlines()


def test_of_several_branches_with_products_only_a_part_may_run():
    schedule = read_schedule(BRANCHES, USE)
    assert (schedule.cycles, schedule.matrix_cycles, schedule.branch_cycles) == (8, 16, 6)
    assert [schedule.cycles_with(cycles, 0) for cycles in (4, 16, 99)] == [4, 16, 16]
    schedule.matrix_cycles = 4
    assert [schedule.cycles_with(cycles, 0) for cycles in (2, 4)] == [5, 8]
    schedule.units["transcendental"] = 2
    assert schedule.cycles_with(2, 1536) == 6 and schedule.cycles_with(2, 10) == 5
    one_branch = read_schedule(BRANCHES[:6], USE)
    assert one_branch.branch_cycles == 0 and one_branch.cycles_with(1, 0) == one_branch.bound_cycles


def test_files_that_are_missing_are_a_failure_and_one_that_was_cut_off_names_its_operation(tmp_path):
    with pytest.raises(Failure, match="libtpu wrote no schedules.*another version of libtpu"):
        read_folder(tmp_path)
    (tmp_path / "1-fusion.7-00-post-delay-converter.txt").write_text("\n".join(PROGRAM))
    (tmp_path / "1-fusion.7-01-pre-delay_hlo-static-per-bundle-utilization.txt").write_text("\n".join(USE[:-3]))
    with pytest.raises(Failure, match="fusion.7"):
        read_folder(tmp_path)


SLICE = tpu.parse_accelerator("v5litepod-8")


def op(opcode, milliseconds=0.0, hbm_bytes=0.0, attributes="", **fields):
    array = hlo.Array("u8", (int(hbm_bytes),), True)
    return Op(hlo.Instruction(opcode, opcode, [array], [], attributes, False), 1, milliseconds, hbm_bytes, **fields)


def run(*ops):
    return timeline.run(ops, lambda op: op.cycles / 1000, SLICE)


def test_what_runs_between_the_start_and_the_end_of_a_transfer_hides_it():
    ms_of_hbm = SLICE.tpu.hbm_bytes_per_s / 1000
    copy, end = op("copy-start", hbm_bytes=4 * ms_of_hbm, begins="a"), op("copy-done", ends="a")
    hidden = run(copy, op("fusion", 3.0), op("fusion", 2.0), end)
    assert (hidden.seconds, hidden.copies_waited_s) == pytest.approx((0.005, 0.0))
    waited = run(copy, op("fusion", 3.0), end, op("fusion", 2.0))
    assert (waited.seconds, waited.copies_waited_s) == pytest.approx((0.006, 0.001))
    disturbed = run(copy, op("fusion", 3.0, hbm_bytes=2 * ms_of_hbm), end)  # both want the memory
    assert (disturbed.seconds, disturbed.copies_waited_s) == pytest.approx((0.006, 0.003))
    assert (waited.low_s, waited.high_s) == pytest.approx((0.005, 0.009))


def test_a_collective_waits_unless_it_is_begun_and_ended():
    size = 1e8
    alone_s = timeline.collective_s(op("all-gather", hbm_bytes=size), SLICE)

    def seconds(*ops):
        line = run(*ops)
        return line.seconds, line.ici_s, line.ici_waited_s

    work = op("fusion", 1000 * alone_s)
    assert seconds(op("all-gather", hbm_bytes=size), work) == pytest.approx((2 * alone_s, alone_s, alone_s))
    begun, ended = op("all-gather", hbm_bytes=size, begins="chain 0"), op("all-gather", ends="chain 0")
    assert seconds(begun, work, ended) == pytest.approx((alone_s, alone_s, 0.0))
    assert seconds(begun, ended, work) == pytest.approx((2 * alone_s, alone_s, alone_s))


def test_a_collective_within_groups_moves_less_and_an_exchange_crosses_the_middle_of_its_box():
    size = 8e6

    def seconds(opcode, groups=""):
        return timeline.collective_s(op(opcode, hbm_bytes=size, attributes=groups), SLICE)

    ring_bytes_per_s = SLICE.tpu.ici_bytes_per_s / 4
    assert seconds("all-gather") == pytest.approx(7 / 8 * size / ring_bytes_per_s)
    assert seconds("all-gather", "replica_groups={{0,1},{2,3},{4,5},{6,7}}") == pytest.approx(
        1 / 2 * size / ring_bytes_per_s)
    assert seconds("all-gather", "replica_groups=[2,4]<=[8], x") == pytest.approx(3 / 4 * size / ring_bytes_per_s)
    # In a box of 2 × 4 chips, 4 send half of their bytes to the other 4, over 2 links of half a ring's speed.
    assert seconds("all-to-all") == pytest.approx(4 * size / 2 / (2 * ring_bytes_per_s / 2))
    assert seconds("all-to-all", "replica_groups={{0,1},{2,3},{4,5},{6,7}}") == pytest.approx(
        size / 2 / (ring_bytes_per_s / 2))
    assert seconds("fusion") == 0


@pytest.mark.parametrize("instruction, cycles", [
    ("vmatmul.bf16.gmra.mxu0", 16), ("vmatmul.bf16.lmr.mxu0", 8), ("vmatmul.f32.gmra.mxu0", 8),  # v5e
    ("vmatmul.s8.gmra.mxu0", 16), ("vmatmul.mubr.s8.vlgmr.msra.gmra.mxu1", 8),
    ("vmatmul.mubr.bf16.gmra.mxu0", 8), ("vmatmul.mubr.f32.gmra.mxu0", 4), ("vmatmul.mubr.msk.f32.gmra.mxu0", 4)])
def test_a_matrix_unit_works_a_cycle_on_a_row_and_half_a_cycle_on_v6e(instruction, cycles):
    """Muon's products of 16 matrices of 1,024 × 1,024 in the update at depth 16 on v6e have registers of float32 and
    65,536 cycles by their FLOPs, which the schedule has too if an instruction counts 4 cycles."""
    program = ["$region0: #{fusion}", "  // region range: [0, 8)", f"  %1 = {instruction} %v1"]
    assert read_schedule(program, USE).matrix_cycles == cycles
