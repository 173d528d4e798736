"""Compares a run's speed and memory with the preflight's estimate, as Markdown to paste into an issue."""
import json
import platform
from importlib import metadata

from nanochat.analysis.summary import peak_bytes, text
from nanochat.common import BadInput, read_named
from nanochat.device.tpu import GIB
from nanochat.model.config import CONFIG_FLAGS

PACKAGES = ("torch", "torch_xla", "libtpu", "jax")
# Flags that change a step's time or memory. The preflight must have the values of the run.
OF_THE_PROGRAMS = (*CONFIG_FLAGS, "device_batch_size", "total_batch_size", "seq_len_ramp", "kernel", "compute_dtype",
                   "activation_checkpointing", "products", "shard_optimizer", "teacher")


def read_preflight(path):
    """Returns the report that tpu_preflight wrote to `path`, a JSON object. Raises BadInput."""
    try:
        report = json.loads(read_named("preflight", path))
    except ValueError:
        report = None
    names = {"accelerator", "chips", "plan", "flags", "kernel", "fits"}
    if not isinstance(report, dict) or not names <= report.keys() or not isinstance(report["flags"], dict):
        raise BadInput(f"--preflight={path} is not a report of tpu_preflight --json")
    return report


def markdown_block(run, flags, report):
    """Returns the block as text. run: a History; flags: {name: value} of its checkpoint, {} without one; report: as
    read_preflight returns it."""
    estimate = report.get("estimate", {})
    if lengths := run.lengths():
        # If rows become longer, the run's medians are of its newest length, so the estimate is that stage's.
        estimate = estimate.get("stages", {}).get(f"micro_step {lengths[-1][1]}", {})
    step_ms = scaled(estimate.get("step_s"), 1000)
    lines = [f"**{report['accelerator']}: run {run.name}, measured beside the preflight's estimate**", "",
             "| | measured | estimated | measured ÷ estimated |", "|---|---|---|---|",
             row("step, ms", "{:,.0f}", run.median("step_ms"), step_ms, error_bar(estimate)),
             row("tokens/s", "{:,.0f}", run.median("tokens_per_s"), estimate.get("tokens_per_s")),
             row("MFU, %", "{:.1f}", scaled(run.median("mfu"), 100), scaled(estimate.get("mfu"), 100)),
             row("peak HBM of a chip, GiB", "{:.2f}", scaled(peak_bytes(run), 1 / GIB),
                 scaled(report.get("peak_bytes"), 1 / GIB))]
    plan = report["plan"]
    lines += ["", f"{report['chips']} chips, steps of {plan['total_batch_size']:,} tokens, {plan['parameters']:,} "
              f"parameters, kernel {report['kernel']}; waiting for data {known(run.median('data_wait'), '{:.1%}')}, "
              f"dispatching programs {known(run.median('host_dispatch'), '{:.1%}')}, goodput "
              f"{known(run.last('goodput'), '{:.1%}')}, interruptions {len(run.interruptions())}; step "
              f"{run.records[-1]['step']:,}.", versions()]
    if different := differences(flags, report["flags"]):
        lines.append(f"**The estimate belongs to another run:** {different}.")
    return "\n".join(lines)


def row(name, form, measured, estimated, spread=""):
    ratio = None
    if measured is not None and estimated:
        ratio = measured / estimated
    return f"| {name} | {known(measured, form)} | {known(estimated, form)}{spread} | {known(ratio, '{:.3f}')} |"


def known(value, form):
    return text(value, form, unknown="–")


def scaled(value, factor):
    return None if value is None else value * factor


def error_bar(estimate):
    """Returns that of the estimated step in milliseconds, " (677 to 912)", or "" without an estimate."""
    if "step_low_s" not in estimate:
        return ""
    return f" ({1000 * estimate['step_low_s']:,.0f} to {1000 * estimate['step_high_s']:,.0f})"


def differences(flags, estimated):
    """Returns the flags in which the programs of the run and of the preflight differ, with both values."""
    found = []
    for name in OF_THE_PROGRAMS:
        if name not in flags or name not in estimated or flags[name] == estimated[name]:
            continue
        if {flags[name], estimated[name]} == {"on", "auto"}:  # the same for shard_optimizer on a TPU
            continue
        found.append(f"{name} was {flags[name]} in the run and {estimated[name]} in the preflight")
    return ", ".join(found)


def versions():
    """Returns the versions of Python and of the packages that decide the speed."""
    found = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found) + "."
