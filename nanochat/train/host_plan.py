"""What each host of a run needs: memory of its processors, and disk.

A run that starts reads or draws its weights in host memory, in the process of every chip; one that saves brings the
whole state to the first host. What Python, libtpu and the data need is not counted, nor the pages of a checkpoint's
files, which the processes of a host share and the system takes back when it needs them.
"""
from nanochat.common import BadInput
from nanochat.data.bucket import in_bucket
from nanochat.data.shards import list_text
from nanochat.device import host_types
from nanochat.train.mesh_plan import TABLES, held_bytes


def estimate_host(flags, plan, tpu_slice):
    """Returns a JSON object about what a host of a tpu.Slice needs for base_train's Flags and their Plan, and has."""
    state = saved_bytes(plan.parameters)
    checkpoints = number_of_checkpoints(flags.record, plan.num_iterations)
    return {
        "ranks": host_types.chips_per_host(tpu_slice), "memory_bytes": host_types.memory_bytes(tpu_slice),
        "starting_bytes": host_types.chips_per_host(tpu_slice) * starting_bytes(plan), "saving_bytes": state,
        "disk_bytes": host_types.BOOT_DISK_BYTES, "checkpoint_bytes": state, "checkpoints": checkpoints,
        "checkpoints_bytes": checkpoints * state, "data_bytes": data_bytes(flags.data)}


def starting_bytes(plan):
    """Returns the bytes that a rank holds in host memory when it brings its weights to its chip: whole fp32 weights or,
    on a mesh that divides them, its parts of them, those of the optimizer in fp32, and the largest table."""
    if not plan.mesh.divides_weights:
        return 4 * sum(plan.parameters.values())
    layers, tables = plan.config.n_layer, [plan.parameters.get(name, 0) for name in TABLES]
    padded = (layers + -layers % plan.mesh.chips) / layers
    masters = 4 * (padded * plan.parameters["matrices"] + sum(tables)) / plan.mesh.chips
    weights = held_bytes(plan.parameters, plan.dtype.itemsize, plan.mesh, layers)["weights"]
    return weights + masters + 4 * max(tables)


def saved_bytes(parameters):
    """Returns the bytes of a checkpoint: fp32 weights, and averages of the gradients, one of matrices, two of others.
    The second moments of Muon's neurons, under a thousandth of it, are not counted."""
    matrices = parameters["matrices"]
    return 8 * matrices + 12 * (sum(parameters.values()) - matrices)


def number_of_checkpoints(record, num_iterations):
    """Returns how many checkpoints the first host's disk has at the most for RecordFlags: those that stay, with the
    newest, and the oldest of them that goes when the newest is whole."""
    if not record.saves:
        return 0
    saves = num_iterations if record.save_every_minutes > 0 else -(-num_iterations // record.save_every)
    for_good = num_iterations // record.keep_every if record.keep_every > 0 else 0
    return min(saves, record.keep_checkpoints + 1 + for_good)


def data_bytes(data):
    """Returns the bytes of a host's disk that DataFlags ask for; None where the shards are not on this machine."""
    if data.synthetic_data:
        return 0
    found = 0
    for split in ("train", "val"):
        if in_bucket(data.folder(split)):
            continue
        try:
            found += sum(path.stat().st_size for path in list_text(data, split))
        except BadInput:
            return None
    return found + (int(1e9 * data.data_cache_gb) if in_bucket(data.data_dir) or in_bucket(data.val_dir) else 0)


def describe_host(found):
    """Returns lines about an `estimate_host`."""
    needed = found["checkpoints_bytes"] + (found["data_bytes"] or 0)
    memory = max(found["starting_bytes"], found["saving_bytes"])
    data = "data that is not on this machine" if found["data_bytes"] is None else f"{_gb(found['data_bytes'])} of data"
    return [f"a host's memory: {found['ranks']} ranks that start hold {_gb(found['starting_bytes'])}; the first host "
            f"holds {_gb(found['saving_bytes'])} while it saves, twice that if a save begins before the last has "
            f"ended; it has {_gb(found['memory_bytes'])}" + _too_little(memory, found["memory_bytes"]),
            f"the first host's disk: {found['checkpoints']} checkpoints of {_gb(found['checkpoint_bytes'])}, and {data}"
            f"; the boot disk has {_gb(found['disk_bytes'])}" + _too_little(needed, found["disk_bytes"])
            + (f": attach another{_fewer(found)}" if needed > found["disk_bytes"] else "")]


def _fewer(found):
    """Returns ", or --keep_checkpoints=2" for as many as the disk has room for, with one more; "" if for none."""
    room = (found["disk_bytes"] - (found["data_bytes"] or 0)) // found["checkpoint_bytes"]
    return f", or --keep_checkpoints={room - 1}" if room > 1 else ""


def _too_little(needed, available):
    return ", TOO LITTLE" if needed > available else ""


def _gb(num_bytes):
    return f"{num_bytes / 1e9:.1f} GB"
