"""The mesh of a run: chosen by memory if --mesh_fsdp=auto asks for it, checked against its model, and described."""
from dataclasses import replace

from nanochat.common import BadInput
from nanochat.device import tpu
from nanochat.device.mesh import Mesh, all_meshes, make_mesh
from nanochat.device.tpu import GIB
from nanochat.kernels.choose import get_kernels
from nanochat.kernels.xla_loss import CHUNK_TOKENS
from nanochat.model.parts import require_parts
from nanochat.train.flags import AUTO

ROOM = 0.95  # of a chip's memory, which an estimate may fill: no compiled peak was more than 5% above its estimate

TABLES = ("embedding", "head", "value embeddings")  # of the parameters: a row for each token


def plan_mesh(flags, config, parameters, device_type, world_size):
    """Returns the Mesh for base_train's Flags, a GPTConfig and its {group: number of parameters}. Raises BadInput if it
    does not fit the model, the number of devices, their type or the other flags."""
    devices = flags.devices
    if devices.mesh_fsdp == AUTO:
        return choose_mesh(flags, config, parameters, device_type, world_size)
    mesh = make_mesh(devices.mesh_data, devices.mesh_fsdp, devices.mesh_tensor, world_size)
    _require_mesh(mesh, flags, config, device_type)
    return mesh


def choose_mesh(flags, config, parameters, device_type, chips):
    """Returns the Mesh for --mesh_fsdp=auto: as few chips along fsdp as fit, by estimate_memory, into ROOM of a chip's
    memory, and the others along data. It follows from the flags, the number of chips and their type alone.

    Where the memory of a device is not known, on other devices than TPUs, all are along data. Raises BadInput if
    nothing fits, or if the flags ask for what the estimate does not know.
    """
    devices = flags.devices
    if (devices.mesh_data, devices.mesh_tensor) != (-1, 1):
        raise BadInput(f"--mesh_fsdp={AUTO} chooses the whole mesh, and --mesh_data={devices.mesh_data} "
                       f"--mesh_tensor={devices.mesh_tensor} is given: leave both out, or give --mesh_fsdp a number")
    accelerator = tpu.detect_accelerator() if device_type == "tpu" else None
    if not accelerator:
        return Mesh(chips, reason=f"the memory of a device ({device_type}) is not known, so none divides the weights")
    kernel = get_kernels(devices.kernel, device_type).name
    if kernel != "flash":
        raise BadInput(f"--mesh_fsdp={AUTO} knows the memory of --kernel=flash only, and this run has {kernel}: give "
                       "--mesh_fsdp a number")
    if flags.distillation.teacher:
        raise BadInput(f"--mesh_fsdp={AUTO} does not count the memory of --teacher={flags.distillation.teacher}: give "
                       "--mesh_fsdp a number; tpu_preflight --find_mesh finds the smallest")
    chip, tried = tpu.parse_accelerator(accelerator).tpu, []
    has = f"{chip.usable_hbm_bytes / GIB:.2f} GiB of a {chip.name}, of which {ROOM:.0%} may be filled"
    # From the fewest chips along fsdp on, and the first that fits is taken: every further one gathers more of each
    # weight from others. After the loop, `largest` and `tried` are of the mesh that divides the most. What does not fit
    # even there decides what the advice is.
    for mesh in possible_meshes(flags, config, device_type, chips):
        needed = estimate_memory(flags, config, parameters, mesh)
        largest = max(needed, key=needed.get)
        tried.append(f"{needed[largest] / GIB:.2f} GiB ({largest}) with --mesh_fsdp={mesh.fsdp}")
        if needed[largest] <= ROOM * chip.usable_hbm_bytes:
            return replace(mesh, reason=f"by estimate a chip needs {', '.join(tried)}, of {has}")
    instead = "a smaller --device_batch_size" if devices.activation_checkpointing == "all" else \
        "--activation_checkpointing, a smaller --device_batch_size"
    if largest == "samples":
        instead = "--sample_every=-1 without --code_eval_every"
    if devices.shard_optimizer == "off" and chips > 1:
        instead = f"no --shard_optimizer=off, because the weights cannot be divided then, {instead}"
    raise BadInput(f"--mesh_fsdp={AUTO}: by estimate a chip needs {tried[-1]}, and there are {has}: use {instead}, "
                   "more chips, or the number that tpu_preflight --find_mesh finds")


def possible_meshes(flags, config, device_type, chips):
    """Returns the Meshes without tensor that the model and the other flags allow on so many chips, the fewest along
    fsdp first."""
    found = []
    for mesh in all_meshes(chips):
        try:
            _require_mesh(mesh, flags, config, device_type)
            found.append(mesh)
        except BadInput:
            pass
    return found


def estimate_memory(flags, config, parameters, mesh):
    """Returns the bytes that a chip of a TPU needs at the most while each program of a run runs, {program: bytes}, with
    the kernel flash on a Mesh without tensor.
    """
    # In the formulas: P parameters, d width, d_kv that of keys and values, V vocabulary, L layers, N tokens of a
    # micro-step on a chip, b bytes of a number that is computed with, F chips along fsdp. The factors 4, 10, 36 and 8
    # are fitted to peaks that libtpu's compiler reports (docs/mesh.md).
    tokens = flags.batch.device_batch_size * config.max_seq_len
    size = 4 if flags.devices.compute_dtype == "float32" else 2
    is_sharded = flags.devices.shard_optimizer != "off"
    weights = sum(parameters.values())
    # Held between programs: b P / F weights + 4 P / F gradients + (8 matrices + 12 tables) / chips of the optimizer.
    held = sum(held_bytes(parameters, size, mesh, config.n_layer, is_sharded).values())
    # The micro-step: L N d b for the inputs of the layers; N (6 d + 2 d_kv) b for what else a layer keeps, L times, or
    # what --activation_checkpointing computes again, once.
    width = size * tokens * config.n_embd
    kv_width = size * tokens * config.n_kv_head * config.head_dim
    again = {"none": 0, "qkv": width + 2 * kv_width, "all": 6 * width + 2 * kv_width}
    again = again[flags.devices.activation_checkpointing]
    layers = config.n_layer * (7 * width + 2 * kv_width - again) + again
    values = 2 * kv_width * config.num_values  # with gradients
    # And the larger of two, which are not there at the same time. For the loss: 4 b V × (8,192 tokens at most) of
    # logits and their gradients, (b + 4) V d of the head and its gradient, and 10 N d b. Without fsdp, v5e and v4 need
    # half as much for the logits; how much follows from where the compiler places them. For the backward pass of a
    # layer: 36 N d b, and if F > 1 its weights and gradients, 2 b matrices / L.
    loss = 4 * size * config.vocab_size * min(tokens, CHUNK_TOKENS) + (size + 4) * parameters["head"] + 10 * width
    backward = 36 * width
    # The update: 4 P of gradients in other places; 8 P / F if F > 1, because parts are exchanged for whole layers; and
    # 4 / F for each parameter of the layers that pad L to a multiple of the chips.
    changes = 4 * weights
    if mesh.fsdp > 1:
        backward += 2 * size * parameters["matrices"] / config.n_layer
        changes = 8 * weights
    padding = _padded(parameters, mesh, config.n_layer) - parameters["matrices"]
    needed = {"micro-step": held + layers + values + max(loss, backward),
              "update": held + (4 * padding + changes) / mesh.fsdp}
    if mesh.fsdp > 1 and max(flags.record.sample_every, flags.record.code_eval_every) > 0:
        needed["samples"] = held + size * weights  # the whole weights
    return needed


def held_bytes(parameters, size, mesh, layers, is_sharded=True):
    """Returns the bytes that a chip holds between programs, {what: bytes}. parameters: {group: number}; size: the bytes
    of a weight; is_sharded: the chips divide the optimizer's state, fp32 weights and averages, one of them for
    matrices, of which a chip has whole layers, and two for tables."""
    weights = sum(parameters.values()) / (mesh.fsdp * mesh.tensor)
    tables = sum(parameters.get(name, 0) for name in TABLES)
    if is_sharded:
        state = (8 * _padded(parameters, mesh, layers) + 12 * tables) / mesh.chips
    else:
        state = 8 * parameters["matrices"] + 12 * tables
    return {"weights": size * weights, "gradients": 4 * weights, "optimizer": state}


def _padded(parameters, mesh, layers):
    """Returns the number of parameters in the matrices, with the layers that pad theirs to a multiple of the chips."""
    # A chip gets whole layers of each stack, because Muon needs whole matrices.
    return parameters["matrices"] // layers * (layers + -layers % mesh.chips)


def _require_mesh(mesh, flags, config, device_type):
    """Raises BadInput if a Mesh fits neither the model nor the devices nor the other flags."""
    if not mesh.divides_weights:
        return
    if device_type not in ("tpu", "xla"):
        raise BadInput(f"{mesh.source}, but this runs on {device_type}: only XLA devices can divide the weights, use "
                       f"{mesh.ask_for_whole_weights()}")
    if flags.devices.shard_optimizer == "off":
        raise BadInput(f"{mesh.source} divides the weights, and with --shard_optimizer=off each rank has all of "
                       "the optimizer's: leave one of them out")
    require_parts(mesh, config)


def describe_mesh(plan):
    """Returns a line about the mesh of a Plan: where its chips stand, what each holds, and what a micro-step moves."""
    mesh = plan.mesh
    because = f"; {mesh.reason}" if mesh.reason else ""
    if not mesh.divides_weights:
        return f"{mesh}{because}"
    held = held_bytes(plan.parameters, plan.dtype.itemsize, mesh, plan.config.n_layer)
    holds = ", ".join(f"{size / GIB:.2f} GiB {name}" for name, size in held.items())
    moved = []
    if mesh.fsdp > 1:
        moved.append(_describe_fsdp(plan))
    if mesh.tensor > 1:
        moved.append(_describe_tensor(plan))
    return (f"{mesh}, chip r at (r // {mesh.fsdp * mesh.tensor}, r // {mesh.tensor} % {mesh.fsdp}, r % {mesh.tensor}); "
            f"a chip holds {holds}; a micro-step sends {', and '.join(moved)}{because}")


def _describe_fsdp(plan):
    """Returns what a chip sends along fsdp in a micro-step."""
    tables = sum(plan.parameters.get(name, 0) for name in TABLES)
    # In parameters. Matrices are gathered in the forward loop and again in the backward loop, tables once; and the
    # gradients of both are exchanged once.
    gathered = 3 * plan.parameters["matrices"] + 2 * tables
    num_bytes = plan.dtype.itemsize * gathered / plan.mesh.tensor * _others(plan.mesh.fsdp)
    return (f"{num_bytes / 1e9:.3g} GB from each along fsdp: matrices twice, tables (embedding, head, value "
            "embeddings) once, all gradients once")


def _describe_tensor(plan):
    """Returns what a chip sends along tensor in a micro-step. A sum is sent twice: in parts that one rank each adds up,
    and what came out. Value embeddings are added up once, and their gradients gathered."""
    config, tokens = plan.config, plan.device_batch_size * plan.config.max_seq_len
    # Two sums in the forward pass of a layer, after attention and after the MLP, and two in the backward pass. A layer
    # that is computed again has one of them again.
    of_layer = 5 if plan.activation_checkpointing == "all" else 4
    sums = of_layer * config.n_layer + 2
    values = config.num_values * config.n_kv_head * config.head_dim
    num_bytes = plan.dtype.itemsize * tokens * (2 * sums * config.n_embd + 3 * values) * _others(plan.mesh.tensor)
    text = f"{num_bytes / 1e9:.3g} GB from each along tensor, adding up activations {sums} times"
    if config.num_values:
        text += ", and the vectors of --value_embeddings"
    return text


def _others(ranks):
    """Returns the fraction of an array that a rank of a ring sends when each of its parts goes to another rank."""
    return (ranks - 1) / ranks
