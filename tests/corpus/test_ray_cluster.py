"""prepare_data on a Ray cluster: several nodes on this machine, of which some are killed, and clusters that cannot be
used."""
import functools
import glob
import http.server
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from nanochat.common import BadInput
from nanochat.corpus import ray_cluster
from nanochat.corpus.sources import check_unchanged, open_source
from tests.corpus.projects import make_project, make_tar, manifest, prepare, shard_hashes, stack_rows, write_table

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # a cluster on 127.0.0.1
    "RAY_memory_monitor_refresh_ms": "0",  # Ray would kill workers because of the memory of the tests beside it
}
COMMANDS = []  # that were started


@pytest.fixture
def cluster(monkeypatch):
    """Yields (address, list of nodes with a core each) of a Ray cluster, whose processes are gone after the test."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    monkeypatch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", False)  # read when ray was imported
    options = {"object_store_memory": 80 << 20, "include_dashboard": False, "node_ip_address": "127.0.0.1"}
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    folder, started = tempfile.mkdtemp(dir="/tmp"), []  # its sockets need short names
    monkeypatch.setenv("RAY_TMPDIR", folder)
    cluster = cluster_utils.Cluster()
    try:
        cluster.add_node(num_cpus=0, memory=10**9, **options)
        nodes = [cluster.add_node(num_cpus=1, memory=2 * 10**9, **options) for _ in range(3)]
        started = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
        yield cluster.address, [node.all_processes["raylet"][0].process.pid for node in nodes]
    finally:
        for process in COMMANDS:
            process.kill()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def start(address, *flags):
    COMMANDS.append(subprocess.Popen([sys.executable, "-m", "scripts.prepare_data", "--engine=ray",
                                      f"--ray_address={address}", "--ray_open",
                                      *map(str, flags)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                     text=True))
    return COMMANDS[-1]


def finish(process):
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    return output


def kill_in_the_middle(raylets, folder, pattern, process):
    """Stops a worker of one of the nodes as soon as it has begun, and not yet finished, a file; then kills its node."""
    while process.poll() is None:
        time.sleep(0.001)
        for partial in map(Path, glob.glob(f"{folder}/.work/{pattern}")):
            worker = psutil.Process(int(re.search(r"\.(\d+)_\w{32}\.partial", partial.name)[1]))
            victim = next((raylet for raylet in raylets if raylet in [parent.pid for parent in worker.parents()]), None)
            if victim is None:
                continue
            worker.suspend()
            if not partial.exists():  # it was faster
                worker.resume()
                continue
            for node_process in [*psutil.Process(victim).children(recursive=True), psutil.Process(victim)]:
                node_process.kill()
            assert partial.exists(), "the node was not in the middle of it"
            raylets.remove(victim)
            return
    raise AssertionError(f"it ended before: {process.communicate()[0]}")


@pytest.mark.slow
def test_the_bytes_are_those_of_one_machine_though_nodes_and_the_command_are_killed(cluster, tmp_path):
    address, raylets = cluster
    for name in "abcdv":
        make_project(tmp_path / "in", name, files=60, lines=300)
    make_project(tmp_path / "in", "copies", files=30, seed="a", lines=300)
    for number in range(10):
        path = tmp_path / "in" / "b" / "src" / f"file{number}.cpp"
        path.with_name(f"similar{number}.cpp").write_text(path.read_text().replace("int", "long", 2))
    make_tar(tmp_path / "in" / "t-1.0.tar.xz", {f"t/{number}.cpp": b"int f();\n" * number for number in range(1, 9)})
    flags = [f"--projects_dir={tmp_path / 'in'}", "--val_projects=v", "--shard_bytes=600000"]
    table = write_table(tmp_path / "stack.jsonl.gz", stack_rows("stack", 100))
    more = [f"--source={table}", "--where=score < 90", "--filters=all"]
    whole = prepare(tmp_path / "whole", *flags, *more)
    assert whole["dropped"]["exact_duplicate"] == 30 and whole["dropped"]["near_duplicate"] == 15
    assert len(shard_hashes(tmp_path / "whole")) > 4

    process = start(address, f"--out_dir={tmp_path / 'nodes'}", *flags, *more)
    kill_in_the_middle(raylets, tmp_path / "nodes", "scans/*.partial", process)
    kill_in_the_middle(raylets, tmp_path / "nodes", "*/*/shard_*.partial", process)
    output = finish(process)
    assert shard_hashes(tmp_path / "nodes") == shard_hashes(tmp_path / "whole")
    assert manifest(tmp_path / "nodes") == manifest(tmp_path / "whole")
    assert {path.name for path in (tmp_path / "nodes").iterdir()} == {
        "base_data_v3", "val", "manifest.json", ".prepare_data.lock"}
    assert len(raylets) == 1 and output.count("was lost with its worker or node: try 2 of 5") >= 2
    cost = re.search(r"node-hours, \d+ CPU-seconds in \d+ tasks \((\d+) repeated\), .* most (\d+) of \d+ MB", output)
    assert int(cost[1]) >= 2 and int(cost[2]) > 50

    process = start(address, f"--out_dir={tmp_path / 'again'}", *flags)
    scans = tmp_path / "again" / ".work" / "scans"
    while process.poll() is None and len(list(scans.glob("*/stats.json"))) < 3:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, output
    kept = {path: path.stat().st_mtime_ns for path in scans.rglob("*.parquet") if ".partial" not in str(path)}
    assert kept and not (tmp_path / "again" / "val").exists()
    prepare(tmp_path / "here", *flags)
    process = start(address, f"--out_dir={tmp_path / 'again'}", *flags)
    while process.poll() is None and not glob.glob(f"{tmp_path}/again/.work/*/*/shard_*.parquet"):
        time.sleep(0.001)
    assert all(not path.exists() or path.stat().st_mtime_ns == kept[path] for path in kept), "it was scanned again"
    finish(process)
    assert shard_hashes(tmp_path / "again") == shard_hashes(tmp_path / "here")

    process = start(address, f"--out_dir={tmp_path / 'large'}", *flags[:1], "--shard_bytes=1000000000")
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 2 and output.count("\n") == 1, output
    assert "no node of the cluster has a core and the 6600 MB that a task needs (2 nodes are there)" in output


class LossyRay:
    """A Ray of two nodes whose first tasks lose their worker, as if Ray's memory monitor had killed it."""
    exceptions = SimpleNamespace(RayError=RuntimeError, RayTaskError=ValueError)
    util = SimpleNamespace(scheduling_strategies=SimpleNamespace(
        NodeAffinitySchedulingStrategy=lambda number, soft: number))

    def __init__(self, losses):
        self.losses = losses  # {number of a node: tasks that it loses}

    def nodes(self):
        return [{"NodeID": number, "Alive": True, "Resources": {"CPU": 1, "memory": 1}, "NodeManagerHostname": "host",
                 "NodeManagerAddress": number, "NodeManagerPort": 1} for number in self.losses]

    def remote(self, **options):
        def of_node(scheduling_strategy, **options):
            return SimpleNamespace(remote=lambda _, *call: functools.partial(self.run, scheduling_strategy, *call))
        return lambda function: SimpleNamespace(options=of_node)

    def run(self, number, function, arguments):
        self.losses[number] -= 1
        if self.losses[number] >= 0:
            raise RuntimeError("killed due to the node running low on memory")
        return function(*arguments), 0, 0

    def wait(self, references, **options):
        return references, []

    def get(self, reference):
        return reference()


def test_a_node_that_loses_its_worker_is_asked_again_and_then_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ray_cluster.time, "sleep", lambda seconds: None)
    ray_cluster.RayRun(LossyRay({"one": 0, "two": 4}), 1, 1).check(tmp_path, [])
    output = capsys.readouterr().out
    assert output.count("node host (two:1) has lost a worker (killed due to the node running low on memory)") == 4
    with pytest.raises(BadInput, match=r"node host \(two:1\) were lost 5 times, perhaps because memory ran out"):
        ray_cluster.RayRun(LossyRay({"one": 0, "two": 5}), 1, 1).check(tmp_path, [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address, message", [
    (None, "no cluster is named: give --ray_address=HOST:PORT"),
    ("127.0.0.1:1025", "nothing answers there .*refused"),
    ("ray://127.0.0.1:10001", "is not HOST:PORT, auto or local; ray:// is not supported"),
    ("127.0.0.1", "is not HOST:PORT"), ("x:²", "is not HOST:PORT"), ("x:" + "9" * 5000, "is not HOST:PORT"),
])
def test_a_cluster_that_is_not_there_is_one_line(tmp_path, monkeypatch, address, message):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(BadInput, match=message) as error:
        prepare(tmp_path / "out", f"--projects_dir={two_projects(tmp_path)}", "--engine=ray",
                *([f"--ray_address={address}"] if address else []))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("found, message", [("", "Ray cluster asks for no token, so anyone"),
                                            ("no memory", "Ray cluster perhaps asks for no token .no memory., so")])
def test_a_cluster_is_refused_unless_it_refuses_a_client_without_a_token(monkeypatch, found, message):
    monkeypatch.setattr(ray_cluster, "_try_to_connect", lambda address, env: found if env else "")
    with pytest.raises(BadInput, match=message), ray_cluster.ray_cluster("127.0.0.1:1025", None, False, 1):
        pass


def two_projects(folder):
    for name in "ab":
        make_project(folder / "in", name, files=1)
    return folder / "in"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["token", "disabled"])
def test_a_cluster_that_asks_for_no_token_is_refused_and_one_that_does_is_used(tmp_path, mode):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    folder = tempfile.mkdtemp(dir="/tmp")  # its sockets need short names
    guarded = {**os.environ, **ENVIRONMENT, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
    head = subprocess.Popen([f"{sys.prefix}/bin/ray", "start", "--head", "--block", f"--port={port}", "--num-cpus=1",
                             "--node-ip-address=127.0.0.1", "--memory=2000000000", "--object-store-memory=80000000",
                             "--include-dashboard=false", f"--temp-dir={folder}"],
                            env={**guarded, "RAY_AUTH_MODE": mode}, stdout=subprocess.DEVNULL)

    def run(name, env):
        return subprocess.run([sys.executable, "-m", "scripts.prepare_data", f"--projects_dir={two_projects(tmp_path)}",
                               "--engine=ray", f"--ray_address=127.0.0.1:{port}", f"--out_dir={tmp_path / name}"],
                              env={**os.environ, **ENVIRONMENT, **env}, capture_output=True, text=True, timeout=150)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and "nothing" in run("early", guarded).stderr:
            time.sleep(1)
        found = run("out", guarded)
        if mode == "disabled":
            assert found.returncode == 2 and "asks for no token, so anyone on its network can run code" in found.stderr
        else:
            assert found.returncode == 0, found.stderr
            found = run("without", {"RAY_AUTH_MODE": "disabled"})
            assert found.returncode == 2 and "set RAY_AUTH_MODE=token, and copy the token" in found.stderr
    finally:
        for process in [*psutil.Process(head.pid).children(recursive=True), head]:
            process.kill()
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)


def test_a_server_that_is_no_cluster_is_one_line_and_not_waited_for(tmp_path, monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(ray_cluster, "CONNECT_S", 4)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.server_port}")
    try:
        with pytest.raises(BadInput, match="no Ray cluster answered in 4 s"):
            prepare(tmp_path / "out", f"--projects_dir={two_projects(tmp_path)}", "--engine=ray")
    finally:
        server.shutdown()
        server.server_close()


def test_without_ray_and_without_the_engine_it_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(BadInput, match="--ray_address and --ray_open need --engine=ray"):
        prepare(tmp_path / "out", f"--projects_dir={two_projects(tmp_path)}", "--ray_address=auto")

    def version(name):
        raise ray_cluster.importlib.metadata.PackageNotFoundError(name)
    monkeypatch.setattr("importlib.metadata.version", version)
    with pytest.raises(BadInput, match="needs ray, which is not installed: pip install"):
        ray_cluster.find_address("auto")


def test_a_node_that_differs_or_sees_other_files_is_named(tmp_path):
    versions = ray_cluster._versions()
    assert ray_cluster._measured(versions, max, (1, 2))[0] == 2
    with pytest.raises(BadInput, match="pyarrow is .* and 0.1 where the command runs"):
        ray_cluster._measured({**versions, "pyarrow": "0.1"}, max, (1, 2))
    source = open_source(make_project(tmp_path, "a"))
    path = os.path.join(source.directory, source.files[0])
    seen = (path, *ray_cluster._seen(path))
    assert ray_cluster._look_around(tmp_path, "one", [seen]) == "" and (tmp_path / "seen_one" / "file").exists()
    check_unchanged(source)
    with open(path, "a") as file:
        file.write("int x;\n")
    assert f"it does not see {path} as this machine does" in ray_cluster._look_around(tmp_path, "two", [seen])
    assert "cannot write to" in ray_cluster._look_around(tmp_path / "nowhere", "three", [])
    with pytest.raises(BadInput, match="sees other files there"):
        check_unchanged(source)
