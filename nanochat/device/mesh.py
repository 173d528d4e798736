"""The mesh: how the chips of a run divide the model and the batch among themselves.

A mesh has three axes, data × fsdp × tensor. Chips along `data` and `fsdp` read different rows. Chips along `data` hold
the same weights. Chips along `fsdp` hold a part of each weight, and gather a layer's weights when they need them
(ZeRO-3, arXiv 1910.02054). Chips along `tensor` read the same rows, and each computes with its part of the heads, the
hidden units and the vocabulary (arXiv 1909.08053).
"""
import math
from bisect import bisect_left
from dataclasses import dataclass

from nanochat.common import BadInput

AXES = ("data", "fsdp", "tensor")


# Eight chips as 2 data × 2 fsdp × 2 tensor:
#     rank      0  1  2  3  4  5  6  7
#     data      0  0  0  0  1  1  1  1      groups 0 4, 1 5, 2 6, 3 7: sum gradients
#     fsdp      0  0  1  1  0  0  1  1      groups 0 2, 1 3, 4 6, 5 7: gather a layer's weights, scatter gradients
#     tensor    0  1  0  1  0  1  0  1      groups 0 1, 2 3, 4 5, 6 7: sum activations
# Four readers read different rows: ranks 0 and 1 are the first.
@dataclass(frozen=True)
class Mesh:
    """The number of chips along each axis. Rank r is at ((d × fsdp) + f) × tensor + t = r."""
    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def chips(self):
        return self.data * self.fsdp * self.tensor

    @property
    def divides_weights(self):
        """Whether a chip holds only a part of the weights."""
        return self.fsdp * self.tensor > 1

    @property
    def readers(self):
        """The number of chips, or groups of chips along tensor, that read different rows."""
        return self.data * self.fsdp

    def reader(self, rank):
        """Returns the number of a rank among the readers, which all ranks of its group along tensor share."""
        return rank // self.tensor

    @property
    def devices_of_readers(self):
        """The readers in words: "devices" or "groups of 2 devices"."""
        return "devices" if self.tensor == 1 else f"groups of {self.tensor} devices"

    def coordinates(self, rank):
        """Returns a rank's place along data, fsdp and tensor."""
        return rank // (self.fsdp * self.tensor), rank // self.tensor % self.fsdp, rank % self.tensor

    def groups(self, axis):
        """Returns the groups of ranks that differ in their place along `axis` only, [[rank, …], …], each in the order
        of that place."""
        number = AXES.index(axis)
        groups = {}  # places along the other axes -> ranks
        for rank in range(self.chips):
            places = self.coordinates(rank)
            groups.setdefault(places[:number] + places[number + 1:], []).append(rank)
        return list(groups.values())

    def __str__(self):
        return " × ".join(f"{getattr(self, axis)} {axis}" for axis in AXES)


ONE_CHIP = Mesh()


def all_meshes(chips, tensor=1):
    """Returns the Meshes of so many chips with `tensor` of them along that axis, the fewest along fsdp first."""
    found = []
    for fsdp in range(1, chips // tensor + 1):
        if chips % (fsdp * tensor) == 0:
            found.append(Mesh(chips // (fsdp * tensor), fsdp, tensor))
    return found


def make_mesh(fsdp, tensor, chips):
    """Returns the Mesh of `chips` chips for --mesh_fsdp and --mesh_tensor; the remaining chips are along data. Raises
    BadInput if these do not divide the number of chips."""
    if chips % (fsdp * tensor):
        instead = f"{divisors_in_words(chips, tensor)} along tensor"
        if chips % tensor == 0:
            instead = f"{divisors_in_words(chips // tensor, fsdp)} along fsdp"
        raise BadInput(f"--mesh_fsdp={fsdp} --mesh_tensor={tensor} do not divide the number of chips, {chips}: use "
                       f"{instead}, and the others along data; on a CPU, CPU_NUM_DEVICES with --device_type=xla sets "
                       "their number")
    return Mesh(chips // (fsdp * tensor), fsdp, tensor)


def require_divisible(mesh, axis, sizes):
    """Raises BadInput if an axis of a Mesh, fsdp or tensor, does not divide a size of the model. sizes: {what it is,
    with its flag: size}, of which each chip along the axis holds an equal part."""
    chips = getattr(mesh, axis)
    others = mesh.tensor if axis == "fsdp" else mesh.fsdp
    for what, size in sizes.items():
        if size % chips:
            # A valid number divides every size, and the chips that the other axis leaves.
            common = math.gcd(*sizes.values(), mesh.chips // others)
            raise BadInput(f"a mesh of {mesh}: {chips} chips along {axis} do not divide {what}, {size}: use "
                           f"{divisors_in_words(common, chips)} along {axis}")


def divisors_in_words(number, near):
    """Returns the divisors of `number` next to `near`, one on each side if there are two, as text: "2 or 4"."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    place = bisect_left(divisors, near)
    return " or ".join(map(str, divisors[max(place - 1, 0):place + 1]))
