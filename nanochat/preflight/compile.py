"""Compiles traced programs for a TPU without one: libtpu compiles for the topology that it is told. Each compiles in a
process of its own (compiler_process.py), because libtpu cannot share one with the XLA client that traced."""
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from nanochat.common import BadInput, Failure
from nanochat.device import tpu
from nanochat.preflight import schedule
from nanochat.preflight.hlo import REPOSITORY

# Options that torch_xla adds to LIBTPU_INIT_ARGS if it finds a TPU (torch_xla/__init__.py) and they are not set.
_TORCH_XLA_LIBTPU_FLAGS = {"xla_tpu_use_enhanced_launch_barrier": "false", "xla_latency_hiding_scheduler_rerun": "1",
                           "xla_tpu_prefer_async_allgather_to_allreduce": "true",
                           "xla_tpu_enable_flash_attention": "false"}
_TORCH_XLA_V5_FLAGS = {"xla_enable_async_all_gather": "true", "xla_enable_async_collective_permute": "true"}


def require_packages():
    """Raises BadInput if a package that compiling for a TPU needs is not installed."""
    from importlib.util import find_spec
    missing = [name for name in ("torch_xla", "libtpu", "jax") if not find_spec(name)]
    if missing:
        raise BadInput(f"compiling for a TPU needs {' and '.join(missing)}: pip install '.[tpu]', with Python 3.11 or "
                       "newer on Linux (x86-64)")


@dataclass(frozen=True)
class CompiledProgram:
    """The TPU compiler's result for a program; only `seconds` and `out_of_memory` if it does not fit. Sizes are per
    chip."""
    seconds: float
    out_of_memory: str = ""  # the compiler's report on a program that does not fit
    hlo_text: str = ""  # optimised
    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0  # of the outputs that reuse the memory of donated arguments
    temp_bytes: int = 0
    code_bytes: int = 0
    schedules: dict = field(default_factory=dict)  # name of an operation -> schedule.Schedule, if asked for


def compile_programs(programs, tpu_slice, folder, timeout_s, jobs=2, with_schedules=False):
    """Compiles each TracedProgram for `tpu_slice` (a tpu.Slice); yields (program, CompiledProgram) as each is done.

    folder: keeps the files that the compilers read and write, in a folder for each program.
    timeout_s: for one program. jobs: the number of compilers that run concurrently.
    with_schedules: whether to read the machine's own schedule of each operation, too.
    Raises Failure if a compiler times out, writes no schedules, or fails for another reason than a lack of device
    memory; the other compilers end then.
    """
    processes = []
    with ThreadPoolExecutor(jobs) as pool:
        futures = {}
        for program in programs:
            own_folder = Path(folder) / program.name.replace(" ", "_")  # libtpu takes no path with a space
            futures[pool.submit(_compile_in_subprocess, program, tpu_slice, own_folder, timeout_s, processes,
                                with_schedules)] = program
        # When the caller stops or a compiler fails, the queue is cancelled before the compilers are killed: a thread
        # whose compiler was killed would take the next program from it.
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.kill()  # does nothing to a process that has ended


def _compile_in_subprocess(program, tpu_slice, folder, timeout_s, processes, with_schedules):
    schedules_folder = folder / "schedules"
    shutil.rmtree(schedules_folder, ignore_errors=True)  # of an earlier preflight that was killed
    schedules_folder.mkdir(parents=True)
    (folder / "traced.pb").write_bytes(program.hlo_proto)
    options = {}
    schedules = {}
    if with_schedules:
        # The compiler's process works in `folder`, so a name without a path is enough.
        options = schedule.LIBTPU_OPTIONS | {"xla_jf_dump_to": schedules_folder.name}
    try:
        _run_compiler(program, tpu_slice, folder, timeout_s, processes, options)
        compiled = json.loads((folder / "compiled.json").read_text())
        if with_schedules and not compiled.get("out_of_memory"):
            schedules = schedule.read_folder(schedules_folder)
    finally:
        shutil.rmtree(schedules_folder, ignore_errors=True)  # 80 MB and more
    return CompiledProgram(**compiled, schedules=schedules, hlo_text=(folder / "optimised.hlo").read_text())


def _run_compiler(program, tpu_slice, folder, timeout_s, processes, options):
    arguments = (str(folder.resolve()), sorted(program.donated), f"{tpu_slice.tpu.name}:{tpu_slice.topology}",
                 _topology_options(tpu_slice))
    # The child ties its life to this process before it imports anything: a compiler works for minutes, and would go on
    # when nobody is left to read its result.
    process = subprocess.Popen(  # without preexec_fn: with it jax, which is in this process, warns of a fork
        [sys.executable, "-c", f"from nanochat.common import end_with_parent; end_with_parent({os.getpid()}); "
         f"from nanochat.preflight.compiler_process import compile_folder; compile_folder{arguments}"],
        cwd=REPOSITORY, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env=_compiler_environment(tpu_slice, options))
    processes.append(process)
    try:
        _, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()  # it writes no more files
        raise Failure(f"the TPU compiler took more than --timeout_s={timeout_s} for {program.name}: give it more time, "
                      "or fewer --jobs") from None
    if process.returncode:
        print(errors[-4000:], file=sys.stderr)
        raise Failure(f"the TPU compiler failed on {program.name}: see its message above")


def _topology_options(tpu_slice):
    """Returns the options that libtpu needs in addition to the topology's name."""
    options = {}
    if tpu_slice.hosts == 1:  # libtpu otherwise assumes hosts of 2x2 chips
        sides = [int(side) for side in tpu_slice.topology.split("x")]
        options["chips_per_host_bounds"] = sides + [1] * (3 - len(sides))
    if tpu_slice.tpu.cores_per_chip == 2:  # both cores of a chip are one device, as in a run
        options["chip_config_name"] = "megacore"
    return options


def _compiler_environment(tpu_slice, options):
    """Returns the environment in which libtpu compiles without a TPU: with the options of a run, and with `options`,
    {name: value}."""
    torch_xla_flags = dict(_TORCH_XLA_LIBTPU_FLAGS)
    if tpu_slice.tpu.name in ("v5e", "v5p"):
        torch_xla_flags |= _TORCH_XLA_V5_FLAGS
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # libtpu's lock file protects a TPU, and none is used here
        "LIBTPU_INIT_ARGS": tpu.libtpu_init_args(tpu_slice, torch_xla_flags | options), "TF_CPP_MIN_LOG_LEVEL": "2"}
    # The topology is enough. With TPU_ACCELERATOR_TYPE, libtpu looks for files that only a real v6e has.
    environment.pop("TPU_ACCELERATOR_TYPE", None)
    return environment
