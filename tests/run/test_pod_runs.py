"""Trainings on two or three "hosts": network namespaces of this machine with cables to the first, each with a folder of
its own. What XLA cannot do between CPU processes, pod_host.py does instead; the rest is the program as it is."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanochat.checkpoint import on_disk
from nanochat.checkpoint.pieces import load_checkpoint
from nanochat.run.pod import PodLimits
from nanochat.run.stopping import EXIT_STATUS
from tests.conftest import last_of_each
from tests.run.life import Life, rank_process

pytestmark = pytest.mark.slow
TIMEOUT_S = 240
LIMITS = PodLimits()
END_S = LIMITS.lost_s + LIMITS.grace_s + 60  # what docs/pods.md promises, and a minute because this machine may be busy
ADDRESSES = ("10.77.0.1", "10.77.0.2", "10.77.0.3")
DISK_BYTES = 8 * 2**20
LONG = ("--num_iterations=100000", "--eval_every=-1", "--save_every=10", "--keep_checkpoints=2")


@pytest.fixture(scope="module")
def network():
    """Three network namespaces. Returns a function: the beginning of a command that runs in that of a host."""
    keepers = []

    def inside(index):
        return ["nsenter", f"--target={keepers[index].pid}", "--user", "--net", "--preserve-credentials", "--"]

    def keep(*command):
        keepers.append(subprocess.Popen([*command, "sh", "-c", "echo ready; exec sleep 100000"], text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        if (said := keepers[-1].stdout.readline()) != "ready\n":
            pytest.skip(f"no network namespaces here: {said.strip()}")

    def ip(index, *arguments):
        subprocess.run([*inside(index), "ip", *arguments], check=True)

    try:
        keep("unshare", "--user", "--map-root-user", "--net")
        ip(0, "link", "set", "lo", "up")
        for index, address in enumerate(ADDRESSES[1:], 1):
            keep(*inside(0), "unshare", "--net")
            ip(index, "link", "set", "lo", "up")
            ip(0, "link", "add", f"cable{index}", "type", "veth", "peer", "name", "cable", "netns",
               str(keepers[index].pid))
            for host, cable, ends in ((0, f"cable{index}", (ADDRESSES[0], address)),
                                      (index, "cable", (address, ADDRESSES[0]))):
                ip(host, "address", "add", ends[0], "peer", ends[1], "dev", cable)
                ip(host, "link", "set", cable, "up")
        yield inside
    finally:
        for keeper in keepers:
            keeper.kill()
            keeper.wait()


@pytest.fixture
def start(network, tiny, tmp_path):
    """Starts a run on so many hosts and returns their Lives."""
    lives = []

    def run(*flags, hosts=2, only_on_1=(), before=(), clock_s=0):
        started = []
        for index in range(hosts):
            started.append(Life(
                [*network(index), *before, sys.executable, "-m", "tests.run.pod_host", *last_of_each(
                    "--run=test", *tiny, "--total_batch_size=128", "--log_every=5",
                    f"--checkpoint_mirror={tmp_path}/mirror", *flags,
                    *(only_on_1 if index else ()))],
                {"NANOCHAT_HOSTS": ",".join(ADDRESSES[:hosts]), "NANOCHAT_HOST_INDEX": str(index),
                 "NANOCHAT_POD_PORT": "7690", "NANOCHAT_HOST_NAME": f"w{index}", "CPU_NUM_DEVICES": "1",
                 "NANOCHAT_BASE_DIR": str(tmp_path / f"w{index}"), "POD_CLOCK_S": str(clock_s * index)}, TIMEOUT_S))
        lives.extend(started)
        return started

    yield run
    for life in lives:
        life.kill()


@pytest.fixture
def run_dirs(tmp_path):
    """The run's folder on each host."""
    return [tmp_path / f"w{index}/checkpoints/test" for index in (0, 1)]


def test_hosts_stop_together_and_name_a_killed_one_and_the_run_goes_on_to_the_bits_of_one_host(
        start, train, run_dirs, base_dir):
    """The clock of each host is an hour ahead of that of the host before it, then an hour behind. After the stop the
    first host loses its disk, and the mirror has the checkpoint."""
    flags = ("--num_lanes=48", "--total_batch_size=192", "--num_iterations=80", "--eval_every=40", "--save_every=10")
    hosts = first, second, third = start(*flags, hosts=3, clock_s=3600)
    first.wait_for("step 00005")
    second.process.send_signal(signal.SIGTERM)
    assert [life.end() for life in hosts] == [EXIT_STATUS] * 3, first.text + second.text
    assert "SIGTERM: the run stops" in second.text and "SIGTERM: " not in first.text
    saved = on_disk.latest(run_dirs[0])
    assert 5 <= on_disk.step_of(saved) < 80 and load_checkpoint(saved).lane_states.keys() == set(range(48))
    assert not list(run_dirs[1].glob("step_*"))
    assert first.count("step 00005/") == 1 and second.count("step 0") == 0  # one console, that of the first host
    assert "host 0 of 3: w0, joined to w1, w2" in first.text and "host 1 of 3: w1, joined to w0, w2" in second.text
    shutil.rmtree(run_dirs[0])
    hosts = first, second, third = start(*flags, hosts=3, clock_s=-3600)
    first.wait_for("saved ")
    os.kill(third.process.pid, signal.SIGKILL)
    began = time.monotonic()
    assert [life.end() for life in hosts] == [1, 1, -signal.SIGKILL], first.text[-3000:] + second.text[-3000:]
    assert time.monotonic() - began < END_S
    for life in (first, second):
        assert "error: host w2 has ended without a word" in life.text, life.text[-3000:]
    assert f"resuming from {saved}" in first.text
    assert all(f"fetched {saved.name} from " in life.text for life in (second, third))
    assert [path.name for path in on_disk.list_checkpoints(run_dirs[1])] == [saved.name]
    hosts = start(*flags, hosts=3)
    assert [life.end() for life in hosts] == [0, 0, 0], hosts[0].text[-3000:]
    alone = train(*flags, "--log_every=5", run="alone", devices=3)
    records = [json.loads(line) for line in (run_dirs[0] / "metrics.jsonl").read_text().splitlines()]
    losses = {record["step"]: record["loss"] for record in records if "loss" in record}
    bpb = {record["step"]: record["val_bpb"] for record in records if "val_bpb" in record}
    assert list(losses) == list(range(1, 81)) and losses == alone.losses
    assert bpb.keys() == {0, 40, 80} and bpb == alone.bpb
    weights = [(folder / "step_000080/model.safetensors").read_bytes()
               for folder in (run_dirs[0], base_dir / "checkpoints/alone")]
    assert weights[0] == weights[1]
    assert all(0 <= record.get("seconds_lost", 0) < 600 for record in records)
    for life in start(*flags, hosts=3):  # nothing is left to do, which all know
        assert life.end() == 0 and "has reached step 80" in life.text


def fill(disk):
    """Writes to the disk until nothing fits, and returns the file."""
    ballast = disk / "ballast"
    with open(ballast, "wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))
    return ballast


def test_full_disks_do_not_stop_a_run_and_a_cut_cable_ends_both_hosts_and_each_names_the_other(
        start, network, tmp_path):
    for index in (0, 1):
        (tmp_path / f"w{index}").mkdir()
    mount = ("unshare", "--mount", "sh", "-c", f"mount -t tmpfs -o size={DISK_BYTES} tmpfs $NANOCHAT_BASE_DIR && "
             'exec "$@"', "sh")
    first, second = start(*LONG, before=mount)
    first.wait_for("saved ", 2)
    disks = [Path(f"/proc/{life.process.pid}/root{tmp_path}/w{index}") for index, life in enumerate((first, second))]
    fill(disks[1])
    first.wait_for("saved ", first.count("saved ") + 2)  # the second host's disk is not needed
    ballast = fill(disks[0])
    first.wait_for("the disk is full")
    first.wait_for("step ", first.count("step ") + 2)
    ballast.unlink()
    first.wait_for("saved ", first.count("saved ") + 1)
    subprocess.run([*network(0), "ip", "link", "set", "cable1", "down"], check=True)
    began = time.monotonic()
    try:
        assert (first.end(), second.end()) == (1, 1), first.text[-3000:] + second.text[-3000:]
        ended = time.monotonic()
    finally:
        subprocess.run([*network(0), "ip", "link", "set", "cable1", "up"], check=True)
    assert ended - began < END_S
    assert f"error: host w1 has been silent for {LIMITS.lost_s} s" in first.text
    assert f"error: host w0 has been silent for {LIMITS.lost_s} s" in second.text
    assert list(tmp_path.glob("mirror/test/step_*/SHA256SUMS"))


@pytest.mark.parametrize("process_of, status, said", [
    (lambda parent: parent.pid, -signal.SIGKILL, "has ended without a word"),
    (rank_process, 1, r": rank 0 \(process \d+\) was ended by SIGKILL"),
], ids=["parent", "rank"])
def test_a_first_host_or_its_rank_that_is_killed_ends_the_other_host_with_its_name(start, process_of, status, said):
    first, second = start(*LONG)
    first.wait_for("saved ")
    os.kill(process_of(first.process), signal.SIGKILL)
    began = time.monotonic()
    assert (first.end(), second.end()) == (status, 1), first.text[-3000:] + second.text[-3000:]
    assert time.monotonic() - began < END_S
    assert re.search(f"error: host w0 ?{said}", second.text), second.text[-3000:]


def test_flags_that_differ_are_refused_on_both_hosts_with_both_values(start, run_dirs):
    words = "the hosts differ: --seed is 0 on w0 and 5 on w1; --depth is 2 on w0 and 3 on w1: start the same"
    for life in start(only_on_1=["--depth=3", "--seed=5"]):
        assert life.end() == 2 and words in life.text, life.text
    assert not any(path.exists() for path in run_dirs)
