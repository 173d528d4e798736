"""meta.json of a checkpoint: everything small that a run needs to resume.

Meta.to_json says what is saved and Meta.from_json what is restored, in the same order. Whoever changes the meaning of
a field, or adds one that older programs must not ignore, raises FORMAT_VERSION.
"""
import base64
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from shlex import quote

import torch

from nanochat.common import BadInput

META = "meta.json"
# 1 has no format_version, 2 no rotary_base in a GPT's config, 3 no tasks in a TRM's, 4 no layer_gates in a GPT's, 5 no
# value_embeddings, 6 no short_window, 7 no key_shift, 8 no shared_values
FORMAT_VERSION = 9


@dataclass(frozen=True)
class Meta:
    step: int  # optimizer steps completed
    config: dict  # the fields of the model's config, a GPTConfig for language
    tokenizer_sha256: str
    data_fingerprint: str
    flags: dict  # of the script that trains, {name: value}
    rng: str  # see rng_state
    wandb_id: str | None = None
    time: float | None = None  # Unix time of the save, s
    batch_schedule: tuple = ()  # ((step, tokens), …) as in Plan; checkpoints of the first runs have none
    interruptions: int = 0  # how often the run was resumed
    nonfinite_steps: dict = field(default_factory=dict)  # {"total": …, "in_a_row": …}
    seconds: dict = field(default_factory=dict)  # {name: seconds}, see Goodput
    task: str = "language"  # what is learnt; checkpoints of the first runs do not say it
    mesh: dict = field(default_factory=dict)  # {axis: chips} on which it was trained; it may go on on another
    is_pause: bool = False  # the run ended here, finished or told to stop: the time until it goes on is not lost

    def to_json(self):
        """Returns the JSON object that from_json reads."""
        return {
            "format_version": FORMAT_VERSION,
            "task": self.task,
            "step": self.step,
            "config": self.config,
            "tokenizer_sha256": self.tokenizer_sha256,
            "data_fingerprint": self.data_fingerprint,
            "flags": settled_flags(self.flags, self.config),
            "rng": self.rng,
            "wandb_id": self.wandb_id,
            "time": self.time,
            "batch_schedule": self.batch_schedule,
            "interruptions": self.interruptions,
            "bad_steps": self.nonfinite_steps,
            "seconds": self.seconds,
            "mesh": self.mesh,
            "is_pause": self.is_pause,
        }

    @classmethod
    def from_json(cls, found):
        """Returns the Meta of a JSON object of this or an older version. Raises KeyError if a field is missing, and
        TypeError if it is of another type."""
        for name, kind in (("step", int), ("config", dict), ("tokenizer_sha256", str), ("data_fingerprint", str),
                           ("flags", dict), ("rng", str)):
            if not isinstance(found[name], kind):
                raise TypeError(f"{name} is {json.dumps(found[name])[:40]}")
        task, version = found.get("task", "language"), found.get("format_version", 1)
        older = {"language": ((3, "rotary_base", 10_000.0), (5, "layer_gates", False), (6, "value_embeddings", False),
                              (7, "short_window", _half_if_any(found["config"])), (8, "key_shift", False),
                              (9, "shared_values", False)),
                 "puzzles": ((4, "tasks", 0),)}
        added = {name: value for since, name, value in older.get(task, ()) if version < since}
        config = found["config"] | added
        flags = _flags_of_version(version, found["flags"]) if task == "language" else found["flags"]
        return cls(
            task=task,
            step=found["step"],
            config=config,
            tokenizer_sha256=found["tokenizer_sha256"],
            data_fingerprint=found["data_fingerprint"],
            flags=settled_flags(flags, config),
            rng=found["rng"],
            wandb_id=found.get("wandb_id"),
            time=found.get("time"),
            batch_schedule=tuple((step, tokens) for step, tokens in found.get("batch_schedule", ())),
            interruptions=found.get("interruptions", 0),
            nonfinite_steps=found.get("bad_steps", {}),
            seconds=found.get("seconds", {}),
            mesh=found.get("mesh", {}),
            is_pause=found.get("is_pause", False),
        )


def settled_flags(flags, config):
    """Returns `flags`, {name: value}, in which those that were left to the program, or had another default once, are
    what they became in `config`, the fields of a GPTConfig. Flags of another task stay as they are."""
    if not flags or not {"window_pattern", "short_window", "key_shift", "layer_gates",
                         "value_embeddings"} <= config.keys():
        return flags
    return flags | {"window_pattern": config["window_pattern"], "short_window": config["short_window"] or -1,
                    "key_shift": "on" if config["key_shift"] else "off",
                    "layer_gates": "on" if config["layer_gates"] else "off",
                    "value_embeddings": value_embeddings_of(config)}


def value_embeddings_of(config):
    """Returns the value of --value_embeddings that gives a GPTConfig with these fields."""
    return "shared" if config.get("shared_values") else "own" if config.get("value_embeddings") else "off"


def _half_if_any(config):
    """Returns the short window, in positions, of a GPT whose config does not say it; 0 if it has none."""
    return max(config["max_seq_len"] // 2, 1) if "S" in str(config.get("window_pattern")) else 0


def _flags_of_version(version, flags):
    """Returns the flags of a checkpoint of this or an older version, {name: value}, with values as they are today."""
    found = with_words(flags)
    if version >= 6:
        return found
    if "weight_decay" in found:  # it was a number for each step, and is one for the whole run now
        found["weight_decay"] = f"{found['weight_decay']} a step"
    if isinstance(kept := found.get("activation_checkpointing"), bool):
        found["activation_checkpointing"] = "all" if kept else "none"
    return found


def with_words(flags):
    """Returns `flags`, {name: value}, of a run of this or an earlier version, in which --value_embeddings and
    --layer_gates had no value, as a dict of its own in which they have one."""
    words = {"value_embeddings": "own", "layer_gates": "on"}
    return flags | {name: word if flags[name] else "off" for name, word in words.items()
                    if isinstance(flags.get(name), bool)}


def load_meta(path):
    """Returns the Meta of the checkpoint at `path`. Raises BadInput if it cannot be read or is of a newer version."""
    try:
        found = json.loads((Path(path) / META).read_text())
        version = found.get("format_version", 1)
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise BadInput(f"checkpoint {path} has format version {version} and this program reads versions up to "
                           f"{FORMAT_VERSION}: update nanochat, or use another checkpoint or --run")
        return Meta.from_json(found)
    except KeyError as error:
        raise BadInput(f"{path} is not a checkpoint ({META} has no {error}): give a step_… directory") from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise BadInput(f"{path} is not a checkpoint ({META}: {error}): give a step_… directory") from None


def read_config(path, meta, config_class):
    """Returns the config, an object of the data class `config_class`, of the model in the checkpoint at `path`. Raises
    BadInput if a field is missing, is unknown or has a value that it cannot have."""
    def refuse(problem):
        return BadInput(f"{path} cannot be used: the model's config in its {META} {problem}: use another checkpoint")

    types = {each.name: each.type for each in fields(config_class)}
    for name in [*types, *meta.config]:
        if name not in meta.config:
            raise refuse(f"has no {name}")
        if name not in types:
            raise refuse(f"has {name}, which this program does not know")
        value = meta.config[name]
        is_right = type(value) is types[name] or type(value) is int and types[name] is float
        if not is_right or types[name] is int and value < 0:
            raise refuse(f"has {name} = {json.dumps(value)[:40]}")
    try:
        return config_class(**meta.config)
    except (BadInput, ArithmeticError) as error:
        raise refuse(f"makes no model ({error})") from None


FLAGS_OF_CONFIG = {"n_layer": "--depth", "n_embd": "--model_dim", "n_head": "--num_heads",
                   "n_kv_head": "--num_kv_heads", "shared_values": "--value_embeddings",
                   "vocab_size": "the vocabulary of --tokenizer_dir"}


ADVICE = "resume with the flags it was trained with, or choose another --run"
# Fields of a GPTConfig that stay as they were when a run resumes without their flags, and their values in a new run.
# None: it follows from other flags.
OF_NEW_RUNS = {"window_pattern": "SSSL", "short_window": None, "rotary_base": None, "key_shift": True,
               "layer_gates": True, "value_embeddings": True, "shared_values": True}


def require_match(path, meta, *, config, tokenizer_sha256, data_fingerprint):
    """Raises BadInput if the checkpoint at `path` is of another architecture, tokenizer or data than these.

    config: the model's config as a dict; None for anything that need not match.
    """
    for key, value in (config or {}).items():
        if meta.config.get(key) != value:
            there, here = (_as_flag(key, found) for found in (meta.config, config))
            flag = FLAGS_OF_CONFIG.get(key, f"--{key}")
            advice = f"leave {flag} out, or choose another --run" if key in OF_NEW_RUNS else ADVICE
            raise BadInput(f"{path} is of another architecture: {flag} is {there} there and {here} here: {advice}")
    for saved, value, what in ((meta.tokenizer_sha256, tokenizer_sha256, "another tokenizer than --tokenizer_dir"),
                               (meta.data_fingerprint, data_fingerprint, "other data than that in --data_dir")):
        if value is not None and saved != value:
            raise BadInput(f"{path} was trained with {what}: its fingerprint is {saved[:12]} there and {value[:12]} "
                           f"here: {ADVICE}")


def _as_flag(key, config):
    """Returns the value of a config's field as its flag names it."""
    value = config.get(key)
    if key in ("value_embeddings", "shared_values"):
        return value_embeddings_of(config)
    return ("off", "on")[value] if isinstance(value, bool) else value


def require_same_flags(path, meta, flags, older=None):
    """Raises BadInput if the checkpoint at `path` was trained with another value of one of `flags`, {name: value}.

    older: {name: value} of the flags that did not exist yet when the oldest checkpoints were made.
    """
    for name, value in flags.items():
        if (saved := meta.flags.get(name, (older or {}).get(name))) != value:
            raise BadInput(f"{path} was trained with --{name}={quote(str(saved))}, and this run has "
                           f"--{name}={quote(str(value))}: {ADVICE}")


def rng_state():
    """Returns the state of torch's default CPU generator as a string."""
    return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()


def restore_rng(state):
    """Sets torch's default CPU generator to a state that rng_state returned."""
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))
