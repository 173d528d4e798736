"""The flags of base_train. Each group is a data class, from which the parser is made."""
import json
import re
from dataclasses import asdict, dataclass, field, fields, make_dataclass, replace
from pathlib import Path

from nanochat.checkpoint.on_disk import step_of
from nanochat.common import BadInput, expand_path, flag, not_empty, read_flags
from nanochat.data.hub_files import on_hub, pinned
from nanochat.data.lanes import NUM_LANES
from nanochat.data.mixture import NAME, read_mixture
from nanochat.data.shards import TextFlags
from nanochat.data.storage import data_place
from nanochat.device.ranks import DEVICE_TYPES
from nanochat.model.config import RECOMPUTED
from nanochat.model.models import CONFIG_FLAGS, KEPT, MODELS, as_flag, settled
from nanochat.model.rates import OptimConfig

MAX_STEPS = 10**9  # of a run
MAX_CHIPS = 2**20


def path_text(text):
    return str(expand_path(text))


def named_places(text):
    """Returns {name: place} of "NAME=PLACE,…", {} for a single place."""
    if not re.match(r"[A-Za-z]\w*=", text) or Path(text).exists():
        return {}
    found = {}
    for part in text.split(","):
        name, equals, place = part.partition("=")
        if not re.fullmatch(NAME, name) or not place or name in found:
            raise BadInput(f"{part} is not NAME=FOLDER with a name of its own, not …per_s: give for example "
                           "own=mine/val,others=stack/val")
        found[name] = data_place(place)
    return found


def val_places(text):
    """Returns the value of --val_dir. Raises BadInput."""
    named = named_places(text)
    return ",".join(f"{name}={place}" for name, place in named.items()) if named else data_place(text)


def mirror_place(text):
    place = data_place(text)
    if on_hub(place):
        raise BadInput("the Hub is only read: give gs://BUCKET/FOLDER, or a directory")
    return place


@dataclass(frozen=True)
class RunFlags:
    run: str = flag("dummy", "name of the run, its folder and its entry in WandB; dummy: no WandB; a run that has a "
                    "checkpoint resumes; docs/training.md#resume")
    seed: int = flag(0, "seed of the weights and of the data order", at_least=0)


@dataclass(frozen=True)
class DeviceFlags:
    device_type: str = flag("auto", f"devices to train on: {', '.join(DEVICE_TYPES)}; docs/training.md#devices")
    compute_dtype: str = flag("auto", "dtype of activations and products; auto: bfloat16 on tpu and cuda, else float32",
                              choices=("auto", "bfloat16", "float32"))
    shard_optimizer: str = flag("auto", "each rank keeps and updates a part of the optimizer's state; auto: on XLA",
                                choices=("auto", "on", "off"))
    no_compile: bool = flag(False, "disable torch.compile on CUDA")

    def dtype_on(self, device_type):
        """Returns the torch.dtype of activations and products."""
        import torch  # here: flags are read without it
        name = self.compute_dtype
        if name == "auto":
            name = "bfloat16" if device_type in ("tpu", "cuda") else "float32"
        return getattr(torch, name)

    def is_sharded_on(self, device_type):
        """Returns whether each rank keeps a part of the optimizer's state. Raises BadInput."""
        is_xla = device_type in ("tpu", "xla")
        if self.shard_optimizer == "on" and not is_xla:
            raise BadInput(f"--shard_optimizer=on is for XLA devices, not for {device_type}: use auto")
        return is_xla and self.shard_optimizer != "off"


@dataclass(frozen=True)
class KernelFlags(DeviceFlags):
    kernel: str = flag("auto", "attention, loss and layers: auto, current, chunked, flash (TPU); "
                       "docs/training.md#kernels")
    products: str = flag("bfloat16", "layers and loss multiply in compute_dtype (bfloat16) or 8-bit integers (int8); "
                         "docs/training.md#products-in-8-bits", choices=("bfloat16", "int8"))
    activation_checkpointing: str = flag(
        "none", "activations that the backward pass recomputes, which saves memory: none, all; without a value: all; "
        " docs/training.md#activation-checkpointing", choices=RECOMPUTED, nargs="?", const="all")
    mesh_fsdp: int = flag(1, "chips that divide each weight, for models that outgrow a chip; docs/mesh.md", at_least=1,
                          at_most=MAX_CHIPS)
    mesh_tensor: int = flag(1, "chips that divide heads, hidden units and vocabulary, for long rows and small batches; "
                            "docs/mesh.md", at_least=1, at_most=MAX_CHIPS)


@dataclass(frozen=True)
class DataFlags(TextFlags):
    data_dir: str | None = flag(None, "folder of parquet shards, gs://…, hf://…, or FILE.toml, a "
                                "mixture of folders; docs/data.md#mixtures; default: "
                                "$NANOCHAT_BASE_DIR/parquet/base_data_v3", of=data_place)
    val_dir: str | None = flag(None, "folder of parquet shards for validation, gs://…, hf://…, or several, "
                               "NAME=FOLDER,…; default: those that a mixture names, or "
                               "$NANOCHAT_BASE_DIR/parquet/val", of=val_places)
    tokenizer_dir: str | None = flag(None, "folder of the tokenizer; default: that of the imported weights with "
                                     "which the run began, else $NANOCHAT_BASE_DIR/tokenizer if it "
                                     "exists, else the shipped one", of=path_text)
    num_lanes: int = flag(NUM_LANES, "streams of data, a multiple of the number of devices; batches depend on it; "
                          "docs/design.md#lanes", at_least=1, at_most=4096)
    fim_rate: float = flag(0.0, "fraction of the documents rewritten for fill in the middle; "
                           "docs/data.md#fill-in-the-middle", at_least=0, at_most=1)
    synthetic_data: bool = flag(False, "train on random tokens, to test a machine without data")

    def folder(self, split):
        return self.val_dir if split == "val" else self.data_dir

    @property
    def mixture(self):
        """The TOML file of the mixture that --data_dir names, else None. A folder may be called so, too."""
        is_file = (self.data_dir or "").endswith(".toml") and not Path(self.data_dir).is_dir()
        return self.data_dir if is_file and not self.synthetic_data else None

    def source_names(self):
        """Returns the names of the mixture's sources, () without one."""
        return tuple(source.name for source in read_mixture(self.mixture).sources) if self.mixture else ()

    def validation_sets(self):
        """Returns {name: DataFlags with the --val_dir of this set}; the name of the only one is ""."""
        places = named_places(self.val_dir or "")
        if self.mixture and not self.val_dir:
            places = {source.name: source.val for source in read_mixture(self.mixture).sources if source.val}
        return {name: replace(self, val_dir=place) for name, place in places.items()} or {"": self}


def _flag_of_field(config_field):
    """Returns the flag of a field of a config. Its default is None: a resumed run keeps the checkpoint's value, and a
    new run takes the config's."""
    # A bool becomes on, off or None: a resumed run must tell "off" from "not given".
    options = {name: value for name, value in config_field.metadata.items() if name not in ("called", "before")}
    options["of"] = config_field.type
    if config_field.type is bool:
        options |= {"of": str, "choices": ("on", "off")}
    if config_field.default is not None:
        options["help"] += f" (default: {as_flag(config_field.default)})"
    return field(default=None, metadata=options)


# The fields of the models' configs become flags: n_layer of GPTConfig, which is called depth, becomes
#
#     depth: int | None = flag(None, "number of layers (default: 16)")
#
# None: the command line does not give it. The fields that are `kept` (models.py) have no flag and travel along.
_MODEL_FIELDS = [("arch", str | None, flag(None, "the model: gpt, or llama, the family of Llama, Qwen2 and Qwen3 "
                                           "(default: gpt)", choices=tuple(MODELS)))]
_MODEL_FIELDS += [(name, each.type | None, _flag_of_field(each)) for name, each in CONFIG_FLAGS.items()]
_MODEL_FIELDS += [(name, object, None) for name in KEPT]
ArchitectureFlags = make_dataclass("ArchitectureFlags", _MODEL_FIELDS, frozen=True)
ArchitectureFlags.__module__ = __name__  # so that it can be handed to other processes


@dataclass(frozen=True)
class BatchFlags:
    num_iterations: int = flag(-1, "optimizer steps; -1: by --target_param_data_ratio", at_least=1, at_most=MAX_STEPS,
                               unset=-1)
    target_param_data_ratio: float = flag(20.0, "tokens of the whole run per parameter of matrices and head", above=0,
                                          at_most=1e6)
    device_batch_size: int = flag(8, "rows of a micro-step on one device, or one group of --mesh_tensor devices",
                                  at_least=1, at_most=2**20)
    total_batch_size: int = flag(-1, "tokens of an optimizer step, in whole micro-steps; -1: by the depth", at_least=1,
                                 at_most=2**40, unset=-1)
    seq_len_ramp: str = flag("", "STEP:LENGTH,…: from STEP on, rows of LENGTH positions, such as "
                             "0:1024,4000:2048,8000:4096; docs/training.md#rows-that-become-longer")


@dataclass(frozen=True)
class DistillationFlags:
    teacher: str = flag("", "run to learn from: RUN, RUN/step_000100 or a path; "
                        "docs/training.md#learn-from-a-larger-model", of=not_empty)
    kd_weight: float = flag(0.5, "weight of the teacher in the loss", above=0, at_most=1)
    kd_temperature: float = flag(1.0, "temperature of both predictions", at_least=0.1, at_most=100)


# find_beginning (start.py) replaces the name by RUN/step_000100, and sets what is no flag. Checkpoints keep all of it.
@dataclass(frozen=True)
class StartFlags:
    init_from: str = flag("", "begin with the weights and the optimizer's state of RUN, RUN/step_000100 or a path; "
                          "docs/training.md#begin-with-another-run", of=not_empty)
    init_optimizer: bool = False  # the run took the optimizer's state: that checkpoint had one
    steps_before: int = 0  # the earlier_steps of the other run, if this one took its optimizer's state
    # The steps for whose length rates and decay are scaled. -1: the run's. 0, if it began with another's weights: the
    # run's for its decay, and none for its rates. Only runs of former versions have other values.
    rate_horizon: int = -1
    # Runs of former versions could begin as the ending of another: they go on to count its steps from this checkpoint
    # on, while their rates fall.
    decay_from: str = ""

    @property
    def first_step(self):
        """The step that the run counts as its first, from 0."""
        return step_of(self.decay_from) if self.decay_from else 0

    @property
    def earlier_steps(self):
        """The steps before the run's first that the optimizer's state has seen and the run does not count."""
        return self.steps_before + (step_of(self.init_from) if self.init_optimizer else 0)


@dataclass(frozen=True)
class RecordFlags:
    eval_every: int = flag(250, "steps between evaluations, also at the end; -1: never", at_least=1, unset=-1)
    sample_every: int = flag(1000, "steps between samples, also at the end; -1: never; none on a mesh that divides "
                             "weights", at_least=1, unset=-1)
    save_every: int = flag(1000, "steps between checkpoints, also at the end; -1: never", at_least=1, unset=-1)
    keep_checkpoints: int = flag(3, "newest checkpoints to keep on disk", at_least=1)
    checkpoint_mirror: str | None = flag(None, "gs://… or a directory for copies of checkpoints, from which a new VM "
                                         "resumes; docs/training.md#the-mirror", of=mirror_place)
    log_every: int = flag(10, "steps between lines of the log", at_least=1)
    step_timeout_s: float = flag(600.0, "end the run if a step exceeds this and 20 × --log_every medians; -1: never",
                                 above=0, unset=-1)


@dataclass(frozen=True)
class LanguageRecordFlags(RecordFlags):
    eval_tokens: int = flag(-1, "tokens of an evaluation, of all validation sets and gaps together; -1: a twentieth of "
                            "the run's, from 64K to 10M", at_least=1, at_most=2**28, unset=-1)


# In --help: the flags of a newcomer, then all others by group.
FIRST = ("run", "depth", "data_dir", "num_iterations", "device_batch_size", "total_batch_size", "max_seq_len",
         "device_type", "save_every", "checkpoint_mirror")
TITLES = {
    RunFlags: "run", KernelFlags: "devices", DataFlags: "data",
    ArchitectureFlags: "model (by default everything follows from the depth; a resumed run keeps its model)",
    BatchFlags: "batch and horizon (the first given horizon counts)",
    OptimConfig: "optimizer (rates are scaled from steps of 2^19 tokens and runs of 2^32)",
    DistillationFlags: "distillation", StartFlags: "start from another run",
    LanguageRecordFlags: "evaluation, samples, checkpoints, logs"}


# Flags that base_train had, and what to do instead.
GONE = {
    "short_window": "short layers see a quarter of --max_seq_len: leave it out",
    "target_flops": "give --num_iterations, or --target_param_data_ratio",
    "kd_until": "the teacher stays to the end: leave it out",
    "code_eval_every": "run python3 -m scripts.code_eval --checkpoint=RUN after the run",
    "code_eval_problems": "run python3 -m scripts.code_eval --checkpoint=RUN --problems=… after the run",
    "gradient_sums": "chips exchange gradients in float32: leave it out",
    "mesh_data": "it is the number of chips / (mesh_fsdp × mesh_tensor): leave it out",
    "ngram_rows": "models have no tables of n-grams: leave it out",
    "fim_context": "models train on single files, and read others when they complete: leave it out",
    "wandb_project": "set $WANDB_PROJECT",
    "save_every_minutes": "divide the minutes by the time of a step, and give --save_every=STEPS",
    "checkpoint_piece_gb": "files have 4 GB at most: leave it out",
    "max_bad_steps": "a run ends after 10 non-finite steps in a row: leave it out",
    "decay_from": "begin a run with --init_from=RUN/step_000100, --warmup_steps=0 and --warmdown_ratio=1; a run "
                  "that began with it resumes without it",
    "init_optimizer": "--init_from takes the optimizer's state, where there is one: leave it out",
    "rate_horizon": "multiply the rates with --lr_scale; a run that began with it keeps it",
    "keep_every": "give --keep_checkpoints, as many as the disk holds",
    "learning_rate": "multiply all rates with --lr_scale, such as --lr_scale=0.5",
    "data_mix": "give its file as --data_dir",
    "skip_bad_shards": "copy a corrupt shard again, or begin a new run without it: leave it out",
    "preflight": "run python3 -m scripts.tpu_preflight before, with the same flags",
    "profile_steps": "set $PROFILE_PORT, and ask the running process for a trace: docs/training.md",
    "resume": "a run that has a checkpoint resumes: to start over, choose another --run, or delete its folder",
    "tokenizer_threads": "each rank has two threads that prefetch and tokenize: leave it out",
}
# The values of some of them that meant "off": runs that began with others cannot resume.
GONE_OFF = {"target_flops": -1.0, "kd_until": 1.0, "gradient_sums": "float32", "fim_context": 0.0,
            "skip_bad_shards": False}


def require_not_gone(saved, run):
    """Raises BadInput if a checkpoint's flags, {name: value}, have one that is gone and made another run of it."""
    for name, off in GONE_OFF.items():
        if saved.get(name, off) != off:
            raise BadInput(f"--run={run} has a checkpoint with --{name}={saved[name]}, which is gone ({GONE[name]}): "
                           "choose another --run, or resume with the version of nanochat that wrote it")


class FlagGroups:
    """A data class whose fields are groups of flags."""

    def as_dict(self):
        """Returns {name: value} of all flags, as in a checkpoint's meta.json, which has no groups."""
        found = {}
        for group in asdict(self).values():
            found |= group
        return found

    def as_toml(self):
        """Returns the flags that differ from their defaults, as the text of a file for --config."""
        lines = ["# --config=FILE repeats this run; give another --run"]
        for group in (getattr(self, each.name) for each in fields(self)):
            for each in fields(group):
                value = getattr(group, each.name)
                if each.metadata and value != each.default:
                    lines.append(f"{each.name} = {json.dumps(value, ensure_ascii=False)}")
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Flags(FlagGroups):
    run: RunFlags = field(default_factory=RunFlags)
    devices: KernelFlags = field(default_factory=KernelFlags)
    data: DataFlags = field(default_factory=DataFlags)
    model: ArchitectureFlags = field(default_factory=ArchitectureFlags)
    batch: BatchFlags = field(default_factory=BatchFlags)
    optimizer: OptimConfig = field(default_factory=OptimConfig)
    distillation: DistillationFlags = field(default_factory=DistillationFlags)
    start: StartFlags = field(default_factory=StartFlags)
    record: LanguageRecordFlags = field(default_factory=LanguageRecordFlags)

    def replace(self, **values):
        """Returns the Flags with other values for the flags of these names."""
        changed = []
        for each in fields(self):
            group = getattr(self, each.name)
            own = {name: value for name, value in values.items() if hasattr(group, name)}
            changed.append(replace(group, **own))
        return Flags(*changed)

    def settled(self, config):
        """Returns the same flags, with those of the model as in its config."""
        return self.replace(**settled(config))

    def at_commits(self, saved):
        """Returns the same flags, with a commit in each place on the Hub (bucket.pinned). saved: the flags in a
        checkpoint, {name: value}."""
        return self.replace(data_dir=pinned(self.data.data_dir, saved.get("data_dir")),
                            val_dir=pinned(self.data.val_dir, saved.get("val_dir")))


def parse_flags(argv=None, description=None):
    """Returns the Flags of a command line. argv: the arguments, by default this process's; description: for --help.
    Raises BadInput."""
    return Flags(*read_flags(argv, description, TITLES, FIRST, GONE))
