"""The mesh of a run: checked against its model, and described for a person."""
from nanochat.common import BadInput
from nanochat.device.mesh import make_mesh, require_divisible
from nanochat.device.tpu import GIB


def plan_mesh(flags, config, device_type, world_size):
    """Returns the Mesh for base_train's Flags and a GPTConfig. Raises BadInput if it does not fit the model, the number
    of devices, their type or the other flags."""
    devices = flags.devices
    mesh = make_mesh(devices.mesh_data, devices.mesh_fsdp, devices.mesh_tensor, world_size)
    if not mesh.divides_weights:
        return mesh
    if device_type not in ("tpu", "xla"):
        raise BadInput(f"{mesh.source}, but this runs on {device_type}: only XLA devices can divide the weights, use "
                       f"{mesh.ask_for_whole_weights()}")
    if devices.shard_optimizer == "off":
        raise BadInput(f"{mesh.source} divides the weights, and with --shard_optimizer=off each rank has all of "
                       "the optimizer's: leave one of them out")
    require_parts(mesh, config)
    return mesh


def require_parts(mesh, config):
    """Raises BadInput if a Mesh cannot divide the weights of a GPTConfig's model."""
    if not mesh.divides_weights:
        return
    require_divisible(mesh, "tensor", {
        "the attention heads (--num_heads)": config.n_head,
        "the heads of keys and values (--num_kv_heads)": config.n_kv_head})
    here = " that a chip along tensor has" if mesh.tensor > 1 else ""
    require_divisible(mesh, "fsdp", {
        f"the width (--model_dim){here}": config.n_embd // mesh.tensor,
        f"the width of keys and values (--num_kv_heads × head size){here}":
            config.n_kv_head * config.head_dim // mesh.tensor})
    if config.vocab_size % mesh.chips:
        raise BadInput(f"{mesh.source} divides the vocabulary among all {mesh.chips} chips, and "
                       f"{config.vocab_size} tokens cannot be divided by {mesh.chips}: use "
                       f"{mesh.ask_for_whole_weights()}, or a tokenizer with "
                       f"{-(-config.vocab_size // mesh.chips) * mesh.chips} tokens")


def describe_mesh(plan):
    """Returns a line about the mesh of a Plan: where its chips stand, what each holds, and what a micro-step moves."""
    mesh, weights, bytes_each = plan.mesh, sum(plan.parameters.values()), plan.dtype.itemsize
    parts = mesh.fsdp * mesh.tensor
    held = {"weights": bytes_each * weights / parts, "gradients": 4 * weights / parts,
            "optimizer": 12 * weights / mesh.chips}
    holds = ", ".join(f"{size / GIB:.2f} GiB {name}" for name, size in held.items())
    tables = plan.parameters["embedding"] + plan.parameters["head"]
    gathered = bytes_each * (3 * plan.parameters["matrices"] + 2 * tables) / mesh.tensor * _others(mesh.fsdp)
    # A sum is sent twice: in parts that one rank each adds up, and what came out.
    sums = (5 if plan.activation_checkpointing else 4) * plan.config.n_layer + 2
    tokens = plan.device_batch_size * plan.config.max_seq_len
    summed = 2 * bytes_each * sums * tokens * plan.config.n_embd * _others(mesh.tensor)
    moved = [f"{gathered / 1e9:.2f} GB from each along fsdp: matrices twice, embedding and head once, all gradients "
             "once"] if mesh.fsdp > 1 else []
    if mesh.tensor > 1:
        moved.append(f"{summed / 1e9:.2f} GB from each along tensor: {sums} sums of activations")
    return (f"{mesh}, chip r at (r // {parts}, r // {mesh.tensor} % {mesh.fsdp}, r % {mesh.tensor}); a chip holds "
            f"{holds}; a micro-step sends {', and '.join(moved)}")


def _others(ranks):
    """Returns the fraction of an array that a rank of a ring sends when each of its parts goes to another rank."""
    return (ranks - 1) / ranks
