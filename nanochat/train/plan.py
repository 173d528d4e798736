"""The plan of a run: what follows from its flags and the number of devices, before anything starts."""
import math
import os
import re
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

import torch

from nanochat.common import BadInput
from nanochat.device.mesh import Mesh, divisors_in_words, make_mesh
from nanochat.kernels.attention_tiles import require_shapes
from nanochat.kernels.choose import get_kernels
from nanochat.kernels.sharded import Sharding
from nanochat.model import weights
from nanochat.model.models import config_from_flags
from nanochat.model.parts import require_parts
from nanochat.model.rates import OptimConfig
from nanochat.model.weights import count_parameters, matrix_parameters
from nanochat.train.flags import MAX_STEPS, StartFlags

MAX_DEVICE_GIB = 512  # more than any TPU or GPU has


# The sizes of a step hang together: its tokens are device_batch_size rows × max_seq_len × readers × micro-steps, such
# as 524,288 = 8 × 1,024 × 8 × 8. Shorter rows are more rows: so every micro-batch of a run has equally many tokens.
@dataclass(frozen=True)
class Plan:
    """What a run of base_train does. See Task.plan (task.py)."""
    config: object  # see model/models.py
    kernel: str  # see kernels/choose.py
    dtype: torch.dtype  # of activations and products
    products: str  # of the layers and the loss
    activation_checkpointing: str
    use_compile: bool  # torch.compile
    optimizer: OptimConfig
    shard_optimizer: bool  # each rank keeps and updates a part of the optimizer's state
    device_type: str
    world_size: int
    mesh: Mesh
    device_batch_size: int  # rows of max_seq_len in a micro-step on one device, or one group of them along tensor
    num_iterations: int
    parameters: dict  # group -> number
    total_batch_size: int  # tokens of an optimizer step
    length_schedule: tuple  # ((step, positions), …) of a row from that step on; the last is max_seq_len
    start: StartFlags
    unit = "tokens"  # in which work is counted, see Task

    @property
    def rules(self):
        """How each parameter is updated, a Rules."""
        return self.config.rules(self.optimizer, self.total_batch_size, self.num_iterations, self.dtype,
                                 self.start.earlier_steps, self.start.rate_horizon)

    @property
    def flops_per_token(self):
        """In rows of max_seq_len."""
        return weights.flops_per_token(self.config, self.config.max_seq_len)

    flops_per_unit = flops_per_token

    @property
    def micro_steps(self):
        """Micro-steps of an optimizer step."""
        return self.total_batch_size // (self.device_batch_size * self.config.max_seq_len * self.mesh.readers)

    def tokens(self, begin, end):
        """Tokens of steps `begin` to `end` - 1."""
        return self.total_batch_size * (end - begin)

    units = tokens

    def num_rows(self, begin, end):
        """Rows of the same steps, on all devices."""
        rows = 0
        for first, last, length in spans(self.length_schedule, begin, end):
            rows += self.tokens(first, last) // length
        return rows

    def flops(self, begin, end):
        """Useful FLOPs of the same steps."""
        flops = 0
        for first, last, length in spans(self.length_schedule, begin, end):
            flops += weights.flops_per_token(self.config, length) * self.tokens(first, last)
        return flops

    def seq_len(self, step):
        """Positions of a row in optimizer step `step`, counted from 0."""
        return next(length for first, length in reversed(self.length_schedule) if first <= step)

    def rows(self, step):
        """Rows in a micro-step of optimizer step `step` on one device."""
        return self.device_batch_size * self.config.max_seq_len // self.seq_len(step)

    @property
    def switches(self):
        """The steps at which rows become longer."""
        return tuple(first for first, _ in self.length_schedule[1:])

    def micro_step_name(self, step):
        """The name of the micro-step's program in optimizer step `step`: each row length has its own program."""
        return f"micro_step {self.seq_len(step)}" if self.switches else "micro_step"

    @property
    def stages(self):
        """((first step, step after the last, name of the micro-step), …) of the run."""
        found = []
        for first, last, _ in spans(self.length_schedule, 0, self.num_iterations):
            found.append((first, last, self.micro_step_name(first)))
        return tuple(found)


def make_plan(flags, vocab_size, device_type, world_size, meta=None):
    """Returns the Plan for base_train's Flags. Raises BadInput for flags that do not fit together.

    device_type: from resolve_device_type. meta: the Meta of the checkpoint to resume from: the run keeps its model, and
    its batch unless the flags of the batch have changed.
    """
    batch = flags.batch
    devices = flags.devices
    config = meta.model_config if meta else config_from_flags(asdict(flags.model), vocab_size)
    # Each follows from the one before: the mesh divides the weights, the kernels must suit the mesh, the row lengths
    # must suit the kernels, a batch is whole micro-steps of the mesh, and the horizon counts batches.
    config.require_flags(flags)
    parameters = count_parameters(config)
    _require_memory(sum(parameters.values()), config, batch, device_type)
    mesh = plan_mesh(devices, config, world_size)
    kernel = plan_kernel(devices, config, device_type, mesh)
    lengths = _plan_lengths(flags, config, kernel, device_type)
    total_batch_size = plan_batch(batch, config.max_seq_len, mesh, parameters, flags.data.num_lanes, meta)
    num_iterations = plan_horizon(batch, config, total_batch_size, lengths, flags.start)
    return Plan(
        config=config,
        kernel=kernel,
        dtype=devices.dtype_on(device_type),
        products=devices.products,
        activation_checkpointing=devices.activation_checkpointing,
        use_compile=device_type == "cuda" and not devices.no_compile,
        optimizer=plan_rates(flags.optimizer, flags.start, num_iterations),
        shard_optimizer=devices.is_sharded_on(device_type),
        device_type=device_type,
        world_size=world_size,
        mesh=mesh,
        device_batch_size=batch.device_batch_size,
        num_iterations=num_iterations,
        parameters=parameters,
        total_batch_size=total_batch_size,
        length_schedule=lengths,
        start=flags.start)


def _require_memory(number, config, batch, device_type):
    """Raises BadInput for a model of this number of parameters that no device can hold, before it is made."""
    # At least: the weight in bf16 and the sum of its gradients in fp32 for each parameter, and the input of each layer
    # in bf16.
    rows = batch.device_batch_size * config.max_seq_len
    needed_gib = (6 * number + 2 * config.n_layer * config.n_embd * rows) / 2**30
    available_gib, whose = MAX_DEVICE_GIB, "no device has more than"
    if device_type not in ("tpu", "cuda"):
        available_gib, whose = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, "this machine has"
    if needed_gib > available_gib:
        raise BadInput(f"{number:.3g} parameters with --device_batch_size={batch.device_batch_size} and --max_seq_len="
                       f"{config.max_seq_len} need at least {needed_gib:,.0f} GiB on a device, and {whose} "
                       f"{available_gib:,.0f}: use smaller ones")


def plan_mesh(devices, config, world_size):
    """Returns the Mesh for KernelFlags and a model's config. Raises BadInput for one that does not suit the model, the
    devices or the other flags."""
    mesh = make_mesh(devices.mesh_fsdp, devices.mesh_tensor, world_size)
    if not mesh.divides_weights:
        return mesh
    if devices.shard_optimizer == "off":
        raise BadInput(f"a mesh of {mesh} divides the weights, and --shard_optimizer=off does not: leave it out, or "
                       "use 1 along fsdp and tensor")
    require_parts(mesh, config)
    return mesh


def plan_kernel(devices, config, device_type, mesh):
    """Returns the name of the kernels, for DeviceFlags. Raises BadInput if they cannot run this model here."""
    kernels = get_kernels(devices.kernel, device_type, Sharding.of_mesh(mesh, config.vocab_size),
                          products=devices.products)
    require_shapes(kernels.name, config, device_type)
    return kernels.name


def plan_rates(rates, start, num_iterations):
    """Returns the OptimConfig of a run that is to have the OptimConfig `rates`. start: its StartFlags."""
    if not start.decay_from:
        return rates
    return replace(rates, warmup_steps=0, warmdown_ratio=1 - start.first_step / num_iterations)


def plan_horizon(batch, config, total_batch_size, lengths, start):
    """Returns the step at which a run ends, for BatchFlags and StartFlags. lengths: its length schedule.
    Raises BadInput if a run cannot have so many steps, or would end before its rows have their full length."""
    if batch.num_iterations > 0:
        num_iterations = start.first_step + batch.num_iterations
    else:
        tokens = batch.target_param_data_ratio * matrix_parameters(count_parameters(config))
        num_iterations = round(tokens / total_batch_size)
    if not 1 <= num_iterations <= MAX_STEPS:
        name = "num_iterations" if batch.num_iterations > 0 else "target_param_data_ratio"
        raise BadInput(f"--{name}={getattr(batch, name):.9g} makes {num_iterations:.10g} steps of the run, and a run "
                       f"has 1 to {MAX_STEPS:,}: give another --num_iterations")
    if lengths[-1][0] >= num_iterations:
        raise BadInput(f"--seq_len_ramp={batch.seq_len_ramp}: the run ends after step {num_iterations}, before it "
                       f"comes to rows of {lengths[-1][1]}: begin them earlier, or train for longer")
    return num_iterations


def _plan_lengths(flags, config, kernel, device_type):
    """Returns the length schedule of base_train's Flags. Raises BadInput if the kernel or other flags forbid it."""
    ramp = flags.batch.seq_len_ramp
    schedule = length_schedule(ramp, config.max_seq_len)
    if len(schedule) == 1:
        return schedule
    if flags.data.fim_rate:
        raise BadInput(f"--seq_len_ramp={ramp} with --fim_rate={flags.data.fim_rate:g}: fill in the middle divides "
                       "documents by the row length, which must not change: leave one of them out")
    for _, length in schedule:
        try:
            require_shapes(kernel, replace(config, max_seq_len=length), device_type)
        except BadInput as error:
            raise BadInput(f"--seq_len_ramp={ramp}: {error}") from None
    return schedule


def plan_batch(batch, seq_len, mesh, parameters, num_lanes, meta=None):
    """Returns the tokens of an optimizer step for BatchFlags. Raises BadInput if they do not divide evenly."""
    readers = mesh.readers
    devices = mesh.devices_of_readers
    if num_lanes % readers:
        raise BadInput(f"{readers} {devices} do not divide the --num_lanes={num_lanes} of the data: use "
                       f"{divisors_in_words(num_lanes, readers)} {devices} (on a CPU, by CPU_NUM_DEVICES), or for a "
                       f"new run --num_lanes={math.lcm(num_lanes, readers)}")
    micro = batch.device_batch_size * seq_len * readers
    product = f"{micro} = device_batch_size {batch.device_batch_size} × max_seq_len {seq_len} × {readers} {devices}"
    # Another number of devices would round the batch differently, and a resumed run would see other batches. So it
    # keeps the checkpoint's, to the token, and is refused below if these devices cannot divide it.
    total = _saved_batch(batch, meta) or batch.total_batch_size
    if total == -1:
        best = default_batch_tokens(batch.target_param_data_ratio * matrix_parameters(parameters))
        total = micro * max(1, round(best / micro))
    if total < 1 or total % micro:
        nearest = sorted({max(total // micro, 1) * micro, (total // micro + 1) * micro})
        raise BadInput(f"--total_batch_size={total} tokens does not divide by {product}: "
                       f"use {' or '.join(map(str, nearest))}")
    return total


def _saved_batch(batch, meta):
    """Returns the tokens of a step of a checkpoint's Meta, or None without one, or if the flags ask for others."""
    if not meta:
        return None
    for name in ("total_batch_size", "target_param_data_ratio"):
        if meta.flags.get(name) != getattr(batch, name):
            return None
    return meta.total_batch_size


def default_batch_tokens(horizon_tokens):
    """Returns the best batch, a power of two. It grows with horizon^0.383 (arXiv 2505.13738) and is 2^19 tokens for
    depth 16 and 20 tokens a parameter."""
    return 2 ** round(19 + 0.383 * math.log2(horizon_tokens / (20 * 268.4e6)))


# Rows that become longer at certain steps. A schedule is ((step, positions per row), …): the length from that step on.
# The first step is 0, and steps rise.


# Of the schedule ((0, 1024), (4000, 2048)), the spans of steps 3000 to 4999 are (3000, 4000, 1024) and
# (4000, 5000, 2048).
def spans(schedule, begin, end):
    """Yields (first, last, length) for each length in turn, of steps `begin` to `end` - 1. `last` is excluded, too."""
    for (first, length), (last, _) in pairwise([*schedule, (math.inf, None)]):
        first = max(first, begin)
        last = min(last, end)
        if first < last:
            yield first, last, length


def length_schedule(ramp, max_seq_len):
    """Returns ((step, positions per row), …) for --seq_len_ramp=STEP:LENGTH,…; "" is `max_seq_len` throughout. Raises
    BadInput unless each length is a multiple of the one before, and the last is `max_seq_len`."""
    schedule = [(-1, 0)]  # one before the first
    for entry in (ramp or f"0:{max_seq_len}").split(","):
        last = schedule[-1][1]
        match = re.fullmatch(r"([0-9]{1,9}):([1-9][0-9]{0,6})", entry)
        if not match or int(match[1]) <= schedule[-1][0] or int(match[2]) <= last:
            raise BadInput(f"--seq_len_ramp={ramp}: {entry} is not STEP:LENGTH with steps and lengths that rise: give "
                           "for example 0:1024,4000:2048,8000:4096")
        step = int(match[1])
        length = int(match[2])
        if not last and step:
            raise BadInput(f"--seq_len_ramp={ramp} does not say how long rows are before step {step}: begin with 0:")
        if last and length % last:
            raise BadInput(f"--seq_len_ramp={ramp}: rows of {length} are not whole rows of {last}, which would change "
                           f"the batch: give a multiple of {last}")
        schedule.append((step, length))
    if length != max_seq_len:
        raise BadInput(f"--seq_len_ramp={ramp} ends with rows of {length}, and the model has "
                       f"--max_seq_len={max_seq_len}: make them equal")
    return tuple(schedule[1:])
