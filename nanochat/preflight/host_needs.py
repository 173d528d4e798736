"""Estimates the memory and disk that each host of a run needs, and says what a TPU's host, a VM, has. A starting run
reads or draws its weights in host memory, in the process of every chip; a save brings the whole state to the first
host. Not counted: Python, libtpu, the data, and the page cache."""
from nanochat.common import BadInput
from nanochat.data.bucket import in_bucket
from nanochat.data.mixture import read_mixture
from nanochat.data.shards import list_shards
from nanochat.device.tpu import GIB
from nanochat.train.mesh_plan import TABLES, held_bytes

# By type and chips of the VM, from Google's list of machine types (ct4p-hightpu-4t, ct5lp-hightpu-1t, -4t and -8t,
# ct5p-hightpu-4t, ct6e-standard-1t, -4t and -8t), in its copy tools/machinetypes.csv of
# github.com/Cyclenerd/google-cloud-pricing-cost-calculator, commit 0026ae3a. docs.cloud.google.com/tpu/docs/v5e and v5p
# agree.
MEMORY_GB = {("v4", 4): 407, ("v5e", 1): 48, ("v5e", 4): 192, ("v5e", 8): 384, ("v5p", 4): 448, ("v6e", 1): 176,
             ("v6e", 4): 720, ("v6e", 8): 1440}
BOOT_DISK_BYTES = 100 * GIB  # cloud.google.com/tpu/docs/setup-persistent-disk, "a 100 GiB boot disk"


def estimate_host(flags, plan, tpu_slice, checkpoint_bytes):
    """Returns a JSON object: what a host of a tpu.Slice has, and what base_train's Flags and their Plan need."""
    ranks = tpu_slice.chips // tpu_slice.hosts
    checkpoints = number_of_checkpoints(flags.record, plan.num_iterations)
    return {
        "ranks": ranks, "memory_bytes": memory_bytes(tpu_slice), "starting_bytes": ranks * starting_bytes(plan),
        "saving_bytes": checkpoint_bytes, "disk_bytes": BOOT_DISK_BYTES, "checkpoint_bytes": checkpoint_bytes,
        "checkpoints": checkpoints, "checkpoints_bytes": checkpoints * checkpoint_bytes,
        "data_bytes": data_bytes(flags.data)}


def memory_bytes(tpu_slice):
    """Returns the memory of a host of the slice."""
    return MEMORY_GB[tpu_slice.tpu.name, tpu_slice.chips // tpu_slice.hosts] * 10**9


def starting_bytes(plan):
    """Returns the bytes that a rank holds in host memory while it brings its weights to its chip: whole fp32 weights
    or, on a mesh that divides them, its parts, the optimizer's parts in fp32, and the largest table."""
    if not plan.mesh.divides_weights:
        return 4 * sum(plan.parameters.values())
    layers = plan.config.n_layer
    tables = [plan.parameters.get(name, 0) for name in TABLES]
    padded = (layers + -layers % plan.mesh.chips) / layers
    masters = 4 * (padded * plan.parameters["matrices"] + sum(tables)) / plan.mesh.chips
    weights = held_bytes(plan.parameters, plan.dtype.itemsize, plan.mesh, layers)["weights"]
    return weights + masters + 4 * max(tables)


def number_of_checkpoints(record, num_iterations):
    """Returns the most checkpoints on the first host's disk for RecordFlags: those that stay, and the oldest, which
    goes when the newest is whole."""
    if not record.saves:
        return 0
    # Minutes say nothing about steps; at most one checkpoint follows each.
    if record.save_every_minutes > 0:
        saves = num_iterations
    else:
        saves = -(-num_iterations // record.save_every)
    for_good = 0
    if record.keep_every > 0:
        for_good = num_iterations // record.keep_every
    return min(saves, record.keep_checkpoints + 1 + for_good)


def data_bytes(data):
    """Returns the bytes of a host's disk that DataFlags ask for; None if the shards are not on this machine."""
    if data.synthetic_data:
        return 0
    places = [("val", each.val_dir) for each in data.validation_sets().values()]
    if data.data_mix:
        places += [("train", source.place) for source in read_mixture(data.data_mix).sources]
    else:
        places.append(("train", data.data_dir))
    found = 0
    cached = 0  # the cache of all places in buckets
    for split, place in places:
        if in_bucket(place):
            cached = int(1e9 * data.data_cache_gb)
            continue
        try:
            found += sum(path.stat().st_size for path in list_shards(place, split))
        except BadInput:
            return None
    return found + cached
