"""The mesh: how the chips of a run divide the model and the batch among themselves.

A mesh has three axes, data × fsdp × tensor. Chips along `data` and `fsdp` read different rows. Chips along `data` hold
the same weights; those along `fsdp` hold a part of each, and gather a layer's weights when they come to it (ZeRO-3,
arXiv 1910.02054). With 1 × 1 for the last two, every chip holds all weights.
"""
import os
import re
from dataclasses import dataclass

from nanochat.common import BadInput

AXES = ("data", "fsdp", "tensor")
_SYNONYMS = {"model": "tensor"}  # in TPU_AXIS_NAMES


@dataclass(frozen=True)
class Mesh:
    """The number of chips along each axis. Rank r is at ((d × fsdp) + f) × tensor + t = r."""
    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def chips(self):
        return self.data * self.fsdp * self.tensor

    def coordinates(self, rank):
        """Returns where a rank stands along data, fsdp and tensor."""
        return rank // (self.fsdp * self.tensor), rank // self.tensor % self.fsdp, rank % self.tensor

    def groups(self, axis):
        """Returns the groups of ranks that differ in their place along `axis` only, [[rank, …], …], each in the order
        of that place."""
        place, groups = AXES.index(axis), {}
        for rank in range(self.chips):
            coordinates = list(self.coordinates(rank))
            coordinates[place] = 0
            groups.setdefault(tuple(coordinates), []).append(rank)
        return list(groups.values())

    def __str__(self):
        return " × ".join(f"{getattr(self, axis)} {axis}" for axis in AXES)


def make_mesh(data, fsdp, tensor, chips, environment=os.environ):
    """Returns the Mesh of `chips` chips for --mesh_data, --mesh_fsdp and --mesh_tensor; a data of -1 is what is left.

    If all three have their defaults, TPU_MESH_CONFIG counts, "4,2" for example, the chips along the axes that
    TPU_AXIS_NAMES lists, by default data,fsdp,tensor. Raises BadInput if the product is another number of chips.
    """
    source = f"--mesh_data={data} --mesh_fsdp={fsdp} --mesh_tensor={tensor}"
    if (data, fsdp, tensor) == (-1, 1, 1) and environment.get("TPU_MESH_CONFIG"):
        sizes = _read_environment(environment["TPU_MESH_CONFIG"], environment.get("TPU_AXIS_NAMES") or ",".join(AXES))
        data, fsdp, tensor = (sizes.get(axis, 1) for axis in AXES)
        source = f"TPU_MESH_CONFIG={environment['TPU_MESH_CONFIG']}"
    if tensor > 1:
        raise BadInput(f"{source}: tensor parallelism does not exist yet; divide the weights with --mesh_fsdp="
                       f"{fsdp * tensor} instead")
    others = fsdp * tensor
    if data == -1 and chips % others == 0:
        data = chips // others
    if data * others != chips:
        product = f"{'?' if data == -1 else data} × {fsdp} × {tensor}"
        raise BadInput(f"{source} are {product} chips along data, fsdp and tensor, and there are {chips}: use "
                       f"--mesh_data=-1 with --mesh_fsdp={_nearest_divisors(chips, fsdp)}")
    return Mesh(data, fsdp, tensor)


def _read_environment(config, names):
    """Returns {axis: chips} for TPU_MESH_CONFIG and TPU_AXIS_NAMES."""
    axes = [_SYNONYMS.get(name, name) for name in (name.strip().lower() for name in names.split(","))]
    sizes = config.strip("() ").split(",")
    are_sizes = all(re.fullmatch(r"\s*[1-9][0-9]{0,5}\s*", size) for size in sizes)
    if not are_sizes or len(set(axes)) < len(axes) or not set(axes) <= {*AXES} or len(sizes) > len(axes):
        raise BadInput(f"TPU_MESH_CONFIG={config} with TPU_AXIS_NAMES={names} is no mesh: give the chips along each "
                       "axis and its names, such as TPU_MESH_CONFIG=4,2 TPU_AXIS_NAMES=data,fsdp")
    return dict(zip(axes, map(int, sizes), strict=False))


def require_divisible(mesh, sizes):
    """Raises BadInput if the fsdp axis of a Mesh does not divide a size of the model.

    sizes: {what it is, with its flag: size}, of which each chip along fsdp holds an equal part.
    """
    for what, size in sizes.items():
        if size % mesh.fsdp:
            raise BadInput(f"--mesh_fsdp={mesh.fsdp} does not divide {what}, {size}: use --mesh_fsdp="
                           f"{_nearest_divisors(size, mesh.fsdp)}")


def _nearest_divisors(number, near):
    """Returns the divisors of `number` that come before and after `near`, in words."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    below, above = [n for n in divisors if n < near], [n for n in divisors if n > near]
    return " or ".join(map(str, below[-1:] + ([near] if number % near == 0 else []) + above[:1]))
