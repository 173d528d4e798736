"""The architecture of a GPT, described once. The fields of GPTConfig make base_train's flags, what a checkpoint stores,
the lines that describe a run, the model card and an export. CONTRIBUTING.md says what else a new field needs. Flags
are read without torch, which takes seconds to import: a config imports its model inside new_model."""
import math
from dataclasses import dataclass, fields

from nanochat.common import BadInput, flag
from nanochat.model import rates
from nanochat.model.weights import WEIGHTS

HEAD_DIM = 128  # the TPU's matrix unit is 128 (v5e) or 256 (v6e) wide
RECOMPUTED = ("none", "all")  # what the backward pass of a layer computes again


def in_whole(size, unit):
    """Returns `size` rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit


@dataclass(frozen=True)
class GPTConfig:
    """A field made with flag() is a flag of base_train, under the name `called` if there is one; a bool is `on` or
    `off` there. __post_init__ derives the fields that are None. Raises BadInput if the fields make no model.

    A checkpoint is read for ever, so a new field says in `before` what stood for it before it existed: that need not be
    its default. A field that goes joins GONE_FIELDS (checkpoint/meta.py). models.py says what the program asks of a
    config beside its fields."""
    vocab_size: int = 65536  # of the tokenizer
    n_layer: int = flag(16, "number of layers", called="depth", at_least=1, at_most=10_000)
    max_seq_len: int = flag(1024, "positions per row; sets the base of the rotary frequencies", at_least=1,
                            at_most=2**20)
    n_embd: int = flag(None, "width of the model; default: 64 × depth, rounded up to a multiple of 128",
                       called="model_dim", at_least=1, at_most=2**16, unset=-1)
    n_head: int = flag(None, "attention heads; default: width / 128, or / --head_dim", called="num_heads",
                       at_least=1, at_most=2**10, unset=-1)
    n_kv_head: int = flag(None, "key and value heads (grouped-query attention); default: as many as --num_heads",
                          called="num_kv_heads", at_least=1, at_most=2**10, unset=-1)
    window_pattern: str = flag("SSSL", "one letter per layer, repeated: L sees all positions, S a quarter of "
                               "--max_seq_len; the last is L")
    short_window: int = None  # positions that an S layer sees, 0 if there is none; default: a quarter of max_seq_len
    key_shift: bool = flag(True, "half of each head's key channels come from the previous position",
                           before=False)
    softcap: float = flag(15.0, "bound of the logits; 0: none", at_least=1, at_most=1e4, unset=0)
    layer_gates: bool = flag(True, "learned, token-dependent gates scale values and what attention and MLP add",
                             before=False)
    value_embeddings: str = flag("shared", "learned per-token vectors that every second layer adds to attention's "
                                 "values: shared or off", before="off", choices=("off", "shared"))
    rotary_base: float = None  # see rotary_base_for

    arch = "gpt"
    kept = ()  # fields that are no flags and follow from no flag
    weights = WEIGHTS
    has_layer_by_hand = True
    has_begun_rate = False
    # Whose learning rates describe_plan prints
    rates_of = {"matrices": "attn_q", "embedding": "wte", "head": "lm_head", "value table": "value_table",
                "scales of the embedding": "x0_scale"}

    def __post_init__(self):
        set_default(self, "n_embd", in_whole(64 * self.n_layer, HEAD_DIM))
        set_default(self, "n_head", max(self.n_embd // HEAD_DIM, 1))
        set_default(self, "n_kv_head", self.n_head)
        set_default(self, "rotary_base", rotary_base_for(self.max_seq_len))
        self._check()
        quarter = 0
        if "S" in self.window_pattern:
            quarter = in_whole(self.max_seq_len, 4 * 128) // 4  # in whole tiles of TPUs (karpathy/nanochat)
        set_default(self, "short_window", quarter)

    def _check(self):
        require_limits(self)
        if self.n_embd % self.n_head or (self.n_embd // self.n_head) % 2:
            raise BadInput(f"--model_dim={self.n_embd} does not divide into --num_heads={self.n_head} heads of an even "
                           "size: change one of them")
        require_heads(self)
        if not self.window_pattern or set(self.window_pattern) - set("SL"):
            raise BadInput(f"--window_pattern={self.window_pattern} is unknown: use letters S (short) and L (long), "
                           "for example SSSL")
        if self.value_embeddings not in ("off", "shared"):
            raise BadInput(f"--value_embeddings={self.value_embeddings} is unknown: use off or shared")

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def mlp_dim(self):
        return 4 * self.n_embd

    def new_model(self, *args, **options):
        from nanochat.model.gpt import GPT
        return GPT(self, *args, **options)

    def rules(self, optimizer, total_batch_size, num_iterations, matrix_dtype, earlier_steps, rate_horizon):
        return rates.gpt_rules(optimizer, total_batch_size, num_iterations, self.n_embd, matrix_dtype, earlier_steps,
                               rate_horizon)

    def require_flags(self, flags):
        """Refuses none: a GPT has all flags but those that config_from_flags refuses."""

    @property
    def context(self):
        return self.max_seq_len

    def with_rows(self, max_seq_len):
        """Returns the same config: its rotary frequencies belong to its row length."""
        return self

    @property
    def has_values(self):
        return self.value_embeddings != "off"

    def adds_values(self):
        """Returns whether each layer adds value embeddings. Every second layer does, the last one always
        (karpathy/nanochat's measurements; the idea is from arXiv 2410.17897)."""
        return [self.has_values and (self.n_layer - layer) % 2 == 1 for layer in range(self.n_layer)]

    def windows(self):
        """Returns the attention window of each layer, in positions; None: unlimited, as always in the last layer."""
        windows = [None] * self.n_layer
        if self.short_window < self.max_seq_len:
            for layer in range(self.n_layer - 1):
                if self.window_pattern[layer % len(self.window_pattern)] == "S":
                    windows[layer] = self.short_window
        return windows


def flag_name(field):
    """Returns the name of the flag of a config's field."""
    return field.metadata.get("called", field.name)


def set_default(config, name, value):
    """Gives the field `name` of a config this value if it has none."""
    if getattr(config, name) is None:
        object.__setattr__(config, name, value)


def require_limits(config):
    """Raises BadInput if a field of a config is beyond the most that its flag takes."""
    for field in fields(config):
        size = getattr(config, field.name)
        most = field.metadata["limits"][2] if field.metadata else math.inf
        if isinstance(size, (int, float)) and size > most:
            raise BadInput(f"--{flag_name(field)}={size:g} is more than {most:g}: give a smaller one")


def require_heads(config):
    """Raises BadInput if a config's key heads do not divide its heads."""
    if config.n_kv_head < 1 or config.n_head % config.n_kv_head:
        raise BadInput(f"--num_kv_heads={config.n_kv_head} does not divide --num_heads={config.n_head}: change one of "
                       "them")


def rotary_base_for(max_seq_len):
    """Returns the base of the rotary frequencies for a model of `max_seq_len` positions. It is chosen once for the
    final length: a base that changed during a run would change what the model learned about distances."""
    if max_seq_len <= 4096:
        return 10_000.0
    return 100_000.0 if max_seq_len <= 2**15 else 500_000.0
