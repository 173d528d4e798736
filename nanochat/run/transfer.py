"""What the hosts of a run exchange of its checkpoints. The first has them on its disk: the others fetch the one to
resume from from the mirror, and send the first the positions in the data that a new checkpoint holds.
"""
import hashlib
from functools import partial

from nanochat.checkpoint import on_disk
from nanochat.checkpoint.mirror import patiently
from nanochat.checkpoint.on_disk import SUMS
from nanochat.checkpoint.saver import save_lane_states
from nanochat.common import BadInput, move_aside, say
from nanochat.record.metrics import METRICS_FILE

# The checkpoint to resume from


def agree_on_checkpoint(pod, mirror, directory, path, is_finished):
    """Returns the path, on this host, of the checkpoint that all hosts resume from, or None; and whether the run had
    ended with it. Hosts that lack the checkpoint fetch it from the mirror. Raises BadInput if only another host than
    the first has one, or the mirror lacks it.

    path, is_finished: on the first host, its newest checkpoint, or None, and whether the run had ended with it.
    """
    if not pod.host.is_first:
        newest = on_disk.latest(directory)
        found = {"name": newest.name} if newest else {}
    elif path:
        patiently(mirror.url, partial(_copy_unless_there, mirror, path))
        found = {"name": path.name, "sums": _digest(path), "is_finished": is_finished}
    else:
        found = {}
    chosen, *others = pod.gather("which checkpoint they have", found)
    if not chosen:
        for name, other in zip(pod.names[1:], others, strict=True):
            if other:
                raise BadInput(f"host {name} has {other['name']} of this run, and host {pod.names[0]}, whose disk "
                               f"counts, has no checkpoint: copy the folder {directory} there, or choose another "
                               "--run")
        return None, False
    if not pod.host.is_first:
        path = _obtain(mirror, directory, chosen["name"], chosen["sums"])
    return path, chosen["is_finished"]


def _copy_unless_there(mirror, path):
    """Copies a checkpoint to the mirror if the process that saved it was killed before."""
    if path.name not in mirror.whole_copies():
        mirror.copy(path, path.with_name(METRICS_FILE))


def _digest(path):
    sums = path / SUMS
    return hashlib.sha256(sums.read_bytes()).hexdigest() if sums.is_file() else None


def _obtain(mirror, directory, name, sums):
    """Returns the path, on this host's disk, of the checkpoint `name` whose SHA256SUMS has the hash `sums`. Fetches it
    if it is missing or damaged, and keeps no other."""
    path = directory / name
    step = on_disk.step_of(path)
    if _digest(path) != sums or on_disk.find_problem(path) is not None:
        if path.is_dir():
            move_aside(path)
        patiently(mirror.url, lambda: mirror.fetch(directory, after_step=step - 1))
        if _digest(path) != sums:
            raise BadInput(f"{mirror.url} has another {name} than the first host, or none: give all hosts the same "
                           "--checkpoint_mirror, or move that copy away, and the first host copies its own there")
        say(f"fetched {name} from {mirror.url}")
    # Later checkpoints here come from a branch of the run that the first host lost or never had.
    on_disk.set_aside_after(directory, step)
    on_disk.prune(directory, step, keep=1)
    return path


# The positions in the data that a checkpoint holds


def serve_lanes(pod, directory):
    """Makes the first host write the states that other hosts' ranks send by send_lanes to its disk, where rank 0 waits
    for them."""
    pod.answer = partial(_write_lanes, directory)


def _write_lanes(directory, message):
    try:
        save_lane_states(directory, message["step"], message["lanes"])
    except OSError as error:
        return {"error": str(error)}
    return {}


def send_lanes(link, step, lane_states):
    """Adds the states of this rank's lanes, {lane: JSON value}, to the checkpoint of `step` that rank 0 saves on the
    first host. link: a Link. Raises OSError."""
    if not lane_states:
        return
    try:
        problem = link.ask(kind="lanes", step=step, lanes=lane_states).get("error")
    except EOFError as error:
        problem = str(error)
    if problem:
        raise OSError(f"the first host, {link.host.addresses[0]}, has not taken the lanes of step {step}: {problem}")
