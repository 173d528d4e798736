"""Learning rates: how high, for which parameter, and their schedule. A plan (train/plan.py) asks the model's config for
its Rules, which the optimizer (optim.py) follows."""
import math
from dataclasses import dataclass

from nanochat.common import flag
from nanochat.model.weights import WEIGHTS

ADAM_BETAS = (0.8, 0.95)
ADAM_EPS = 1e-10
REFERENCE_WIDTH = 768  # the width at which the learning rates of AdamW were tuned
REFERENCE_BATCH_TOKENS = 2**19  # the batch at which all learning rates were tuned
WARMUP_STEPS = 40
REFERENCE_RUN_TOKENS = 2**32  # longer runs use the tuned rates, too
SHORTEST_RUN_TOKENS = 2**18  # shorter runs use its rates


@dataclass(frozen=True)
class OptimConfig:
    """Each field is a flag of base_train. Learning rates are for a batch of 2^19 tokens in a run of 2^32 tokens or more
    (see batch_lr_scale and run_lr_scale)."""
    matrix_lr: float = flag(0.02, "Muon's learning rate, for the matrices of the layers", at_least=0)
    embedding_lr: float = flag(0.3, "AdamW's learning rate for the embedding, at width 768", at_least=0)
    unembedding_lr: float = flag(0.004, "AdamW's learning rate for the head, at width 768", at_least=0)
    scalar_lr: float = flag(0.05, "AdamW's learning rate for the layers' embedding scales; the residual stream's "
                            "scales get a hundredth", at_least=0)
    lr_scale: float = flag(1.0, "multiplies all learning rates", above=0)
    weight_decay: float = flag(4.0, "over the run, matrices shrink by exp(-weight_decay) at most", at_least=0)
    clip_norm: float = flag(-1.0, "scale the gradients down to this norm of all together; -1: never; "
                            "docs/training.md#learning-rates", above=0, unset=-1)
    warmup_steps: int = flag(-1, f"steps in which learning rates rise; -1: {WARMUP_STEPS}, at most a fifth of the run",
                             at_least=0, unset=-1)
    warmdown_ratio: float = flag(0.5, "fraction of the run in which learning rates fall", at_least=0, at_most=1)
    final_lr_frac: float = flag(0.05, "fraction of the learning rates that remains at the end", at_least=0, at_most=1)


# Schedules. Steps count from 0.


#     1.0      ______________
#             /              \___
#     step   0  warmup     fall  num_iterations, where final_lr_frac is left
def lr_multiplier(step, num_iterations, config):
    """Returns the factor of all learning rates, 0 to 1: warm-up, flat, then linear down to `final_lr_frac` (the
    trapezoid of arXiv 2405.18392)."""
    step = min(step, num_iterations)
    warmup, fall = lr_stages(num_iterations, config)
    if step < warmup:
        return (step + 1) / warmup
    if step <= fall:
        return 1.0
    progress = (num_iterations - step) / (num_iterations - fall)
    return progress + (1 - progress) * config.final_lr_frac


def lr_stages(num_iterations, config):
    """Returns the number of steps in which the learning rates rise, and the step after which they fall."""
    warmup = config.warmup_steps
    if warmup < 0:
        warmup = min(WARMUP_STEPS, max(num_iterations // 5, 1))
    return min(warmup, num_iterations), num_iterations - round(config.warmdown_ratio * num_iterations)


def muon_momentum(step):
    """0.85 rising to 0.95 over the first 300 steps: early gradients become stale sooner (modded-nanogpt)."""
    return 0.85 + 0.10 * min(step / 300, 1)


def batch_lr_scale(total_batch_size):
    """Learning rates scale with the square root of the batch (arXiv 2006.08517), relative to 2^19 tokens."""
    return math.sqrt(total_batch_size / REFERENCE_BATCH_TOKENS)


def run_lr_scale(run_tokens):
    """Shorter runs need higher learning rates: (2^32 / tokens)^0.32, from 22.3 at 2^18 tokens to 1 at 2^32 (form and
    exponent of arXiv 2409.19913; dev/log compares it with the best rates)."""
    tokens = min(max(run_tokens, SHORTEST_RUN_TOKENS), REFERENCE_RUN_TOKENS)
    return (REFERENCE_RUN_TOKENS / tokens) ** 0.32


def width_lr_scale(width):
    """AdamW's learning rates scale with (width / 768)^-0.5 (karpathy/nanochat)."""
    return (width / REFERENCE_WIDTH) ** -0.5


def decay_rate(weight_decay, matrix_lr, num_steps):
    """Returns AdamW's and Muon's weight decay that multiplies weights by exp(-weight_decay) in `num_steps` steps at the
    learning rate `matrix_lr`. Weights then forget gradients older than 1 / weight_decay of the run, for every batch,
    width and length (arXiv 2405.13698; dev/log). 0 if the learning rate is 0, or too small for fp32."""
    if matrix_lr <= 1e-30:
        return 0.0
    # A step multiplies weights by 1 - matrix_lr × rate, and all steps by exp(-weight_decay). expm1 keeps the digits of
    # a rate that is much smaller than 1.
    return -math.expm1(-weight_decay / num_steps) / matrix_lr


@dataclass(frozen=True)
class AdamW:
    """How one parameter is updated by AdamW (arXiv 1711.05101)."""
    lr: float
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Rules:
    """How each parameter is updated, and the schedule."""
    adam: dict  # name of a parameter -> AdamW; Muon updates the others, stacks of matrices (L, m, n)
    matrix_lr: float
    matrix_weight_decay: float
    schedule: OptimConfig  # or another object with its warmup_steps, warmdown_ratio and final_lr_frac
    num_iterations: int
    betas: tuple = ADAM_BETAS
    average_decay: float = 0.0  # of a running average of the weights; 0: none
    matrix_dtype: object = None  # the torch.dtype in which Muon orthogonalises; None: float32
    earlier_steps: int = 0  # of the optimizer's state, before the first step of the run
    clip_norm: float = -1.0  # of all gradients together; -1: none

    def lr_multiplier(self, step):
        """Returns the factor of all learning rates at `step`."""
        return lr_multiplier(step, self.num_iterations, self.schedule)


def gpt_rules(config, total_batch_size, num_iterations, width, matrix_dtype=None, earlier_steps=0,
              rate_horizon=-1):
    """Returns a GPT's Rules. config: OptimConfig; total_batch_size: tokens of a step; rate_horizon: in steps; 0: no
    scaling by length; -1: the run's steps."""
    horizon = rate_horizon if rate_horizon > 0 else num_iterations
    scale = config.lr_scale * batch_lr_scale(total_batch_size)
    if rate_horizon:
        scale *= run_lr_scale(total_batch_size * horizon)
    matrix_lr = config.matrix_lr * scale
    adam = {}
    for weight in WEIGHTS:
        rate = weight.rate
        if rate is None:
            continue
        base = 1.0
        if rate.flag:
            base = getattr(config, rate.flag)
        scale_here = scale
        if rate.by_width:
            scale_here = scale * width_lr_scale(width)
        adam[weight.name] = AdamW(base * rate.factor * scale_here)
    decay = decay_rate(config.weight_decay, matrix_lr, horizon)
    return Rules(adam, matrix_lr, decay, config, num_iterations, matrix_dtype=matrix_dtype, earlier_steps=earlier_steps,
                 clip_norm=config.clip_norm)
