"""What follows from the flags of a run and the number of its devices: the model's shape, the batch, the horizon."""
import math
import re
from dataclasses import dataclass

import torch

from nanochat.common import BadInput
from nanochat.data.lanes import NUM_LANES
from nanochat.device import tpu
from nanochat.model import flops
from nanochat.model.gpt import GPT, GPTConfig, config_for_depth

ASSUMED_MFU = 0.3  # for the estimated time


@dataclass(frozen=True)
class Plan:
    config: GPTConfig
    world_size: int
    total_batch_size: int  # tokens; of the first step
    grad_accum_steps: int
    num_iterations: int
    flops_per_token: float
    matrix_params: int  # with the head; what the horizon is measured in
    parameters: dict  # group -> number
    batch_schedule: tuple  # ((step, tokens), …): how large the batch is from that step on; the first is step 0

    def batch_tokens(self, step):
        """Tokens of optimizer step `step`, counted from 0."""
        return next(tokens for first, tokens in reversed(self.batch_schedule) if first <= step)

    def accum_steps(self, step):
        """Micro-steps of optimizer step `step`. No step needs programs of its own: the micro-batch stays."""
        return self.batch_tokens(step) * self.grad_accum_steps // self.total_batch_size

    def batch_growth(self, step):
        """The batch of optimizer step `step` over that of the first."""
        return self.batch_tokens(step) / self.total_batch_size

    def tokens(self, begin, end):
        """Tokens of the steps from `begin` up to and without `end`."""
        ends = [first for first, _ in self.batch_schedule[1:]] + [end]
        return sum(tokens * max(0, min(last, end) - max(first, begin))
                   for (first, tokens), last in zip(self.batch_schedule, ends, strict=True))


def make_plan(args, vocab_size, world_size, meta=None):
    """Plan of base_train's flags (an argparse Namespace). Raises BadInput for what does not fit together.

    meta: of the checkpoint that the run goes on from. Where the flags about the batch are the same, its schedule stays
    as it is: on another number of devices it would be rounded differently, and the run would see other batches.
    """
    for name in ("depth", "max_seq_len", "device_batch_size", "log_every", "keep_checkpoints", "tokenizer_threads"):
        if getattr(args, name) < 1:
            raise BadInput(f"--{name}={getattr(args, name)} must be at least 1")
    config = config_for_depth(
        args.depth, vocab_size=vocab_size, max_seq_len=args.max_seq_len, window_pattern=args.window_pattern,
        softcap=args.softcap, n_embd=max(args.model_dim, 0), n_head=max(args.num_heads, 0),
        n_kv_head=max(args.num_kv_heads, 0))
    shapes = {name: p.numel() for name, p in GPT.on_meta(config).named_parameters()}
    parameters = {
        "matrices": sum(n for name, n in shapes.items() if name.startswith(("attn", "mlp"))),
        "embedding": shapes["wte"], "head": shapes["lm_head"],
        "scalars": shapes["resid_scale"] + shapes["x0_scale"],
    }
    matrix_params = parameters["matrices"] + parameters["head"]
    flops_per_token = flops.flops_per_token(config, args.max_seq_len)
    if NUM_LANES % world_size:
        raise BadInput(f"{world_size} devices do not divide the {NUM_LANES} lanes of the data: use 1, 2, 4, 8, 16, 32 "
                       f"or 64 devices")
    micro = args.device_batch_size * args.max_seq_len * world_size
    saved = _saved_schedule(args, meta)
    total = saved[0][1] if saved else args.total_batch_size
    if total == -1:
        total = micro * max(1, round(default_batch_tokens(args.target_param_data_ratio * matrix_params) / micro))
    if total < 1 or total % micro:
        nearest = sorted({max(total // micro, 1) * micro, (total // micro + 1) * micro})
        raise BadInput(f"--total_batch_size={total} tokens does not divide by {micro} = device_batch_size "
                       f"{args.device_batch_size} × max_seq_len {args.max_seq_len} × {world_size} devices: "
                       f"use {' or '.join(map(str, nearest))}")
    schedule = saved or _batch_schedule(args.batch_ramp, total, micro)
    if any(tokens % micro for _, tokens in schedule):
        raise BadInput(f"the run's batches ({', '.join(f'{tokens:,}' for _, tokens in schedule)} tokens) do not all "
                       f"divide by {micro} = device_batch_size {args.device_batch_size} × max_seq_len "
                       f"{args.max_seq_len} × {world_size} devices: use fewer devices, or a smaller "
                       "--device_batch_size")
    if args.num_iterations > 0:
        num_iterations = args.num_iterations
    elif args.target_flops > 0:
        num_iterations = _steps_to_see(args.target_flops / flops_per_token, schedule)
    else:
        num_iterations = _steps_to_see(args.target_param_data_ratio * matrix_params, schedule)
    if num_iterations < 1:
        raise BadInput("the horizon is less than one step: set --num_iterations, --target_flops or "
                       "--target_param_data_ratio")
    return Plan(config, world_size, total, total // micro, num_iterations, flops_per_token,
                matrix_params, parameters, schedule)


def _saved_schedule(args, meta):
    """The batch schedule of a checkpoint's meta, or None if there is none or the flags ask for another."""
    if not meta or not meta.batch_schedule:
        return None
    is_same = all(meta.flags.get(name) == getattr(args, name)
                  for name in ("batch_ramp", "total_batch_size", "target_param_data_ratio"))
    return meta.batch_schedule if is_same else None


def _batch_schedule(ramp, total, micro):
    """((step, tokens), …) of --batch_ramp=STEP:FACTOR,…; each factor is of `total`, rounded to whole micro-steps."""
    schedule = [(0, total)]
    for entry in filter(None, ramp.split(",")):
        match = re.fullmatch(r"(\d+):(\d+\.?\d*)", entry)
        step, factor = (int(match[1]), float(match[2])) if match else (0, 0)
        if step <= schedule[-1][0] or not factor:
            raise BadInput(f"--batch_ramp={ramp}: {entry} is not STEP:FACTOR with rising steps: give for example "
                           "2000:1.2,4000:1.5")
        schedule.append((step, max(1, round(factor * total / micro)) * micro))
    return tuple(schedule)


def _steps_to_see(tokens, schedule):
    """In how many steps a batch schedule comes nearest to `tokens` tokens."""
    ends = [first for first, _ in schedule[1:]] + [math.inf]
    for (first, batch), end in zip(schedule, ends, strict=True):
        if first + round(tokens / batch) <= end:
            return first + round(tokens / batch)
        tokens -= (end - first) * batch


def default_batch_tokens(horizon_tokens):
    """The best batch grows with horizon^0.383 (arXiv 2505.13738); anchored at 2^19 tokens for depth 16 and 20 tokens a
    parameter; a power of two."""
    return 2 ** round(19 + 0.383 * math.log2(horizon_tokens / (20 * 268.4e6)))


def describe_plan(plan, args, dist, model, tokenizer):
    """The plan as lines for a person."""
    config = plan.config
    accelerator = tpu.detect_accelerator() if dist.device_type == "tpu" else None
    micro = f"{args.device_batch_size} rows × {args.max_seq_len} × {plan.world_size} devices"
    ramp = "".join(f", {tokens:,} from step {first:,} on ({plan.accum_steps(first)} micro-steps)"
                   for first, tokens in plan.batch_schedule[1:])
    tokens = plan.tokens(0, plan.num_iterations)
    lines = {
        "devices": f"{plan.world_size} × {accelerator or dist.device_type}, kernel {model.kernels.name}, "
                   f"{str(model.compute_dtype).removeprefix('torch.')} compute",
        "model": f"depth {config.n_layer}, width {config.n_embd}, {config.n_head} heads of {config.head_dim} "
                 f"({config.n_kv_head} for keys and values), windows {config.window_pattern}, "
                 f"vocabulary {config.vocab_size:,}",
        "parameters": f"{sum(plan.parameters.values()):,} = "
                      + " + ".join(f"{n:,} {group}" for group, n in plan.parameters.items()),
        "batch": f"{plan.total_batch_size:,} tokens = {micro} × {plan.grad_accum_steps} micro-steps{ramp}",
        "horizon": f"{plan.num_iterations:,} steps, {tokens:,} tokens "
                   f"({tokens / plan.matrix_params:.1f} a matrix parameter)",
        "compute": f"{plan.flops_per_token:.3e} FLOPs a token, {plan.flops_per_token * tokens:.3e} in all",
        "tokenizer": f"{tokenizer.n_vocab:,} tokens, sha256 {tokenizer.sha256[:12]}",
    }
    peak = peak_flops(dist)
    if peak:
        hours = plan.flops_per_token * tokens / (peak * plan.world_size * ASSUMED_MFU) / 3600
        price = tpu.usd_per_hour(accelerator, spot=True) if accelerator else None
        cost = f", {hours * price:.0f} USD on spot" if price else ""
        lines["estimate"] = f"{hours:.1f} h{cost}, if {ASSUMED_MFU:.0%} of the peak is reached"
    return [f"{name:>11}  {text}" for name, text in lines.items()]


def peak_flops(dist):
    """bf16 FLOP/s of one device, or None where it is not known."""
    if dist.device_type == "tpu":
        accelerator = tpu.detect_accelerator()
        return tpu.peak_flops(accelerator) if accelerator else None
    return tpu.peak_flops(torch.cuda.get_device_name()) if dist.device_type == "cuda" else None
