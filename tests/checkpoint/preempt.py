"""What of a depth-16 state is in a bucket 30 s after the notice of a preemption, if the bucket takes 100 MB/s:

    python3 -m tests.checkpoint.preempt --depth=16 --mb_per_s=100 --notice_s=30

A state of that model, with random numbers, goes the way of a run at its notice: Saves, the files in memory, the uploads
to an emulated bucket that takes so many MB a second in all. One process with the threads of this machine does what the
processes of all chips do on a VM. It is killed at the end of the notice. Prints the timeline, and the step from which a
new VM resumes.
"""
import argparse
import os
import re
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from nanochat.checkpoint.mirror import run_mirror
from nanochat.checkpoint.on_disk import Kept
from nanochat.checkpoint.pieces import state_bytes
from nanochat.data import storage
from nanochat.model.config import GPTConfig
from nanochat.model.weights import shapes
from tests.checkpoint.states import Training, make_meta, saves_of
from tests.deploy.cloud import Cloud


class Rate:
    """Lets so many bytes a second through, for all threads together."""

    def __init__(self, bytes_per_s):
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, count):
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + count / self._bytes_per_s
            wait_s = self._free_at - time.monotonic()
        time.sleep(max(0.0, wait_s))


def make_state(depth):
    """Returns ({name: weight}, {name: state}) of the model that --depth makes, in random numbers."""
    weights, state = {}, {}
    for name, shape in shapes(GPTConfig(n_layer=depth)).items():
        weights[name] = torch.rand(shape)
        state[f"{name}.momentum"] = torch.rand(shape)
        is_matrices = len(shape) == 3  # Muon has a second moment for each neuron
        state[f"{name}.second_moment"] = torch.rand((*shape[:-1], 1) if is_matrices else shape)
    return weights, state


def save_at_the_notice(depth, url):
    """Does in a child process what a run does at the notice, and says when it did what."""
    state = make_state(depth)
    run_dir = Path(tempfile.mkdtemp())
    (run_dir / "metrics.jsonl").write_text("{}\n")
    mirror = run_mirror(url, "run", Kept(2))
    saves = saves_of(run_dir, mirror, num_lanes=1)
    os.write(1, f"state of {state_bytes(*state) / 1e9:.2f} GB; notice\n".encode())
    saves.save(123, {0: {}}, Training(state), make_meta(123), is_preempted=True)
    os.write(1, b"the rounded state is in memory, and the loop ends\n")
    saves.finish(lambda: False)
    saves.finish_mirror(lambda: False)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--mb_per_s", type=float, default=100.0)
    parser.add_argument("--notice_s", type=float, default=30.0)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.url:
        rate, content = Rate(1e6 * flags.mb_per_s), storage._content

        def limited(*args):
            for part in content(*args):
                rate.take(len(part))
                yield part

        storage._content = limited
        return save_at_the_notice(flags.depth, flags.url)
    return watch(flags)


def watch(flags):
    """Starts the run, kills it at the end of the notice, and resumes from what is in the bucket."""
    cloud = Cloud()
    os.environ.update(cloud.env(tempfile.mkdtemp()))
    reader, writer = os.pipe()
    command = [sys.executable, "-u", "-m", "tests.checkpoint.preempt", f"--depth={flags.depth}",
               f"--mb_per_s={flags.mb_per_s}", "--url=gs://b"]
    pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, writer, 1)])
    os.close(writer)
    begin = timer = None
    for line in open(reader):
        if line.endswith("notice\n"):
            begin = time.monotonic()
            timer = threading.Timer(flags.notice_s, os.kill, (pid, 9))
            timer.start()
        seconds = time.monotonic() - begin if begin else 0.0
        print(f"{seconds:5.1f} s  {re.sub('/tmp/[^ ]*/', '', line.strip())}", flush=True)
    os.waitpid(pid, 0)
    if timer is None:
        sys.exit("the run did not start")
    timer.cancel()
    stored_gb = sum(map(len, cloud.objects.values())) / 1e9
    print(f"{time.monotonic() - begin:5.1f} s  killed; {stored_gb:.2f} GB in the bucket")
    new_vm = Path(tempfile.mkdtemp())
    (new_vm / "metrics.jsonl").touch()
    path = run_mirror("gs://b", "run", Kept(2)).fetch(new_vm)
    print("a new VM", f"resumes from {path.name}" if path else "finds no checkpoint")
    cloud.close()


if __name__ == "__main__":
    main()
