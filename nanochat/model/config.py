"""The architecture of a GPT, described once: base_train's flags, what a checkpoint stores, the lines that describe a
run, the model card and an export follow from the fields of GPTConfig. A new field needs no line anywhere else."""
from dataclasses import dataclass, fields

from nanochat.common import BadInput, flag

HEAD_DIM = 128  # the TPU's matrix unit is 128 (v5e) or 256 (v6e) wide


def in_whole(size, unit):
    """Returns the smallest multiple of `unit` that is not below `size`."""
    return -(-size // unit) * unit


@dataclass(frozen=True)
class GPTConfig:
    """A field that is made with flag() is a flag of base_train, named `called` there if that is given. A switch is
    `on` or `off` there. A field that is None follows from the others: __post_init__ says how.

    Raises BadInput for fields that make no model.
    """
    vocab_size: int = 65536  # of the tokenizer
    n_layer: int = flag(16, "number of layers", called="depth", at_least=1, at_most=10_000)
    max_seq_len: int = flag(1024, "positions per row; the base of the rotary positions follows from it", at_least=1,
                            at_most=2**20)
    n_embd: int = flag(None, "width; default: 64 × depth, rounded up to whole heads of 128", called="model_dim",
                       at_least=1, at_most=2**16, unset=-1)
    n_head: int = flag(None, "attention heads; default: width / 128", called="num_heads", at_least=1, at_most=2**10,
                       unset=-1)
    n_kv_head: int = flag(None, "key and value heads (grouped-query attention); default: as many as --num_heads",
                          called="num_kv_heads", at_least=1, at_most=2**10, unset=-1)
    window_pattern: str = flag("SSSL", "attention windows, one letter per layer, repeated: L all positions, S the last "
                               "--short_window of them; the last layer is always L")
    short_window: int = flag(None, "positions that a layer S sees; default: a quarter of --max_seq_len, in whole 128s",
                             at_least=2, at_most=2**20, unset=-1)
    key_shift: bool = flag(True, "in half of each head's channels, a position's keys are those of the position before "
                           "it")  # see layers.shift_keys
    softcap: float = flag(15.0, "bound of the logits; 0: none", at_least=1, at_most=1e4, unset=0)
    layer_gates: bool = flag(True, "attention's values and what attention and MLP add are multiplied by gates, learnt "
                             "numbers that depend on the token")  # see gates.py
    value_embeddings: str = flag("shared", "every second layer adds to attention's values a vector that is learnt for "
                                 "each token of the vocabulary: shared: all of them the same one; own: each its own; "
                                 "off", choices=("off", "own", "shared"))
    rotary_base: float = None  # of the frequencies, see rotary_base_for

    def __post_init__(self):
        self._follow("n_embd", in_whole(64 * self.n_layer, HEAD_DIM))
        self._follow("n_head", max(self.n_embd // HEAD_DIM, 1))
        self._follow("n_kv_head", self.n_head)
        self._follow("rotary_base", rotary_base_for(self.max_seq_len))
        self._check()
        is_short = "S" in self.window_pattern
        if self.short_window and not is_short:
            raise BadInput(f"--short_window={self.short_window}, but no layer of "
                           f"--window_pattern={self.window_pattern} is short: give a pattern with S, such as SSSL, or "
                           "leave --short_window out")
        # A quarter, in whole tiles of TPUs (nanochat).
        self._follow("short_window", in_whole(self.max_seq_len, 4 * 128) // 4 if is_short else 0)

    def _follow(self, name, value):
        """Gives the field `name` this value if it has none."""
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    def _check(self):
        if self.n_embd % self.n_head or (self.n_embd // self.n_head) % 2:
            raise BadInput(f"--model_dim={self.n_embd} does not divide into --num_heads={self.n_head} heads of an even "
                           "size: change one of them")
        if self.n_kv_head < 1 or self.n_head % self.n_kv_head:
            raise BadInput(f"--num_kv_heads={self.n_kv_head} does not divide --num_heads={self.n_head}: change one of "
                           "them")
        if not self.window_pattern or set(self.window_pattern) - set("SL"):
            raise BadInput(f"--window_pattern={self.window_pattern} is unknown: use letters S (short) and L (long), "
                           "for example SSSL")
        if self.value_embeddings not in ("off", "own", "shared"):
            raise BadInput(f"--value_embeddings={self.value_embeddings} is unknown: use off, own or shared")

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    def value_slots(self):
        """Returns which value embedding each layer adds, a number, or None: every second layer adds one, and the last
        one always (nanochat's measurements; the idea is of arXiv 2410.17897)."""
        slots = []
        for layer in range(self.n_layer):
            adds_one = self.value_embeddings != "off" and layer % 2 == (self.n_layer - 1) % 2
            number = 0 if self.value_embeddings == "shared" else layer // 2
            slots.append(number if adds_one else None)
        return slots

    @property
    def num_values(self):
        """How many value embeddings a token has."""
        return {"off": 0, "shared": 1, "own": -(-self.n_layer // 2)}[self.value_embeddings]

    def windows(self):
        """Returns the attention window of each layer, in positions; None is unlimited. The last layer always sees
        everything."""
        pattern = [self.window_pattern[i % len(self.window_pattern)] for i in range(self.n_layer - 1)] + ["L"]
        is_unlimited = self.short_window >= self.max_seq_len
        return [None if letter == "L" or is_unlimited else self.short_window for letter in pattern]

    def describe(self):
        """Returns the architecture as a text for a person."""
        windows = f"{self.window_pattern} (S: {self.short_window:,} positions)" if any(self.windows()) else "L"
        said = {"depth", "max_seq_len", "model_dim", "num_heads", "num_kv_heads", "window_pattern", "short_window"}
        others = [f"{name} {value}" for name, value in config_as_flags(self).items() if name not in said]
        return (f"depth {self.n_layer}, width {self.n_embd}, {self.n_head} heads of {self.head_dim} "
                f"({self.n_kv_head} for keys and values), windows {windows}, {', '.join(others)}, "
                f"vocabulary {self.vocab_size:,}")


def rotary_base_for(max_seq_len):
    """Returns the base of the rotary frequencies for a model that will see `max_seq_len` positions. It is chosen once
    for the final length: a base that changes during a run would change what the model has learnt of distances."""
    if max_seq_len <= 4096:
        return 10_000.0
    return 100_000.0 if max_seq_len <= 2**15 else 500_000.0


# -----------------------------------------------------------------------------
# The flags of base_train

# {name of a flag: its field}
CONFIG_FLAGS = {field.metadata.get("called", field.name): field for field in fields(GPTConfig) if field.metadata}


def as_flag(value):
    """Returns the value of a field as its flag has it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return value


def config_as_flags(config):
    """Returns the flags that make a GPTConfig, {name: value}."""
    flags = {name: as_flag(getattr(config, field.name)) for name, field in CONFIG_FLAGS.items()}
    flags["short_window"] = flags["short_window"] or -1  # no layer is short
    return flags


def is_given(value):
    """Returns whether a flag of the model says something: -1 and a flag that was left out leave it to the program."""
    return value not in (None, -1)


def config_from_flags(given, vocab_size):
    """Returns the GPTConfig of a new run. given: {name of a flag: its value}; for those that are not given the default
    counts. Raises BadInput."""
    values = {}
    for name, value in given.items():
        field = CONFIG_FLAGS[name]
        if is_given(value):
            values[field.name] = value == "on" if field.type is bool else value
    return GPTConfig(vocab_size=vocab_size, **values)


def require_as_saved(given, config, path):
    """Raises BadInput if a flag was given another value than the model in the checkpoint at `path` has.

    given: as in config_from_flags; config: the model's GPTConfig.
    """
    for name, saved in config_as_flags(config).items():
        if is_given(given[name]) and given[name] != saved:
            raise BadInput(f"--{name}={given[name]}, and the model in {path} has --{name}={saved}: leave the flag out, "
                           "choose another --run, or start anew with --resume=never")
