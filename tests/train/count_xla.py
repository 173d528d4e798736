"""Twenty steps of base_train's Trainer with each kernel, with torch_xla's counters read after each step.

    python3 -m tests.train.count_xla TOKENIZER_DIR OUT.json KERNEL…
"""
import json
import sys
from pathlib import Path

from nanochat.device.collectives import thread_barrier
from nanochat.device.programs import synchronize
from nanochat.device.ranks import compute_init, prepare_xla_environment
from nanochat.run.processes import exclusive_use
from nanochat.train.flags import parse_flags
from nanochat.train.language import make_task
from nanochat.train.prepare import prepare, run_directory
from nanochat.train.trainer import Trainer


def count_all(index, runs, out):
    dist = compute_init("xla")
    counters = {run.plan.kernel: count(run, dist) for run in runs}
    if dist.rank == 0:
        Path(out).write_text(json.dumps(counters))


def count(run, dist):
    """Trains, and returns what was counted, as {name: number}; on rank 0."""
    import torch_xla.debug.metrics as met

    def value(name):
        data = met.metric_data(name)
        return data[0] if data else 0

    trainer = Trainer(run, dist)
    training, rows = trainer.training, trainer.batches
    thread_barrier(trainer.dist)  # each rank compiles its own way of putting its part of the state on its device
    before = value("CompileTime")
    compilations, between_logs, pending = [], 0, []
    fetched_before = value("TransferFromDeviceTime")
    for step in range(20):
        transfers = value("TransferFromDeviceTime")
        pending.append(training.run(rows, training.optimizer.scheduled(step)))
        compilations.append(value("CompileTime"))
        if trainer.dist.world_size == 1:  # with several ranks the counters are of all threads together
            between_logs += value("TransferFromDeviceTime") - transfers
        if step == 0 or (step + 1) % 10 == 0:
            for measured in pending:
                measured.fetch()
            pending = []
    rows.close()
    synchronize(trainer.dist)
    thread_barrier(trainer.dist)
    return {
        "compilations": compilations, "programs_of_a_step": compilations[-1] - before,
        "recompiled": training.observer.record(window_s=1.0).get("recompiled"),
        "transfers_between_logs": between_logs, "transfers": value("TransferFromDeviceTime") - fetched_before,
        "fallbacks": met.executed_fallback_ops()}


if __name__ == "__main__":
    tokenizer_dir, out, *kernels = sys.argv[1:]
    prepare_xla_environment("xla")
    flags = [parse_flags([
        "--depth=2", "--model_dim=64", "--num_heads=2", "--max_seq_len=32", "--synthetic_data", "--device_batch_size=2",
        "--total_batch_size=256", "--num_iterations=20", f"--tokenizer_dir={tokenizer_dir}", f"--kernel={kernel}"])
        for kernel in kernels]
    with exclusive_use(run_directory(flags[0])):
        runs = [prepare(of_kernel, "xla", make_task) for of_kernel in flags]
        import torch_xla.distributed.xla_multiprocessing as xmp
        xmp.spawn(count_all, args=(runs, out), nprocs=None)
