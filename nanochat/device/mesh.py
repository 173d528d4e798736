"""The mesh: how the chips of a run divide the model and the batch among themselves.

A mesh has three axes, data × fsdp × tensor. Chips along `data` and `fsdp` read different rows. Chips along `data` hold
the same weights; those along `fsdp` hold a part of each, and gather a layer's weights when they come to it (ZeRO-3,
arXiv 1910.02054). With 1 × 1 for the last two, every chip holds all weights.
"""
import math
import os
import re
from dataclasses import dataclass, field

from nanochat.common import BadInput

AXES = ("data", "fsdp", "tensor")
_SYNONYMS = {"model": "tensor"}  # in TPU_AXIS_NAMES


@dataclass(frozen=True)
class Mesh:
    """The number of chips along each axis. Rank r is at ((d × fsdp) + f) × tensor + t = r."""
    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    variables: str = field(default="", compare=False, repr=False)  # of the environment that name it; "": flags do

    @property
    def source(self):
        """What asked for this many chips along fsdp, for an error."""
        return self.variables or f"--mesh_fsdp={self.fsdp}"

    def ask_for(self, *sizes):
        """Returns what to give for another number of chips along fsdp, one of `sizes`, for an error."""
        if not self.variables:
            return f"--mesh_fsdp={_in_words(sizes)}"
        return _in_environment(self.chips, sizes)

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
    source, variables = f"--mesh_data={data} --mesh_fsdp={fsdp} --mesh_tensor={tensor}", ""
    if (data, fsdp, tensor) == (-1, 1, 1) and environment.get("TPU_MESH_CONFIG"):
        config, names = environment["TPU_MESH_CONFIG"], environment.get("TPU_AXIS_NAMES") or ",".join(AXES)
        sizes = _read_environment(config, names)
        data, fsdp, tensor = (sizes.get(axis, 1) for axis in AXES)
        source = variables = f"TPU_MESH_CONFIG={config} with TPU_AXIS_NAMES={names}"
    if tensor > 1:
        instead = _in_environment(chips, _nearest_divisors(chips, fsdp * tensor)) if variables else \
            f"--mesh_fsdp={fsdp * tensor}"
        raise BadInput(f"{source}: tensor parallelism does not exist yet; divide the weights with {instead} instead")
    others = fsdp * tensor
    if data == -1 and chips % others == 0:
        data = chips // others
    if data * others != chips:
        product = f"{'?' if data == -1 else data} × {fsdp} × {tensor}"
        nearest = _nearest_divisors(chips, fsdp)
        instead = _in_environment(chips, nearest) if variables else \
            f"--mesh_data=-1 with --mesh_fsdp={_in_words(nearest)}"
        raise BadInput(f"{source} are {product} chips along data, fsdp and tensor, and there are {chips}: "
                       f"use {instead}")
    return Mesh(data, fsdp, tensor, variables)


def _read_environment(config, names):
    """Returns {axis: chips} for TPU_MESH_CONFIG and TPU_AXIS_NAMES."""
    axes = [_SYNONYMS.get(name, name) for name in (name.strip().lower() for name in names.split(","))]
    sizes = config.strip("() ").split(",")
    are_sizes = all(re.fullmatch(r"\s*[1-9][0-9]{0,5}\s*", size) for size in sizes)
    if not are_sizes or len(set(axes)) < len(axes) or not set(axes) <= {*AXES} or len(sizes) > len(axes):
        raise BadInput(f"TPU_MESH_CONFIG={config[:40]} with TPU_AXIS_NAMES={names[:80]} is no mesh: set the chips "
                       "along each axis and its names, such as TPU_MESH_CONFIG=4,2 TPU_AXIS_NAMES=data,fsdp, or unset "
                       "both")
    return dict(zip(axes, map(int, sizes), strict=False))


def require_divisible(mesh, sizes):
    """Raises BadInput if the fsdp axis of a Mesh does not divide a size of the model.

    sizes: {what it is, with its flag: size}, of which each chip along fsdp holds an equal part.
    """
    for what, size in sizes.items():
        if size % mesh.fsdp:
            # The variables name all axes, so their fsdp must divide the chips, too.
            nearest = _nearest_divisors(math.gcd(size, mesh.chips) if mesh.variables else size, mesh.fsdp)
            raise BadInput(f"{mesh.source}: {mesh.fsdp} chips along fsdp do not divide {what}, {size}: use "
                           f"{mesh.ask_for(*nearest)}")


def _nearest_divisors(number, near):
    """Returns the divisors of `number` that come before and after `near`, and `near` if it is one."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    below, above = [n for n in divisors if n < near], [n for n in divisors if n > near]
    return below[-1:] + ([near] if number % near == 0 else []) + above[:1]


def _in_words(values):
    return " or ".join(map(str, values))


def _in_environment(chips, fsdps):
    """Returns the environment variables that ask for one of `fsdps` chips along fsdp, in words."""
    configs = _in_words(f"{chips // fsdp},{fsdp}" for fsdp in fsdps)
    return f"TPU_MESH_CONFIG={configs} with TPU_AXIS_NAMES=data,fsdp, or unset both"
