"""What meta.json of a checkpoint says, and whether a run can use it."""
import base64
import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from shlex import quote

import torch

from nanochat.checkpoint.on_disk import META, read_text
from nanochat.common import BadInput
from nanochat.model.models import MODELS

FORMAT = 2  # of a checkpoint. Whoever changes the meaning of a field of Meta, or of a config, raises it
# What Meta.source says, all of it texts: ORG/NAME or the folder's name, the Hub's commit or "", the licence that the
# model card states or "", and two names of transformers, such as llama and bfloat16.
SOURCE_FIELDS = {"model", "commit", "licence", "model_type", "dtype"}
SOURCE_DTYPES = ("bfloat16", "float16", "float32")
GONE_FIELDS = {"ngram_rows": 0}  # of configs: the value that meant "off", the only one that is still read


@dataclass(frozen=True)
class Meta:
    """The contents of meta.json."""
    step: int  # optimizer steps completed
    config: dict  # the fields of the model's config, a GPTConfig for language
    tokenizer_sha256: str
    data_fingerprint: str
    flags: dict  # of the script that trains, {name: value}; {} of a model that was trained elsewhere
    rng: str  # see rng_state; "" of a model that was trained elsewhere
    wandb_id: str | None = None
    time: float | None = None  # Unix time of the save, s
    total_batch_size: int = 0  # tokens (or puzzles) of an optimizer step; 0 of a model that was trained elsewhere
    interruptions: int = 0  # how often the run was resumed
    nonfinite_steps: dict = field(default_factory=dict)  # {"total": …, "in_a_row": …}
    seconds: dict = field(default_factory=dict)  # {name: seconds}, see Goodput
    task: str = "language"
    mesh: dict = field(default_factory=dict)  # {axis: chips} on which it was trained; a resumed run may use another
    source: dict = field(default_factory=dict)  # of imported weights, and of what was trained from them: SOURCE_FIELDS
    is_pause: bool = False  # the run finished or was told to stop here: the time until it resumes is not lost

    def to_json(self):
        return {"format": FORMAT} | asdict(self)

    def config_as(self, config_class):
        """Returns the model's config, a `config_class`, with what stood for the fields that did not exist yet. Raises
        BadInput, and TypeError for fields that are missing or unknown."""
        config = dict(self.config)
        for each in fields(config_class):
            if "before" in each.metadata:
                config.setdefault(each.name, each.metadata["before"])
        for name, off in GONE_FIELDS.items():
            if (value := config.pop(name, off)) != off:
                raise BadInput(f"{name} = {json.dumps(value)[:40]}, an option that is gone")
        return config_class(**config)

    @property
    def arch(self):
        """The name of the language model in models.MODELS. The first checkpoints have none: they are of GPTs."""
        return self.config.get("arch", "gpt")

    @property
    def model_config(self):
        """The config of the language model, once read_language_config has accepted it."""
        return self.config_as(MODELS[self.arch])

    @classmethod
    def from_json(cls, found):
        """Returns the Meta of a JSON object. Raises TypeError if a field is missing, unknown or of another type."""
        values = {name: value for name, value in found.items() if name != "format"}
        needed = {each.name for each in fields(cls) if each.default is each.default_factory is MISSING}
        unlike = needed - values.keys() or values.keys() - {each.name for each in fields(cls)}
        if unlike:
            raise TypeError(f"{min(unlike)} is missing or unknown")
        meta = cls(**values)
        for each in fields(meta):
            value = getattr(meta, each.name)
            if not isinstance(value, each.type):
                raise TypeError(f"{each.name} is {json.dumps(value)[:40]}")
        source = meta.source
        is_source = source.keys() == SOURCE_FIELDS and all(isinstance(value, str) for value in source.values())
        if source and not (is_source and source["dtype"] in SOURCE_DTYPES):
            raise TypeError(f"source is {json.dumps(source)[:100]}")
        return meta


def load_meta(path):
    """Returns the Meta of the checkpoint at `path`. Raises BadInput if it cannot be read or has another format."""
    try:
        found = json.loads(read_text(Path(path) / META))
        if not isinstance(found, dict):
            raise TypeError("it is no JSON object")
        if found.get("format") != FORMAT:
            raise BadInput(f"checkpoint {path} has format {found.get('format', 'none')} and this program reads format "
                           f"{FORMAT}: use another checkpoint or --run, or the version of nanochat that wrote it")
        return Meta.from_json(found)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        problem = getattr(error, "strerror", None) or error
        raise BadInput(f"checkpoint {path} is damaged ({META}: {problem}): move it away, or name another "
                       "step") from None


def read_config(path, meta, config_class):
    """Returns the config of the model in the checkpoint at `path`, a `config_class`, which is a data class. Raises
    BadInput if a field is missing or unknown, or has an impossible value."""
    def refuse(problem):
        return BadInput(f"{path} cannot be used: the model's config in its {META} {problem}: use another checkpoint, "
                        "or the version of nanochat that wrote it")

    for each in fields(config_class):
        name = each.name
        if name not in meta.config and "before" not in each.metadata:
            raise refuse(f"has no {name}")
        value = meta.config.get(name, each.metadata.get("before"))
        is_right = type(value) is each.type or type(value) is int and each.type is float
        if not is_right or each.type is int and value < 0:
            raise refuse(f"has {name} = {json.dumps(value)[:40]}")
    unknown = meta.config.keys() - {each.name for each in fields(config_class)} - GONE_FIELDS.keys()
    if unknown:
        raise refuse(f"has {min(unknown)}, which this program does not know")
    try:
        return meta.config_as(config_class)
    except (BadInput, ArithmeticError) as error:
        raise refuse(f"makes no model ({error})") from None


def read_language_config(path, meta):
    """Returns the config of the language model in the checkpoint at `path`, see model/models.py. Raises BadInput."""
    if meta.arch not in tuple(MODELS):
        raise BadInput(f"{path} cannot be used: its model is {json.dumps(meta.arch)[:40]}, and this program knows "
                       f"{' and '.join(MODELS)}: use the version of nanochat that wrote it")
    return read_config(path, meta, MODELS[meta.arch])


def require_same(path, values):
    """Raises BadInput if the checkpoint at `path` and the run differ in one of `values`, {what: (saved, now)}."""
    for what, (saved, now) in values.items():
        if saved != now:
            raise BadInput(f"{path} does not fit this run: {what} is {quote(str(saved)[:40])} there and "
                           f"{quote(str(now)[:40])} here: resume with the flags it was trained with, or choose another "
                           "--run")


def rng_state():
    return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()


def restore_rng(state):
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))
