"""The mesh of a run: checked against its model, and described for a person."""
from nanochat.common import BadInput
from nanochat.device.mesh import make_mesh, require_divisible
from nanochat.device.tpu import GIB


def plan_mesh(flags, config, device_type, world_size):
    """Returns the Mesh for base_train's Flags and a GPTConfig. Raises BadInput if it does not fit the model, the number
    of devices, their type or the other flags."""
    devices = flags.devices
    mesh = make_mesh(devices.mesh_data, devices.mesh_fsdp, devices.mesh_tensor, world_size)
    if mesh.fsdp == 1:
        return mesh
    if device_type not in ("tpu", "xla"):
        raise BadInput(f"{mesh.source}, but this runs on {device_type}: fsdp is for XLA devices, use {mesh.ask_for(1)}")
    if devices.shard_optimizer == "off":
        raise BadInput(f"{mesh.source} divides the weights, and with --shard_optimizer=off each rank has all of "
                       "the optimizer's: leave one of them out")
    if flags.distillation.teacher:
        raise BadInput(f"--teacher={flags.distillation.teacher} needs all weights of the student on each chip: use "
                       f"no teacher, or {mesh.ask_for(1)} instead of {mesh.source}")
    require_divisible(mesh, {
        "the width (--model_dim)": config.n_embd,
        "the width of keys and values (--num_kv_heads × head size)": config.n_kv_head * config.head_dim})
    if config.vocab_size % mesh.chips:
        raise BadInput(f"{mesh.source} divides the vocabulary among all {mesh.chips} chips, and "
                       f"{config.vocab_size} tokens cannot be divided by {mesh.chips}: use {mesh.ask_for(1)}, "
                       f"or a tokenizer with {-(-config.vocab_size // mesh.chips) * mesh.chips} tokens")
    return mesh


def describe_mesh(plan):
    """Returns a line about the mesh of a Plan: where its chips stand, what each holds, and what a micro-step moves."""
    mesh, weights, bytes_each = plan.mesh, sum(plan.parameters.values()), plan.dtype.itemsize
    held = {"weights": bytes_each * weights / mesh.fsdp, "gradients": 4 * weights / mesh.fsdp,
            "optimizer": 12 * weights / mesh.chips}
    parts = ", ".join(f"{size / GIB:.2f} GiB {name}" for name, size in held.items())
    tables = plan.parameters["embedding"] + plan.parameters["head"]
    moved = bytes_each * (3 * plan.parameters["matrices"] + 2 * tables) * (mesh.fsdp - 1) / mesh.fsdp
    return (f"{mesh}, chip r at (r // {mesh.fsdp}, r % {mesh.fsdp}, 0); a chip holds {parts}; a micro-step sends "
            f"{moved / 1e9:.2f} GB from each: matrices twice, embedding and head once, all gradients once")
