"""What checks of chips teach the preflight: scripts.tpu_check writes how long each category of work took over its
estimate, and later estimates are corrected by the same factors."""
import importlib.metadata
import json
from contextlib import suppress

import numpy as np

from nanochat.common import BadInput, get_base_dir, read_named
from nanochat.device.tpu import parse_accelerator
from nanochat.preflight.hlo import REPOSITORY

LARGEST_FACTOR = 3  # beyond it, or below its inverse, something else than the estimate is wrong
NEEDED = {"products", "update"}
OF_A_RUN = {"host", "memory"}  # these factors say nothing of another model
BAR = 0.1  # of a corrected estimate: the next chip, clock or shape may differ
CHIPS = REPOSITORY / "dev" / "chips"
ADVICE = "give the check.json of scripts.tpu_check with the same flags, or leave --measured out"


def measurements(found, plan, accelerator):
    """Returns the JSON object for read_check. found: {check: [Finding]}; plan: of the run."""
    measured = [each for findings in found.values() for each in findings if each.factor]
    factors = {each.what.partition(":")[0]: each.factor for each in measured if not each.parts}
    if of_parts := [each for each in measured if each.parts]:
        factors |= split(of_parts, factors.get("collectives", 1))
    return {"accelerator": accelerator, "factors": factors, **about(plan)}


def split(micro_steps, collectives):
    """Returns {"products": factor, "attention": factor}. micro_steps: Findings, of several shapes; collectives: their
    factor."""
    products, attention, waits = (np.array([each.parts[name] for each in micro_steps])
                                  for name in ("products", "attention", "collectives"))
    totals = np.array([each.factor for each in micro_steps])
    seconds = totals * (products + attention + waits) - collectives * waits
    if len(totals) > 1 and attention.any():
        found = np.linalg.lstsq(np.stack([products, attention], axis=1), seconds, rcond=None)[0]
        if found.min() >= 1 / LARGEST_FACTOR:
            return {"products": float(found[0]), "attention": float(found[1])}
    # One shape cannot tell them apart, and neither can two that differ by less than the measurements.
    factor = float(seconds[0] / (products[0] + attention[0]))
    return {"products": factor, "attention": factor}


def about(plan):
    """Returns what must be the same in a check and an estimate, {name: value}."""
    return {"libtpu": importlib.metadata.version("libtpu"), "depth": plan.config.n_layer,
            "mesh_fsdp": plan.mesh.fsdp, "mesh_tensor": plan.mesh.tensor}


def find_checks(path, plan, tpu_slice):
    """Returns [(date, {category: factor})] by which to correct the estimates of a run: of the check.json at `path`; if
    that is None, of all checks of this kind of chip that this user has made or dev/chips/ has. Raises BadInput if
    `path` is no check, or one of something else."""
    expected = about(plan)
    if path:
        return [read_check(path, expected, tpu_slice)]
    found = []
    for known in sorted([*CHIPS.glob("*.json"), *(get_base_dir() / "chips").glob("*.json")]):
        with suppress(BadInput):  # of another chip or libtpu
            date, factors = read_check(known, {"libtpu": expected["libtpu"]}, tpu_slice)
            found.append((date, {name: factor for name, factor in factors.items() if name not in OF_A_RUN}))
    return found


def read_check(path, expected, tpu_slice):
    """Returns (date, {category: factor}) of a check.json. expected: part of about(plan), which it must have. Raises
    BadInput if it is none, or is of something else."""
    try:
        report = json.loads(read_named("measured", path))
        date, found = str(report["date"])[:10], report["measured"]
        factors = {str(name): float(factor) for name, factor in found["factors"].items()}
        kind = parse_accelerator(found["accelerator"], "accelerator").tpu.name
    except (ValueError, LookupError, TypeError, AttributeError, BadInput):
        raise BadInput(f"--measured={path} has no measurements of a chip: {ADVICE}") from None
    found, expected = found | {"chip": kind}, expected | {"chip": tpu_slice.tpu.name}
    problems = [f"is of {name} {found.get(name)}, and here it is {value}" for name, value in expected.items()
                if found.get(name) != value]
    problems += [f"has a factor of {factor:g} for {name}, beyond {LARGEST_FACTOR}" for name, factor in factors.items()
                 if not 1 / LARGEST_FACTOR <= factor <= LARGEST_FACTOR]
    if not NEEDED <= factors.keys():
        problems.append("lacks the time of a program")
    if problems:
        raise BadInput(f"--measured={path} {problems[0]}: {ADVICE}")
    return date, factors


def corrected(programs, checks):
    """Returns the programs of a report with their times multiplied by the factors of their categories: the mean of all
    checks. The error bar goes from the smallest to the largest of them, and BAR beyond, if that is narrower."""
    found = {}
    for name, program in programs.items():
        factors = [_factor(name, program, of_check) for _, of_check in checks]
        estimated_s = program["estimated_s"]
        found[name] = program | {
            "estimated_s": estimated_s * sum(factors) / len(factors),
            "low_s": min(factors) * max(program["low_s"], (1 - BAR) * estimated_s),
            "high_s": max(factors) * min(program["high_s"], (1 + BAR) * estimated_s)}
    return found


def _factor(name, program, factors):
    """Returns the factor of a program's time, by those of a check."""
    host = factors.get("host", 1)
    if name == "update":
        return host * factors["update"]
    parts = program["parts_s"]
    return host * sum(factors.get(part, 1) * seconds for part, seconds in parts.items()) / sum(parts.values())
