"""The flags of base_train, in groups. Each group is a data class, from which the parser is made."""
import os
from dataclasses import asdict, dataclass, field, fields, make_dataclass, replace

from nanochat.common import BadInput, expand_path, flag, read_flags
from nanochat.data.bucket import data_place
from nanochat.data.lanes import NUM_LANES
from nanochat.data.shards import TextFlags
from nanochat.device.ranks import DEVICE_TYPES
from nanochat.model.config import CONFIG_FLAGS, as_flag, config_as_flags
from nanochat.model.layers import RECOMPUTED
from nanochat.model.rates import OptimConfig

MAX_STEPS = 10**9  # of a run
MAX_CHIPS = 2**20
AUTO = "auto"


def path_text(text):
    """Returns the path that a flag names, as a text that a checkpoint can hold."""
    return str(expand_path(text))


def chips_or_auto(text):
    """Returns the number of chips that a flag names, or AUTO. Raises BadInput."""
    if text == AUTO:
        return AUTO
    if not text.isdecimal() or len(text) > 7 or not 1 <= int(text) <= MAX_CHIPS:
        raise BadInput(f"give a whole number of chips, from 1 to {MAX_CHIPS}, or {AUTO}")
    return int(text)


@dataclass(frozen=True)
class RunFlags:
    run: str = flag("dummy", "name of the run, of its folder and in WandB; dummy: without WandB")
    resume: str = flag("auto", "auto: resume the run of this name if it has a checkpoint; never: move the old run "
                       "aside", choices=("auto", "never"))
    preflight: bool = flag(False, "first compile the run's programs for this TPU, in another process; exit with status "
                           "3 if they do not fit into its memory (base_train only)")
    seed: int = flag(0, "seed of the weights and of the data order", at_least=0)
    wandb_project: str = flag(os.environ.get("WANDB_PROJECT", "nanochat"), "project in WandB")


@dataclass(frozen=True)
class DeviceFlags:
    device_type: str = flag("auto", "one of " + ", ".join(DEVICE_TYPES))
    compute_dtype: str = flag("auto", "dtype of activations and products; auto: bfloat16 on tpu and cuda, else float32",
                              choices=("auto", "bfloat16", "float32"))
    shard_optimizer: str = flag("auto", "each rank keeps and updates a part of the optimizer's state; auto: on XLA",
                                choices=("auto", "on", "off"))
    no_compile: bool = flag(False, "no torch.compile (on CUDA; there is none on XLA and cpu anyway)")


@dataclass(frozen=True)
class KernelFlags(DeviceFlags):
    kernel: str = flag("auto", "attention, loss and layers: auto, current, chunked, flash (TPU), cce (CUDA)")
    activation_checkpointing: str = flag(
        "none", "what the backward pass computes again, for less memory and more time: none, qkv (queries, keys and "
        "values; where layers are a loop: chunked and flash on XLA), or all, also meant without a value",
        choices=RECOMPUTED, nargs="?", const="all")
    gradient_sums: str = flag("float32", "dtype in which gradients travel when the chips sum them: bfloat16 halves "
                              "that traffic, and rounds each chip's gradients first (XLA; what is summed within the "
                              "micro-step, along fsdp, is bfloat16 anyway)", choices=("float32", "bfloat16"))
    mesh_data: int = flag(-1, "chips along the mesh's axis data, which hold the same weights; -1: what the other axes "
                          "leave", at_least=1, at_most=MAX_CHIPS, unset=-1)
    mesh_fsdp: int | str = flag(1, "chips along the axis fsdp, which divide each weight among themselves and gather a "
                                "layer's when they come to it: for models that outgrow a chip; auto: as few as fit, by "
                                "an estimate of a TPU's memory", of=chips_or_auto)
    mesh_tensor: int = flag(1, "chips along the axis tensor, which read the same rows and divide heads, hidden units "
                            "and vocabulary among themselves: for long rows and small batches", at_least=1,
                            at_most=MAX_CHIPS)


@dataclass(frozen=True)
class DataFlags(TextFlags):
    val_dir: str | None = flag(None, "folder of parquet shards for validation, or gs://…; default: "
                               "$NANOCHAT_BASE_DIR/parquet/val", of=data_place)
    tokenizer_dir: str | None = flag(None, "default: $NANOCHAT_BASE_DIR/tokenizer if it exists, else the shipped one",
                                     of=path_text)
    tokenizer_threads: int = flag(2, "threads per rank that tokenize ahead", at_least=1, at_most=1000)
    num_lanes: int = flag(NUM_LANES, "streams in which the data is read, a multiple of the number of devices; the rows "
                          "of a batch depend on it", at_least=1, at_most=4096)
    fim_rate: float = flag(0.0, "share of the documents that are rewritten for fill in the middle", at_least=0,
                           at_most=1)
    synthetic_data: bool = flag(False, "train on random tokens: tries a machine without data")

    def folder(self, split):
        return self.val_dir if split == "val" else self.data_dir


def _flag_of_field(config_field):
    """Returns the flag of a field of GPTConfig. Its own default is None: a run that resumes keeps the value of its
    checkpoint, and only a new one takes that of GPTConfig."""
    # A bool has three states here: on, off and not given. A switch that is given or not would have two, and a run that
    # resumes could not tell off from not given.
    options = {name: value for name, value in config_field.metadata.items() if name != "called"}
    options["of"] = config_field.type
    if config_field.type is bool:
        options |= {"of": str, "choices": ("on", "off")}
    if config_field.default is not None:
        options["help"] += f" (default: {as_flag(config_field.default)})"
    return field(default=None, metadata=options)


# The flags of the model, {name: value}; None where the command line does not give it.
ModelFlags = make_dataclass("ModelFlags", [(name, config_field.type | None, _flag_of_field(config_field))
                                           for name, config_field in CONFIG_FLAGS.items()], frozen=True)
ModelFlags.__module__ = __name__  # so that it can be handed to other processes


@dataclass(frozen=True)
class BatchFlags:
    num_iterations: int = flag(-1, "optimizer steps; -1: from target_flops or target_param_data_ratio", at_least=1,
                               at_most=MAX_STEPS, unset=-1)
    target_flops: float = flag(-1.0, "train until this many FLOPs are spent; -1: as target_param_data_ratio says",
                               above=0, at_most=1e30, unset=-1)
    target_param_data_ratio: float = flag(20.0, "train on this many tokens per matrix parameter", above=0, at_most=1e6)
    device_batch_size: int = flag(8, "rows in a micro-step on one device, or, with --mesh_tensor, on one group "
                                  "of devices", at_least=1, at_most=2**20)
    total_batch_size: int = flag(-1, "tokens in an optimizer step; -1: from the depth", at_least=1,
                                 at_most=2**40, unset=-1)
    batch_ramp: str = flag("", "STEP:FACTOR,…: from that step on the batch is FACTOR × total_batch_size, in whole "
                           "micro-steps, and the learning rates are √FACTOR as high")
    seq_len_ramp: str = flag("", "STEP:LENGTH,…, such as 0:1024,4000:2048,8000:4096: from that step on rows have "
                             "LENGTH positions, in batches of as many tokens; the last is --max_seq_len")


@dataclass(frozen=True)
class DistillationFlags:
    teacher: str = flag("", "learn also from the predictions of this run (its newest checkpoint), RUN/step_000100 or a "
                        "path, which has the same tokenizer")
    kd_weight: float = flag(0.5, "weight of the teacher in the loss", above=0, at_most=1)
    kd_temperature: float = flag(1.0, "temperature of both predictions", at_least=0.1, at_most=100)
    kd_until: float = flag(1.0, "the fraction of the run's steps after which there is no teacher", above=0, at_most=1)


@dataclass(frozen=True)
class RecordFlags:
    eval_every: int = flag(250, "steps between evaluations, also at the end; -1: never", at_least=1, unset=-1)
    sample_every: int = flag(1000, "steps between samples, also at the end; -1: never", at_least=1, unset=-1)
    save_every: int = flag(1000, "steps between checkpoints, also at the end; -1: by --save_every_minutes, or never",
                           at_least=1, unset=-1)
    save_every_minutes: float = flag(-1.0, "minutes between checkpoints, also at the end; -1: by steps only", above=0,
                                     unset=-1)
    checkpoint_piece_gb: float = flag(4.0, "larger files of weights or of the optimizer's state become pieces "
                                      "of so many GB", above=0)
    keep_checkpoints: int = flag(3, "number of newest checkpoints that stay on disk", at_least=1)
    keep_every: int = flag(-1, "checkpoints of steps that are multiples of this stay for good; -1: none", at_least=1,
                           unset=-1)
    checkpoint_mirror: str | None = flag(None, "gs://… or a directory for copies of checkpoints, from which a new VM "
                                         "resumes")
    log_every: int = flag(10, "steps between lines of the log", at_least=1)
    step_timeout_s: float = flag(600.0, "a step that takes longer than this and 20 times the median ends the run; -1: "
                                 "never", above=0, unset=-1)
    max_bad_steps: int = flag(10, "end the run after this many non-finite steps in a row; -1: never", at_least=1,
                              unset=-1)
    profile_steps: str = flag("", "BEGIN:END, such as 10:13: record a trace of the steps after BEGIN up to END, for "
                              "TensorBoard, in the run's folder")

    @property
    def saves(self):
        """Whether there are checkpoints, and so one at the end."""
        return self.save_every > 0 or self.save_every_minutes > 0


@dataclass(frozen=True)
class LanguageRecordFlags(RecordFlags):
    eval_tokens: int = flag(10 * 2**20, "tokens of an evaluation, whatever the world size; each document once at most",
                            at_least=1, at_most=2**28)
    code_eval_every: int = flag(-1, "steps between evaluations of whether the code that the model writes compiles and "
                                "works, also at the end; needs g++ and bubblewrap; -1: never", at_least=1, unset=-1)


TITLES = {
    RunFlags: "run", KernelFlags: "devices", DataFlags: "data",
    ModelFlags: "model (everything follows from the depth; a run that resumes keeps what it began with)",
    BatchFlags: "batch and horizon (the first horizon that is given counts)",
    OptimConfig: "optimizer (rates for steps of 2^19 tokens and runs of 2^32; those of others follow)",
    DistillationFlags: "distillation",
    LanguageRecordFlags: "evaluation, samples, checkpoints, logs"}


class FlagGroups:
    """A data class whose fields are groups of flags."""

    def as_dict(self):
        """Returns {name: value} of all flags, as a checkpoint's meta.json has them."""
        # Flat, because a flag's name is its only one on the command line, too: checkpoints do not know the groups.
        return {name: value for group in asdict(self).values() for name, value in group.items()}

    def settled(self, config):
        """Returns the same flags with those of the model as they became in its config."""
        return self


@dataclass(frozen=True)
class Flags(FlagGroups):
    run: RunFlags = field(default_factory=RunFlags)
    devices: KernelFlags = field(default_factory=KernelFlags)
    data: DataFlags = field(default_factory=DataFlags)
    model: ModelFlags = field(default_factory=ModelFlags)
    batch: BatchFlags = field(default_factory=BatchFlags)
    optimizer: OptimConfig = field(default_factory=OptimConfig)
    distillation: DistillationFlags = field(default_factory=DistillationFlags)
    record: LanguageRecordFlags = field(default_factory=LanguageRecordFlags)

    def replace(self, **values):
        """Returns the Flags with other values for the flags of these names."""
        # Each group takes those of the values that are its own; no name is in two groups.
        groups = [getattr(self, group.name) for group in fields(self)]
        return Flags(*(replace(group, **{name: values[name] for name in values.keys() & asdict(group).keys()})
                       for group in groups))


    def settled(self, config):
        return self.replace(**config_as_flags(config))


def parse_flags(argv=None, description=None):
    """Returns the Flags on a command line. argv: the arguments, by default those of this process; description: the
    beginning of --help. Raises BadInput."""
    return Flags(*read_flags(argv, description, TITLES))
