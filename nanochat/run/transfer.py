"""Transfers between the disks of a run's hosts. The first has the run's checkpoints: the others receive the one to
resume from, and send it the positions in the data that a new checkpoint holds.
"""
import hashlib
import time
from functools import partial
from pathlib import Path

from nanochat.checkpoint import on_disk
from nanochat.checkpoint.on_disk import SUMS, Kept
from nanochat.checkpoint.saver import save_lane_states
from nanochat.common import BadInput, is_disk_full, move_aside, say
from nanochat.run import wire
from nanochat.run.pod import PodError

# The checkpoint to resume from


def agree_on_checkpoint(pod, directory, path, is_finished):
    """Returns the path, on this host, of the checkpoint that all hosts resume from, or None; and whether the run had
    ended with it. Hosts that lack the checkpoint receive it. Raises BadInput if only another host than the first has
    one.

    path, is_finished: on the first host, its newest checkpoint, or None, and whether the run had ended with it.
    """
    if not pod.host.is_first:
        newest = on_disk.latest(directory)
        found = {"name": newest.name} if newest else {}
    elif path:
        found = {"name": path.name, "sums": _digest(path / SUMS), "is_finished": is_finished}
        # Before gather: as soon as the other hosts know of the checkpoint, they ask for it.
        pod.serves["checkpoint"] = partial(_serve_checkpoint, path)
    else:
        found = {}
    chosen, *others = pod.gather("which checkpoint they have", found)
    if not chosen:
        for name, other in zip(pod.names[1:], others, strict=True):
            if other:
                raise BadInput(f"host {name} has {other['name']} of this run, and host {pod.names[0]}, whose disk "
                               f"counts, has no checkpoint: copy the folder {directory} there, or start over with "
                               "--resume=never")
        return None, False
    if not pod.host.is_first:
        path = obtain(pod, directory, chosen["name"], chosen["sums"])
    return path, chosen["is_finished"]


def _digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def obtain(pod, directory, name, sums):
    """Returns the path, on this host's disk, of the checkpoint `name` whose SHA256SUMS has the hash `sums`. Receives it
    from the first host if it is missing or damaged, and keeps no other."""
    path = directory / name
    is_here = (path / SUMS).is_file() and _digest(path / SUMS) == sums and on_disk.find_problem(path) is None
    if not is_here:
        if path.is_dir():
            move_aside(path)
        _get_checkpoint(pod, path, sums)
    # Later checkpoints here come from a branch of the run that the first host lost or never had.
    on_disk.set_aside_after(directory, on_disk.step_of(path))
    on_disk.prune(directory, on_disk.step_of(path), Kept(1))
    return path


def _get_checkpoint(pod, path, sums):
    started = time.monotonic()
    partial_path = on_disk.partial_dir(path.parent, on_disk.step_of(path))
    partial_path.mkdir(parents=True)
    try:
        _receive_checkpoint(pod, partial_path)
        problem = on_disk.find_problem(partial_path)
        if _digest(partial_path / SUMS) != sums:
            problem = "its SHA256SUMS is another"
    except OSError as error:
        if is_disk_full(error):
            raise BadInput(f"the disk is full: {path.parent} has no room for {path.name}: free some space") from None
        problem = str(error)
    except (EOFError, ValueError) as error:
        problem = str(error)
    if problem:
        raise PodError(f"{path.name} was not received whole from host {pod.names[0]}: {problem}", 1)
    on_disk.publish(partial_path, path)
    say(f"received {path.name} from host {pod.names[0]} in {time.monotonic() - started:.1f} s")


def _receive_checkpoint(pod, folder):
    with pod.link.request(kind="checkpoint") as connection:
        for name in wire.receive(connection)["files"]:
            # Only the last part of a name counts, so that no file is written outside of this folder.
            wire.receive_file(connection, folder / Path(name).name)


def _serve_checkpoint(path, connection, message):
    connection.settimeout(wire.REQUEST_TIMEOUT_S)
    names = [*on_disk.read_sums(path), SUMS]
    wire.send(connection, {"files": names})
    for name in names:
        wire.send_file(connection, path / name)


# The positions in the data that a checkpoint holds


def serve_lanes(pod, directory):
    """Makes the first host write the states that other hosts' ranks send by send_lanes to its disk, where rank 0 waits
    for them."""
    pod.serves["lanes"] = partial(_serve_lanes, directory)


def _serve_lanes(directory, connection, message):
    answer = {}
    try:
        save_lane_states(directory, message["step"], message["lanes"])
    except OSError as error:
        answer = {"error": str(error)}
    wire.send(connection, answer)


def send_lanes(link, step, lane_states):
    """Adds the states of this rank's lanes, {lane: JSON value}, to the checkpoint of `step` that rank 0 saves on the
    first host. link: a Link. Raises OSError."""
    if not lane_states:
        return
    try:
        with link.request(kind="lanes", step=step, lanes=lane_states) as connection:
            problem = wire.receive(connection).get("error")
    except EOFError as error:
        problem = str(error)
    if problem:
        raise OSError(f"the first host, {link.host.addresses[0]}, has not taken the lanes of step {step}: {problem}")
