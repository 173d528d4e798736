"""What watch.sh keeps in its state folder: the journal, and one file with all that it knows, has spent and tries."""
import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass

from deploy.lib.from_vm import LARGEST, printable
from nanochat.record.alerts import post

BYTES_PER_S = 5e6  # from the VM to this machine: 40 Mbit/s, a slow line


# Both clocks go on while the machine sleeps, the first on Linux and the second on macOS.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_STARTED = time.time() - time.clock_gettime(_CLOCK)


def steady_time():
    """Returns the Unix time at the start of this process plus what has passed since: no jump of the clock counts."""
    return _STARTED + time.clock_gettime(_CLOCK)


def open_private(path, mode):
    """Opens a file that only its owner may read."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))


def replace_file(path, text):
    """Writes a file in one rename. Returns whether that worked: on a full disk the old file stays."""
    try:
        part = path.with_name(f"{path.name}.{os.getpid()}")
        with open_private(part, "wb") as file:
            file.write(text.encode())  # not in the locale's encoding, in which nobody reads it
            file.flush()
            os.fsync(file.fileno())  # else some file systems have an empty file after a power failure
        part.replace(path)
        return True
    except OSError:
        return False


class Journal:
    """Lines for the person who reads them later: on stdout, in the file `journal`, and at the webhook's address."""

    def __init__(self, folder, name, webhook=""):
        self.path, self.name, self.webhook = folder / "journal", name, webhook
        self._posts, self._said = [], {}

    def note(self, text):
        text = text.replace("\n", " ")
        self.add(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}")
        if self.webhook:
            self._posts = [thread for thread in self._posts if thread.is_alive()]
            thread = threading.Thread(target=post, args=(self.webhook, f"{self.name}: {text}"), daemon=True)
            with suppress(RuntimeError):  # this user has too many processes; that must not end the watch
                thread.start()
                self._posts.append(thread)

    def add(self, text):
        """Prints a text and writes it to the journal, with escapes for control characters."""
        self.show(text)
        try:
            with open_private(self.path, "ab") as file:
                file.write((printable(text) + "\n").encode())
        except OSError:  # a full disk must not end the watch
            pass

    def show(self, line):
        """Prints a line that is not for the journal."""
        try:
            print(printable(line), flush=True)
        except OSError:  # the terminal was closed
            pass

    def note_change(self, about, text, again_after_s=3600):
        """Notes a condition when it begins, when its text changes, and again every hour. "" ends it silently."""
        before, since = self._said.get(about, ("", 0))
        if text and (text != before or time.time() - since > again_after_s):
            self.note(text)
            self._said[about] = text, time.time()
        elif not text:
            self._said.pop(about, None)

    def close(self):
        """Waits until the last lines have been sent, at most 10 s."""
        for thread in self._posts:
            thread.join(10)


@dataclass
class Vm:
    """What was seen of one VM."""
    state: str = "absent"  # as the API last reported it
    zone: str = ""
    id: str = ""
    ips: str = ""
    run: str = ""
    checkpoint: str = ""  # the newest whole one on the VM's disk
    checkpoint_bytes: int = 0
    mirrored: str = ""  # the newest one that the mirror has
    mirror_fails: bool = False  # for so long that nobody should wait for it
    fetched: str = ""  # the newest one that was fetched to this machine
    has_limit: bool = False  # whether this start of watch.sh has set the VM's own limit
    deletes_itself: bool = False  # at that limit: it has said that it may

    @property
    def exists(self):
        return self.state != "absent"

    @property
    def is_home(self):
        """Whether the newest checkpoint was fetched to this machine."""
        return self.fetched == self.checkpoint != ""

    @property
    def is_at_risk(self):
        """Whether the newest whole checkpoint is, as far as anybody knows, on the VM's disk alone."""
        return bool(self.checkpoint) and self.checkpoint != self.mirrored and not self.is_home

    def transfer_s(self):
        """Returns the seconds that copying the newest checkpoint to this machine takes, with a quarter to spare."""
        return 1.25 * self.checkpoint_bytes / BYTES_PER_S


@dataclass
class Tries:
    """What was tried in vain since watch.sh was started."""
    troubles: int = 0  # failed checks in a row
    futile: int = 0  # VMs in a row that could not train
    pending: int = 0  # checks in a row at which the VM was neither ready nor gone
    crashes: int = 0  # ends of the run at the same step
    furthest: int = -1  # the furthest step at which it ended
    misses: int = 0  # creations in a row without capacity
    hold: int = 0  # checks until the next creation
    refusals: int = 0  # times in a row that gcloud could not say for a reason that no waiting mends
    settling: int = 0  # how many more times gcloud must say that there is no VM before another is created


@dataclass
class State:
    """All that one start of watch.sh leaves to the next."""
    creating: bool = False  # a creation has begun, and it is not known whether it made a VM
    vm: Vm = field(default_factory=Vm)
    tries: Tries = field(default_factory=Tries)
    finished: str = ""  # the flags of the run that is finished and home: its VM is only to be deleted
    script: str = ""  # the one that runs, and its process group
    group: int = 0
    counted_at: float = 0  # until then everything is counted
    existed: bool = False  # whether there was a VM then
    elapsed_s: float = 0
    spent_usd: float = 0
    pending_usd: float = 0  # what a creation cost if it made a VM
    is_lost: bool = False  # whether there was a file that could not be read: what was spent is not known

    @classmethod
    def load(cls, path, now):
        """Returns what `save` has written. A value that cannot be used is as one that is missing. What no VM cost while
        no watch.sh ran is not counted."""
        try:
            state = _read(cls, dict(json.loads(path.read_text())))
        except FileNotFoundError:
            state = cls()
        except (OSError, ValueError, TypeError, RecursionError):
            state = cls(is_lost=True)
        if not state.counted_at or not (state.existed or state.creating or state.vm.exists):
            state.counted_at = now
        return state

    def save(self, path):
        """Returns whether the file could be written."""
        return replace_file(path, json.dumps(asdict(self)) + "\n")

    def count(self, usd_per_hour, now):
        """Adds the time since the last count, and the VM's price for it if it existed at either end. Whether a creation
        made a VM is known afterwards: until then its price is pending."""
        seconds = max(0, now - self.counted_at)  # if the clock was set back, the spending stays
        usd = usd_per_hour * seconds / 3600
        if self.vm.exists or self.existed:
            self.charge()
            self.spent_usd += usd
        else:
            self.pending_usd = self.pending_usd + usd if self.creating else 0
        self.elapsed_s += seconds
        self.counted_at, self.existed = now, self.vm.exists

    def charge(self):
        """Counts what a creation has cost: there was a VM."""
        self.spent_usd += self.pending_usd
        self.pending_usd = 0

    def left_s(self, settings, usd_per_hour):
        """Returns for how many seconds the budget lasts if a VM of this price exists. A budget of which it is not known
        how much was spent is at its end."""
        if self.is_lost:
            return 0
        left = [float("inf")]
        if settings.max_hours is not None:
            left.append(3600 * settings.max_hours - self.elapsed_s)
        if settings.max_usd is not None:
            usd = settings.max_usd - self.spent_usd - self.pending_usd
            if usd_per_hour > 0:
                left.append(3600 * usd / usd_per_hour)
            elif usd <= 0 < self.spent_usd:
                left.append(0)
        return min(left)

    @property
    def spent(self):
        return f"{self.spent_usd:.2f} USD and {self.elapsed_s / 3600:.2f} hours"


def _read(cls, values):
    result = cls()
    for each in fields(cls):
        value, default = values.get(each.name), getattr(result, each.name)
        if is_dataclass(default):
            setattr(result, each.name, _read(type(default), value if isinstance(value, dict) else {}))
        elif _is_usable(value, default):
            setattr(result, each.name, value)
    return result


def _is_usable(value, default):
    """Returns whether a value that was read may take the place of this default: of its type, and a number in bounds."""
    if isinstance(default, str | bool):
        return type(value) is type(default)
    return type(value) in (int, float) and 0 <= value < LARGEST
