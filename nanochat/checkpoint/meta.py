"""meta.json of a checkpoint: everything small that a run needs to resume."""
import base64
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from shlex import quote

import torch

from nanochat.common import BadInput

META = "meta.json"
FORMAT = 1  # of a checkpoint. Whoever changes the meaning of a field, or adds one, raises it
ADVICE = "resume with the flags it was trained with, or choose another --run"


@dataclass(frozen=True)
class Meta:
    step: int  # optimizer steps completed
    config: dict  # the fields of the model's config, a GPTConfig for language
    tokenizer_sha256: str
    data_fingerprint: str
    flags: dict  # of the script that trains, {name: value}; {} of a model that was trained elsewhere
    rng: str  # see rng_state
    wandb_id: str | None = None
    time: float | None = None  # Unix time of the save, s
    batch_schedule: tuple = ()  # ((step, tokens), …) as in Plan
    interruptions: int = 0  # how often the run was resumed
    nonfinite_steps: dict = field(default_factory=dict)  # {"total": …, "in_a_row": …}
    seconds: dict = field(default_factory=dict)  # {name: seconds}, see Goodput
    task: str = "language"  # what is learnt
    mesh: dict = field(default_factory=dict)  # {axis: chips} on which it was trained; it may go on on another
    is_pause: bool = False  # the run ended here, finished or told to stop: the time until it goes on is not lost

    def to_json(self):
        """Returns the JSON object that from_json reads."""
        return {"format": FORMAT} | asdict(self)

    @classmethod
    def from_json(cls, found):
        """Returns the Meta of a JSON object. Raises TypeError if a field is missing, unknown or of another type."""
        values = {name: value for name, value in found.items() if name != "format"}
        values["batch_schedule"] = tuple((step, tokens) for step, tokens in values.get("batch_schedule", ()))
        meta = cls(**values)
        for each in fields(cls):
            value = getattr(meta, each.name)
            if not isinstance(value, each.type) and not (each.type == float | None and type(value) is int):
                raise TypeError(f"{each.name} is {json.dumps(value)[:40]}")
        return meta


def load_meta(path):
    """Returns the Meta of the checkpoint at `path`. Raises BadInput if it cannot be read or has another format."""
    try:
        found = json.loads((Path(path) / META).read_text())
        if found.get("format") != FORMAT:
            raise BadInput(f"checkpoint {path} has format {found.get('format', 'none')} and this program reads format "
                           f"{FORMAT}: use another checkpoint or --run, or the version of nanochat that wrote it")
        return Meta.from_json(found)
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


def require_match(path, meta, *, config=None, tokenizer_sha256=None, data_fingerprint=None):
    """Raises BadInput if the checkpoint at `path` is of another architecture, tokenizer or data than these.

    config: the model's config as a dict; None for anything that need not match.
    """
    for name, value in (config or {}).items():
        if meta.config.get(name) != value:
            raise BadInput(f"{path} is of another architecture: --{name} is {meta.config.get(name)} there and {value} "
                           f"here: {ADVICE}")
    for saved, value, what in ((meta.tokenizer_sha256, tokenizer_sha256, "another tokenizer than --tokenizer_dir"),
                               (meta.data_fingerprint, data_fingerprint, "other data than that in --data_dir")):
        if value is not None and saved != value:
            raise BadInput(f"{path} was trained with {what}: its fingerprint is {saved[:12]} there and {value[:12]} "
                           f"here: {ADVICE}")


def require_same_flags(path, meta, flags):
    """Raises BadInput if the checkpoint at `path` was trained with another value of one of `flags`, {name: value}."""
    for name, value in flags.items():
        saved = meta.flags.get(name)
        if saved != value:
            raise BadInput(f"{path} was trained with --{name}={quote(str(saved))}, and this run has "
                           f"--{name}={quote(str(value))}: {ADVICE}")


def rng_state():
    """Returns the state of torch's default CPU generator as a string."""
    return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()


def restore_rng(state):
    """Sets torch's default CPU generator to a state that rng_state returned."""
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))
