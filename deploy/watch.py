"""Keeps one run alive on one VM, within a budget. watch.sh, whose --help describes it, starts this program.

It is one process with one file, state.json: what is asked, what is known of the VM, what was spent, what was tried. If
it is killed, the VM may remain and cost money until its own limit. The next watch.sh counts the time in between, ends
the script that was left running, and goes on. SIGINT and SIGTERM end it and leave the VM as it is.
"""
import fcntl
import os
import re
import shlex
import signal
import sys
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path

if not __package__:  # watch.sh runs this file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from deploy.lib.calls import Calls  # noqa: E402
from deploy.lib.catalogue import hourly_prices  # noqa: E402
from deploy.lib.from_vm import RUN  # noqa: E402
from deploy.lib.loop import Loop, ToldToStop  # noqa: E402
from deploy.lib.settings import read_settings  # noqa: E402
from deploy.lib.state import Journal, State, open_private, replace_file, steady_time  # noqa: E402
from nanochat.common import BadInput  # noqa: E402


def main():
    settings = read_settings(sys.argv[sys.argv.index("--") + 1:])
    check(settings)
    prices = hourly_prices(settings.type, settings.zones, settings.spot, settings.usd_per_hour,
                           partial(print, file=sys.stderr if settings.dry_run else sys.stdout, flush=True))
    if prices is None and settings.max_usd is not None:
        raise BadInput(f"the price of {settings.type} is not known: give --usd_per_hour")
    if settings.dry_run:
        return explain(settings, prices or {})
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the watch outlives the terminal
    make_private(settings.state)
    with open_private(settings.state / "lock", "a+") as lock:
        if not take(lock, settings):
            return 6
        keep_config(settings)
        return watch(settings, prices or {})


def on_signal(*_):
    raise ToldToStop


def make_private(folder):
    """Makes the state folder, which only its owner may read."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        open_private(folder / "lock", "a").close()
    except OSError as error:
        raise BadInput(f"the state folder {folder} cannot be written: {error.strerror}") from None


def keep_config(settings):
    """Lets the scripts read config.env as it is now: a mistake in it later must not keep a VM from being deleted, and
    another setting must not create another kind of VM."""
    path = Path(os.environ.get("NANOCHAT_DEPLOY_CONFIG") or Path(__file__).parent / "config.env")
    kept = settings.state / "config.env"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if replace_file(kept, text):
        os.environ["NANOCHAT_DEPLOY_CONFIG"] = str(kept)


def check(settings):
    """Refuses a run whose name is not known or cannot be that of a folder, and a budget or patience of nothing."""
    if not re.fullmatch(RUN, settings.run):
        raise BadInput(f"--run={settings.run}: only letters, digits, . - and _, at most 100, and no . or - first")
    if settings.flag("__config") and not settings.flag("__run"):
        raise BadInput("--config may name a run: give --run as a flag, too")
    for name in ("max_usd", "max_hours", "patience", "stall_s"):
        if getattr(settings, name) == 0:
            raise BadInput(f"--{name}=0: give more than 0")


def explain(settings, by_zone):
    """Says in words what a watch would do and cost. Returns the exit status."""
    say = partial(print, file=sys.stderr)
    kind = "a spot VM, which may be preempted" if settings.spot else "on demand"
    zones = [f"{zone} ({by_zone[zone]:.2f} USD an hour)" if zone in by_zone else zone for zone in settings.zones]
    say(f"+ create, setup, push, data, train{'' if settings.bucket else ' (no --bucket, so no data)'}: "
        f"{settings.name}, {settings.type}, {kind}, in {' or '.join(zones)}")
    hours = lasts_s(settings, by_zone) / 3600
    say(f"the budget buys {hours:.2f} hours at most, of which the last {settings.margin_s / 3600:.2f} are reserved to "
        f"stop the run, bring it home and delete the VM")
    if warning := reserve_warning(settings, by_zone):
        say(f"warning: {warning}")
    say(f"the run is {settings.run}: base_train {shlex.join(settings.flags)}")
    say(f"journal and spending are in {settings.state}, and the run comes home to {settings.to / settings.run}")
    return 0


def lasts_s(settings, by_zone):
    """Returns for how many seconds the whole budget lasts, at the dearest of these prices."""
    return State().left_s(settings, max(by_zone.values(), default=0))


def reserve_warning(settings, by_zone):
    """Returns a warning, in words, if the budget is less than what is reserved for its end, or ""."""
    seconds = lasts_s(settings, by_zone)
    if seconds > settings.margin_s:
        return ""
    return (f"the budget lasts {seconds:.0f} s, and --margin_s={settings.margin_s:g} of them are reserved for its end: "
            "no VM would be created")


def take(lock, settings):
    """Makes this the only watch of this VM. Returns whether that worked."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        print(f"error: {settings.name} is watched by process {lock.read().strip()}", file=sys.stderr)
        return False
    with suppress(OSError):  # the number is for people, and the disk may be full
        os.ftruncate(lock.fileno(), 0)
        os.write(lock.fileno(), f"{os.getpid()}\n".encode())
    return True


def watch(settings, prices):
    """Runs the loop and returns the exit status. `prices` is {zone: USD per hour}, empty if they are not known."""
    path, journal = settings.state / "state.json", Journal(settings.state, settings.name, settings.webhook)
    state = State.load(path, steady_time())
    if warning := reserve_warning(settings, prices):
        if not state.vm.exists and not state.creating:
            raise BadInput(warning)
        journal.show(f"warning: {warning}")
    if not settings.mirror:
        journal.show("warning: without --checkpoint_mirror a preemption loses every checkpoint")
    if state.is_lost:
        journal.note(f"{path} could not be read, so nobody knows what was spent: the budget is over. Remove this file "
                     "to begin another")
    loop = Loop(settings, state, journal, prices, None)
    loop.call = Calls(settings, loop.wait, loop.record)
    journal.note(f"watching {settings.name}: {settings.type} in {','.join(settings.zones)}, {loop.usd_text()}, at most "
                 f"{budget_text(settings)}; spent so far: {state.spent}")
    status = run(loop)
    if status == 0:
        state.spent_usd, state.elapsed_s, state.finished = 0, 0, ""  # the next run has a budget of its own
    loop.save()
    journal.close()
    return status


def run(loop):
    """Returns the exit status of the loop."""
    try:
        status = loop.run()
        loop.count()
        loop.note(f"watch.sh ends; spent: {loop.state.spent}")
    except ToldToStop:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        loop.end_orphan()
        loop.count()
        leave_alone(loop, "told to stop")
        status = 143
    except Exception as error:
        loop.journal.add(traceback.format_exc())
        leave_alone(loop, f"watch.sh failed: {error!r}")
        status = 70
    return status


def budget_text(settings):
    most = [f"{settings.max_usd:g} USD"] if settings.max_usd is not None else []
    most += [f"{settings.max_hours:g} hours"] if settings.max_hours is not None else []
    return " and ".join(most)


def leave_alone(loop, why):
    vm, name = loop.state.vm, loop.settings.name
    state = "being created" if loop.state.creating else vm.state
    limit = "it deletes itself before the budget is spent" if vm.deletes_itself else \
        "whether it may delete itself is not known"
    loop.note(f"{why}. {name} ({state}) is left as it is, at {loop.usd_text()}: watch.sh resumes the watch, delete.sh "
              f"deletes it{f'; {limit}' if vm.exists else ''}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ToldToStop:
        sys.exit(143)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except Exception:
        traceback.print_exc()
        sys.exit(70)
