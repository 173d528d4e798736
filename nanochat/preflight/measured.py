"""What a check of a chip teaches the preflight: scripts.tpu_check writes how long the programs took and how much memory
they needed over the estimates, and --measured corrects later estimates by the same factors."""
import importlib.metadata
import json

from nanochat.common import BadInput, read_named
from nanochat.device.tpu import parse_accelerator

LARGEST_FACTOR = 3  # beyond it, or below its inverse, something else than the estimate is wrong
TIMES = {"micro_step", "update"}
ADVICE = "give the check.json of scripts.tpu_check with the same flags, or leave --measured out"


def measurements(found, plan, accelerator):
    """Returns the JSON object for read_measured. found: {check: [Finding]}; plan: of the run."""
    factors = {each.what: each.factor for findings in found.values() for each in findings if each.factor}
    return {"accelerator": accelerator, "factors": factors, **about(plan)}


def about(plan):
    """Returns what must be the same in a check and an estimate, {name: value}."""
    return {"libtpu": importlib.metadata.version("libtpu"), "depth": plan.config.n_layer,
            "mesh_fsdp": plan.mesh.fsdp, "mesh_tensor": plan.mesh.tensor}


def read_measured(path, plan, tpu_slice):
    """Returns (date, {name: factor}) of a check.json. Raises BadInput if it is none, or is of something else."""
    try:
        report = json.loads(read_named("measured", path))
        date, found = str(report["date"])[:10], report["measured"]
        factors = {str(name): float(factor) for name, factor in found["factors"].items()}
        kind = parse_accelerator(found["accelerator"], "accelerator").tpu.name
    except (ValueError, LookupError, TypeError, AttributeError, BadInput):
        raise BadInput(f"--measured={path} has no measurements of a chip: {ADVICE}") from None
    if kind != tpu_slice.tpu.name:
        raise BadInput(f"--measured={path} is of {kind}, and --accelerator={tpu_slice.accelerator}: {ADVICE}")
    for name, value in about(plan).items():
        if found.get(name) != value:
            raise BadInput(f"--measured={path} is of {name} {found.get(name)}, and here it is {value}: {ADVICE}")
    for name, factor in factors.items():
        if not 1 / LARGEST_FACTOR <= factor <= LARGEST_FACTOR:
            raise BadInput(f"--measured={path} has a factor of {factor:g} for {name}, beyond {LARGEST_FACTOR}: "
                           f"{ADVICE}")
    if not TIMES <= factors.keys():
        raise BadInput(f"--measured={path} lacks the time of a program: {ADVICE}")
    return date, factors


def corrected(programs, factors):
    """Returns the programs of a report with their times multiplied by the factors of their kinds."""
    found = {}
    for name, program in programs.items():
        factor = factors.get(name.partition(" ")[0], 1)
        found[name] = program | {which: factor * program[which] for which in ("estimated_s", "low_s", "high_s")}
    return found
