"""Runs the tasks of a corpus on a Ray cluster instead of one machine's processes (workers.py).

Plain tasks, and no Ray Data: tasks pass on nothing except files in one folder that all nodes see. So a lost node costs
only its running tasks, and the order of documents is that of one machine. Blocks of Ray Data would be lost with their
node, and need a sort to come back into an order.
"""
import hashlib
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections import Counter, deque
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from nanochat.common import BadInput

TRIES = 5  # of a task whose worker or node is lost
CONNECT_S, PROBE_S, NO_ROOM_S, STALL_S = 60, 120, 600, 6 * 3600
LOCAL_STORE_BYTES = 80_000_000  # of Ray's own memory, which this program hardly uses

_CONNECT = """
import sys, ray
try:
    ray.init(sys.stdin.read(), logging_level="ERROR", log_to_driver=False)
except Exception as error:
    sys.exit(" ".join(str(error).split())[:400])
"""

# The environment of a client without a token. It tries twice only, because a guarded cluster refuses every try.
_WITHOUT_TOKEN = {"RAY_AUTH_MODE": "disabled", "RAY_NUM_REDIS_GET_RETRIES": "2"}
_NEEDS_TOKEN = "it asks for its token: set RAY_AUTH_MODE=token, and copy the token to ~/.ray/auth_token"


def find_address(address):
    """Returns the address of the cluster: `address`, or $RAY_ADDRESS. Raises BadInput if ray is not installed, or
    nothing answers at the address."""
    try:
        importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        raise BadInput("--engine=ray needs ray, which is not installed: pip install '.[data,ray]'") from None
    name = "--ray_address" if address else "RAY_ADDRESS"
    address = address or os.environ.get("RAY_ADDRESS")
    if not address:
        raise BadInput("--engine=ray: no cluster is named: give --ray_address=HOST:PORT or set RAY_ADDRESS (auto: the "
                       "cluster of which this machine is a node; local: start one here)")
    if address in ("auto", "local"):
        return address
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not (port.isascii() and port.isdigit() and 1024 <= int(port[:6]) < 65536):
        raise BadInput(f"{name}={address} is not HOST:PORT, auto or local; ray:// is not supported: run this "
                       "command on a node of the cluster")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, UnicodeError) as error:
        raise BadInput(f"{name}={address}: nothing answers there ({error}): check the address, and that the "
                       "cluster runs") from None
    return address


@contextmanager
def ray_cluster(address, workers, may_be_open, task_bytes):
    """Yields a RayRun. address: what find_address returns. workers: concurrent tasks at most; None: as many as fit.
    may_be_open: the cluster need not ask for a token. task_bytes: memory of a task. Raises BadInput if the cluster
    cannot be used."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    options = {"logging_level": "ERROR", "log_to_driver": False}
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options |= {"num_cpus": workers, "include_dashboard": False, "object_store_memory": LOCAL_STORE_BYTES}
    else:
        # Two clients try before the real one: that this machine may connect, and that nobody without a token may.
        if problem := _try_to_connect(address, {}):
            raise BadInput(f"{address}, the address of the Ray cluster: {problem}")
        if not may_be_open and (problem := _try_to_connect(address, _WITHOUT_TOKEN)) != _NEEDS_TOKEN:
            doubt = f"perhaps asks for no token ({problem})" if problem else "asks for no token"
            raise BadInput(f"{address}: the Ray cluster {doubt}, so anyone on its network can run code on its nodes: "
                           "start it with RAY_AUTH_MODE=token, as docs/data.md shows, or add --ray_open")
    import ray
    ray.init(address, **options)
    try:
        run = RayRun(ray, workers, task_bytes)
        run.require_room()
        yield run
    finally:
        ray.shutdown()


def _try_to_connect(address, env):
    """Returns why the cluster refuses, or "". Raises BadInput if none answers. A process tries it, because ray.init
    waits forever, and cannot be interrupted, if another program answers."""
    try:
        tried = subprocess.run([sys.executable, "-c", _CONNECT], input=address, capture_output=True, text=True,
                               timeout=CONNECT_S, env=os.environ | env)
    except subprocess.TimeoutExpired:
        raise BadInput(f"{address}: no Ray cluster answered in {CONNECT_S} s: check the address, and that this machine "
                       "is a node of the cluster") from None
    if not tried.returncode:
        return ""
    if "InvalidAuthToken" in tried.stderr:
        return _NEEDS_TOKEN
    return (tried.stderr.strip().splitlines() or [f"status {tried.returncode}"])[-1]


class RayRun:
    """run(function, calls, done), as worker_pool yields it, on the nodes of a Ray cluster."""

    def __init__(self, ray, workers, task_bytes):
        self.ray = ray
        self.workers = workers
        self.task_bytes = task_bytes
        self.started = time.monotonic()
        self.looked = self.started
        self.alive = {}  # {id: node} at the last look
        self.node_s = 0.0
        self.cpu_s = 0.0
        self.peak_bytes = 0
        self.tasks = 0
        self.repeated = 0
        # Ray repeats a task that ran out of memory without end. So it must repeat none, and __call__ counts the tries.
        self._task = ray.remote(max_retries=0, num_cpus=1, memory=task_bytes)(_measured)
        self.look()

    def look(self):
        """Counts the time of the nodes, and prints which of them are gone. Returns those with room for a task."""
        now = time.monotonic()
        nodes = {node["NodeID"]: node for node in self.ray.nodes() if node["Alive"]}
        # Node-hours add up from look to look: the nodes of the last look count as alive since then.
        self.node_s += (now - self.looked) * len(self.alive)
        for gone in self.alive.keys() - nodes.keys():
            print(f"node {_name(self.alive[gone])} is gone: others repeat its tasks", flush=True)
        self.looked = now
        self.alive = nodes
        with_room = {}
        for number, node in nodes.items():
            if node["Resources"].get("CPU", 0) >= 1 and node["Resources"].get("memory", 0) >= self.task_bytes:
                with_room[number] = node
        return with_room

    def require_room(self):
        """Returns the nodes with room for a task. Raises BadInput if there are none."""
        if nodes := self.look():
            return nodes
        raise BadInput(f"no node of the cluster has a core and the {self.task_bytes / 1e6:.0f} MB that a task needs "
                       f"({len(self.alive)} nodes are there): add nodes, start them with more --memory, or give a "
                       "smaller --shard_bytes and --max_file_bytes")

    def check(self, folder, sources):
        """Raises BadInput unless each node has this machine's versions and sees `folder` and the Sources as it does."""
        files = []
        for source in sources:
            for path in (*source.archives, *(os.path.join(source.directory, file) for file in source.files[:1])):
                files.append((path, *_seen(path)))
        passed = set()
        tries = 0
        while asked := {number: node for number, node in self.require_room().items() if number not in passed}:
            if tries == TRIES:
                raise BadInput(f"the workers of node {_name(next(iter(asked.values())))} were lost {TRIES} times, "
                               "perhaps because memory ran out: give it more, and run the same command again")
            if tries:
                time.sleep(1)  # a worker that ran out of memory may have more now
            passed |= self._probe(asked, folder, files)
            tries += 1

    def _probe(self, nodes, folder, files):
        """Returns the numbers of the nodes ({number: node}) that pass. The others have lost their worker. Raises
        BadInput if a node has a problem or does not answer."""
        probe = folder / f"probe_{uuid.uuid4().hex}"
        probe.mkdir()
        # One probe is bound to each node. It claims neither cores nor memory, so it also runs on a busy node.
        strategy = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        asked = {}  # {reference to the probe's result: number of the node}
        for number in nodes:
            probing = self._task.options(num_cpus=0, memory=0, scheduling_strategy=strategy(number, soft=False))
            asked[probing.remote(_versions(), _look_around, (probe, number, files))] = number
        try:
            ready, late = self.ray.wait(list(asked), num_returns=len(asked), timeout=PROBE_S)
            passed = set()
            for reference in ready:
                if self._passes(reference, nodes[asked[reference]], probe):
                    passed.add(asked[reference])
            if late:
                raise BadInput(f"node {_name(nodes[asked[late[0]]])} did not answer in {PROBE_S} s: check it")
            return passed
        finally:
            shutil.rmtree(probe, ignore_errors=True)  # a late node may still write there

    def _passes(self, reference, node, probe):
        """Returns whether a node's probe ended well, or else lost its worker. Raises BadInput if it found a problem."""
        try:
            problem, *_ = self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            problem = f"{error.cause}"
            if not isinstance(error.cause, BadInput):
                problem = (f"it cannot run this program ({_lines(error.cause)[-1]}): install the same version there, "
                           "with '.[data,ray]'")
        except self.ray.exceptions.RayError as error:
            print(f"node {_name(node)} has lost a worker ({_lines(error)[0]})", flush=True)
            return False
        # A node that writes to a disk of its own, under the same path, reports no error: its file must be seen here.
        if not problem and not any((probe / f"seen_{node['NodeID']}").glob("file")):
            problem = f"what it writes to {probe.parent} is not seen here: name an --out_dir that all nodes share"
        if problem:
            raise BadInput(f"node {_name(node)}: {problem}")
        return True

    def __call__(self, function, calls, done):
        tries = Counter()
        waiting = deque(range(len(calls)))
        running = {}  # {reference: number of its call}
        ended = time.monotonic()  # when a task last ended
        room = ended  # when a node was last seen that can take one; lost nodes may be replaced, within NO_ROOM_S
        try:
            while waiting or running:
                # Ray gets about two tasks for each core, so that a node has its next one at hand when one ends.
                cores = sum(int(node["Resources"].get("CPU", 0)) for node in self.alive.values())
                while waiting and len(running) < (self.workers or 2 * cores + 2):
                    i = waiting.popleft()
                    tries[i] += 1
                    running[self._task.remote(_versions(), function, calls[i])] = i
                ready, _ = self.ray.wait(list(running), timeout=5)
                now = time.monotonic()
                for reference in ready:
                    i = running.pop(reference)
                    ended = now
                    try:
                        done(i, self._result(reference))
                    except self.ray.exceptions.RayTaskError as error:
                        raise (error.cause if isinstance(error.cause, Exception) else error) from None
                    except self.ray.exceptions.RayError as error:  # its worker or node is lost
                        self._again(function, tries[i], error)
                        waiting.appendleft(i)
                if (not ready or now - self.looked > 5) and self.look():
                    room = now
                if now - room > NO_ROOM_S:
                    self.require_room()
                if now - ended > STALL_S:
                    raise BadInput(f"no task ended in {STALL_S // 3600} hours: look at the nodes and their disks, and "
                                   "run the same command again, which resumes")
        except BaseException:
            for reference in running:
                self.ray.cancel(reference, force=True)
            raise

    def _result(self, reference):
        """Returns the result of a task that has ended, and counts what it took."""
        result, cpu_s, peak_bytes = self.ray.get(reference)
        self.tasks += 1
        self.cpu_s += cpu_s
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        return result

    def _again(self, function, tries, error):
        if tries == TRIES:
            raise BadInput(f"a task ({function.__name__}) was lost {TRIES} times, perhaps because memory ran out "
                           f"({_lines(error)[0]}): give the nodes more, and run the same command again, which "
                           "resumes")
        self.repeated += 1
        print(f"a task ({function.__name__}) was lost with its worker or node: try {tries + 1} of {TRIES}", flush=True)

    def cost(self, nbytes):
        """Returns a line with the cost of the run and the bytes of sources per second."""
        self.look()
        seconds = self.looked - self.started
        return (f"ray: {len(self.alive)} nodes, {self.node_s / 3600:.3f} node-hours, {self.cpu_s:.0f} CPU-seconds in "
                f"{self.tasks} tasks ({self.repeated} repeated), {nbytes / 1e6 / seconds:.1f} MB of sources per "
                f"second, at most {self.peak_bytes / 1e6:.0f} of {self.task_bytes / 1e6:.0f} MB in a worker")


def _lines(error):
    return str(error).strip().splitlines() or [type(error).__name__]


def _name(node):
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}:{node['NodeManagerPort']})"


# On the nodes


@cache
def _versions():
    """Returns {name: version} of everything that decides the bytes of a corpus."""
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        code.update(path.read_bytes())
    return {"Python": ".".join(platform.python_version_tuple()[:2]), "the code of nanochat": code.hexdigest()[:12],
            **{name: importlib.metadata.version(name) for name in ("numpy", "pyarrow", "rensa")}}


def _measured(versions, function, arguments):
    """Calls function(*arguments). Returns its result, the CPU seconds, and the peak memory of this process in bytes.
    Raises BadInput if the versions differ from those of the machine that asks."""
    for name, version in versions.items():
        if _versions()[name] != version:
            raise BadInput(f"{name} is {_versions()[name]} on {socket.gethostname()} and {version} where the command "
                           "runs, which would make other bytes: install the same version")
    before = time.process_time()
    result = function(*arguments)
    return result, time.process_time() - before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _seen(path):
    """Returns (size, time of change) of a file, or () if there is none."""
    try:
        stat = os.stat(path)
    except OSError:
        return ()
    return stat.st_size, stat.st_mtime_ns


def _look_around(folder, node, files):
    """Writes to the shared folder as scan does, and returns what is wrong on this node, or ""."""
    try:
        partial = folder / f"{node}.partial"
        partial.mkdir()
        (partial / "file").write_bytes(b"")
        partial.rename(folder / f"seen_{node}")
    except OSError as error:
        return f"it cannot write to {folder.parent} ({error.strerror}): name an --out_dir that all nodes share"
    for path, *seen in files:
        if _seen(path) != tuple(seen):
            return f"it does not see {path} as this machine does: put the sources where all nodes share them"
    return ""
