"""Prepares a run, in the parent process: everything is decided and checked before a device is touched."""
from dataclasses import asdict, dataclass
from pathlib import Path

from nanochat.common import BadInput, get_base_dir
from nanochat.data.shards import fingerprint, list_shards, open_shards
from nanochat.data.tokenizer import Tokenizer, load_tokenizer
from nanochat.model.gpt import GPT
from nanochat.model.optim import MuonAdamW
from nanochat.record.observe import parse_profile_steps
from nanochat.run import checkpoint_files
from nanochat.run.meta import load_meta, require_match
from nanochat.run.mirror import Mirror
from nanochat.run.processes import expected_world_size, hosts
from nanochat.run.stopping import Requests
from nanochat.run.watchdog import Heartbeats
from nanochat.train.flags import Flags
from nanochat.train.plan import Plan, make_plan

# In the run's folder: see stopping.py and watchdog.py; the last one exists once the run has come to its end.
REQUESTS_FILE, HEARTBEATS_FILE, FINISHED_FILE = ".requests", ".heartbeats", ".finished"


@dataclass(frozen=True)
class Run:
    """What the parent process hands to the ranks, which only check that their number is that of the plan."""
    flags: Flags
    plan: Plan
    directory: Path  # of checkpoints and metrics
    checkpoint: Path | None  # to resume from
    is_finished: bool  # that checkpoint is the end of the run, so there is nothing left to do
    tokenizer: Tokenizer
    mirror: Mirror | None
    profile_steps: tuple  # (begin, end), see Profile

    @property
    def requests_file(self):
        return self.directory / REQUESTS_FILE

    @property
    def heartbeats_file(self):
        return self.directory / HEARTBEATS_FILE

    def mark_finished(self):
        """Marks the run as finished, in its folder."""
        (self.directory / FINISHED_FILE).touch()

    def check_world_size(self, world_size):
        """Raises BadInput if the number of ranks is another than the plan's."""
        if world_size != self.plan.world_size:
            raise BadInput(f"the runtime has {world_size} devices and {self.plan.world_size} were expected: set "
                           "TPU_ACCELERATOR_TYPE to the type of this TPU, to v5litepod-8 for example")


def run_directory(flags):
    """Returns the path of the folder of a run's checkpoints and metrics. Raises BadInput if --run cannot name one."""
    name = flags.run.run
    if Path(name).name != name or name in ("", ".", ".."):
        raise BadInput(f"--run={name} is not a plain name: it becomes the name of a folder")
    return get_base_dir() / "checkpoints" / name


def prepare(flags, device_type):
    """Returns the Run for base_train's Flags. Raises BadInput for anything that can be refused now.

    device_type: as resolve_device_type returns it. Only one process may prepare a run at a time (exclusive_use): this
    deletes what interrupted saves have left, and may fetch a checkpoint from the mirror.
    """
    record, directory = flags.record, run_directory(flags)
    tokenizer = load_tokenizer(flags.data.tokenizer_dir)
    plan = make_plan(flags, tokenizer.n_vocab, device_type, expected_world_size(device_type))
    profile_steps = parse_profile_steps(record.profile_steps, plan.num_iterations)
    if record.save_every_minutes > 0 and hosts(device_type) > 1:
        raise BadInput(f"--save_every_minutes={record.save_every_minutes:g}: the hosts of a pod agree on steps, not on "
                       "the time: use --save_every")
    data_fingerprint = check_data(flags)
    mirror = None
    if record.checkpoint_mirror:
        mirror = Mirror(f"{record.checkpoint_mirror.rstrip('/')}/{flags.run.run}", record.keep_checkpoints,
                        record.keep_every)
    checkpoint_files.clean_partial(directory)
    Requests(directory / REQUESTS_FILE, create=True)
    Heartbeats(directory / HEARTBEATS_FILE, create=True)
    if flags.run.resume == "never":
        checkpoint_files.set_aside_after(directory, -1)
    if record.save_every > 0:
        checkpoint_files.check_disk_space(directory, checkpoint_bytes(plan))
    if mirror and flags.run.resume == "auto" and not checkpoint_files.list_checkpoints(directory):
        mirror.fetch(directory)
    path = checkpoint_files.latest_good(directory, report=lambda message: print(f"warning: {message}", flush=True))
    is_finished = False
    if path:
        meta = load_meta(path)
        require_match(path, meta, config=asdict(plan.config), tokenizer_sha256=tokenizer.sha256,
                      data_fingerprint=data_fingerprint)
        plan = make_plan(flags, tokenizer.n_vocab, device_type, plan.world_size, meta)
        # A run without the mark may lack its last evaluation.
        is_finished = meta.step >= plan.num_iterations and (directory / FINISHED_FILE).exists()
    if not is_finished:
        (directory / FINISHED_FILE).unlink(missing_ok=True)
    return Run(flags, plan, directory, path, is_finished, tokenizer, mirror, profile_steps)


def check_data(flags):
    """Returns the fingerprint of the training data, None for synthetic data. Raises BadInput if data cannot be used."""
    data = flags.data
    if data.synthetic_data:
        return None
    if flags.record.eval_every > 0:
        open_shards(list_shards(data.val_dir, "val"), data.skip_bad_shards)
    return fingerprint(open_shards(list_shards(data.data_dir), data.skip_bad_shards))


def checkpoint_bytes(plan):
    """Returns the bytes of weights and optimizer state in a checkpoint of the plan's model."""
    optimizer = MuonAdamW(GPT.on_meta(plan.config), plan.optimizer, plan.total_batch_size, plan.num_iterations)
    return checkpoint_files.state_bytes(optimizer.masters, optimizer.state)
