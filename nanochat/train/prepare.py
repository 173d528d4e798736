"""Prepares a run, in the parent process: everything is decided and checked before a device is touched."""
import json
import re
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from nanochat.checkpoint.format import (
    Kept,
    check_disk_space,
    clean_partial,
    latest_good,
    load_meta,
    set_aside_after,
    step_of,
)
from nanochat.checkpoint.mirror import STATE_FILE, Mirror, MirrorError, MirrorState, Patience, run_mirror
from nanochat.common import BadInput, get_base_dir
from nanochat.record.observe import parse_profile_steps
from nanochat.run.agreement import Requests
from nanochat.run.hosts import require_alike
from nanochat.run.processes import expected_world_size
from nanochat.run.transfer import agree_on_checkpoint
from nanochat.run.watchdog import Heartbeats
from nanochat.run.wire import Link
from nanochat.train.task import Task

# In the run's folder: see agreement.py and watchdog.py; the last one exists once the run has come to its end.
REQUESTS_FILE, HEARTBEATS_FILE, FINISHED_FILE = ".requests", ".heartbeats", ".finished"


@dataclass(frozen=True)
class Run:
    """What the parent process hands to the ranks, which only check that their number is that of the plan."""
    task: Task
    directory: Path  # of checkpoints and metrics
    checkpoint: Path | None  # to resume from
    finished_step: int | None  # if that checkpoint is the end of the run, so there is nothing left to do
    mirror: Mirror | None
    profile_steps: tuple  # (begin, end), see Profile
    link: Link | None = None  # to the first host, if there are several

    @property
    def hosts(self):
        """How many hosts train the run."""
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

    @property
    def starts_over(self):
        """Whether an older run of this name is moved aside."""
        return self.flags.run.resume == "never"

    def begin(self):
        """Changes the run's folder when training begins: no start that is refused comes here. Rank 0 only."""
        if self.starts_over:
            set_aside_after(self.directory, -1)
        (self.directory / FINISHED_FILE).unlink(missing_ok=True)

    def mark_finished(self):
        """Marks the run as finished, in its folder."""
        (self.directory / FINISHED_FILE).touch()

    def check_ranks(self, dist):
        """Raises BadInput if the number of ranks is another than the plan's, or if rank 0 is not on the first host."""
        if dist.rank == 0 and self.link and not self.link.host.is_first:
            raise BadInput(f"rank 0 is on host {self.link.host.name}, which is not the first: set NANOCHAT_HOSTS, with "
                           "the address of this host first, and NANOCHAT_HOST_INDEX on all hosts")
        if dist.world_size != self.plan.world_size:
            raise BadInput(f"the runtime has {dist.world_size} devices and {self.plan.world_size} were expected: set "
                           "TPU_ACCELERATOR_TYPE to the type of this TPU, to v5litepod-8 for example")


def run_directory(flags):
    """Returns the path of the folder of a run's checkpoints and metrics. Raises BadInput if --run cannot name one."""
    name = flags.run.run
    if not re.fullmatch(r"\w[\w.+=-]*", name):
        raise BadInput(f"--run={name} is not a plain name: it becomes the name of a folder, so give letters, digits, _ "
                       "and, after the first, . + = and -")
    return get_base_dir() / "checkpoints" / name


def prepare(flags, device_type, make_task, pod=None):
    """Returns the Run for a script's flags. Raises BadInput for anything that can be refused now, and MirrorError if
    the mirror cannot be reached.

    device_type: as resolve_device_type returns it. make_task(flags, device_type, world_size, directory) -> Task. Only
    one process may prepare a run at a time (exclusive_use): this deletes what interrupted saves have left, and may
    fetch a checkpoint from the mirror. pod: the Pod, if there are several hosts; all prepare the run at the same time,
    and the first alone uses the mirror.
    """
    record = flags.record
    directory = run_directory(flags)
    is_first = pod is None or pod.is_first
    world_size = expected_world_size(device_type, pod.host.count if pod else 1)
    task = make_task(flags, device_type, world_size, directory)
    if pod:
        found = pod.gather("which data they have", what_is_trained(task))
        require_alike(pod.names, found, "give all hosts the same data, tokenizer and devices")
    # Up to here nothing of the run has been written, so most commands that are refused change nothing. Whether the
    # mirror can be written to is tried now: found out at the first save, it would cost the time until then.
    profile_steps = parse_profile_steps(record.profile_steps, task.plan.num_iterations)
    mirror = None
    if record.checkpoint_mirror is not None and is_first:
        mirror = run_mirror(record.checkpoint_mirror, flags.run.run, Kept(record.keep_checkpoints, record.keep_every))
    mirror_state = reach(mirror, directory)
    clean_partial(directory)
    # Made anew by this process alone, before a rank opens them: what stopped an earlier process must not stop this one.
    Requests(directory / REQUESTS_FILE, create=True)
    Heartbeats(directory / HEARTBEATS_FILE, create=True)
    # A host that is not the first holds only the one checkpoint that it fetches.
    if record.saves:
        check_disk_space(directory, task.state_bytes(), copies=2 if is_first else 1)
    path = finished_step = None
    if flags.run.resume == "auto":
        path, is_finished = resumed_checkpoint(directory, mirror, pod)
    elif not is_first:
        set_aside_after(directory, -1)  # copies of what the first host has; see Run.begin
    if path:
        task, finished_step = resume(task, path, is_finished, is_first)
    if mirror and path:
        # It may be on this disk and not in the mirror, if the process before was killed while it copied.
        mirror_state.saved(path.name)
        mirror_state.write(directory)
    return Run(task, directory, path, finished_step, mirror, profile_steps, pod.link if pod else None)


def resume(task, path, is_finished, is_first):
    """Returns the task as it resumes from the checkpoint at `path`, and the step of that checkpoint if the run is
    finished with it, else None. Raises BadInput if the run cannot resume from it.

    is_finished: the run has come to its end with its newest checkpoint; without this mark it may lack its last
    evaluation. is_first: this is the host that says which flags have changed.
    """
    meta = load_meta(path)
    if meta.task != task.name:
        raise BadInput(f"{path} is of the task {meta.task}, and this run is of {task.name}: choose another --run")
    task = task.resumed(path, meta)
    finished_step = None
    # Without the mark, a run that has come to its last step goes on all the same: it was killed before its last
    # evaluation, and its loop begins with what is due after that step.
    if meta.step >= task.plan.num_iterations and is_finished:
        finished_step = meta.step
    elif meta.step > task.plan.num_iterations:
        raise BadInput(f"{path} is past step {task.plan.num_iterations}, with which this run would end: raise "
                       "--num_iterations (or the other horizon that you gave), or choose another --run")
    changes = changed_flags(meta.flags, task)
    if changes and is_first:
        print(f"changed since the checkpoint: {changes}", flush=True)
    return task, finished_step


def what_is_trained(task):
    """Returns what must be the same for the ranks of all hosts, {name: JSON value}."""
    identity = json.loads(json.dumps(task.identity()))
    return {"number of devices": task.plan.world_size, "hash of the data": task.data_fingerprint,
            "hash of the tokenizer": identity["tokenizer_sha256"]}


def resumed_checkpoint(directory, mirror, pod=None):
    """Returns the path of the checkpoint from which the run goes on, or None, and whether the run had come to its end
    with it."""
    path = None
    is_finished = (directory / FINISHED_FILE).exists()
    if pod is None or pod.is_first:
        path = newest_checkpoint(directory, mirror)
    if pod is None:
        return path, is_finished
    return agree_on_checkpoint(pod, directory, path, is_finished)


def reach(mirror, directory):
    """Tries to write to the mirror, and waits for one that cannot be reached. Returns its MirrorState, which is written
    to the run's directory, or None without a mirror. Raises BadInput or MirrorError."""
    if mirror is None:
        (directory / STATE_FILE).unlink(missing_ok=True)
        return None
    state = MirrorState(mirror.url)
    print(f"trying whether {mirror.url} can be written to", flush=True)
    patience = Patience(mirror.url)
    while True:
        try:
            mirror.try_to_write(directory)
            copies = mirror.whole_copies()
            break
        except (BadInput, MirrorError) as error:
            state.error = str(error)
            state.write(directory)
            if isinstance(error, BadInput):
                raise
            patience.wait_after(error)
    state.newest_copied = copies[-1] if copies else None
    state.error = None
    state.write(directory)
    return state


def newest_checkpoint(directory, mirror):
    """Returns the path of the newest undamaged checkpoint of a run, or None. If the mirror has a newer one, fetches
    that. Raises BadInput or MirrorError."""
    path = latest_good(directory)
    if mirror is None:
        return path
    step = step_of(path) if path else -1
    patience = Patience(mirror.url)
    while True:
        try:
            return mirror.fetch(directory, after_step=step) or path
        except MirrorError as error:
            patience.wait_after(error)


def changed_flags(saved, task):
    """Returns the task's changing_flags that are not those of a checkpoint, {name: value}, as a text such as
    "matrix_lr 0.02 -> 0.01, weight_decay 0.2 -> 0.1, teacher big -> ''"; "" if there are none."""
    now = task.flags.as_dict()
    changes = []
    for name in task.changing_flags:
        if name in saved and saved[name] != now[name]:
            changes.append(f"{name} {quote(str(saved[name]))} -> {quote(str(now[name]))}")
    return ", ".join(changes)
