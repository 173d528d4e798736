"""The Llama family: Llama, SmolLM2, Qwen2, Qwen2.5-Coder and Qwen3, trained from nothing or from the weights of others
(scripts/import_hf.py). RMSNorm with weights, rotary positions, grouped-query attention, SwiGLU; for Qwen2 biases of
queries, keys and values, for Qwen3 QK-norm; the head may be the embedding. llama_layer.py has its layer."""
from dataclasses import dataclass, field, fields, replace

from nanochat.common import BadInput, flag
from nanochat.model.config import GPTConfig, in_whole, require_heads, require_limits, set_default
from nanochat.model.rates import AdamW, OptimConfig, Rules
from nanochat.model.weights import Initial, Rate, Weight

CONTEXT = 2048  # positions that are used of a model with more, unless rows of training are longer
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1  # of matrices and tables, times the learning rate, in each step
FRESH_LR = 6e-4  # of a model that begins from nothing
# Of one that begins with trained weights: the best of 1e-5, 3e-5 and 1e-4 for SmolLM2-135M (dev/DECISIONS.md). For 7B,
# Qwen's makers name 3e-5 as the most (QwenLM/Qwen#784).
BEGUN_LR = 1e-4

RANDOM = Initial(normal=0.02)  # as transformers begins
ONES = Initial.at(1.0)
_ADAM = Rate("")  # one rate for all, see LlamaConfig.rules
WEIGHTS = (
    Weight("wte", "V C", "embedding", RANDOM, rate=_ADAM),
    Weight("attn_norm", "L C", "vectors", ONES, rate=_ADAM, divides="nothing"),
    Weight("attn_q", "L C_q C", "matrices", RANDOM, rate=_ADAM),
    Weight("attn_k", "L C_kv C", "matrices", RANDOM, rate=_ADAM),
    Weight("attn_v", "L C_kv C", "matrices", RANDOM, rate=_ADAM),
    Weight("q_bias", "L C_q", "vectors", rate=_ADAM, divides="nothing", only_with="qkv_bias"),
    Weight("k_bias", "L C_kv", "vectors", rate=_ADAM, divides="nothing", only_with="qkv_bias"),
    Weight("v_bias", "L C_kv", "vectors", rate=_ADAM, divides="nothing", only_with="qkv_bias"),
    Weight("q_norm", "L D", "vectors", ONES, rate=_ADAM, divides="nothing", only_with="qk_norm"),
    Weight("k_norm", "L D", "vectors", ONES, rate=_ADAM, divides="nothing", only_with="qk_norm"),
    Weight("attn_o", "L C C_q", "matrices", RANDOM, rate=_ADAM, divides="inputs"),
    Weight("mlp_norm", "L C", "vectors", ONES, rate=_ADAM, divides="nothing"),
    Weight("mlp_gate", "L M C", "matrices", RANDOM, rate=_ADAM),
    Weight("mlp_in", "L M C", "matrices", RANDOM, rate=_ADAM),
    Weight("mlp_out", "L C M", "matrices", RANDOM, rate=_ADAM, divides="inputs"),
    Weight("out_norm", "C", "vectors", ONES, rate=_ADAM, divides="nothing"),
    Weight("lm_head", "V C", "head", RANDOM, rate=_ADAM, only_with="has_own_head"),
)


def _as_in_gpt(name):
    """Returns a field whose flag is that of the GPTConfig's field `name`."""
    theirs = next(each for each in fields(GPTConfig) if each.name == name)
    return field(default=theirs.default, metadata=theirs.metadata)


@dataclass(frozen=True)
class LlamaConfig:
    """As GPTConfig. Fields without flag() come with imported weights. Rows of attn_q and attn_k are in transformers'
    order: rotary turns the channels i and i + head_dim / 2 of a head together."""
    arch: str = "llama"
    vocab_size: int = 65536  # rows of the embedding: at least as many as the tokenizer has tokens
    n_layer: int = _as_in_gpt("n_layer")
    max_seq_len: int = _as_in_gpt("max_seq_len")
    n_embd: int = _as_in_gpt("n_embd")
    n_head: int = _as_in_gpt("n_head")
    n_kv_head: int = _as_in_gpt("n_kv_head")
    head_dim: int = flag(64, "size of an attention head, with --arch=llama", at_least=2, at_most=2**10, unset=-1)
    mlp_dim: int = flag(None, "hidden units of the MLP, with --arch=llama; default: 8/3 × width, in whole 128",
                        at_least=1, at_most=2**18, unset=-1)
    tied_head: bool = flag(True, "the head is the embedding, with --arch=llama")
    max_positions: int = None  # that the model has, at least max_seq_len; default: the same
    rope_theta: float = 10_000.0  # base of the rotary frequencies
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False

    kept = ("vocab_size", "max_positions", "rope_theta", "norm_eps", "qkv_bias", "qk_norm")
    weights = WEIGHTS
    has_layer_by_hand = False
    has_begun_rate = True
    rates_of = {"all weights": "wte"}
    # What a GPT may have
    softcap = 0.0
    key_shift = False
    has_values = False

    def __post_init__(self):
        set_default(self, "n_embd", in_whole(64 * self.n_layer, 128))
        set_default(self, "n_head", max(self.n_embd // self.head_dim, 1))
        set_default(self, "n_kv_head", self.n_head)
        set_default(self, "mlp_dim", in_whole(self.n_embd * 8 // 3, 128))
        set_default(self, "max_positions", self.max_seq_len)
        require_limits(self)
        require_heads(self)
        if self.head_dim % 2:
            raise BadInput(f"--head_dim={self.head_dim}: rotary turns pairs of channels, so give an even one")
        if self.max_seq_len > self.max_positions:
            raise BadInput(f"--max_seq_len={self.max_seq_len} is more than the {self.max_positions} positions that the "
                           "model has: give at most that")

    @property
    def has_own_head(self):
        return not self.tied_head

    def new_model(self, *args, **options):
        from nanochat.model.llama_layer import Llama
        return Llama(self, *args, **options)

    @property
    def context(self):
        return max(self.max_seq_len, min(self.max_positions, CONTEXT))

    def windows(self):
        return [None] * self.n_layer

    def adds_values(self):
        return [False] * self.n_layer

    def rules(self, optimizer, total_batch_size, num_iterations, matrix_dtype, earlier_steps, rate_horizon):
        """Returns the Rules: AdamW with one rate, whatever the width, the batch and the length of the run.
        rate_horizon: 0 if the run began with trained weights (StartFlags)."""
        lr = optimizer.lr_scale * (FRESH_LR if rate_horizon else BEGUN_LR)
        adam = {weight.name: AdamW(lr, WEIGHT_DECAY if weight.is_divided else 0.0) for weight in WEIGHTS}
        return Rules(adam, lr, 0.0, optimizer, num_iterations, BETAS, earlier_steps=earlier_steps,
                     clip_norm=optimizer.clip_norm)

    def require_flags(self, flags):
        """Raises BadInput for flags, train.flags.Flags, that this family does not have."""
        refused = {"products": "bfloat16", "seq_len_ramp": ""}
        kept = ("lr_scale", "clip_norm", "warmup_steps", "warmdown_ratio", "final_lr_frac")
        for each in fields(OptimConfig):
            if each.name not in kept:
                refused[each.name] = each.default
        given = flags.as_dict()
        for name, default in refused.items():
            if given[name] != default:
                instead = ", --lr_scale multiplies its learning rate" if hasattr(flags.optimizer, name) else ""
                raise BadInput(f"--{name}={given[name]} is not for --arch=llama: leave it out{instead}")

    def with_rows(self, max_seq_len):
        return replace(self, max_seq_len=max_seq_len)
