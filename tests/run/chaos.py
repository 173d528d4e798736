"""Does a run survive everything? Trains a small model over XLA CPU devices twice at the same time, undisturbed and with
faults at random moments, and compares: all losses, evaluations and the final weights must be equal bit for bit.

    python -m tests.run.chaos --seed=1 --interruptions=27

The test (test_chaos.py) runs it with 9 faults; every kind comes once before one comes again. --every is the number of
steps between two lines of the log, half of those between two checkpoints.
The faults: SIGTERM and SIGKILL to the parent, to a rank's process and to the whole group; a full disk; the newest
checkpoint truncated; a flipped byte in a shard (the run must refuse it, naming file and row group; then it is mended).
The disturbed run writes to a small file system of its own, which a user namespace lets anyone mount.
"""
import atexit
import collections
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from nanochat.common import ArgumentParser
from tests.conftest import save_byte_tokenizer, write_headers
from tests.run.life import Life, rank_process

TIMEOUT_S = 300
DISK_BYTES = 32 * 2**20


class Trainer(Life):
    """One process of the run, whose end comes with that of this process at the latest."""

    def __init__(self, base_dir, data, steps, devices, every):
        super().__init__(
            [sys.executable, "-m", "scripts.base_train", "--run=chaos", "--device_type=xla", "--depth=2",
             "--model_dim=64", "--num_heads=2", "--max_seq_len=32", "--device_batch_size=2",
             f"--total_batch_size={64 * devices}", f"--num_iterations={steps}", f"--eval_every={10 * every}",
             "--eval_tokens=4096", "--sample_every=-1", f"--save_every={2 * every}", "--keep_checkpoints=3",
             f"--log_every={every}", "--warmup_steps=5",
             f"--tokenizer_dir={data}/tokenizer", f"--data_dir={data}/train", f"--val_dir={data}/val"],
            {"NANOCHAT_BASE_DIR": str(base_dir), "CPU_NUM_DEVICES": str(devices)}, TIMEOUT_S, start_new_session=True)
        atexit.register(self.kill)

    def kill(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def progress(self):
        return sum(line.startswith("step ") for line in self.lines)

    def end(self, *expected):
        """Waits for the end and checks the exit status."""
        status = super().end()
        if status not in expected:
            raise AssertionError(f"exit status {status}, not one of {expected}:\n" + "\n".join(self.lines[-60:]))
        return status


# Faults. Each leaves the run's process ended, or (full disk) alive.


def signal_to(number, target, expected):
    def fault(life, **_):
        if target == "parent":
            os.kill(life.process.pid, number)
        elif target == "rank":
            os.kill(rank_process(life.process), number)
        else:
            os.killpg(life.process.pid, number)
        life.end(expected)
        assert target != "rank" or number != signal.SIGKILL or life.count("was ended by SIGKILL") == 1
    return fault


def fill_disk(life, base_dir, **_):
    """Until the run has complained and gone on. What it deletes to make room is filled, too."""
    ballast, is_over = base_dir / "ballast", threading.Event()

    def fill():
        with open(ballast, "wb", buffering=0) as file:
            while not is_over.wait(0.005):
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    pass

    filler = threading.Thread(target=fill)
    filler.start()
    try:
        complained = life.wait_until(lambda: life.count("the disk is full"))
        seen = life.progress()
        assert complained and life.wait_until(lambda: life.progress() > seen), "a full disk ended the run:\n" + \
            "\n".join(life.lines[-40:])
    finally:
        is_over.set()
        filler.join()
        ballast.unlink()


def truncate_checkpoint(life, base_dir, **_):
    os.killpg(life.process.pid, signal.SIGKILL)
    life.end(-signal.SIGKILL)
    checkpoints = sorted(path for path in (base_dir / "checkpoints/chaos").glob("step_*") if path.suffix == "")
    if checkpoints:
        os.truncate(checkpoints[-1] / "model.safetensors", 1000)


def flip_byte(life, data, start, quiet, **_):
    quiet.end(0)  # it reads the same shard
    os.killpg(life.process.pid, signal.SIGKILL)
    life.end(-signal.SIGKILL)
    shard = data / "train/shard_00000.parquet"
    whole = shard.read_bytes()
    altered = bytearray(whole)
    altered[random.randrange(100, len(whole) // 2)] ^= 1  # the footer is at the end
    shard.write_bytes(altered)
    refused = start()
    refused.end(2)
    assert any("shard_00000.parquet" in line and "row group" in line for line in refused.lines), refused.lines[-5:]
    shard.write_bytes(whole)


FAULTS = {
    "SIGTERM to the parent": signal_to(signal.SIGTERM, "parent", 75),
    "SIGTERM to a rank": signal_to(signal.SIGTERM, "rank", 75),
    "SIGTERM to the group": signal_to(signal.SIGTERM, "group", 75),
    "SIGKILL to the parent": signal_to(signal.SIGKILL, "parent", -signal.SIGKILL),
    "SIGKILL to a rank": signal_to(signal.SIGKILL, "rank", 1),
    "SIGKILL to the group": signal_to(signal.SIGKILL, "group", -signal.SIGKILL),
    "full disk": fill_disk,
    "checkpoint truncated": truncate_checkpoint,
    "byte flipped in a shard": flip_byte,
}


def result(base_dir):
    """Of a finished run: [(step, loss)], [(step, bits per byte)], the weights' hash."""
    run_dir = base_dir / "checkpoints/chaos"
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    newest = max(path for path in run_dir.glob("step_*") if path.suffix == "")
    return ([(r["step"], r["loss"]) for r in records if "loss" in r],
            [(r["step"], r["val_bpb"]) for r in records if "val_bpb" in r],
            hashlib.sha256((newest / "model.safetensors").read_bytes()).hexdigest())


def run(seed, interruptions, devices, steps, every, directory, report=print):
    """Returns {fault: how often it was survived}; AssertionError or TimeoutError if one was not."""
    random.seed(seed)
    data, quiet_dir, base_dir = directory / "data", directory / "quiet", directory / "chaos"
    base_dir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", base_dir], check=True)
    write_headers(data, {"train/shard_00000": slice(50), "val/shard_00000": slice(50, 60)}, write_page_checksum=True)
    save_byte_tokenizer(data / "tokenizer")
    quiet = Trainer(quiet_dir, data, steps, devices, every)
    survived, faults = collections.Counter(), []

    def start():
        return Trainer(base_dir, data, steps, devices, every)

    life = start()
    for number in range(interruptions):
        if not faults:  # every kind once before one comes again
            faults = random.sample(sorted(FAULTS), len(FAULTS))
        name, lines = faults.pop(), random.randint(1, 6)
        if life.process.poll() is not None:
            life = start()
        seen = life.progress()
        if not life.wait_until(lambda life=life, wanted=seen + lines: life.progress() >= wanted):
            life.end(0)
            report(f"the run was finished after {number} interruptions")
            break
        time.sleep(random.uniform(0, every / 10))  # to some moment between two lines
        report(f"{number + 1}: {name}, at: {life.lines[-1]}")
        FAULTS[name](life, base_dir=base_dir, data=data, start=start, quiet=quiet)
        survived[name] += 1
    if life.process.poll() is not None:
        life = start()
    life.end(0)
    quiet.end(0)
    losses, evaluations, weights = result(base_dir)
    expected_losses, expected_evaluations, expected_weights = result(quiet_dir)
    assert [step for step, _ in losses] == list(range(1, steps + 1)), "steps are missing, or there twice"
    assert losses == expected_losses, "other losses"
    assert evaluations == expected_evaluations, "other evaluations"
    assert weights == expected_weights, "other weights"
    report(f"{steps} steps: all losses, evaluations and the final weights are equal bit for bit")
    return survived


def main():
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--interruptions", type=int, default=27)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, help="default: 25 for each interruption, and 25")
    parser.add_argument("--every", type=int, default=5)
    args = parser.parse_args()
    if "CHAOS_NAMESPACE" not in os.environ:
        os.environ["CHAOS_NAMESPACE"] = "1"
        os.execvp("unshare", ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-m",
                              "tests.run.chaos", *sys.argv[1:]])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        try:
            survived = run(args.seed, args.interruptions, args.devices,
                           args.steps or 25 * (args.interruptions + 1), args.every, Path(directory),
                           report=lambda line: print(line, flush=True))
        finally:
            subprocess.run(["umount", "--lazy", f"{directory}/chaos"], check=False)
    for name in FAULTS:
        print(f"{survived[name]:4} × {name}")
    print(f"{sum(survived.values())} interruptions survived in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
