"""What a TPU's host, a VM, has besides its chips: memory, a disk, and its share of the network between slices.

Memory: Google's list of machine types (ct4p-hightpu-4t, ct5lp-hightpu-1t, -4t and -8t, ct5p-hightpu-4t,
ct6e-standard-1t, -4t and -8t), in the copy of github.com/Cyclenerd/google-cloud-pricing-cost-calculator,
tools/machinetypes.csv at commit 0026ae3a; docs.cloud.google.com/tpu/docs/v5e and v5p say the same of theirs.
Network: docs.cloud.google.com/tpu/docs/v5e and v6e, "Per-host NIC configuration", 2 × 100 and 4 × 200 Gbit/s for a
machine of 8 chips, which is also what they say of a whole pod (6.4 and 25.6 Tbit/s for 256 chips); v5p, "Data center
network (DCN) bandwidth per chip", 50 Gbit/s. A VM with a part of a machine's chips is assumed to have that part of its
network. For v4 no figure was found.
Disk: cloud.google.com/tpu/docs/setup-persistent-disk, "a 100 GiB boot disk".
"""
from nanochat.device.tpu import GIB

MEMORY_GB = {("v4", 4): 407, ("v5e", 1): 48, ("v5e", 4): 192, ("v5e", 8): 384, ("v5p", 4): 448, ("v6e", 1): 176,
             ("v6e", 4): 720, ("v6e", 8): 1440}  # by type and chips of the VM
GBPS_PER_CHIP = {"v5e": 25, "v5p": 50, "v6e": 100}  # Gbit/s between slices, in each direction
BOOT_DISK_BYTES = 100 * GIB


def chips_per_host(tpu_slice):
    """Returns the number of chips of each host of a tpu.Slice."""
    return tpu_slice.chips // tpu_slice.hosts


def memory_bytes(tpu_slice):
    """Returns the memory of a host of the slice."""
    return MEMORY_GB[tpu_slice.tpu.name, chips_per_host(tpu_slice)] * 10**9


def dcn_gbps(tpu_slice):
    """Returns the Gbit/s between slices of a host of the slice, or None where none is known."""
    per_chip = GBPS_PER_CHIP.get(tpu_slice.tpu.name)
    return per_chip and per_chip * chips_per_host(tpu_slice)
