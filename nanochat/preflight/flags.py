"""The preflight's own flags, and what it needs before anything is traced."""
import os
from dataclasses import dataclass, replace
from pathlib import Path

from nanochat.common import BadInput, expand_path, flag, read_flags, require_writable_dir
from nanochat.device import tpu
from nanochat.train.flags import GONE, TITLES, Flags

PROGRAMS = ("micro_step", "update", "evaluate")


@dataclass(frozen=True)
class PreflightFlags:
    accelerator: str = flag("", "the TPU to compile for: v5litepod-8, v6e-4, v4-32 …", required=True)
    json: Path | None = flag(None, "write the report to FILE", metavar="FILE", of=expand_path)
    programs: str = flag(",".join(PROGRAMS), "programs to compile; a step's estimate needs micro_step and update")
    find_batch: bool = flag(False, "double or halve --device_batch_size until it is the largest that fits")
    find_mesh: bool = flag(False, "search for the smallest --mesh_fsdp that fits")
    dump_dir: Path | None = flag(None, "keep the traced and the optimised programs in DIR", metavar="DIR",
                                 of=expand_path)
    jobs: int = flag(2, "the number of compilers that run concurrently", at_least=1, at_most=1000)
    timeout_s: int = flag(1800, "the longest time that one program may take to compile", at_least=1)
    measured: Path | None = flag(None, "check.json of tpu_check, which corrects the estimates; default: all "
                                 "known ones of this kind of chip", metavar="FILE", of=expand_path)
    zone: str | None = flag(None, "zone whose prices in nanochat/device/prices.csv count, such as us-west4-a; default: "
                            "the dearest")

    @property
    def tpu_slice(self):
        return tpu.parse_accelerator(self.accelerator)

    @property
    def kinds(self):
        """The kinds of programs to compile, among PROGRAMS."""
        return set(self.programs.split(","))


def read_preflight_flags(argv=None, description=""):
    """Returns the PreflightFlags of a command line and base_train's Flags. Raises BadInput."""
    own, *of_training = read_flags(argv, description, {PreflightFlags: "preflight", **TITLES}, gone=GONE | {
        "usd_per_chip_hour": "multiply the printed hours by the chips and your price"})
    if not own.kinds <= set(PROGRAMS):
        raise BadInput(f"--programs={own.programs} is unknown: choose among {','.join(PROGRAMS)}")
    tpu.require_known_zone(own.tpu_slice.accelerator, own.zone)
    if own.json and (own.json.is_dir() or own.json.exists() and not os.access(own.json, os.W_OK)
                     or not os.access(own.json.parent, os.W_OK | os.X_OK)):
        raise BadInput(f"--json={own.json} cannot be written: name a file in a writable folder")
    if own.dump_dir:
        require_writable_dir(own.dump_dir)
    return replace(own, accelerator=own.tpu_slice.accelerator), Flags(*of_training)


def prepare(own):
    """Prepares this process for tracing, before torch_xla is imported. Raises BadInput if a package is missing."""
    from nanochat.preflight.compile import require_packages
    from nanochat.preflight.trace import prepare_environment
    require_packages()
    prepare_environment()
    os.environ["TPU_ACCELERATOR_TYPE"] = own.accelerator  # the attention kernel's tiles depend on the chip
