"""A run's speed and memory beside the preflight's estimate, as Markdown to paste into an issue."""
import platform
from importlib import metadata

from nanochat.model.config import CONFIG_FLAGS

GIB = 2**30
PACKAGES = ("torch", "torch_xla", "libtpu", "jax")
# Flags that change a step's time or memory; the preflight must have had the values of the run.
OF_THE_PROGRAMS = (*CONFIG_FLAGS, "device_batch_size", "total_batch_size", "seq_len_ramp", "kernel", "compute_dtype",
                   "activation_checkpointing", "shard_optimizer", "gradient_sums", "teacher")


def markdown_block(run, flags, report):
    """Returns the block as text.

    run: a Run (record/history.py); flags: {name: value} of its checkpoint, {} if there is none; report: the JSON object
    that tpu_preflight --json wrote. The first record of a process is left out, because its steps include compiling.
    """
    estimate, lengths = report.get("estimate", {}), run.lengths()
    if lengths:
        estimate = estimate.get("stages", {}).get(f"micro_step {lengths[-1][1]}", {})
    rows = [
        ("step, ms", run.median("step_ms"), scaled(estimate.get("step_s"), 1000), "{:,.0f}",
         of_range(estimate, "step_low_s", "step_high_s")),
        ("tokens/s", run.median("tokens_per_s"), estimate.get("tokens_per_s"), "{:,.0f}", ""),
        ("MFU, %", scaled(run.median("mfu"), 100), scaled(estimate.get("mfu"), 100), "{:.1f}", ""),
        ("peak HBM of a chip, GiB", scaled(peak_bytes(run), 1 / GIB), scaled(report.get("peak_bytes"), 1 / GIB),
         "{:.2f}", "")]
    lines = [f"**{report['accelerator']}: run {run.name}, measured beside the preflight's estimate**", "",
             "| | measured | estimated | measured ÷ estimated |", "|---|---|---|---|"]
    for name, measured, estimated, form, spread in rows:
        ratio = f"{measured / estimated:.3f}" if measured is not None and estimated else "–"
        lines.append(f"| {name} | {text(measured, form)} | {text(estimated, form)}{spread} | {ratio} |")
    plan = report["plan"]
    lines += ["", f"{report['chips']} chips, steps of {plan['total_batch_size']:,} tokens, {plan['parameters']:,} "
              f"parameters, kernel {report['kernel']}; waiting for data {text(run.median('data_wait'), '{:.1%}')}, "
              f"dispatching programs {text(run.median('host_dispatch'), '{:.1%}')}, goodput "
              f"{text(run.last('goodput'), '{:.1%}')}, interruptions {len(run.interruptions())}; step "
              f"{run.records[-1]['step']:,}.", versions()]
    if different := differences(flags, report["flags"]):
        lines.append(f"**The estimate is of another run:** {different}.")
    return "\n".join(lines)


def scaled(value, factor):
    return None if value is None else value * factor


def text(value, form):
    """Returns the value in this form, or a dash for None."""
    return "–" if value is None else form.format(value)


def of_range(estimate, low, high):
    """Returns the error bar of the estimated step in milliseconds, " (677 to 912)", or ""."""
    return f" ({1000 * estimate[low]:,.0f} to {1000 * estimate[high]:,.0f})" if low in estimate else ""


def peak_bytes(run):
    """Returns the largest peak of a device's memory in bytes, or None if it was not measured."""
    peaks = run.series("device_memory_peak_bytes")[1]
    return float(peaks.max()) if len(peaks) else None


def differences(flags, estimated):
    """Returns the flags of programs and batch that the run and the preflight do not share, "depth 12, not 8"."""
    same = {"on", "auto"}  # of shard_optimizer on a TPU
    return ", ".join(f"{name} was {flags[name]} in the run and {estimated[name]} in the preflight"
                     for name in OF_THE_PROGRAMS
                     if name in flags and name in estimated and flags[name] != estimated[name]
                     and not {flags[name], estimated[name]} <= same)


def versions():
    """Returns the versions of Python and of the packages that decide the speed."""
    found = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found) + "."
