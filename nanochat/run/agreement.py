"""What the hosts of a run agree on through their channel (pod.py): that they are alike, which checkpoint to resume, and
before which tick all ranks stop or save.

Stopping: the first host numbers the requests, and begins one once the last is done everywhere. It asks the parents of
all hosts to hold: each publishes the request to its ranks, and answers with the highest tick that any of them has come
to. From then on a rank that comes to a tick waits there, for the parents alone. The request is due at the tick after
the highest answer, which no rank has passed. Parents answer without waiting for a rank, so ranks that wait here keep no
other rank waiting but for this exchange of messages.
"""
import hashlib
import importlib.metadata
import json
import os
import platform
import threading
import time
from pathlib import Path

from nanochat.checkpoint.format import (
    SUMS,
    Kept,
    find_problem,
    latest,
    prune,
    read_sums,
    set_aside,
    set_aside_after,
    step_of,
    sync_to_disk,
)
from nanochat.checkpoint.saver import save_lane_states
from nanochat.common import BadInput, is_disk_full
from nanochat.run import wire
from nanochat.run.pod import REQUEST_TIMEOUT_S, PodError
from nanochat.run.stopping import SAVE, STOP

POLL_S = 0.05
PACKAGES = ("torch", "torch_xla", "libtpu", "jax", "numpy")
VARIABLES = ("LIBTPU_INIT_ARGS", "XLA_FLAGS", "TPU_MESH_CONFIG", "TPU_AXIS_NAMES")  # which make other programs


# -----------------------------------------------------------------------------
# Alike


def describe(flags, device_type):
    """Returns what must be the same on all hosts before a run begins, {name: JSON value}."""
    return {"device type": device_type, "code": code_version(), "Python": platform.python_version(),
            **{package: _version(package) for package in PACKAGES},
            **{f"${name}": os.environ.get(name, "") for name in VARIABLES},
            **{f"--{name}": value for name, value in json.loads(json.dumps(flags.as_dict())).items()}}


def code_version():
    """Returns a few digits that are others if a line of this program is another."""
    root, digest = Path(__file__).resolve().parents[2], hashlib.sha256()
    for path in sorted([*root.glob("nanochat/**/*.py"), *root.glob("scripts/*.py")]):
        digest.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def require_alike(names, found, advice):
    """Raises BadInput if hosts differ, with what differs and both values. names: of the hosts; found: what each says,
    {name: value}."""
    for name, other in zip(names[1:], found[1:], strict=True):
        differences = [f"{key} is {_show(found[0].get(key))} on {names[0]} and {_show(other.get(key))} on {name}"
                       for key in {**found[0], **other} if found[0].get(key) != other.get(key)]
        if differences:
            raise BadInput(f"the hosts differ: {'; '.join(differences[:4])}"
                           + (f" (and {len(differences) - 4} more)" if differences[4:] else "") + f": {advice}")


def _show(value):
    return "not given" if value in (None, "") else value


# -----------------------------------------------------------------------------
# The checkpoint to resume


def agree_on_checkpoint(pod, directory, find, report=print):
    """Returns the path of the checkpoint that all hosts resume, here, or None, and what the first host says of it.

    find() is called on the first host: it returns the path of its newest checkpoint, or None, and a JSON value. Hosts
    that do not have that checkpoint get it from the first. Raises BadInput if only another host has one.
    """
    found = {}
    if pod.is_first:
        path, note = find()
        found = {"name": path.name, "sums": _digest(path / SUMS), "note": note} if path else {}
        pod.serves["checkpoint"] = lambda connection, message: _serve_checkpoint(connection, path)
    else:
        newest = latest(directory)
        found = {"name": newest.name} if newest else {}
    chosen, *others = pod.gather("which checkpoint they have", found)
    if not chosen:
        for name, other in zip(pod.names[1:], others, strict=True):
            if other:
                raise BadInput(f"host {name} has {other['name']} of this run, and host {pod.names[0]}, whose disk "
                               f"counts, has no checkpoint: copy the folder {directory} there, or start over with "
                               "--resume=never")
        return None, None
    if not pod.is_first:
        path = obtain(pod, directory, chosen["name"], chosen["sums"], report)
    return path, chosen["note"]


def _digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def obtain(pod, directory, name, sums, report):
    """Returns the path of the checkpoint `name` whose SHA256SUMS has the hash `sums`, on this host's disk. Gets it from
    the first host if it is not there or damaged, and keeps no other."""
    path, partial = directory / name, directory / f"{name}.tmp"
    if not ((path / SUMS).is_file() and _digest(path / SUMS) == sums and find_problem(path) is None):
        started = time.monotonic()
        if path.is_dir():
            set_aside(path)
        partial.mkdir(parents=True)
        try:
            _receive_checkpoint(pod, partial)
            problem = "its SHA256SUMS is another" if _digest(partial / SUMS) != sums else \
                find_problem(partial)
        except OSError as error:
            if is_disk_full(error):
                raise BadInput(f"the disk is full: {directory} has no room for {name}: free some space") from None
            problem = str(error)
        except (EOFError, ValueError) as error:
            problem = str(error)
        if problem:
            raise PodError(f"{name} was not received whole from host {pod.names[0]}: {problem}", 1)
        sync_to_disk(partial)
        partial.rename(path)
        sync_to_disk(directory)
        report(f"received {name} from host {pod.names[0]} in {time.monotonic() - started:.1f} s", flush=True)
    set_aside_after(directory, step_of(path))
    prune(directory, step_of(path), Kept(1))
    return path


def _receive_checkpoint(pod, partial):
    with pod.link.request(kind="checkpoint") as connection:
        for name in wire.receive(connection)["files"]:
            wire.receive_file(connection, partial / Path(name).name)


def _serve_checkpoint(connection, path):
    connection.settimeout(REQUEST_TIMEOUT_S)
    names = [*read_sums(path), SUMS]
    wire.send(connection, {"files": names})
    for name in names:
        wire.send_file(connection, path / name)


# -----------------------------------------------------------------------------
# The positions in the data that a checkpoint holds


def serve_lanes(pod, directory):
    """Makes the first host write what the other hosts' ranks send with send_lanes to its disk, where rank 0 waits for
    it."""
    def serve(connection, message):
        try:
            save_lane_states(directory, message["step"], message["lanes"])
        except OSError as error:
            wire.send(connection, {"error": str(error)})
        else:
            wire.send(connection, {})

    pod.serves["lanes"] = serve


def send_lanes(link, step, lane_states):
    """Adds the states of this rank's lanes, {lane: JSON value}, to the checkpoint of `step` that rank 0 saves, from
    another host than rank 0's. link: a Link. Raises OSError."""
    if not lane_states:
        return
    try:
        with link.request(kind="lanes", step=step, lanes=lane_states) as connection:
            problem = wire.receive(connection).get("error")
    except EOFError as error:
        problem = str(error)
    if problem:
        raise OSError(f"the first host, {link.host.addresses[0]}, has not taken the lanes of step {step}: {problem}")


# -----------------------------------------------------------------------------
# Stopping and saving


class StopAgreement:
    """One host's part in agreeing on when all ranks of all hosts stop or save."""

    def __init__(self, pod, requests, num_ranks):
        """requests: the Requests of this host's ranks; num_ranks: how many they are."""
        self._pod, self._requests, self._num_ranks = pod, requests, num_ranks
        self._lock = threading.RLock()  # guards all below
        self._told_stops, self._told_preemption, self._open_number = 0, False, 0  # of this host
        self._number, self._kind = 0, 0  # the first host's: of the last request
        self._held, self._done, self._is_stop_asked = {}, set(), False
        pod.handlers |= {"stop": self._on_stop, "hold": self._on_hold, "held": self._on_held, "due": self._on_due,
                         "done": self._on_done, "preempted": lambda index, message: requests.note_preemption()}
        pod.gather("that they are ready", True)
        threading.Thread(target=self._work, name="agreement", daemon=True).start()

    def _work(self):
        while self._pod.trouble() is None:
            self._tell_the_first()
            if self._pod.is_first:
                self._begin_if_asked()
            time.sleep(POLL_S)

    def _tell_the_first(self):
        requests, stops = self._requests, self._requests.times_asked
        if stops > self._told_stops or requests.is_preempted and not self._told_preemption:
            self._told_stops, self._told_preemption = stops, requests.is_preempted
            if stops:
                self._pod.tell(0, {"kind": "stop", "is_preempted": self._told_preemption})
        with self._lock:
            number = self._open_number
            is_done = number and requests.is_done(number, self._num_ranks)
            if is_done:
                self._open_number = 0
        if is_done:
            self._pod.tell(0, {"kind": "done", "number": number})

    # On the first host

    def _begin_if_asked(self):
        with self._lock:
            is_open = self._number and len(self._done) < self._pod.host.count
            if is_open or self._kind == STOP or not (self._is_stop_asked or self._requests.save_is_asked):
                return
            self._number, self._kind = self._number + 1, STOP if self._is_stop_asked else SAVE
            self._held, self._done = {}, set()
            message = {"kind": "hold", "number": self._number, "action": self._kind}
        self._pod.tell_all(message)

    def _on_stop(self, index, message):
        with self._lock:
            self._is_stop_asked = True
        if message["is_preempted"]:
            self._pod.tell_all({"kind": "preempted"})

    def _on_held(self, index, message):
        with self._lock:
            self._held[index] = message["tick"]
            is_whole = len(self._held) == self._pod.host.count
            tick = max(self._held.values()) + 1
        if is_whole:
            self._pod.tell_all({"kind": "due", "number": message["number"], "tick": tick})

    def _on_done(self, index, message):
        with self._lock:
            self._done.add(index)

    # On every host

    def _on_hold(self, index, message):
        tick = self._requests.hold(message["number"], message["action"])
        self._pod.tell(0, {"kind": "held", "tick": tick, "number": message["number"]})

    def _on_due(self, index, message):
        self._requests.decide(message["number"], message["tick"])
        with self._lock:
            self._open_number = message["number"]
