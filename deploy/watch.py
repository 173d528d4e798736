"""Keeps one run alive on one VM, within a budget. watch.sh, whose --help describes it, starts this program.

It is two processes. This one, the keeper, watches the budget. Its child, the worker, creates the VM, starts the run and
replaces what is lost. Each notices the end of the other:

- The worker ends by itself or is killed: the keeper starts another. When the budget ends, the keeper ends the worker,
  even one that hangs, and saves the run and deletes the VM itself.
- The keeper is killed: the worker ends the script that it runs and becomes a keeper without a worker, called guard. It
  does nothing but count, and end the budget. A new watch.sh ends the guard and goes on from its state.
- Both are killed: a VM may remain and cost money. The next watch.sh counts the time in between, and ends the script
  that was left running.
- The keeper gets SIGINT or SIGTERM: both end, and the VM is left as it is.
"""
import fcntl
import json
import math
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path

if not __package__:  # watch.sh runs this file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from deploy.lib.actions import Actions  # noqa: E402
from deploy.lib.calls import Calls, end_group, processes  # noqa: E402
from deploy.lib.catalogue import hourly_prices  # noqa: E402
from deploy.lib.keeper import ENDED, Keeper  # noqa: E402
from deploy.lib.settings import read_settings  # noqa: E402
from deploy.lib.state import Books, Ended, Journal, Known, open_private, replace_file  # noqa: E402
from deploy.lib.worker import Worker  # noqa: E402
from nanochat.common import BadInput  # noqa: E402


class ToldToStop(Exception):
    pass


class KeeperGone(Exception):
    pass


def on_signal(*_):
    raise ToldToStop


def main():
    role, flags = sys.argv[1], sys.argv[sys.argv.index("--") + 1:]
    settings = read_settings(flags)
    check(settings)
    if role == "dry_run":
        return explain(settings)
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the watch outlives the terminal
    make_private(settings.state)
    if role == "worker":
        return work(settings)
    lock = take_lock(settings, role)
    if lock is None:
        return 6
    keep_config(settings)
    status = keep(settings, role)
    lock.close()
    return status


def make_private(folder):
    """Makes the state folder, or closes one of an earlier watch.sh for other users."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = [path for path in folder.iterdir() if path.is_file() and not path.is_symlink()]
        if not files or (folder / "lock").exists():
            for path in (folder, *files):
                path.chmod(0o700 if path == folder else 0o600)
        open_private(folder / "lock", "a").close()
    except OSError as error:
        raise BadInput(f"--state={folder} cannot be written: {error.strerror}") from None


def keep_config(settings):
    """Lets the scripts read config.env as it is now: a mistake in it later must not keep a VM from being deleted, and
    another setting must not create another kind of VM."""
    path = Path(os.environ.get("NANOCHAT_DEPLOY_CONFIG") or Path(__file__).parent / "config.env")
    kept = settings.state / "config.env"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if replace_file(kept, text):
        os.environ["NANOCHAT_DEPLOY_CONFIG"] = str(kept)


def check(settings):
    """Refuses a run whose name cannot be that of a folder, and a budget of nothing."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", settings.run):
        raise BadInput(f"--run={settings.run}: only letters, digits, . - and _, at most 100, and no . or - first")
    for name, limit in (("max_usd", settings.max_usd), ("max_hours", settings.max_hours)):
        if limit == 0:
            raise BadInput(f"--{name}=0 is no budget: give more than 0")


def explain(settings):
    """Says in words what a watch would do and cost. Returns the exit status."""
    say = partial(print, file=sys.stderr)
    by_zone = hourly_prices(settings, say) or {}
    kind = "a spot VM, which may be preempted" if settings.spot else "on demand"
    zones = [f"{zone} ({by_zone[zone]:.2f} USD an hour)" if zone in by_zone else zone for zone in settings.zones]
    say(f"+ create, setup, push, data, train{'' if settings.has_bucket else ' (no --bucket, so no data)'}: "
        f"{settings.name}, {settings.type}, {kind}, in {' or '.join(zones)}")
    hours = budget_hours(settings, max(by_zone.values(), default=0))
    say(f"the budget buys {hours:.2f} hours at most, of which the last {settings.margin_s / 3600:.2f} are reserved to "
        f"stop the run, bring it home and delete the VM")
    if warning := reserve_warning(settings, by_zone):
        say(f"warning: {warning}")
    say(f"the run is {settings.run}: base_train {shlex.join(settings.flags)}")
    say(f"journal and spending are in {settings.state}, and the run comes home to {settings.to / settings.run}")
    return 0


def budget_hours(settings, usd_per_hour):
    """Returns for how many hours the whole budget lasts."""
    hours = [settings.max_hours] if settings.max_hours is not None else []
    if settings.max_usd is not None and usd_per_hour > 0:
        hours.append(settings.max_usd / usd_per_hour)
    return min(hours, default=math.inf)


def reserve_warning(settings, by_zone):
    """Returns a warning, in words, if the budget is less than what is reserved for its end, or ""."""
    hours = budget_hours(settings, max(by_zone.values(), default=0))
    if 3600 * hours > settings.margin_s:
        return ""
    return (f"the budget lasts {3600 * hours:.0f} s, and --margin_s={settings.margin_s:g} of them are "
            "reserved for its end: no VM would be created")


def take_lock(settings, role):
    """Returns the open file that makes this the only keeper of this VM, or None. A guard makes room for a watch.sh."""
    lock = open_private(settings.state / "lock", "a+")
    deadline = time.monotonic() + 30
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            lock.seek(0)
            pid, _, other = lock.read().strip().partition(" ")
            if role == "guard" or other != "guard" or time.monotonic() > deadline:
                if role != "guard":
                    print(f"error: {settings.name} is watched by process {pid}", file=sys.stderr)
                return None
            if is_ours(settings, pid, "guard"):
                os.kill(int(pid), signal.SIGTERM)
            time.sleep(0.5)
    lock.truncate(0)
    lock.write(f"{os.getpid()} {role}\n")
    lock.flush()
    return lock


def make_actions(settings, wait=time.sleep):
    journal = Journal(settings.state, settings.name, settings.webhook)
    known = Known.load(settings.state / "known.json")
    return Actions(settings, known, journal, Calls(settings, wait))


# ----------------------------------------------------------------------
# The keeper


def keep(settings, role):
    """Watches the budget, with a worker or, as guard, without one. Returns the exit status."""
    actions = make_actions(settings)
    journal = actions.journal
    ended = Ended.load(settings.state / "ended")
    if ended and ended.flags == list(settings.flags) and not settings.again:
        print(f"the run {settings.run} {ended}", flush=True)
        return ended.status
    if "WATCH_PRICES" not in os.environ:
        by_zone = hourly_prices(settings, lambda line: print(line, flush=True))
        if by_zone is None and settings.max_usd is not None:
            print(f"error: the price of {settings.type} is not known: give --usd_per_hour", file=sys.stderr)
            return 2
        os.environ["WATCH_PRICES"] = json.dumps(by_zone or {})
    if warning := reserve_warning(settings, json.loads(os.environ["WATCH_PRICES"])):
        if role == "watch" and not actions.known.exists and not actions.known.creating:
            print(f"error: {warning}", file=sys.stderr)
            return 2
        print(f"warning: {warning}", flush=True)
    usd_at, usd_text = prices(settings)
    books = Books(settings.state / "spent", settings.max_usd, settings.max_hours)
    keeper = Keeper(settings, actions, books, usd_at, lambda: start_worker(settings) if role == "watch" else None)
    try:
        if role == "guard":
            journal.note("watch.sh was killed; the budget is still watched, but nothing else is done: "
                         "start watch.sh again to go on")
        else:
            end_lost_worker(settings)
            if not settings.mirror:
                print("warning: without --checkpoint_mirror a preemption loses every checkpoint", flush=True)
            journal.note(f"{describe(settings, usd_text)}; spent so far: {books}")
        (settings.state / "ended").unlink(missing_ok=True)
        status = keeper.run()
    except ToldToStop:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        keeper.end_worker()
        keeper.count()
        if role == "watch":
            leave_alone(keeper, usd_text, "told to stop")
        status = 143
    except Exception as error:
        keeper.end_worker()
        leave_alone(keeper, usd_text, f"watch.sh failed: {error!r}")
        traceback.print_exc()
        status = 70
    else:
        journal.note(f"watch.sh ends; spent: {books}")
        if status in (0, 1):
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            Ended(status, list(settings.flags), at).save(settings.state / "ended")
        if status == 0:
            (settings.state / "spent").unlink(missing_ok=True)  # the next run has a budget of its own
    journal.close()
    return status


def describe(settings, usd_text):
    """Returns in words what is watched, and its budget."""
    most = []
    if settings.max_usd is not None:
        most.append(f"{settings.max_usd:g} USD")
    if settings.max_hours is not None:
        most.append(f"{settings.max_hours:g} hours")
    return (f"watching {settings.name}: {settings.type} in {','.join(settings.zones)}, {usd_text()} USD an hour, at "
            f"most {' and '.join(most)}")


def prices(settings):
    """Returns usd_at(zone), the VM's price there or the dearest, and usd_text(zone), the same for people."""
    by_zone = json.loads(os.environ.get("WATCH_PRICES", "{}"))
    dearest = max(by_zone.values(), default=0)

    def usd_at(zone=""):
        return by_zone.get(zone, dearest)

    def usd_text(zone=""):
        return f"{usd_at(zone):.2f}" if by_zone else "?"

    return usd_at, usd_text


def leave_alone(keeper, usd_text, why):
    known, name = keeper.known, keeper.settings.name
    state = "being created" if known.creating else known.state
    keeper.note(f"{why}. {name} ({state}) is left as it is, at {usd_text(known.zone)} USD an hour: "
                "watch.sh resumes the watch, delete.sh deletes it")


def start_worker(settings):
    """Starts the worker. When this process ends, the worker sees the end of the pipe."""
    reader, writer = os.pipe()
    os.set_inheritable(reader, True)
    worker = subprocess.Popen([sys.executable, __file__, "worker", settings.name, str(reader), "--", *settings.flags],
                              pass_fds=[reader], stdin=subprocess.DEVNULL, start_new_session=True)
    os.close(reader)
    worker.keeps = writer  # open as long as this process lives
    return worker


def end_lost_worker(settings):
    """Ends a worker that outlived its keeper because it hangs."""
    try:
        pid = (settings.state / "worker").read_text().strip()
    except OSError:
        return
    if is_ours(settings, pid, "worker"):
        end_group(int(pid))


def is_ours(settings, pid, role):
    """Returns whether this process is a watch.py of this VM: the number may belong to another program by now."""
    return any(words[0] == pid and f"watch.py {role} {settings.name} " in words[-1] for words in processes(["pid"]))


# ----------------------------------------------------------------------
# The worker


def work(settings):
    """Runs the worker and returns its exit status, or becomes the guard when the keeper is gone."""
    pipe = int(sys.argv[3])
    replace_file(settings.state / "worker", f"{os.getpid()}\n")

    def wait(seconds):
        if select.select([pipe], [], [], seconds)[0]:
            raise KeeperGone

    actions = make_actions(settings, wait)
    usd_at, usd_text = prices(settings)

    def left_s():
        books = Books(settings.state / "spent", settings.max_usd, settings.max_hours)
        return books.left_s(usd_at(actions.known.zone))

    try:
        return ENDED + Worker(settings, actions, wait, lambda: usd_text(actions.known.zone), left_s).run()
    except ToldToStop:
        return 143
    except KeeperGone:
        os.close(pipe)
        os.execv(sys.executable, [sys.executable, __file__, "guard", settings.name, "--", *settings.flags])
    finally:
        actions.journal.close()


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
