"""prepare_data on a Ray cluster: several nodes on this machine, of which some are killed, and clusters that cannot be
used."""
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
def flags(tmp_path):
    """The flags that name two small projects."""
    for name in "ab":
        make_project(tmp_path / "in", name, files=1)
    return [f"--projects_dir={tmp_path / 'in'}"]


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
                                      f"--ray_address={address}", *map(str, flags)],
                                     stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    return COMMANDS[-1]


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
    table = write_table(tmp_path / "stack.jsonl.gz", stack_rows("stack", 100))
    flags = [f"--projects_dir={tmp_path / 'in'}", "--val_projects=v", "--shard_bytes=600000", f"--source={table}",
             "--filters=all"]
    whole = prepare(tmp_path / "whole", *flags)
    assert whole["dropped"]["exact_duplicate"] == 30 and whole["dropped"]["near_duplicate"] == 15
    assert len(shard_hashes(tmp_path / "whole")) > 4

    nodes = tmp_path / "nodes"
    process = start(address, f"--out_dir={nodes}", *flags)
    kill_in_the_middle(raylets, nodes, "*/scans/*/*.partial", process)
    while process.poll() is None and len(list(nodes.glob(".work/*/scans/*/stats.json"))) < 3:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, output
    kept = {path: path.stat().st_mtime_ns for path in nodes.glob(".work/*/scans/*/stats.json")}
    process = start(address, f"--out_dir={nodes}", *flags)
    kill_in_the_middle(raylets, nodes, "*/*/shard_*.partial", process)
    assert kept.items() <= {path: path.stat().st_mtime_ns for path in nodes.glob(".work/*/scans/*/stats.json")}.items()
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0 and "warning: the Ray cluster asks for no token" in output, output
    assert shard_hashes(nodes) == shard_hashes(tmp_path / "whole") and manifest(nodes) == manifest(tmp_path / "whole")
    assert {path.name for path in nodes.iterdir()} == {"base_data_v3", "val", "manifest.json", ".prepare_data.lock"}
    assert len(raylets) == 1

    process = start(address, f"--out_dir={tmp_path / 'large'}", *flags[:1], "--shard_bytes=1000000000")
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 2, output
    assert "no node of the cluster has a core and the 6600 MB that a task needs" in output


@pytest.mark.parametrize("address, message", [
    (None, "no cluster is named: give --ray_address=HOST:PORT"),
    ("127.0.0.1:1025", "nothing answers there .*refused"), ("ray://127.0.0.1:10001", "nothing answers there .* without ray://"),
    *((address, "nothing answers there .*give HOST:PORT") for address in ("127.0.0.1", "x:²", "x:" + "9" * 5000)),
])
def test_a_cluster_that_is_not_there_is_one_line(tmp_path, monkeypatch, address, message, flags):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address:
        flags = [*flags, f"--ray_address={address}"]
    with pytest.raises(BadInput, match=message):
        prepare(tmp_path / "out", *flags, "--engine=ray")


@pytest.mark.slow
def test_a_cluster_with_a_token_refuses_a_client_without(tmp_path, flags):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    folder = tempfile.mkdtemp(dir="/tmp")  # its sockets need short names
    guarded = {**os.environ, **ENVIRONMENT, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
    head = subprocess.Popen([f"{sys.prefix}/bin/ray", "start", "--head", "--block", f"--port={port}", "--num-cpus=1",
                             "--node-ip-address=127.0.0.1", "--memory=2000000000", "--object-store-memory=80000000",
                             "--include-dashboard=false", f"--temp-dir={folder}"],
                            env=guarded, stdout=subprocess.DEVNULL)

    def run(name, env):
        return subprocess.run([sys.executable, "-m", "scripts.prepare_data", *flags,
                               "--engine=ray", f"--ray_address=127.0.0.1:{port}", f"--out_dir={tmp_path / name}"],
                              env={**os.environ, **ENVIRONMENT, **env}, capture_output=True, text=True, timeout=150)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.1)
        found = run("out", guarded)
        assert found.returncode == 0 and "asks for no token" not in found.stdout, found.stderr
        found = run("without", {"RAY_AUTH_MODE": "disabled"})
        assert found.returncode == 2 and "set RAY_AUTH_MODE=token, and copy the token" in found.stderr
    finally:
        for process in [*psutil.Process(head.pid).children(recursive=True), head]:
            process.kill()
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)


def test_a_server_that_is_no_cluster_is_one_line_and_not_waited_for(tmp_path, monkeypatch, flags):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(ray_cluster, "CONNECT_S", 2)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.server_port}")
    try:
        with pytest.raises(BadInput, match="no Ray cluster answered in 2 s"):
            prepare(tmp_path / "out", *flags, "--engine=ray")
    finally:
        server.shutdown()
        server.server_close()


def test_without_ray_and_without_the_engine_it_is_one_line(tmp_path, monkeypatch, flags):
    with pytest.raises(BadInput, match="--ray_address needs --engine=ray"):
        prepare(tmp_path / "out", *flags, "--ray_address=auto")

    def version(name):
        raise ray_cluster.importlib.metadata.PackageNotFoundError(name)
    monkeypatch.setattr("importlib.metadata.version", version)
    with pytest.raises(BadInput, match="needs ray, which is not installed: pip install"):
        ray_cluster.find_address("auto")


def test_a_node_that_differs_or_sees_other_files_is_named(tmp_path):
    versions = ray_cluster._versions()
    assert ray_cluster._with_same_versions(versions, max, (1, 2)) == 2
    with pytest.raises(BadInput, match=f"node {socket.gethostname()}: it has .*, and the command Python 2"):
        ray_cluster._with_same_versions("Python 2", max, (1, 2))
    source = open_source(make_project(tmp_path, "a"))
    ray_cluster._with_same_versions(versions, check_unchanged, (source,))
    with open(os.path.join(source.directory, source.files[0]), "a") as file:
        file.write("int x;\n")
    with pytest.raises(BadInput, match=f"node {socket.gethostname()}: .* sees other files there"):
        ray_cluster._with_same_versions(versions, check_unchanged, (source,))


@pytest.mark.parametrize("step", ["scan", "write_shard"])
def test_what_a_node_writes_to_a_disk_of_its_own_is_missed_at_once(tmp_path, monkeypatch, step, flags):
    monkeypatch.setattr(f"nanochat.corpus.build.{step}", lambda *arguments: {})
    with pytest.raises(BadInput, match="is not seen here: name an --out_dir that all nodes share"):
        prepare(tmp_path / "out", *flags)
    assert not (tmp_path / "out" / "val").exists()
