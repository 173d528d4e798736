"""Runs the tasks of a corpus on a Ray cluster instead of one machine's processes (workers.py).

Plain tasks, and no Ray Data: tasks pass on nothing except files in one folder that all nodes see. So a lost node costs
only its running tasks, which Ray repeats, and the order of documents is that of one machine. Blocks of Ray Data would
be lost with their node, and need a sort to come back into an order.
"""
import hashlib
import importlib.metadata
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

from nanochat.common import BadInput, say

TRIES = 5  # of a task whose worker or node is lost
CONNECT_S, NO_ROOM_S, STALL_S = 60, 600, 6 * 3600


def find_address(address):
    """Returns the address of the cluster: `address`, or $RAY_ADDRESS. Raises BadInput if ray is not installed, or
    nothing answers at the address."""
    try:
        importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        raise BadInput("--engine=ray needs ray, which is not installed: pip install '.[data,ray]'") from None
    address = address or os.environ.get("RAY_ADDRESS")
    if not address:
        raise BadInput("--engine=ray: no cluster is named: give --ray_address=HOST:PORT or set RAY_ADDRESS (auto: the "
                       "cluster of which this machine is a node)")
    if address == "auto":
        return address
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, OverflowError, ValueError) as error:
        reason = str(error)[:80]
        raise BadInput(f"--ray_address or RAY_ADDRESS={address[:80]}: nothing answers there ({reason}): give HOST:PORT "
                       "of a cluster that runs, without ray://, and run this command on one of its nodes") from None
    return address


@contextmanager
def ray_cluster(address, workers, task_bytes):
    """Yields run(function, calls, done), as worker_pool does. address: what find_address returns. workers: concurrent
    tasks at most; None: as many as fit. task_bytes: memory of a task. Raises BadInput if the cluster cannot be used."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_task_oom_retries", str(TRIES - 1))  # Ray would repeat what needs too much without end
    _require_cluster(address)
    import ray
    ray.init(address, logging_level="ERROR", log_to_driver=False)
    if os.environ.get("RAY_AUTH_MODE") != "token":
        say("warning: the Ray cluster asks for no token, so anyone on its network can run code on its nodes: start it "
            "with RAY_AUTH_MODE=token, as docs/data.md shows")
    try:
        _require_room(ray, task_bytes)
        yield partial(_run, ray, workers, task_bytes)
    finally:
        ray.shutdown()


def _require_cluster(address):
    """Raises BadInput if no cluster answers, or it refuses. A process tries it, because ray.init waits forever, and
    cannot be interrupted, if another program answers."""
    try:
        program = "import ray; ray.init(input(), logging_level='ERROR', log_to_driver=False)"
        tried = subprocess.run([sys.executable, "-c", program], input=address, capture_output=True, text=True,
                               timeout=CONNECT_S)
    except subprocess.TimeoutExpired:
        raise BadInput(f"{address}: no Ray cluster answered in {CONNECT_S} s: check the address, and that this machine "
                       "is a node of the cluster") from None
    if tried.returncode:
        problem = tried.stderr.strip().rpartition("\n")[2][:400]
        if "InvalidAuthToken" in tried.stderr:
            problem = "it asks for its token: set RAY_AUTH_MODE=token, and copy the token to ~/.ray/auth_token"
        raise BadInput(f"{address}, the address of the Ray cluster: {problem}")


def _require_room(ray, task_bytes):
    """Raises BadInput if no node has room for a task."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(node.get("CPU", 0) >= 1 and node.get("memory", 0) >= task_bytes for node in alive):
        raise BadInput(f"no node of the cluster has a core and the {task_bytes / 1e6:.0f} MB that a task needs "
                       f"({len(alive)} nodes are there): add nodes, start them with more --memory, or give a smaller "
                       "--shard_bytes and --max_file_bytes")


def _run(ray, workers, task_bytes, function, calls, done):
    task = ray.remote(max_retries=TRIES - 1, num_cpus=1, memory=task_bytes)(_with_same_versions)
    waiting = list(enumerate(calls))[::-1]
    running = {}  # {reference: number of its call}
    stalled_s = 0
    while waiting or running:
        # Ray gets about two tasks for each core, so that a node has its next one at hand when one ends.
        while waiting and len(running) < (workers or 2 * int(ray.cluster_resources().get("CPU", 0)) + 2):
            i, call = waiting.pop()
            running[task.remote(_versions(), function, call)] = i
        ended, _ = ray.wait(list(running), timeout=NO_ROOM_S)
        stalled_s = 0 if ended else stalled_s + NO_ROOM_S
        if stalled_s >= STALL_S:
            raise BadInput(f"no task ended in {STALL_S // 3600} hours: look at the nodes and their disks, and run the "
                           "same command again, which resumes")
        for reference in ended:
            done(running.pop(reference), _result_of(ray, reference))
        if not ended:
            _require_room(ray, task_bytes)  # lost nodes may be replaced, within NO_ROOM_S


def _result_of(ray, reference):
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, BadInput | OSError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        reason = str(error).strip().partition("\n")[0]
        raise BadInput(f"a task was lost {TRIES} times, perhaps because memory ran out ({reason}): give the nodes "
                       "more, and run the same command again, which resumes") from None


# On the nodes


@cache
def _versions():
    """Returns the versions of everything that decides the bytes of a corpus, as text."""
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        code.update(path.read_bytes())
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "pyarrow", "rensa"))
    return f"Python {sys.version_info[0]}.{sys.version_info[1]}, {packages}, nanochat with hash {code.hexdigest()[:12]}"


def _with_same_versions(versions, function, arguments):
    """Returns function(*arguments). Raises BadInput, which names this node, if the versions differ from those of the
    machine that asks, or the function does."""
    try:
        if _versions() != versions:
            raise BadInput(f"it has {_versions()}, and the command {versions}, which would make other bytes: install "
                           "the same versions")
        return function(*arguments)
    except BadInput as error:
        raise BadInput(f"node {socket.gethostname()}: {error}") from None
