"""The models that the program trains and runs: the GPT and the Llama family. Trainer, optimizer, mesh, checkpoints,
engine and preflight know a model by its config alone. What they ask of it, beside the fields for its sizes:

| of a config | what |
|---|---|
| `arch`, `kept` | its name, a value of --arch; the fields that are no flags and follow from no flag |
| `new_model(kernels, dtype, recompute)` | its Decoder |
| `weights` | the table of its weights |
| `rules(…)`, `rates_of` | how each weight is updated |
| `windows()`, `adds_values()` | what layers get beside their weights |
| `has_begun_rate` | whether trained weights go on at a rate of their own; else the rates of their run count |
| `has_layer_by_hand` | whether the kernel `flash` has its whole layer, not attention alone |
| `require_flags(flags)` | raises BadInput for flags that it does not have |
| `with_rows(max_seq_len)` | the same model for other rows, if it allows that |
| `context` | how many positions it sees when it completes |
"""
from dataclasses import fields

from nanochat.common import BadInput
from nanochat.model.config import GPTConfig, flag_name
from nanochat.model.llama import LlamaConfig

MODELS = {"gpt": GPTConfig, "llama": LlamaConfig}

# A name means the same in every model.
_WEIGHTS = [weight for config_class in MODELS.values() for weight in config_class.weights]
DIVIDED_BY_INPUTS = frozenset(weight.name for weight in _WEIGHTS if weight.divides == "inputs")
UNDIVIDED = frozenset(weight.name for weight in _WEIGHTS if not weight.is_divided)
TABLES = frozenset(weight.name for weight in _WEIGHTS if weight.is_table)


def _flags_of(config_class):
    """Returns the flags of base_train that make a config, {name of a flag: its field}."""
    return {flag_name(field): field for field in fields(config_class) if field.metadata}


CONFIG_FLAGS = _flags_of(GPTConfig) | _flags_of(LlamaConfig)  # all of them but --arch
KEPT = tuple(name for config_class in MODELS.values() for name in config_class.kept)


def as_flag(value):
    """Returns the value of a field as its flag spells it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return value


def config_as_flags(config):
    """Returns the flags that make a config, {name: value}."""
    found = {"arch": config.arch}
    return found | {name: as_flag(getattr(config, field.name)) for name, field in _flags_of(type(config)).items()}


def settled(config):
    """Returns the same, and the fields that are `kept`: config_from_flags makes an equal config of them."""
    return config_as_flags(config) | {name: getattr(config, name) for name in config.kept}


def describe(config):
    """Returns the architecture as text: the values of its flags, and the size of the vocabulary."""
    values = {**config_as_flags(config), "vocabulary": f"{config.vocab_size:,}"}
    return ", ".join(f"{name} {value}" for name, value in values.items())


def is_given(value):
    """Returns whether a flag of the model was given: -1 and None leave it to the program."""
    return value not in (None, -1)


def config_from_flags(given, vocab_size):
    """Returns the config of a new run. given: {name of a flag, or of a field that is kept: its value}; what is not
    given takes its default. Raises BadInput."""
    config_class = MODELS[given.get("arch") or "gpt"]
    own = _flags_of(config_class)
    values = {"vocab_size": vocab_size}
    for name, value in given.items():
        if name == "arch" or not is_given(value):
            continue
        if name in own:
            values[own[name].name] = value == "on" if own[name].type is bool else value
        elif name in config_class.kept:
            values[name] = value
        else:
            raise BadInput(f"--{name}={value} is not for --arch={config_class.arch}: leave it out")
    return config_class(**values)


def require_as_saved(given, config, path, otherwise=", or choose another --run"):
    """Raises BadInput if a flag differs from the model in the checkpoint at `path`. given: as in config_from_flags;
    config: the model's; otherwise: what a person may do, but for leaving the flag out."""
    saved = config_as_flags(config)
    for name, value in given.items():
        if is_given(value) and value != saved.get(name):
            there = f"has --{name}={saved[name]}" if name in saved else f"is of --arch={config.arch}"
            raise BadInput(f"--{name}={value}, but the model in {path} {there}: leave the flag out{otherwise}")
