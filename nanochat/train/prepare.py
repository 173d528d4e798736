"""Prepares a run, in the parent process: decides and checks everything before a device is touched."""
import re
from dataclasses import dataclass
from pathlib import Path

from nanochat.checkpoint import on_disk
from nanochat.checkpoint.mirror import Mirror, patiently, run_mirror
from nanochat.checkpoint.uploader import STATE_FILE, MirrorState
from nanochat.common import BadInput, get_base_dir, move_aside, say, written_whole
from nanochat.data.remote import Interruption
from nanochat.run.agreement import Requests
from nanochat.run.hosts import require_alike
from nanochat.run.processes import expected_world_size
from nanochat.run.transfer import agree_on_checkpoint
from nanochat.run.watchdog import Heartbeats
from nanochat.run.wire import Link
from nanochat.train.task import Task

# Files in the run's folder:
REQUESTS_FILE = ".requests"  # see agreement.py
HEARTBEATS_FILE = ".heartbeats"  # see watchdog.py
FINISHED_FILE = ".finished"  # marks a run that has reached its end
CONFIG_FILE = "run.toml"  # the run's flags, for --config


@dataclass(frozen=True)
class Run:
    """What the parent process hands to the ranks."""
    task: Task
    directory: Path  # of checkpoints and metrics
    checkpoint: Path | None  # to resume from
    finished_step: int | None  # of that checkpoint, if the run ends with it
    mirror: Mirror | None
    link: Link | None = None  # to the first host, if there are several

    @property
    def hosts(self):
        return self.link.host.count if self.link else 1

    @property
    def flags(self):
        return self.task.flags

    @property
    def plan(self):
        return self.task.plan

    @property
    def requests_file(self):
        return self.directory / REQUESTS_FILE

    @property
    def heartbeats_file(self):
        return self.directory / HEARTBEATS_FILE

    def begin(self):
        """Changes the run's folder when training begins, after the last refusal. Rank 0 only."""
        (self.directory / FINISHED_FILE).unlink(missing_ok=True)
        with written_whole(self.directory / CONFIG_FILE) as file:
            file.write_text(self.flags.as_toml(), encoding="utf-8")

    def mark_finished(self):
        (self.directory / FINISHED_FILE).touch()

    def check_ranks(self, dist):
        """Raises BadInput if the plan is for another number of ranks, or if rank 0 is not on the first host."""
        if dist.rank == 0 and self.link and not self.link.host.is_first:
            raise BadInput(f"rank 0 is on host {self.link.host.name}, which is not the first: set NANOCHAT_HOSTS, with "
                           "this host's address first, and NANOCHAT_HOST_INDEX on all hosts")
        if dist.world_size != self.plan.world_size:
            raise BadInput(f"the runtime has {dist.world_size} devices and {self.plan.world_size} were expected: set "
                           "TPU_ACCELERATOR_TYPE to this TPU's type, for example v5litepod-8")


def run_directory(flags):
    """Returns the folder of a run's checkpoints and metrics. Raises BadInput if --run cannot name one."""
    name = flags.run.run
    if not re.fullmatch(r"\w[\w.+=-]*", name) or len(name.encode()) > 200:
        raise BadInput(f"--run={name[:200]} is not a plain name, as for a folder: give at most 200 bytes, letters, "
                       "digits and _, and after the first also . + = and -")
    return get_base_dir() / "checkpoints" / name


def prepare(flags, device_type, make_task, pod=None):
    """Returns the Run for a script's flags. Raises BadInput, and Outage if the mirror cannot be reached.

    device_type: from resolve_device_type. make_task(flags, device_type, world_size, directory, checkpoint) -> Task, for
    the path of the run's own checkpoint, or None. pod: the Pod, if there are several hosts: all prepare the run at the
    same time, and only the first writes to the mirror. One process at a time may prepare a run (exclusive_use): this
    deletes the remains of interrupted saves.
    """
    directory = run_directory(flags)
    is_first = pod is None or pod.host.is_first
    # The checkpoint comes first: it knows the model, the commits of the data, and how the run began. A mirror that
    # cannot be written to is found now and not at the first save.
    record = flags.record
    mirror = None
    if record.checkpoint_mirror:
        mirror = run_mirror(record.checkpoint_mirror, flags.run.run, record.keep_checkpoints)
    mirror_state = reach_mirror(mirror if is_first else None, directory)
    on_disk.clean_partial(directory)
    path, is_finished = resumed_checkpoint(directory, mirror, pod)
    world_size = expected_world_size(device_type, pod.host.count if pod else 1)
    task = make_task(flags, device_type, world_size, directory, path)
    if pod:
        found = pod.gather("what they train", what_is_trained(task))
        require_alike(pod.names, found, "give all hosts the same data, tokenizer, devices and --init_from")
    finished_step = step_if_finished(path, task.plan.num_iterations, is_finished) if path else None
    # New files, by this process alone and before a rank opens them: an earlier process's stop must not stop this one.
    Requests(directory / REQUESTS_FILE, create=True)
    Heartbeats(directory / HEARTBEATS_FILE, create=True)
    if record.save_every > 0:
        on_disk.check_renaming(directory)
        # Another host than the first holds only the checkpoint that it fetches.
        on_disk.check_disk_space(directory, task.state_bytes(), 2 if is_first else 1)
    if mirror_state and path:  # the mirror may lack it: the process before was perhaps killed during the copy
        mirror_state.saved(path.name)
        mirror_state.write(directory)
    return Run(task, directory, path, finished_step, mirror, pod.link if pod else None)


def step_if_finished(path, num_iterations, is_finished):
    """Returns the step of the checkpoint at `path` if the run ends with it, else None. Raises BadInput if it is past
    the end of the run. is_finished: the run has the mark of its end."""
    step = on_disk.step_of(path)
    # A run at its last step without the mark was killed before its last evaluation. It resumes, and its loop begins
    # with the events due after that step.
    if step >= num_iterations and is_finished:
        return step
    if step > num_iterations:
        raise BadInput(f"{path} is past step {num_iterations}, the end of this run: raise --num_iterations or the "
                       "horizon that you gave, or choose another --run")
    return None


def what_is_trained(task):
    """Returns {name: JSON value} that must be equal on all hosts."""
    return {"number of devices": task.plan.world_size, "hash of the data": task.data_fingerprint,
            "hash of the tokenizer": task.identity()["tokenizer_sha256"], "checkpoint to begin with": task.origin}


def resumed_checkpoint(directory, mirror, pod=None):
    """Returns the path of the checkpoint to resume from, or None, and whether the run had ended with it."""
    path = None
    is_finished = (directory / FINISHED_FILE).exists()
    if pod is None or pod.host.is_first:
        path = newest_checkpoint(directory, mirror)
    if pod is None:
        return path, is_finished
    return agree_on_checkpoint(pod, mirror, directory, path, is_finished)


def reach_mirror(mirror, directory):
    """Writes to the mirror as a test, and waits for an unreachable one. Returns its MirrorState, which is also in the
    run's directory, or None without a mirror. Raises BadInput or Outage."""
    if mirror is None:
        (directory / STATE_FILE).unlink(missing_ok=True)
        return None
    state = MirrorState(mirror.url)

    # An attempt does both, because the mirror may go away in between. Meanwhile mirror.json says why the run waits, to
    # the scripts that watch it from outside.
    def try_mirror():
        try:
            mirror.try_to_write(directory)
            return mirror.whole_copies()
        except (BadInput, Interruption) as error:
            state.error = str(error)
            state.write(directory)
            raise

    say(f"testing whether {mirror.url} is writable")
    copies = patiently(mirror.url, try_mirror)
    state.newest_copied = copies[-1] if copies else None
    state.error = None
    state.write(directory)
    return state


def newest_checkpoint(directory, mirror):
    """Returns the path of a run's newest undamaged checkpoint, or None if the run has none. Fetches it if only the
    mirror has it. Raises Outage, and BadInput if all checkpoints are damaged."""
    path, damaged = on_disk.latest_good(directory)
    if mirror:
        if path:
            patiently(mirror.url, lambda: mirror.require_same_run(path))
        step = on_disk.step_of(path) if path else -1
        path = patiently(mirror.url, lambda: mirror.fetch(directory, after_step=step)) or path
        if not path and MirrorState.read(directory).newest_copied:
            raise BadInput(f"all checkpoints in {mirror.url} are damaged: put whole copies in their place, or choose "
                           "another --run")
    if damaged and not path:
        if on_disk.has_weights_only(next(iter(damaged))):
            raise BadInput(f"--run={directory.name} is a model that import_hf made, and no training to resume: choose "
                           f"another --run, and give --init_from={directory.name}")
        problems = ", ".join(f"{bad.name} ({problem})" for bad, problem in damaged.items())
        raise BadInput(f"all checkpoints in {directory} are damaged: {problems}: put whole copies in their place, or "
                       "choose another --run")
    for bad, problem in damaged.items():
        say(f"warning: checkpoint {bad} is damaged ({problem}): it is set aside")
        if bad != path:  # otherwise the mirror's copy is in its place
            move_aside(bad)
    return path
