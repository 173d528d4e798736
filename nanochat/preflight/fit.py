"""Searches for the largest batch, or the smallest mesh, with which base_train's programs fit into a chip's memory."""
import tempfile

from nanochat.common import BadInput, say, work
from nanochat.device.mesh import all_meshes
from nanochat.device.tpu import GIB
from nanochat.preflight.compile import compile_programs
from nanochat.preflight.estimate import peak_bytes
from nanochat.preflight.language import trace_run
from nanochat.preflight.report import of_kinds
from nanochat.train.plan import make_plan
from nanochat.train.prepare import run_directory
from nanochat.train.start import run_tokenizer
from nanochat.train.teacher import find_teacher


def require_searchable(own, flags):
    """Raises BadInput if base_train's Flags fix what the PreflightFlags `own` search for."""
    if own.find_mesh and flags.devices.mesh_fsdp != 1:
        raise BadInput(f"--find_mesh searches for the mesh, but --mesh_fsdp={flags.devices.mesh_fsdp} names one: leave "
                       "it out")


def search(own, flags):
    """Returns {"find_mesh": …, "find_batch": …} of the searches that the PreflightFlags `own` ask for. flags: those of
    base_train."""
    found = {}
    if own.find_mesh:
        trials = flags_of_meshes(flags, own.tpu_slice.chips)
        found["find_mesh"] = find_mesh(lambda fsdp: try_run(own, trials[fsdp], {"micro_step", "update"}), trials)
    if own.find_batch:
        def try_batch(batch_size):
            # Only the micro-step is compiled, because the update works on weights. Its memory does not depend on the
            # total batch size, which might not be a multiple of this batch size.
            return try_run(own, flags.replace(device_batch_size=batch_size, total_batch_size=-1), {"micro_step"})

        found["find_batch"] = find_batch(try_batch, flags.batch.device_batch_size)
    return found


def flags_of_meshes(flags, chips):
    """Returns {chips along fsdp: Flags} for each mesh on which a run is possible, the fewest first."""
    tokenizer = run_tokenizer(flags)
    found = {}
    for mesh in all_meshes(chips, flags.devices.mesh_tensor):
        trial = flags.replace(mesh_fsdp=mesh.fsdp)
        try:
            find_teacher(trial, make_plan(trial, tokenizer.n_vocab, "tpu", chips), tokenizer, run_directory(flags))
        except BadInput:
            continue
        found[mesh.fsdp] = trial
    return found


def try_run(own, flags, kinds):
    """Compiles the programs of these kinds of a run with base_train's Flags. Returns the most bytes of a chip's memory
    that one of them takes; None if they do not fit."""
    work.begin("trying another size")
    programs, traced = trace_run(flags, own.tpu_slice.chips)
    resident_bytes = programs.resident_bytes()
    peaks = []
    # Without schedules, which memory does not need: they take a tenth to a quarter of the time of compiling.
    with tempfile.TemporaryDirectory(prefix="tpu_preflight_") as scratch:
        for program, compiled in compile_programs(of_kinds(traced, kinds), own.tpu_slice, scratch, own.timeout_s,
                                                  own.jobs):
            peaks.append(peak_bytes(program, compiled, resident_bytes))
            if compiled.out_of_memory or peaks[-1] > own.tpu_slice.tpu.usable_hbm_bytes:
                return None
    return max(peaks)


def verdict(peak):
    return "does not fit" if peak is None else f"fits, {peak / GIB:.2f} GiB"


def find_mesh(try_mesh, sizes):
    """Tries the `sizes` of --mesh_fsdp in their order until one fits: try_mesh(size) returns the peak memory or None.
    Returns a JSON object with the size that fits (None if none does) and the peak memory of all that it tried."""
    peaks = {}
    for fsdp in sizes:
        peaks[fsdp] = try_mesh(fsdp)
        say(f"--mesh_fsdp={fsdp}: {verdict(peaks[fsdp])}")
        if peaks[fsdp] is not None:
            return {"smallest": fsdp, "peak_bytes": peaks}
    return {"smallest": None, "peak_bytes": peaks}


def find_batch(try_batch, start):
    """Doubles or halves --device_batch_size, from `start` on, until it is known which is the largest that fits:
    try_batch(size) returns the peak memory or None. Returns a JSON object with the size (None if none fits) and the
    peak memory of all that it tried."""
    peaks = {}
    batch = start
    while batch and batch not in peaks:
        peaks[batch] = peak = try_batch(batch)
        say(f"--device_batch_size={batch}: {verdict(peak)}")
        batch = batch // 2 if peak is None else 2 * batch
    fitting = [size for size, peak in peaks.items() if peak is not None]
    return {"largest": max(fitting, default=None), "peak_bytes": peaks}
