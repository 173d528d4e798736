"""The flags of puzzle_train."""
from dataclasses import dataclass, field

from nanochat.common import flag, get_base_dir, read_flags
from nanochat.train.flags import GONE, MAX_STEPS, DeviceFlags, FlagGroups, RecordFlags, RunFlags, path_text


@dataclass(frozen=True)
class PuzzleFlags:
    data_dir: str | None = flag(None, "folder of puzzles; default: $NANOCHAT_BASE_DIR/puzzles", of=path_text)
    num_iterations: int = flag(1000, "optimizer steps, which are supervision steps", at_least=1, at_most=MAX_STEPS)
    total_batch_size: int = flag(64, "puzzles in a step", at_least=1, at_most=2**20)
    supervision_steps: int = flag(16, "most steps of an episode; in evaluation, all", at_least=1, at_most=1000)
    explore: float = flag(0.1, "share of episodes with a random minimum of steps", at_least=0, at_most=1)
    eval_puzzles: int = flag(1024, "puzzles of an evaluation, at most", at_least=1, at_most=10**6)


@dataclass(frozen=True)
class RecursionFlags:
    hidden: int = flag(96, "width", at_least=2, at_most=2**16)
    layers: int = flag(2, "layers of the network", at_least=1, at_most=1000)
    recursions: int = flag(1, "updates of the latent in a cycle (n)", at_least=1, at_most=1000)
    cycles: int = flag(1, "cycles in a supervision step; the last has a gradient (T)", at_least=1, at_most=1000)
    prefix: int = flag(4, "learned positions before the cells", at_least=1, at_most=1000)


@dataclass(frozen=True)
class UpdateFlags:
    lr: float = flag(0.003, "learning rate of AdamW", at_least=0)
    matrix_lr: float = flag(0.02, "learning rate of Muon, of the matrices", at_least=0)
    warmup_steps: int = flag(10, "steps in which the learning rates rise", at_least=0)
    warmdown_ratio: float = flag(0.5, "fraction of the run in which the learning rates fall", at_least=0, at_most=1)
    final_lr_frac: float = flag(0.05, "final fraction of the learning rates", at_least=0, at_most=1)
    ema: float = flag(0.999, "decay of the averaged weights, which are evaluated", above=0, below=1)


TITLES = {RunFlags: "run", DeviceFlags: "devices", PuzzleFlags: "puzzles", RecursionFlags: "model",
          UpdateFlags: "optimizer", RecordFlags: "evaluation, samples, checkpoints, logs"}


@dataclass(frozen=True)
class Flags(FlagGroups):
    run: RunFlags = field(default_factory=RunFlags)
    devices: DeviceFlags = field(default_factory=DeviceFlags)
    puzzles: PuzzleFlags = field(default_factory=PuzzleFlags)
    model: RecursionFlags = field(default_factory=RecursionFlags)
    optimizer: UpdateFlags = field(default_factory=UpdateFlags)
    record: RecordFlags = field(default_factory=RecordFlags)

    @property
    def data_dir(self):
        return self.puzzles.data_dir or str(get_base_dir() / "puzzles")


def parse_flags(argv=None, description=None):
    """Returns the Flags on a command line. Raises BadInput."""
    default = "the defaults are what solved Sudokus: leave it out"
    names = ("mixer", "heads", "optimizer", "loss", "weight_decay")
    return Flags(*read_flags(argv, description, TITLES, gone=GONE | dict.fromkeys(names, default)))
