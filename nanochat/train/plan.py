"""The plan of a run: all that follows from its flags and the number of its devices, before anything is started."""
import math
import os
from dataclasses import asdict, dataclass, replace

import torch

from nanochat.common import BadInput
from nanochat.data.loader import divisors_near
from nanochat.device import tpu
from nanochat.device.mesh import Mesh
from nanochat.kernels.choose import get_kernels
from nanochat.kernels.flash_shapes import require_shapes
from nanochat.kernels.sharded import Sharding
from nanochat.model import flops
from nanochat.model.config import GPTConfig, config_from_flags
from nanochat.model.rates import OptimConfig, gpt_rules, lr_stages
from nanochat.model.weights import count_parameters
from nanochat.train.flags import MAX_STEPS
from nanochat.train.mesh_plan import describe_mesh, plan_mesh
from nanochat.train.stages import batch_schedule, length_schedule, spans, value_at

ASSUMED_MFU = 0.3  # for the estimated time
MAX_DEVICE_BYTES = 512 << 30  # more than any TPU or GPU has


@dataclass(frozen=True)
class Plan:
    config: GPTConfig
    kernel: str  # see kernels/choose.py
    dtype: torch.dtype  # of activations and products
    activation_checkpointing: str
    use_compile: bool  # torch.compile
    optimizer: OptimConfig
    shard_optimizer: bool  # each rank keeps and updates a part of the optimizer's state
    gradient_sums: torch.dtype  # in which gradients travel when the ranks sum them
    device_type: str
    world_size: int
    mesh: Mesh
    device_batch_size: int  # rows of max_seq_len in a micro-step on one device, or one group of them along tensor
    total_batch_size: int  # tokens of the first optimizer step
    grad_accum_steps: int  # micro-steps of the first optimizer step
    num_iterations: int
    flops_per_token: float  # in rows of max_seq_len
    matrix_params: int  # with the head; the unit of the horizon
    parameters: dict  # group -> number
    batch_schedule: tuple  # ((step, tokens), …): the size of the batch from that step on; the first step is 0
    length_schedule: tuple  # ((step, positions), …) of a row from that step on; the last is max_seq_len
    unit = "tokens"  # in which work is counted, see Task

    def batch_tokens(self, step):
        """Tokens of optimizer step `step`, counted from 0."""
        return value_at(self.batch_schedule, step)

    def micro_steps(self, step):
        """Micro-steps of optimizer step `step`. A micro-batch always has as many tokens."""
        return self.batch_tokens(step) * self.grad_accum_steps // self.total_batch_size

    @property
    def all_micro_steps(self):
        """The numbers of micro-steps that a step of the run can have."""
        return {self.micro_steps(step) for step, _ in self.batch_schedule}

    def batch_growth(self, step):
        """The batch of optimizer step `step` over that of the first."""
        return self.batch_tokens(step) / self.total_batch_size

    def tokens(self, begin, end):
        """Tokens of the steps from `begin` up to and without `end`."""
        return sum(tokens * (last - first) for first, last, tokens in spans(self.batch_schedule, begin, end))

    units = tokens

    def flops(self, begin, end):
        """Useful FLOPs of the same steps."""
        return sum(flops.flops_per_token(self.config, length) * self.tokens(first, last)
                   for first, last, length in spans(self.length_schedule, begin, end))

    def seq_len(self, step):
        """Positions of a row in optimizer step `step`."""
        return value_at(self.length_schedule, step)

    def rows(self, step):
        """Rows in a micro-step of optimizer step `step` on one device."""
        return self.device_batch_size * self.config.max_seq_len // self.seq_len(step)

    @property
    def switches(self):
        """The steps with which rows become longer."""
        return tuple(first for first, _ in self.length_schedule[1:])

    def micro_step_name(self, step):
        """The name of the program that is the micro-step of optimizer step `step`: there is one for each length."""
        return f"micro_step {self.seq_len(step)}" if self.switches else "micro_step"

    @property
    def stages(self):
        """((first step, step after the last, name of the micro-step), …) of the whole run."""
        return tuple((first, last, self.micro_step_name(first))
                     for first, last, _ in spans(self.length_schedule, 0, self.num_iterations))

    @property
    def flops_per_unit(self):
        return self.flops_per_token


def make_plan(flags, vocab_size, device_type, world_size, meta=None):
    """Returns the Plan for base_train's Flags. Raises BadInput for flags that do not fit together.

    device_type: as resolve_device_type returns it. meta: the Meta of the checkpoint to resume from, whose model the run
    keeps. If the flags about the batch have not changed, the batch schedule is the checkpoint's, too: another number of
    devices would round it differently, and the run would see other batches.
    """
    batch, devices = flags.batch, flags.devices
    config = GPTConfig(**meta.config) if meta else config_from_flags(asdict(flags.model), vocab_size)
    shard_optimizer = plan_sharding(devices, device_type)
    # In the order in which one follows from the other: the mesh divides the weights, the kernels must suit the mesh,
    # the lengths of rows suit the kernels, batches are whole micro-steps of the mesh, and the horizon counts batches.
    parameters = count_parameters(config)
    _require_memory(parameters, config, batch, device_type)
    mesh = plan_mesh(flags, config, parameters, device_type, world_size)
    kernel = plan_kernel(devices, config, device_type, mesh)
    lengths = _plan_lengths(flags, config, kernel, device_type)
    matrix_params = parameters["matrices"] + parameters["head"]
    schedule = plan_batches(batch, config.max_seq_len, mesh, matrix_params, flags.data.num_lanes, meta)
    total = schedule[0][1]
    dtype = devices.compute_dtype
    if dtype == "auto":
        dtype = "bfloat16" if device_type in ("tpu", "cuda") else "float32"
    return Plan(
        config=config,
        kernel=kernel,
        dtype=getattr(torch, dtype),
        activation_checkpointing=devices.activation_checkpointing,
        use_compile=device_type == "cuda" and not devices.no_compile,
        optimizer=flags.optimizer,
        shard_optimizer=shard_optimizer,
        gradient_sums=getattr(torch, devices.gradient_sums),
        device_type=device_type,
        world_size=world_size,
        mesh=mesh,
        device_batch_size=batch.device_batch_size,
        total_batch_size=total,
        grad_accum_steps=total // (batch.device_batch_size * config.max_seq_len * mesh.readers),
        num_iterations=plan_horizon(batch, config, matrix_params, schedule, lengths),
        flops_per_token=flops.flops_per_token(config, config.max_seq_len),
        matrix_params=matrix_params,
        parameters=parameters,
        batch_schedule=schedule,
        length_schedule=lengths)


def plan_sharding(devices, device_type):
    """Returns whether each rank keeps a part of the optimizer's state, for DeviceFlags. Raises BadInput."""
    is_xla = device_type in ("tpu", "xla")
    if devices.shard_optimizer == "on" and not is_xla:
        raise BadInput(f"--shard_optimizer=on, but this runs on {device_type}: it is for XLA devices, use auto")
    is_sharded = is_xla and devices.shard_optimizer != "off"
    if devices.gradient_sums == "bfloat16" and not is_sharded:
        where = "with --shard_optimizer=off" if is_xla else f"on {device_type}"
        raise BadInput(f"--gradient_sums=bfloat16, but {where} gradients are summed in fp32: leave it out")
    return is_sharded


def plan_kernel(devices, config, device_type, mesh):
    """Returns the name of the kernels, for DeviceFlags. Raises BadInput if they cannot run this model here."""
    kernels = get_kernels(devices.kernel, device_type, Sharding.of_mesh(mesh))
    if devices.activation_checkpointing == "qkv" and not kernels.run_layers:
        raise BadInput(f"--activation_checkpointing=qkv needs layers that run as a loop on XLA, and "
                       f"--kernel={kernels.name} has none here (device type {device_type}): give all, or "
                       "--kernel=flash or chunked on tpu or xla")
    require_shapes(kernels.name, config, device_type)
    return kernels.name


def plan_horizon(batch, config, matrix_params, schedule, lengths):
    """Returns the number of optimizer steps, for BatchFlags. Raises BadInput if it is none that a run can have, or if
    the run ends before its rows have their full length."""
    if batch.num_iterations > 0:
        num_iterations = batch.num_iterations
    elif batch.target_flops > 0:
        num_iterations = _steps_to_spend(batch.target_flops, config, schedule, lengths)
    else:
        num_iterations = _steps_to_see(batch.target_param_data_ratio * matrix_params, schedule)
    if not 1 <= num_iterations <= MAX_STEPS:
        name = "target_flops" if batch.target_flops > 0 else "target_param_data_ratio"
        raise BadInput(f"--{name}={getattr(batch, name):g} is a horizon of {num_iterations:.3g} steps, which is not "
                       f"between 1 and {MAX_STEPS:,}: change it, or set --num_iterations")
    if lengths[-1][0] >= num_iterations:
        raise BadInput(f"--seq_len_ramp={batch.seq_len_ramp}: the run ends after step {num_iterations}, before it "
                       f"comes to rows of {lengths[-1][1]}: let them begin earlier, or train for longer")
    return num_iterations


def _plan_lengths(flags, config, kernel, device_type):
    """Returns the length schedule of base_train's Flags. Raises BadInput if it fits neither the kernel nor the other
    flags."""
    ramp, taught = flags.batch.seq_len_ramp, flags.distillation
    schedule = length_schedule(ramp, config.max_seq_len)
    if len(schedule) == 1:
        return schedule
    if flags.data.fim_rate:
        raise BadInput(f"--seq_len_ramp={ramp} with --fim_rate={flags.data.fim_rate:g}: fill in the middle divides "
                       "documents by the length of a row, so rows cannot become longer: leave one of them out")
    if taught.teacher and taught.kd_until < 1:
        raise BadInput(f"--seq_len_ramp={ramp} with --kd_until={taught.kd_until:g}: every length would need another "
                       "program once the teacher has gone: use --kd_until=1, or leave one of them out")
    for _, length in schedule:
        try:
            require_shapes(kernel, replace(config, max_seq_len=length), device_type)
        except BadInput as error:
            raise BadInput(f"--seq_len_ramp={ramp}: {error}") from None
    return schedule


def _require_memory(parameters, config, batch, device_type):
    """Raises BadInput for a model that cannot be held in a device's memory, before it is made. This is a lower bound:
    of each parameter a device holds the weight in bf16 and the sum of its gradients in fp32, and of each layer its
    input in bf16 for the backward pass."""
    inputs = 2 * config.n_layer * config.n_embd * batch.device_batch_size * config.max_seq_len
    total = sum(parameters.values())
    if device_type in ("tpu", "cuda"):
        available, whose = MAX_DEVICE_BYTES, "no device has more than"
    else:
        available, whose = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this machine has"
    if 6 * total + inputs > available:
        raise BadInput(
            f"--depth={config.n_layer} with --model_dim={config.n_embd} is a model of {total:.3g} parameters, which "
            f"needs at least {6 * total / tpu.GIB:,.1f} GiB on a device, and {inputs / tpu.GIB:,.1f} GiB more for "
            f"--device_batch_size={batch.device_batch_size} and --max_seq_len={config.max_seq_len}; {whose} "
            f"{available / tpu.GIB:,.0f} GiB: use smaller ones")


def plan_batches(batch, seq_len, mesh, matrix_params, num_lanes, meta=None):
    """Returns the batch schedule ((step, tokens), …) for BatchFlags. Raises BadInput if it does not divide evenly."""
    readers, devices = mesh.readers, mesh.devices_of_readers
    if num_lanes % readers:
        raise BadInput(f"{readers} {devices} do not divide the --num_lanes={num_lanes} of the data: use "
                       f"{divisors_near(num_lanes, readers)} {devices} (on a CPU, by CPU_NUM_DEVICES), or for a new "
                       f"run --num_lanes={math.lcm(num_lanes, readers)}")
    micro = batch.device_batch_size * seq_len * readers
    product = f"{micro} = device_batch_size {batch.device_batch_size} × max_seq_len {seq_len} × {readers} {devices}"
    # A batch that was rounded for other devices stays as it is, to the token: otherwise a run that resumes on them
    # would see other batches. If these devices cannot divide it, the run is refused below.
    saved = _saved_schedule(batch, meta)
    total = saved[0][1] if saved else batch.total_batch_size
    if total == -1:
        total = micro * max(1, round(default_batch_tokens(batch.target_param_data_ratio * matrix_params) / micro))
    if total < 1 or total % micro:
        nearest = sorted({max(total // micro, 1) * micro, (total // micro + 1) * micro})
        raise BadInput(f"--total_batch_size={total} tokens does not divide by {product}: "
                       f"use {' or '.join(map(str, nearest))}")
    schedule = saved or batch_schedule(batch.batch_ramp, total, micro)
    if any(tokens % micro for _, tokens in schedule):
        raise BadInput(f"the run's batches ({', '.join(f'{tokens:,}' for _, tokens in schedule)} tokens) do not all "
                       f"divide by {product}: use fewer devices, or a smaller --device_batch_size")
    return schedule


def _saved_schedule(batch, meta):
    """Returns the batch schedule of a checkpoint's Meta, or None if there is none or the flags ask for another."""
    if not meta or not meta.batch_schedule:
        return None
    is_same = all(meta.flags.get(name) == getattr(batch, name)
                  for name in ("batch_ramp", "total_batch_size", "target_param_data_ratio"))
    return meta.batch_schedule if is_same else None


def _steps_to_spend(target_flops, config, batches, lengths):
    """Returns the number of steps after which the run comes nearest to `target_flops`."""
    # A token costs less in a shorter row, where it sees fewer others. So each counts as the fraction of a token in a
    # full row that its FLOPs are, and the search for so many tokens finds the step for FLOPs, too. The pieces of this
    # schedule end where batch or length changes.
    whole = flops.flops_per_token(config, config.max_seq_len)
    firsts = sorted({first for first, _ in (*batches, *lengths)})
    return _steps_to_see(target_flops / whole, [
        (first, value_at(batches, first) * (flops.flops_per_token(config, value_at(lengths, first)) / whole))
        for first in firsts])


def _steps_to_see(tokens, schedule):
    """Returns the number of steps after which a batch schedule comes nearest to `tokens` tokens."""
    # Takes the tokens of one span after the other, until what is left ends within a span. The last one has no end, so
    # something is always returned.
    for first, end, batch in spans(schedule, 0, math.inf):
        if first + round(tokens / batch) <= end:
            return first + round(tokens / batch)
        tokens -= (end - first) * batch


def default_batch_tokens(horizon_tokens):
    """The best batch grows with horizon^0.383 (arXiv 2505.13738); anchored at 2^19 tokens for depth 16 and 20 tokens a
    parameter; a power of two."""
    return 2 ** round(19 + 0.383 * math.log2(horizon_tokens / (20 * 268.4e6)))


# -----------------------------------------------------------------------------
# For a person


def describe_plan(plan, tokenizer):
    """Returns the plan as lines for a person."""
    accelerator = tpu.detect_accelerator() if plan.device_type == "tpu" else None
    tokens = plan.tokens(0, plan.num_iterations)
    parameters = " + ".join(f"{number:,} {group}" for group, number in plan.parameters.items())
    dtype = str(plan.dtype).removeprefix("torch.")
    lines = {
        "devices": f"{plan.world_size} × {accelerator or plan.device_type}, kernel {plan.kernel}, {dtype} compute",
        "model": plan.config.describe(),
        "parameters": f"{sum(plan.parameters.values()):,} = {parameters}",
        "batch": _describe_batch(plan),
        "horizon": f"{plan.num_iterations:,} steps, {tokens:,} tokens "
                   f"({tokens / plan.matrix_params:.1f} per matrix parameter)",
        "rates": _describe_rates(plan),
        "compute": _describe_compute(plan),
        "tokenizer": f"{tokenizer.n_vocab:,} tokens, sha256 {tokenizer.sha256[:12]}",
    }
    if plan.switches:
        lines["rows"] = _describe_rows(plan)
    if plan.mesh.divides_weights or plan.mesh.reason:
        lines["mesh"] = describe_mesh(plan)
    if tpu.peak_flops_here(plan.device_type):
        lines["estimate"] = _describe_estimate(plan, accelerator)
    return [f"{name:>11}  {text}" for name, text in lines.items()]


def _describe_batch(plan):
    text = (f"{plan.total_batch_size:,} tokens = {plan.device_batch_size} rows × {plan.config.max_seq_len} × "
            f"{plan.mesh.readers} {plan.mesh.devices_of_readers} × {plan.grad_accum_steps} micro-steps")
    for first, tokens in plan.batch_schedule[1:]:
        text += f", {tokens:,} from step {first:,} on ({plan.micro_steps(first)} micro-steps)"
    return text


def _describe_rows(plan):
    texts = []
    for first, length in plan.length_schedule:
        since = f"from step {first:,} on" if first else "per micro-step and device"
        texts.append(f"{plan.rows(first)} × {length:,} {since}")
    return ", ".join(texts)


def _describe_compute(plan):
    in_the_end = " in the end" if plan.switches else ""  # longer rows have more attention
    total = plan.flops(0, plan.num_iterations)
    return f"{plan.flops_per_token:.3e} FLOPs per token{in_the_end}, {total:.3e} in all"


def _describe_estimate(plan, accelerator):
    peak = tpu.peak_flops_here(plan.device_type)
    hours = plan.flops(0, plan.num_iterations) / (peak * plan.world_size * ASSUMED_MFU) / 3600
    text = f"{hours:.1f} h"
    price = tpu.usd_per_hour(accelerator, spot=True) if accelerator else None
    if price:
        text += f", {hours * price:.0f} USD on spot in the dearest region"
    return f"{text}, if {ASSUMED_MFU:.0%} of the peak is reached"


def _describe_rates(plan):
    """Returns the schedule of the learning rates and their height, with steps counted from 1, as the log does."""
    optimizer = plan.optimizer
    warmup, fall = lr_stages(plan.num_iterations, optimizer)
    rise = f"rise until step {warmup:,}" if warmup > 1 else "do not rise"
    if warmup > 1 and optimizer.warmup_steps > warmup:
        rise += f" (--warmup_steps={optimizer.warmup_steps} is longer than the run)"
    first_lower = max(warmup, fall + 1) + 1
    falls = first_lower <= plan.num_iterations and optimizer.final_lr_frac < 1
    fall_text = f"fall from step {first_lower:,} on" if falls else "do not fall"
    rules = gpt_rules(optimizer, plan.total_batch_size, plan.num_iterations, plan.config.n_embd)
    rates = {"matrices": rules.matrix_lr, "embedding": rules.adam["wte"].lr, "head": rules.adam["lm_head"].lr}
    if plan.config.num_values:
        rates["value table"] = rules.adam["value_table"].lr
    rates["scales of the embedding"] = rules.adam["x0_scale"].lr
    heights = ", ".join(f"{name} {rate:.3g}" for name, rate in rates.items())
    return f"{rise}, {fall_text}; at lr 1.000: {heights}"
