"""Runs the preflight as a person does, with the real TPU compiler."""
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading

import pytest

from nanochat.common import BadInput, Failure
from nanochat.data.tokenizer import SHIPPED_DIR, load_tokenizer
from nanochat.device.tpu import parse_accelerator
from nanochat.preflight.compile import compile_programs
from nanochat.preflight.fit import flags_of_meshes
from nanochat.preflight.hlo import LINE_IN_NAME, REPOSITORY
from nanochat.preflight.trace import TracedProgram
from nanochat.train.flags import parse_flags
from nanochat.train.language import LanguageTask
from nanochat.train.plan import make_plan
from scripts import tpu_preflight
from tests.conftest import last_of_each
from tests.preflight.program_texts import hash_of, plain_environment
from tests.warm import CHEAP_COMPILATION

pytestmark = pytest.mark.skipif(not (importlib.util.find_spec("libtpu") and importlib.util.find_spec("jax")),
                                reason="needs libtpu and jax: pip install '.[tpu]'")
# With the shipped tokenizer, whose tokens all ranks of a mesh divide
TINY = ["--depth=2", "--model_dim=128", "--num_heads=1", "--max_seq_len=128", "--device_batch_size=1",
        "--total_batch_size=1024", "--num_iterations=10"]


@pytest.fixture(scope="module")
def preflight(tmp_path_factory):
    """Runs tpu_preflight and returns the process; `.report` is the JSON object that it wrote."""

    def run(*flags, status=0, timeout_s=300):
        path = tmp_path_factory.mktemp("preflight") / "report.json"
        process = subprocess.run([sys.executable, "-m", "scripts.tpu_preflight", f"--json={path}",
                                  *last_of_each(*flags)],
                                 capture_output=True, text=True, timeout=timeout_s, env=plain_environment())
        assert process.returncode == status, process.stdout[-2000:] + process.stderr[-4000:]
        process.report = json.loads(path.read_text()) if path.exists() else None
        return process

    return run


@pytest.fixture(scope="module")
def tiny(byte_tokenizer_dir):
    return [*TINY, f"--tokenizer_dir={byte_tokenizer_dir}"]


@pytest.fixture(scope="module")
def tiny_process(preflight, tiny):
    """The preflight of a tiny run, compiled for four chips."""
    return preflight("--accelerator=v5litepod-4", "--kernel=current", *tiny)


@pytest.fixture(scope="module")
def tiny_report(tiny_process):
    return tiny_process.report


@pytest.mark.slow
def test_it_begins_with_the_plan_that_base_train_prints(monkeypatch, tiny, tiny_process):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    flags = parse_flags([*tiny, "--kernel=current"])
    tokenizer = load_tokenizer(flags.data.tokenizer_dir)
    plan = make_plan(flags, tokenizer.n_vocab, "tpu", 4)
    lines = LanguageTask(flags, plan, tokenizer, None, None).describe()
    assert lines[0].split() == "devices 4 × v5litepod-4, kernel current, bfloat16 compute".split()
    assert tiny_process.stdout.splitlines()[:len(lines)] == lines


def test_a_tiny_run_is_compiled_for_four_chips_and_fits(tiny_report):
    report = tiny_report
    assert report["fits"] and sorted(report["programs"]) == ["evaluate", "micro_step", "update"]
    update, micro = report["programs"]["update"], report["programs"]["micro_step"]
    weights, gradients = report["memory"]["weights"], report["memory"]["gradients"]
    assert report["memory"]["optimizer"] < weights  # a quarter of everything, which is more than three times as much
    assert update["collectives"]["reduce-scatter"][1] > 0.99 * gradients and not micro["collectives"]
    assert update["collectives"]["all-gather"][1] > 0.99 * weights
    assert update["alias_bytes"] >= gradients + report["memory"]["optimizer"] and micro["alias_bytes"] >= gradients
    assert micro["runs_per_step"] == 2 and report["estimate"]["tokens_per_s"] > 0
    assert micro["pallas_calls"] == micro["parts_s"]["attention"] == 0  # of the kernel `current`
    assert sum(micro["parts_s"].values()) == pytest.approx(micro["estimated_s"])


def lines_of_top_operations(report):
    """Returns {(path, number)} of the lines of this repository from which the top operations of a report come. They
    exist, and most operations have one."""
    operations = [each for program in report["programs"].values() for each in program["top_operations"]]
    lines = list(filter(None, (LINE_IN_NAME.match(operation["source"]) for operation in operations)))
    assert len(lines) > 0.8 * len(operations)
    found = {(line[1], int(line[2])) for line in lines}
    for path, number in found:
        assert 0 < number <= len((REPOSITORY / path).read_text().splitlines()), (path, number)
    return found


def test_the_top_operations_are_named_by_the_line_that_they_come_from_also_in_loops(tiny_report):
    found = lines_of_top_operations(tiny_report)
    assert len(found) > 5 and {path.split("/")[1] for path, _ in found} >= {"kernels", "model"}
    products = [each["source"].split()[0].split(":") for program in tiny_report["programs"].values()
                for each in program["top_operations"] if each["source"].endswith("aten__mm")]
    for path, number in products:  # their lines show what they are
        line = (REPOSITORY / path).read_text().splitlines()[int(number) - 1]
        assert re.search(r"linear\(|matmul\(|of_input\(| @ ", line), f"{path}:{number}: {line}"
    assert products


@pytest.mark.parametrize("flags, message", [
    (["--accelerator=v9-8"], "--accelerator=v9-8 .*: give one of v4-N"),
    (["--accelerator=v6e-4", "--programs=backward"], "--programs=backward .*: choose among micro_step"),
    (["--accelerator=v6e-4", "--jobs=0"], "--jobs=0 is not a whole number"),
    (["--accelerator=v6e-4", "--json=/nowhere/report.json"], "--json=/nowhere/report.json cannot be written: name"),
    (["--accelerator=v5e-8", "--zone=us-wets4-a"], "--zone=us-wets4-a: .*v5litepod-8 .*us-west4"),
    (["--accelerator=v6e-4", "--json=/tmp"], "--json=/tmp cannot be written: name a file"),
    (["--accelerator=v6e-4", "--dump_dir=/proc/x"], "cannot write to /proc/x")])
def test_bad_flags_are_found_before_anything_is_traced(tiny, flags, message):
    with pytest.raises(BadInput, match=message):
        tpu_preflight.read_preflight_flags(last_of_each(*tiny, *flags))


def test_a_search_for_what_is_given_is_refused_before_anything_is_traced(tiny):
    with pytest.raises(BadInput, match="--find_mesh .* --mesh_fsdp=4 .*: leave it out"):
        tpu_preflight.main([*tiny, "--accelerator=v6e-4", "--find_mesh", "--mesh_fsdp=4"])


@pytest.mark.parametrize("flags, sizes", [
    (["--kernel=flash"], [1, 2, 4, 8]), (["--kernel=chunked", "--mesh_tensor=2"], [1, 2, 4]),
    (["--kernel=current"], [1]), (["--shard_optimizer=off"], [1]),
    (["--kernel=chunked", "--model_dim=1020", "--num_heads=6"], [1, 2, 4])])
def test_the_search_for_a_mesh_tries_those_on_which_a_run_is_possible(monkeypatch, flags, sizes):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    trials = flags_of_meshes(parse_flags(flags), chips=8)
    assert [*trials] == sizes
    for fsdp, trial in trials.items():
        mesh = make_plan(trial, 65536, "tpu", 8).mesh
        assert (mesh.fsdp, mesh.tensor, mesh.chips) == (fsdp, trial.devices.mesh_tensor, 8)


TRACER = """
import contextlib, io, json, os, sys
from nanochat.preflight import trace
trace.prepare_environment()
for line in sys.stdin:
    code, sys.argv[1:], os.environ["NANOCHAT_BASE_DIR"] = json.loads(line)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(code, {})
    print(json.dumps(output.getvalue().splitlines()), flush=True)
"""


@pytest.fixture(scope="module")
def traced():
    """Runs code with these flags as its arguments in a process that traces for TPUs, and returns the lines that it
    prints. One process serves all tests, which import torch_xla and jax once."""
    process = subprocess.Popen([sys.executable, "-c", TRACER], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(code, flags):
        watchdog = threading.Timer(300, process.kill)
        watchdog.start()
        process.stdin.write(json.dumps([code, flags, os.environ["NANOCHAT_BASE_DIR"]]) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        watchdog.cancel()
        assert answer, f"the tracing process has ended with status {process.wait()}"
        return json.loads(answer)

    yield run
    process.communicate()


def test_a_compiler_that_takes_too_long_is_a_failure_that_names_the_program(tmp_path):
    program = TracedProgram("update", b"", "", (), frozenset())
    with pytest.raises(Failure, match="the TPU compiler took more than --timeout_s=0.1 for update"):
        list(compile_programs([program], parse_accelerator("v5litepod-4"), tmp_path, timeout_s=0.1))


TRACE = """
import json, sys
from nanochat.train.flags import parse_flags
from nanochat.preflight.language import trace_run
from tests.preflight.program_texts import hash_of
_, programs = trace_run(parse_flags(sys.argv[1:]), chips=4)
print(json.dumps({name: (hash_of(program.hlo_text), sorted(program.donated)) for name, program in programs.items()}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("others", [[], ["--teacher=teacher", "--seq_len_ramp=0:32,1:128"]])
def test_the_compiled_programs_are_those_that_base_train_runs(train, traced, tiny, tmp_path, others):
    """Compares their HLO and their donated arguments with those that XLA gets in a run on four CPU devices.

    The run's programs are dumped before XLA optimises them, so that it need not optimise them well.
    """
    if others:
        train("--synthetic_data", "--num_iterations=1", "--eval_every=-1", "--sample_every=-1", run="teacher")
    flags = last_of_each(*tiny, "--kernel=current", *others, "--compute_dtype=bfloat16", "--synthetic_data",
                         "--num_iterations=2", "--eval_tokens=2048", "--eval_every=2", "--sample_every=-1",
                         "--save_every=-1")
    environment = os.environ | {"CPU_NUM_DEVICES": "4", "XLA_FLAGS":
                                f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text {CHEAP_COMPILATION}"}
    del environment["PJRT_DEVICE"]
    with subprocess.Popen([sys.executable, "-m", "scripts.base_train", "--device_type=xla", *flags],
                          env=environment) as training:
        try:
            programs = json.loads(traced(TRACE, flags)[-1])
            assert training.wait(timeout=300) == 0
        finally:
            training.kill()  # does nothing to a process that has ended
    trained = {}
    for path in tmp_path.glob("*.before_optimizations.txt"):
        donors = re.search(r"buffer_donor=\{(.*?) \}", path.read_text())
        trained[hash_of(path.read_text())] = re.findall(r"\((\d+), ", donors[1] if donors else "")
    of_micro = ["micro_step 128", "micro_step 32"] if others else ["micro_step"]
    assert sorted(programs) == ["evaluate", *of_micro, "update"]
    for name, (hlo_hash, donated) in programs.items():
        assert trained[hlo_hash] == [str(index) for index in donated], name


@pytest.mark.slow
def test_a_mesh_compiles_for_a_pod_whose_exchanges_cannot_be_asynchronous(preflight):
    process = preflight(*TINY, "--accelerator=v5litepod-32", "--kernel=chunked", "--mesh_fsdp=2",
                        "--programs=update,evaluate", "--total_batch_size=4096")
    assert process.report["fits"] and process.report["programs"]["update"]["collectives"]["all-to-all"][0] > 0


@pytest.mark.slow
def test_the_smallest_mesh_that_fits_is_found(preflight, tiny):
    process = preflight(*tiny, "--accelerator=v5litepod-8", "--kernel=chunked", "--programs=evaluate", "--find_mesh")
    report = process.report
    assert report["find_mesh"]["smallest"] == 1 and [*report["find_mesh"]["peak_bytes"]] == ["1"]
    assert "smallest --mesh_fsdp that fits: 1; 1 tried" in process.stdout


TRACE_AS_RANKS = """
import functools, json, sys
from unittest import mock
from nanochat.preflight import language
from nanochat.train.flags import parse_flags
from tests.preflight.program_texts import hash_of
for rank in (0, 3, 254):
    with mock.patch.object(language, "Dist", functools.partial(language.Dist, rank=rank)):
        run, programs = language.trace_run(parse_flags(sys.argv[1:]), chips=256)
    hashes = {name: hash_of(program.hlo_text) for name, program in programs.items()}
    print(json.dumps([hashes, run.memory_groups().get("teacher")]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("teacher", [(), ("--teacher=teacher",)])
def test_all_ranks_of_a_mesh_run_the_same_programs(train, traced, teacher):
    """Otherwise their collectives would not meet on a TPU, where each rank traces for itself. Each of these 256 holds a
    quarter of the teacher's weights, in bf16."""
    if teacher:
        train("--synthetic_data", f"--tokenizer_dir={SHIPPED_DIR}", "--num_heads=4", "--num_iterations=1",
              "--eval_every=-1", "--save_every=1", run="teacher")
    flags = last_of_each(*TINY, "--kernel=chunked", "--num_heads=4", "--mesh_fsdp=2", "--mesh_tensor=2",
                         "--num_lanes=128", "--total_batch_size=16384", *teacher)
    of_ranks = traced(TRACE_AS_RANKS, flags)
    hashes, teacher_bytes = json.loads(of_ranks[0])
    assert len(of_ranks) == 3 and len(set(of_ranks)) == 1 and len(set(hashes.values())) == 3
    if teacher:
        weights = 2 * 12 * 128**2 + 3 * load_tokenizer(SHIPPED_DIR).n_vocab * 128
        assert teacher_bytes == pytest.approx(2 * weights / 4, rel=0.01)


TRAVELLING = """
import json, re, sys
from jaxlib import xla_client
from nanochat.preflight.language import trace_run
from nanochat.train.flags import parse_flags
program = trace_run(parse_flags(sys.argv[1:]), chips=8)[1]["micro_step"]
text = xla_client.XlaComputation(program.hlo_proto).as_hlo_text()
print(json.dumps([re.findall(rf"([a-z0-9]+)\\[[^=]*? {kind}\\(", text) for kind in ("all-to-all", "all-gather")]))
"""


@pytest.mark.slow
def test_int8_gathers_8_bits_along_fsdp_and_exchanges_what_bfloat16_does(traced):
    """Its gradients are fp32. As such, those of 1.88B parameters would travel for longer than their products take."""
    flags = [*TINY, "--kernel=chunked", "--mesh_fsdp=8"]
    exchanged, gathered = json.loads(traced(TRAVELLING, [*flags, "--products=int8"])[-1])
    exchanged_before, gathered_before = json.loads(traced(TRAVELLING, flags)[-1])
    assert exchanged == exchanged_before and set(exchanged) == {"bf16"}
    assert gathered.count("s8") == gathered_before.count("bf16") - 3  # the three tables travel in bfloat16


MOSAIC_VERSIONS = """
import base64, re
from functools import partial
import jax
from jax._src import tpu_custom_call
from jax._src.lib.mlir import ir
from nanochat.kernels import pallas_attention
from nanochat.kernels.choose import get_kernels
tpu_custom_call.get_ir_version = lambda *args, **kwargs: 8  # what other tests of this process traced has set 7
get_kernels("flash", "tpu")
stack, table = jax.ShapeDtypeStruct((1, 1, 128, 128), "bfloat16"), jax.ShapeDtypeStruct((128, 128), "float32")
place, row = jax.ShapeDtypeStruct((2,), "int32"), jax.ShapeDtypeStruct((1, 128, 128), "bfloat16")
log_sums = jax.ShapeDtypeStruct((1, 1, 1, 1, 128), "float32")
for kernel, arguments in ((pallas_attention.forward, [stack] * 3),
                          (pallas_attention.backward, [stack] * 3 + [log_sums, row])):
    kernel = jax.jit(partial(kernel, windows=(), matrix_unit=128))
    text = kernel.trace(place, *arguments, table, table).lower(lowering_platforms=("tpu",)).as_text()
    with ir.Context() as context:
        context.allow_unregistered_dialects = True
        body = base64.b64decode(re.search(r'"body": "(.*?)"', text.replace(chr(92) + "22", '"'))[1])
        print("version", ir.Module.parse(body).operation.attributes["stable_mosaic.version"])
"""


@pytest.mark.slow
def test_kernels_are_written_in_the_version_of_mosaic_that_libtpu_reads(traced):
    """libtpu 0.0.21 on a chip refuses version 8, which jaxlib 0.7.1 writes unless it is told not to."""
    assert traced(MOSAIC_VERSIONS, []) == ["version 7 : i64"] * 2


# The compiler is quicker with few rows, and with a quarter of the width, on which only Pallas kernels depend. The tiny
# run above has the kernel `current`.
ROWS = "--device_batch_size=2"
NARROW = ("--model_dim=256", "--num_heads=2")
LLAMA = ("--arch=llama", "--head_dim=64", "--num_kv_heads=1")


@pytest.mark.slow
@pytest.mark.parametrize("accelerator, kernel, flags", [
    ("v6e-4", "flash", ("--max_seq_len=2048", "--programs=micro_step")),
    ("v5litepod-8", "flash", ("--programs=micro_step", ROWS)),
    ("v6e-4", "flash", ("--programs=micro_step", ROWS, *NARROW, *LLAMA)),
    ("v5litepod-8", "flash", ("--programs=micro_step", *NARROW, *LLAMA)),
    ("v5litepod-8", "chunked", ("--programs=micro_step,update,evaluate", ROWS, *NARROW))])
def test_the_chips_compile_every_kernel_at_depth_2(preflight, accelerator, kernel, flags):
    report = preflight(f"--accelerator={accelerator}", "--depth=2", f"--kernel={kernel}", *flags, timeout_s=1800).report
    micro = report["programs"]["micro_step"]
    assert report["fits"] and not micro["pallas_uncounted"]
    assert (micro["pallas_calls"] > 0) == (micro["parts_s"]["attention"] > 0) == (kernel == "flash")
    assert sum(micro["parts_s"].values()) == pytest.approx(micro["estimated_s"])
    if kernel == "flash":
        assert 0.9 * micro["cycles"] < micro["scheduled_cycles"] <= micro["cycles"]
        assert micro["low_s"] <= micro["estimated_s"] <= micro["high_s"]
        assert len(lines_of_top_operations(report)) > 3


@pytest.mark.slow
def test_rows_whose_attention_does_not_fit_into_vmem_are_named(preflight, tiny):
    """A v4 has 16 MiB of it, and has tens of GiB of HBM left, so that a mesh would not help."""
    process = preflight(*tiny, "--accelerator=v4-8", "--max_seq_len=32768", "--total_batch_size=131072",
                        "--kernel=flash", "--programs=micro_step", status=3)
    assert re.search(r"micro_step does not fit: it needs \d\d\.\d\d MiB of VMEM for one operation", process.stdout)
    assert "does not fit into VMEM. Try a shorter --max_seq_len, or --kernel=chunked" in process.stdout


@pytest.mark.slow
def test_running_out_of_memory_is_foreseen_and_the_culprit_is_named(preflight):
    """65,536 positions, for each of which a vocabulary of 65,536 tokens has a logit. One narrow layer, because the
    compiler tries for long to make a deep or wide model fit."""
    process = preflight("--accelerator=v5litepod-8", "--depth=1", "--model_dim=128", "--num_heads=1",
                        "--device_batch_size=64", "--max_seq_len=1024", "--kernel=current", "--programs=micro_step",
                        status=3, timeout_s=900)
    assert process.report["out_of_memory"]["micro_step"]["largest"][0]["shape"].endswith(",65536]")
    assert "does not fit into 15.75 GiB" in process.stdout and "--kernel=flash" in process.stdout
