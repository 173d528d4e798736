"""Tables of accelerators: peak FLOP/s, memory, prices, and the meaning of accelerator strings such as "v5litepod-8".

Nothing here asks a runtime or the network. The prices are in prices.csv, by type of TPU, region, and spot or on demand;
deploy/lib/catalogue.py reads them, too. Prices change: scripts that print a cost have a flag that overrides it.
"""
import csv
import glob
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from nanochat.common import BadInput

GIB = 2**30


@dataclass(frozen=True)
class TpuType:
    """One generation of TPU. All figures are per chip."""
    name: str
    accelerator_prefix: str  # of the accelerator strings that create such VMs
    peak_flops: float  # dense bf16 FLOP/s
    hbm_bytes: int
    usable_hbm_bytes: int  # the part that the compiler leaves to programs
    hbm_bytes_per_s: float
    ici_bytes_per_s: float  # between chips, all links, both directions
    flops_per_cycle: int  # bf16, of the matrix units; peak_flops over it is the clock of the compiler's cycles
    torus_dims: int  # 2: flat slices, 3: cubic ones
    cores_per_chip: int  # the number in an accelerator string counts cores on v4 and v5p, chips on v5e and v6e
    max_chips_per_host: int  # of a slice with one host
    runtime_version: str  # of the VM image
    matrix_unit: int = 128  # width of a matrix unit
    max_whole: int | None = None  # positions of a sequence for which attention fits VMEM, if few
    scoped_vmem_kib: int | None = None  # VMEM for the tiles of one operation, if libtpu's own choice is slower
    async_gathers: bool = True  # libtpu, or torch_xla, overlaps all-gathers with products by default
    async_exchange_chips: int = 2**20  # of the largest slice for which libtpu compiles asynchronous exchanges


# Figures from Google's "TPU versions" pages; usable HBM from the out-of-memory reports of libtpu 0.0.21. Matrix units:
# 4 of 128 × 128 in each core of v4, v5e and v5p, 4 of 256 × 256 on v6e. In a line: the names; FLOP/s; HBM, and what
# programs get of it; bytes/s of HBM and links; FLOPs a cycle; dimensions; cores; chips of a host; the image.
TPU_TYPES = {tpu.name: tpu for tpu in (
    TpuType("v4", "v4", 275e12, 32 * GIB, int(30.75 * GIB), 1200e9, 600e9, 2**18, 3, 2, 4, "tpu-ubuntu2204-base",
            max_whole=1024, async_gathers=False),
    TpuType("v5e", "v5litepod", 197e12, 16 * GIB, int(15.75 * GIB), 819e9, 400e9, 2**17, 2, 1, 8, "v2-alpha-tpuv5-lite",
            scoped_vmem_kib=32768, async_exchange_chips=16),
    TpuType("v5p", "v5p", 459e12, 95 * GIB, int(95.74 * GIB), 2765e9, 1200e9, 2**18, 3, 2, 4, "v2-alpha-tpuv5"),
    TpuType("v6e", "v6e", 918e12, 32 * GIB, int(31.25 * GIB), 1640e9, 800e9, 2**19, 2, 1, 8, "v2-alpha-tpuv6e",
            matrix_unit=256, scoped_vmem_kib=65536),
)}
_PCI_DEVICE_TO_TYPE = {"0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e"}
_CHIPS_PER_HOST_OF_A_POD = 4  # every slice of more than one host, of every type

# Options that overlap collectives with products. On a mesh with fsdp, 84% of the gathered bytes overlap. libtpu refuses
# asynchronous exchanges for slices "on limited ICI": of v5e for 32 chips and more, of v4, v5p and v6e for none tried.
_ASYNC_EXCHANGES = {"xla_tpu_enable_async_all_to_all": "true"}
_ASYNC_GATHERS = {
    "xla_enable_async_all_gather": "true", "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true"}


def libtpu_init_args(tpu_slice, others=()):
    """Returns $LIBTPU_INIT_ARGS, extended by the options of a Slice and by `others`, {name: value}. Options that the
    variable already sets stay."""
    tpu = tpu_slice.tpu
    options = dict(others)
    if tpu.scoped_vmem_kib:
        options["xla_tpu_scoped_vmem_limit_kib"] = tpu.scoped_vmem_kib
    if tpu_slice.chips <= tpu.async_exchange_chips:
        options |= _ASYNC_EXCHANGES
    if not tpu.async_gathers:
        options |= _ASYNC_GATHERS
    arguments = os.environ.get("LIBTPU_INIT_ARGS", "").split()
    known = {argument.partition("=")[0] for argument in arguments if "=" in argument}
    for name, value in options.items():
        if f"--{name}" not in known:
            arguments.append(f"--{name}={value}")
    return " ".join(arguments)


class Slice(NamedTuple):
    """The chips that an accelerator string stands for."""
    tpu: TpuType
    chips: int
    hosts: int
    topology: str  # "2x4": chips along each dimension of the torus

    @property
    def accelerator(self):
        """The accelerator string, as Google spells it."""
        return f"{self.tpu.accelerator_prefix}-{self.chips * self.tpu.cores_per_chip}"


_NAMES = {"v4": "v4", "v5e": "v5e", "v5lite": "v5e", "v5litepod": "v5e", "v5p": "v5p", "v6e": "v6e"}


def parse_accelerator(accelerator, source="--accelerator"):
    """Returns the Slice of an accelerator string such as "v5litepod-8" or "v4-32", or of another spelling, such as
    "v5e-8", "v6e4" or "tpu-V5LITEPOD_8". source: the flag that has it. Raises BadInput if there is none."""
    spelling = accelerator.lower().replace("_", "-")
    match = re.fullmatch("(?:tpu-?)?(v[0-9](?:litepod|lite|[a-z])?)-?([0-9]{1,6})", spelling)
    name, count = match.groups() if match else ("", "0")
    if name not in _NAMES:
        known = ", ".join(f"{tpu.accelerator_prefix}-N" for tpu in TPU_TYPES.values())
        raise BadInput(f"{source}={accelerator} is unknown: give one of {known}")
    tpu = TPU_TYPES[_NAMES[name]]
    chips, odd_core = divmod(int(count), tpu.cores_per_chip)
    # Slices are powers of two of chips. There is none of 2 chips, and of v4 and v5p none below 4.
    is_power_of_two = chips and chips & (chips - 1) == 0
    if odd_core or not is_power_of_two or (chips < 4 and tpu.torus_dims == 3) or chips == 2 or count[0] == "0":
        sizes = "1, 4, 8, 16, 32 …" if tpu.torus_dims == 2 else "8, 16, 32, 64 …"
        raise BadInput(f"{source}={accelerator} does not exist: sizes are {sizes}")
    hosts = 1
    if chips > tpu.max_chips_per_host:
        hosts = chips // _CHIPS_PER_HOST_OF_A_POD
    return Slice(tpu, chips, hosts, _topology(chips, tpu.torus_dims))


def _topology(chips, torus_dims):
    """Returns the most even box of `chips` chips, a power of two, with the longest side last: 8 is 2x4, or 2x2x2."""
    if torus_dims == 3 and chips == 4:
        return "2x2x1"
    # The sides' exponents add up to log2_chips, and differ by one at most.
    log2_chips = chips.bit_length() - 1
    return "x".join(str(2 ** ((log2_chips + i) // torus_dims)) for i in range(torus_dims))


def count_tpu_chips(pci_devices="/sys/bus/pci/devices", dev="/dev"):
    """Returns the number of TPU chips of this machine, without starting a runtime.

    They are on the PCI bus. If a container hides the bus, they are /dev/accel0 …; or, if the environment says that this
    is a TPU, /dev/vfio/0 …, which other devices have, too.
    """
    chips = 0
    for vendor_path in glob.glob(f"{pci_devices}/*/vendor"):
        if _read_id(vendor_path) == "0x1ae0":  # Google
            # The ids that torch_xla knows; other Google devices (gVNIC, 0x0042) are not TPUs.
            chips += _read_id(Path(vendor_path).with_name("device")) in (
                "0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")
    # A bus that shows devices but no TPU is an answer. An empty one is hidden.
    if chips or os.path.isdir(pci_devices) and os.listdir(pci_devices):
        return chips
    chips = len(glob.glob(f"{dev}/accel[0-9]*"))
    if not chips and (os.environ.get("PJRT_DEVICE") == "TPU" or os.environ.get("TPU_ACCELERATOR_TYPE")):
        chips = len(glob.glob(f"{dev}/vfio/[0-9]*"))
    return chips


def _read_id(path):
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def detect_accelerator(pci_devices="/sys/bus/pci/devices"):
    """Returns the accelerator string of this machine, or None if it has no TPU or an unknown one.

    $TPU_ACCELERATOR_TYPE comes first; raises BadInput if it names no TPU. Otherwise the string follows from the PCI
    bus, which shows the chips of this host only: a host of a larger slice looks like a slice of one host.
    """
    if os.environ.get("TPU_ACCELERATOR_TYPE"):
        return parse_accelerator(os.environ["TPU_ACCELERATOR_TYPE"], "TPU_ACCELERATOR_TYPE").accelerator
    chips = count_tpu_chips(pci_devices)
    device_ids = {_read_id(path) for path in Path(pci_devices).glob("*/device")}
    for device_id in _PCI_DEVICE_TO_TYPE.keys() & device_ids:
        tpu = TPU_TYPES[_PCI_DEVICE_TO_TYPE[device_id]]
        return f"{tpu.accelerator_prefix}-{chips * tpu.cores_per_chip}"
    return None


def peak_flops_here(device_type):
    """Returns the dense bf16 FLOP/s of one chip of this machine, for MFU, or None if it is not known, as of GPUs."""
    accelerator = detect_accelerator() if device_type == "tpu" else None
    return parse_accelerator(accelerator).tpu.peak_flops if accelerator else None


# Prices


class Price(NamedTuple):
    usd_per_chip_hour: float
    is_known: bool  # False: the region is not in the table, and this is the price of the dearest region


def region_of(zone):
    """Returns the region of a zone: us-west4 for us-west4-a."""
    return zone.rpartition("-")[0]


@cache
def _read_prices():
    """Returns {(type, kind): {region: USD per chip-hour}}. Lines that begin with # are comments."""
    table = {}
    with open(Path(__file__).with_name("prices.csv"), encoding="utf-8") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            table.setdefault((row["type"], row["kind"]), {})[row["region"]] = float(row["usd_per_chip_hour"])
    return table


def chip_price(accelerator, spot, zone=None):
    """Returns the Price of one chip of an accelerator such as "v5litepod-8" in this zone, or None if no price of the
    type is known. Without a zone, and in an unknown one, the dearest region counts."""
    by_region = _read_prices().get((accelerator.partition("-")[0], "spot" if spot else "on_demand"))
    if not by_region:
        return None
    usd = by_region.get(region_of(zone or ""))
    return Price(max(by_region.values()), False) if usd is None else Price(usd, True)


def usd_per_hour(accelerator, spot, zone=None):
    """Returns the price of a slice in USD per hour: of the zone, or of the dearest region without one. Returns None if
    it is unknown."""
    price = chip_price(accelerator, spot, zone)
    if price is None or zone and not price.is_known:
        return None
    return price.usd_per_chip_hour * parse_accelerator(accelerator).chips


def require_known_zone(accelerator, zone):
    """Raises BadInput if the table has prices of this type of TPU, and none for the zone."""
    regions = set()
    for (name, _), by_region in _read_prices().items():
        if name == accelerator.partition("-")[0]:
            regions |= by_region.keys()
    if zone and regions and region_of(zone) not in regions:
        raise BadInput(f"--zone={zone}: no price of {accelerator} is known there: give one "
                       f"of {', '.join(sorted(regions))}")
