"""Checks in ten minutes what of this program holds on a TPU, from the chips to a whole run, and what to do about the
rest:

    python3 -m scripts.tpu_check --depth=16 --device_batch_size=8

It takes base_train's flags, and needs no data; with --checkpoint_mirror=gs://… it tries the bucket, too. Each check
runs in a process of its own, with a limit. At the end it prints a table, and writes to --out_dir check.toml, flags with
which a run works (base_train --config), and check.json, to attach to an issue: it has no names, keys or addresses.

On a pod, start the same command on every host, with a --checkpoint_mirror that all share: they check together, and each
prints the same table.

On a machine without a TPU it rehearses:

    CPU_NUM_DEVICES=2 python3 -m scripts.tpu_check --device_type=xla --depth=1 --max_seq_len=128 --device_batch_size=1

Exit status: 0 if all holds, 1 if something does not but a run is possible, 3 if none is, 2 for bad flags.
"""
import json
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

from nanochat.common import (
    BadInput,
    expand_path,
    flag,
    get_base_dir,
    move_aside,
    read_flags,
    require_writable_dir,
    run_script,
    say,
    work,
)
from nanochat.data.remote import Interruption
from nanochat.data.storage import delete_folder
from nanochat.device import tpu
from nanochat.device.ranks import resolve_device_type
from nanochat.run.hosts import describe, require_alike, this_host
from nanochat.run.pod import END, membership
from nanochat.run.processes import begin_with_parent, expected_world_size
from nanochat.train.flags import GONE, TITLES, Flags

# Where in preflight/ the function of this name is, and its seconds, if all have ten minutes
CHECKS = {"machine": ("chip", 60), "collectives": ("chip", 120), "kernels": ("chip", 240),
          "training": ("chip_runs", 240), "programs": ("chip_runs", 300), "survival": ("chip_runs", 240),
          "host": ("chip_runs", 60), "attention": ("chip_runs", 150)}
MINUTES, POD_MINUTES = 10, 20
OF_FIRST_HOST = {"training", "programs", "survival", "attention"}  # the first host alone has the records of their runs
FREE_AGAIN_S = 20  # until the chips of a check that has ended must be free
NO_RUN = 3
CHANNEL = 2  # the hosts of a pod agree at so many ports above that of a run


@dataclass(frozen=True)
class CheckFlags:
    minutes: float = flag(-1.0, f"time for all checks, what does not fit is not reached; -1: {MINUTES}, on a pod "
                                f"{POD_MINUTES}", above=0, at_most=600, unset=-1)
    out_dir: Path | None = flag(None, "in its folder check: check.toml, check.json, logs; default: the base directory",
                                metavar="DIR", of=expand_path)


def main(argv=None):
    own, *of_training = read_flags(argv, __doc__, {CheckFlags: "check", **TITLES}, gone=GONE)
    from nanochat.preflight.chip import Setting, foreign_variables
    from nanochat.preflight.measured import measurements
    from nanochat.train.plan import make_plan
    from nanochat.train.start import run_tokenizer
    foreign = foreign_variables()
    flags = Flags(*of_training)
    device_type = resolve_device_type(flags.devices.device_type)
    if device_type not in ("tpu", "xla"):
        raise BadInput(f"--device_type={flags.devices.device_type} means {device_type} here, and this checks TPUs: "
                       "give --device_type=xla to rehearse on the CPU")
    host = this_host(device_type)
    if host and flags.record.checkpoint_mirror is None:
        raise BadInput("the runs of a check on several hosts need --checkpoint_mirror, as every run there: give "
                       "gs://BUCKET/FOLDER, or a directory that all hosts share")
    if host and host.port + CHANNEL >= 2**16:
        raise BadInput(f"NANOCHAT_POD_PORT={host.port} leaves no port {host.port + CHANNEL} for the check: give a "
                       "smaller number")
    hosts = host.count if host else 1
    plan = make_plan(flags, run_tokenizer(flags).n_vocab, device_type, expected_world_size(device_type, hosts))
    folder = require_writable_dir(own.out_dir or get_base_dir()) / "check"
    move_aside(folder)
    setting = Setting(flags, device_type, require_writable_dir(folder), foreign, hosts, not host or host.is_first)
    minutes = own.minutes
    if minutes < 0:  # it was not given
        minutes = POD_MINUTES if host else MINUTES
    accelerator = setting.accelerator
    usd = accelerator and tpu.usd_per_hour(accelerator, spot=False)
    price = f", {usd * minutes / 60:.2f} USD on demand in the dearest region" if usd else ""
    say(f"{len(CHECKS)} checks take at most {minutes:g} minutes{price}; logs are in {folder}")
    # The runs of the checks listen at the host's port.
    with membership(host and replace(host, port=host.port + CHANNEL)) as pod:
        if pod:
            about = pod.join(describe(flags, device_type) | {"--minutes": minutes})
            require_alike(pod.names, about, "start the same code with the same command on all hosts")
            begun = pod.gather("when they begin", time.strftime("%Y%m%d_%H%M%S"))[0]
            setting = replace(setting, mirror=f"{flags.record.checkpoint_mirror}/tpu_check_{begun}")
        try:
            found = check_all(setting, plan, minutes, pod)
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            measured = accelerator and measurements(found, plan, accelerator)
            status = deliver(found, flags.replace(**instead_of(found, plan)), measured, folder)
        finally:  # also if a host has died, or on Ctrl-C
            if pod and host.is_first:
                delete_copies(setting.mirror)
        if pod:
            pod.gather(END, status)
    if measured:  # where the preflight looks for it
        chips = require_writable_dir(get_base_dir() / "chips")
        shutil.copy(folder / "check.json", chips / f"{accelerator}.json")
    return status


def check_all(setting, plan, minutes, pod=None):
    """Runs all checks, one after the other, and prints a line as each ends. Returns {check: [Finding]}. pod: the Pod,
    if there are several hosts: all begin each check together, and know what all have found."""
    from nanochat.preflight.chip import Finding
    deadline = time.monotonic() + 60 * minutes
    found = {}
    for name, (file, most_s) in CHECKS.items():
        limit_s = min(most_s * minutes / 10, deadline - time.monotonic())
        if pod:
            limit_s = min(pod.gather(f"how long {name} may take", limit_s))
        if limit_s < 1 or "run" in broken(found):
            found[name] = [Finding(name, False, "not reached")]
            say(f"{name}: not reached")
            continue
        work.begin(f"checking {name}")
        begun = time.monotonic()
        flags = setting.flags.replace(**instead_of(found, plan))
        check = getattr(import_module(f"nanochat.preflight.{file}"), name)
        found[name] = run_limited(name, check, replace(setting, flags=flags), limit_s, pod)
        if pod:
            found[name] = of_all_hosts(pod.gather(f"what {name} has found", [*map(asdict, found[name])]))
        failed = "; ".join(f"{each.what}: {each.figure}" for each in found[name] if not each.holds)
        say(f"{name}: {f'NOT {failed}' if failed else 'holds'}, {time.monotonic() - begun:.0f} s")
    return found


def of_all_hosts(found):
    """Returns the Findings of the first host, whose factors count, and what does not hold on others, with their place.
    found: the Findings of each host, as dicts."""
    from nanochat.preflight.chip import Finding
    others = [each | {"what": f"host {index}: {each['what']}", "factor": None}
              for index, of_host in enumerate(found[1:], 1) for each in of_host if not each["holds"]]
    return [Finding(**each) for each in [*found[0], *others]]


def run_limited(name, check, setting, limit_s, pod=None):
    """Runs a check in a process of its own, which ends early if the Pod fails. Returns its Findings, with one more if
    it does not end well."""
    from nanochat.preflight.chip import Finding, anonymous, holders
    log = setting.folder / f"{name}.log"
    log.touch()  # for a process that ends before its first line
    process = get_context("spawn").Process(target=run_alone, args=(name, check, setting))
    process.start()
    try:
        deadline = time.monotonic() + limit_s
        while process.is_alive() and time.monotonic() < deadline and not (pod and pod.failure):
            process.join(0.5)
        status = process.exitcode
    finally:
        process.kill()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its ranks, and the runs that it has started
        process.join()
    path = setting.folder / f"{name}.json"
    found = [Finding(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
    # Without a finding of `training`, not even the kernel that every run can have has trained.
    is_first_step = name in ("machine", "collectives") or name == "training" and setting.is_first and not found
    if status != 0:
        words = log.read_text(errors="replace").split()[-20:]
        figure = f"status {status}: {' '.join(words)}" if status else f"hangs, ended after {limit_s:.0f} s"
        found.append(Finding(f"{name} ends", False, anonymous(figure), f"within {limit_s:.0f} s",
                             "run" if is_first_step else ""))
    deadline = time.monotonic() + FREE_AGAIN_S
    while (pids := holders()) and time.monotonic() < deadline:
        time.sleep(0.2)
    if pids:
        found.append(Finding(f"the chips are free after {name}", False, f"{len(pids)} processes hold them", "0", "run"))
    return found


def run_alone(name, check, setting):
    """As a process: runs a check, and writes each Finding to the check's file at once."""
    begin_with_parent()
    os.setsid()
    log = os.open(setting.folder / f"{name}.log", os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    with open(setting.folder / f"{name}.json", "w") as file:
        for finding in check(setting):
            if setting.is_first or name not in OF_FIRST_HOST:
                print(json.dumps(asdict(finding)), file=file, flush=True)


def delete_copies(mirror):
    """Deletes what the runs of the checks have copied to a mirror of theirs."""
    try:
        delete_folder(mirror)
    except (BadInput, Interruption, OSError) as error:
        say(f"the checks' copies in {mirror} are left ({error}): delete them")


def broken(found):
    """Returns what does not work: Finding.breaks of all that do not hold."""
    return {each.breaks for findings in found.values() for each in findings if not each.holds}


def instead_of(found, plan):
    """Returns {flag: value} with which the run of a Plan works."""
    parts = broken(found)
    instead = {}
    if plan.kernel in parts:
        instead["kernel"] = next(name for name in ("flash", "chunked", "current") if name not in parts)
    if plan.products in parts:
        instead["products"] = "bfloat16"
    return instead


def deliver(found, flags, measured, folder):
    """Prints the table, and writes check.json and check.toml, the Flags with which a run works. Returns the exit
    status."""
    say(f"\n{'check':<12} {'':<40} {'':<6} {'figure':<30} expected", keep="\n")
    for name, findings in found.items():
        for each in findings:
            say(f"{name:<12} {each.what:<40} {'holds' if each.holds else 'NOT':<6} {each.figure:<30} {each.expected}")
    is_possible = "run" not in broken(found)
    report = {"version": 1, "date": time.strftime("%Y-%m-%d", time.gmtime()), "possible": is_possible,
              "measured": measured,
              "checks": {name: [asdict(each) for each in findings] for name, findings in found.items()}}
    (folder / "check.json").write_text(json.dumps(report, indent=1))
    if not is_possible:
        say("no run is possible: the logs say why")
        return NO_RUN
    config = folder / "check.toml"
    config.write_text(flags.as_toml())
    say(f"a run works with base_train --config={config}")
    return 1 if broken(found) else 0


if __name__ == "__main__":
    run_script(main)
