"""Fifty steps of base_train's Trainer, with torch_xla's counters read after each.

    python3 -m tests.train.count_xla TOKENIZER_DIR OUT.json
"""
import json
import sys
from pathlib import Path

from nanochat.device.collectives import thread_barrier
from nanochat.device.programs import synchronize
from nanochat.device.ranks import compute_init, prepare_xla_environment
from nanochat.run.processes import exclusive_use
from scripts.base_train import Trainer, check, get_run_dir, parse_args


def count(index, flags, out):
    import torch_xla.debug.metrics as met

    def value(name):
        data = met.metric_data(name)
        return data[0] if data else 0

    trainer = Trainer(parse_args(flags), compute_init("xla"))
    thread_barrier(trainer.dist)  # each rank compiles its own way of putting its part of the state on its device
    before = value("CompileTime")
    compilations, between_logs, pending = [], 0, []
    fetched_before = value("TransferFromDeviceTime")
    for _ in range(50):
        transfers = value("TransferFromDeviceTime")
        pending.append(trainer.train_step()[0])
        compilations.append(value("CompileTime"))
        if trainer.dist.world_size == 1:  # with several ranks the counters are of all threads together
            between_logs += value("TransferFromDeviceTime") - transfers
        trainer.step += 1
        if trainer.step in (1, 50) or trainer.step % 10 == 0:
            for loss in pending:
                loss.tolist()
            pending = []
    trainer.loader.close()
    synchronize(trainer.dist)
    thread_barrier(trainer.dist)
    if trainer.dist.rank == 0:
        Path(out).write_text(json.dumps({
            "compilations": compilations, "programs_of_a_step": compilations[-1] - before,
            "transfers_between_logs": between_logs, "transfers": value("TransferFromDeviceTime") - fetched_before,
            "fallbacks": met.executed_fallback_ops()}))


if __name__ == "__main__":
    flags = ["--depth=2", "--model_dim=64", "--num_heads=2", "--max_seq_len=32", "--synthetic_data",
             "--device_batch_size=2", "--total_batch_size=256", "--num_iterations=50", f"--tokenizer_dir={sys.argv[1]}"]
    prepare_xla_environment("xla")
    with exclusive_use(get_run_dir(parse_args(flags))):
        check(parse_args(flags), "xla")
        import torch_xla.distributed.xla_multiprocessing as xmp
        xmp.spawn(count, args=(flags, sys.argv[2]), nprocs=None)
