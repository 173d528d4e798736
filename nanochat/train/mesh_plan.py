"""The mesh of a run: chosen by memory for --mesh_fsdp=auto, and checked against the model."""
from dataclasses import replace

from nanochat.common import BadInput
from nanochat.device import tpu
from nanochat.device.mesh import Mesh, all_meshes, make_mesh
from nanochat.device.tpu import GIB
from nanochat.kernels.choose import get_kernels
from nanochat.kernels.xla_loss import CHUNK_TOKENS
from nanochat.model.parts import require_parts
from nanochat.train.flags import AUTO

ROOM = 0.95  # of a chip's memory that an estimate may fill: no compiled peak exceeded its estimate by more than 5%
TABLES = ("embedding", "head", "value embeddings", "n-grams")  # of the parameters: rows of tokens or n-grams


def plan_mesh(flags, config, parameters, device_type, world_size):
    """Returns the Mesh for base_train's Flags, a GPTConfig and its {group: number of parameters}. Raises BadInput for a
    mesh that does not suit the model, the devices or the other flags."""
    devices = flags.devices
    if devices.mesh_fsdp == AUTO:
        return choose_mesh(flags, config, parameters, device_type, world_size)
    mesh = make_mesh(devices.mesh_data, devices.mesh_fsdp, devices.mesh_tensor, world_size)
    _require_mesh(mesh, flags, config, device_type)
    return mesh


def choose_mesh(flags, config, parameters, device_type, chips):
    """Returns the Mesh for --mesh_fsdp=auto: the fewest chips along fsdp that fit into ROOM of a chip's memory by
    estimate_memory, the others along data; on other devices than TPUs, all along data.

    Raises BadInput if nothing fits, or for flags that the estimate does not cover.
    """
    devices = flags.devices
    if (devices.mesh_data, devices.mesh_tensor) != (-1, 1):
        raise BadInput(f"--mesh_fsdp={AUTO} chooses the whole mesh, and --mesh_data={devices.mesh_data} "
                       f"--mesh_tensor={devices.mesh_tensor} is given: leave both out, or give --mesh_fsdp a number")
    accelerator = tpu.detect_accelerator() if device_type == "tpu" else None
    if not accelerator:
        return Mesh(chips, reason=f"the memory of a device ({device_type}) is unknown, so none divides the weights")
    kernel = get_kernels(devices.kernel, device_type).name
    if kernel != "flash":
        raise BadInput(f"--mesh_fsdp={AUTO} estimates memory for --kernel=flash only, and this run has {kernel}: give "
                       "--mesh_fsdp a number")
    if flags.distillation.teacher:
        raise BadInput(f"--mesh_fsdp={AUTO} does not count the memory of --teacher={flags.distillation.teacher}: give "
                       "--mesh_fsdp a number; tpu_preflight --find_mesh finds the smallest")
    chip = tpu.parse_accelerator(accelerator).tpu
    tried = []
    has = f"{chip.usable_hbm_bytes / GIB:.2f} GiB of a {chip.name}, {ROOM:.0%} of it usable"
    # From the fewest chips along fsdp on: every further one gathers more of each weight from others.
    for mesh in all_meshes(chips):
        try:
            _require_mesh(mesh, flags, config, device_type)
        except BadInput:  # it does not suit the model or the other flags
            continue
        needed = estimate_memory(flags, config, parameters, mesh)
        largest = max(needed, key=needed.get)
        tried.append(f"{needed[largest] / GIB:.2f} GiB ({largest}) with --mesh_fsdp={mesh.fsdp}")
        if needed[largest] <= ROOM * chip.usable_hbm_bytes:
            return replace(mesh, reason=f"by estimate a chip needs {', '.join(tried)}, and has {has}")
    raise BadInput(f"--mesh_fsdp={AUTO}: by estimate a chip needs {tried[-1]}, and has {has}: use a smaller "
                   "--device_batch_size, --activation_checkpointing, --sample_every=-1 without --code_eval_every for "
                   "samples, --shard_optimizer=auto, more chips, or the number that tpu_preflight --find_mesh finds")


def estimate_memory(flags, config, parameters, mesh):
    """Returns {program of a run: peak bytes on a chip of a TPU}, with the kernel flash on a Mesh without tensor."""
    # In the formulas: P parameters, d width, d_kv that of keys and values, V vocabulary, L layers, N tokens of a
    # micro-step on a chip, b bytes of a number in compute, F chips along fsdp. The factors 4, 10, 36 and 8 are fitted
    # to peaks that libtpu's compiler reports (docs/mesh.md).
    tokens = flags.batch.device_batch_size * config.max_seq_len
    size = 4 if flags.devices.compute_dtype == "float32" else 2
    is_sharded = flags.devices.shard_optimizer != "off"
    weights = sum(parameters.values())
    # Held between programs: b P / F weights + 4 P / F gradients + (8 matrices + 12 tables) / chips of the optimizer.
    held = sum(held_bytes(parameters, size, mesh, config.n_layer, is_sharded).values())
    # The micro-step: L N d b for the layers' inputs; N (6 d + 2 d_kv) b for the other activations of a layer, L times,
    # or once for those that --activation_checkpointing recomputes.
    width = size * tokens * config.n_embd
    kv_width = size * tokens * config.n_kv_head * config.head_dim
    again = {"none": 0, "all": 6 * width + 2 * kv_width}
    again = again[flags.devices.activation_checkpointing]
    layers = config.n_layer * (7 * width + 2 * kv_width - again) + again
    values = 2 * kv_width * config.num_values  # with gradients
    # And the larger of two that do not coexist. For the loss: 4 b V × (8,192 tokens at most) of logits and their
    # gradients, (b + 4) V d of the head and its gradient, and 10 N d b. Without fsdp, v5e and v4 need half as much for
    # the logits; it depends on where the compiler places them. For the backward pass of a layer: 36 N d b, and if F > 1
    # its weights and gradients, 2 b matrices / L.
    loss = 4 * size * config.vocab_size * min(tokens, CHUNK_TOKENS) + (size + 4) * parameters["head"] + 10 * width
    backward = 36 * width
    # The update: 4 P of gradients in other places; 8 P / F if F > 1, because ranks exchange parts for whole layers; and
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
    """Returns the bytes that a chip holds between programs, {what: bytes}.

    parameters: {group: number}; size: the bytes of a weight; is_sharded: the chips divide the optimizer's state. That
    is fp32 weights and averages: one for matrices, of which a chip has whole layers, none for n-grams, and two for
    the other tables.
    """
    weights = sum(parameters.values()) / (mesh.fsdp * mesh.tensor)
    tables = 12 * sum(parameters.get(name, 0) for name in TABLES) - 8 * parameters.get("n-grams", 0)
    if is_sharded:
        state = (8 * _padded(parameters, mesh, layers) + tables) / mesh.chips
    else:
        state = 8 * parameters["matrices"] + tables
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
        raise BadInput(f"a mesh of {mesh}, but this runs on --device_type={device_type}: only XLA devices can "
                       "divide the weights, use 1 along fsdp and tensor")
    if flags.devices.shard_optimizer == "off":
        raise BadInput(f"a mesh of {mesh} divides the weights, and --shard_optimizer=off does not: leave it out, or "
                       "use 1 along fsdp and tensor")
    require_parts(mesh, config)
