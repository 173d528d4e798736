"""The plan of a run as lines for a person, and how long it would take on a CPU."""
import time

import torch

from nanochat.common import BadInput, say
from nanochat.device import tpu
from nanochat.kernels.choose import get_kernels
from nanochat.model.models import describe
from nanochat.model.rates import lr_stages
from nanochat.model.weights import matrix_parameters, shapes
from nanochat.record.metrics import format_duration

SHORT_FLOPS = 1e14  # a CPU is done with a shorter run in minutes
DAY_S = 86400
FIRST_TRY = "--num_iterations=100 --max_seq_len=256 --device_batch_size=4 --total_batch_size=4096"


def describe_plan(plan, tokenizer):
    """Returns the plan as lines for a person."""
    accelerator = tpu.detect_accelerator() if plan.device_type == "tpu" else None
    tokens = plan.tokens(0, plan.num_iterations)
    divisor = matrix_parameters(plan.parameters)
    parameters = " + ".join(f"{number:,} {group}" for group, number in plan.parameters.items())
    dtype = str(plan.dtype).removeprefix("torch.")
    products = ", int8 products" if plan.products == "int8" else ""
    when = " in the end" if plan.switches else ""  # longer rows have more attention
    lines = {
        "devices": f"{plan.world_size} × {accelerator or plan.device_type}, kernel {plan.kernel}, {dtype} compute"
                   f"{products}",
        "model": describe(plan.config),
        "parameters": f"{sum(plan.parameters.values()):,} = {parameters}",
        "batch": f"{plan.total_batch_size:,} tokens = {plan.device_batch_size} rows × {plan.config.max_seq_len} × "
                 f"{plan.mesh.readers} {plan.mesh.devices_of_readers} × {plan.micro_steps} micro-steps",
        "horizon": f"{plan.num_iterations:,} steps, {tokens:,} tokens, {tokens / divisor:.1f} for each of the "
                   f"{divisor:,} parameters of matrices and head",
        "rates": _describe_rates(plan),
        "compute": f"{plan.flops_per_token:.3e} FLOPs per token{when}, {plan.flops(0, plan.num_iterations):.3e} in all",
        "tokenizer": f"{tokenizer.n_vocab:,} tokens, sha256 {tokenizer.sha256[:12]}",
    }
    if tokenizer.losses:
        lines["tokenizer"] += f"; some texts do not come back exactly: {tokenizer.losses}"
    if plan.switches:
        lines["rows"] = _describe_rows(plan)
    if plan.mesh.divides_weights:
        mesh = plan.mesh
        lines["mesh"] = (f"{mesh}, chip r at (r // {mesh.fsdp * mesh.tensor}, r // {mesh.tensor} % {mesh.fsdp}, "
                         f"r % {mesh.tensor})")
    return [f"{name:>11}  {text}" for name, text in lines.items()]


def _describe_rows(plan):
    texts = []
    for first, length in plan.length_schedule:
        since = f"from step {first:,} on" if first else "per micro-step and device"
        texts.append(f"{plan.rows(first)} × {length:,} {since}")
    return ", ".join(texts)


def _describe_rates(plan):
    """Returns the learning rates, and when they rise and fall."""
    warmup, fall = lr_stages(plan.num_iterations, plan.optimizer)
    rules = plan.rules
    rates = []
    for what, name in plan.config.rates_of.items():
        if name in shapes(plan.config):
            rates.append(f"{what} {rules.adam[name].lr if name in rules.adam else rules.matrix_lr:.3g}")
    return (f"rise for {warmup:,} steps, fall after step {max(warmup, fall):,} to {plan.optimizer.final_lr_frac:g}; at "
            f"lr 1.000: {', '.join(rates)}")


def require_time(plan, num_iterations):
    """Says how long a long run takes on this CPU. Raises BadInput if it is over a day and nobody asked for it."""
    if plan.device_type not in ("cpu", "xla") or plan.flops(0, plan.num_iterations) < SHORT_FLOPS:
        return
    seconds = seconds_of_row(plan.config) * plan.tokens(0, plan.num_iterations) / plan.config.max_seq_len
    text = f"about {format_duration(seconds)}"
    if seconds > 2 * DAY_S:
        text = f"about {seconds / DAY_S:,.0f} days"
    if seconds > DAY_S and num_iterations == -1:
        raise BadInput(f"{plan.num_iterations:,} steps take {text} on this CPU: for a first try add {FIRST_TRY}, or "
                       f"give --num_iterations={plan.num_iterations} for all of them")
    say(f"{plan.num_iterations:,} steps take {text} on this CPU; for a first try add {FIRST_TRY}")


def seconds_of_row(config, compute_dtype=torch.float32):
    """Returns the seconds of the forward and the backward pass of one row on this CPU."""
    model = config.new_model(get_kernels("current", "cpu"), compute_dtype)
    model.init_weights()
    ids = torch.zeros((1, config.max_seq_len), dtype=torch.int64)
    begun = time.monotonic()
    model(ids, ids, reduction="mean").backward()
    return time.monotonic() - begun
