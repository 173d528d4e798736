"""What watch.sh keeps in its state folder: the journal, the money that was spent, and what is known about the VM."""
import json
import os
import threading
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from deploy.lib.from_vm import LARGEST, printable
from nanochat.record.alerts import post

RATE_UNTIL_MEASURED = 5e6  # bytes per second between the VM and this machine: 40 Mbit/s, a slow line


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
        with open_private(part, "w") as file:
            file.write(text)
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
            self._posts.append(threading.Thread(target=post, args=(self.webhook, f"{self.name}: {text}"), daemon=True))
            self._posts[-1].start()

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


@dataclass(frozen=True)
class Ended:
    """How the watch of a run has ended for good: the next watch.sh with the same flags, at a boot for example, must not
    start it again."""
    status: int  # of watch.sh: 0 finished, 1 given up
    flags: list  # the run's
    at: str

    @classmethod
    def load(cls, path):
        """Returns the Ended that `save` has written, or None."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def save(self, path):
        return replace_file(path, json.dumps(asdict(self)) + "\n")

    def __str__(self):
        how = "finished" if self.status == 0 else "was given up"
        return f"{how} at {self.at}: --again starts it again"


@dataclass
class Known:
    """What is known about the VM. The file lets the keeper of the budget, and the next watch.sh, know it as well."""
    state: str = "absent"  # as the API last reported it
    creating: bool = False  # a creation has begun, and it is not known whether it made a VM
    zone: str = ""
    id: str = ""
    ips: str = ""
    run: str = ""
    checkpoint: str = ""  # the newest whole one on the VM's disk
    checkpoint_bytes: int = 0
    mirrored: str = ""  # the newest one that the mirror has
    mirror_fails: bool = False  # for so long that nobody should wait for it
    fetched: str = ""  # the newest one that was fetched to this machine
    bytes_per_s: float = 0  # from the VM to this machine, as measured; 0: not yet
    seen_at: float = 0  # the time of the last sign of life
    gone_at: float = 0  # the time at which a VM that is absent now was deleted; 0: not known

    @classmethod
    def load(cls, path):
        """Returns what `save` has written. A value that cannot be used is as one that is missing."""
        try:
            values = dict(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError, RecursionError):
            values = {}
        return cls(**{field.name: values[field.name] for field in fields(cls)
                      if field.name in values and is_usable(values[field.name], field.default)})

    def save(self, path):
        return replace_file(path, json.dumps(asdict(self)) + "\n")

    @property
    def exists(self):
        return self.state != "absent"

    def forget_vm(self):
        """Forgets what belongs to one VM: the next one has another disk."""
        for field in fields(self):
            if field.name != "creating":
                setattr(self, field.name, field.default)

    def transfer_s(self):
        """Returns the seconds that copying the newest checkpoint to this machine takes, with a quarter to spare."""
        return 1.25 * self.checkpoint_bytes / (self.bytes_per_s or RATE_UNTIL_MEASURED)


def is_usable(value, default):
    """Returns whether a value that was read may take the place of this default: of its type, and a number in bounds."""
    if isinstance(default, str | bool):
        return type(value) is type(default)
    return type(value) in (int, float) and 0 <= value < LARGEST


def usable_number(text, default=0.0):
    """Returns the number that a text is, or the default if it is none or out of bounds."""
    try:
        return float(text) if 0 <= float(text) < LARGEST else default
    except ValueError:
        return default


class Books:
    """The spending of one run, over all starts of watch.sh, and the budget."""

    def __init__(self, path, max_usd=None, max_hours=None):
        self.path, self.max_usd, self.max_hours = path, max_usd, max_hours
        self.counted_at, self.elapsed_s, self.was = steady_time(), 0.0, "absent"
        self.spent_usd = self.pending_usd = self.usd_per_hour = 0.0  # the last: of the VM that was counted last
        try:
            words = [*Path(path).read_text().split(), *6 * [""]][:6]
        except (OSError, ValueError):
            return
        self.elapsed_s, self.spent_usd, self.pending_usd, self.usd_per_hour = (
            usable_number(words[i]) for i in (1, 2, 4, 5))
        self.was = words[3] or "absent"
        # A VM that existed when the last watch.sh ended may have cost money since, although nobody counted.
        if self.was != "absent":
            self.counted_at = usable_number(words[0], self.counted_at)

    def count(self, known, usd_per_hour, now):
        """Adds the time since the last count, and the VM's price for it if it existed at either end. A VM that is gone
        by now costs what it cost until it was deleted, where that is known. Whether a creation made a VM is known
        afterwards: until then its price is pending. Returns whether the file could be written."""
        seconds = max(0, now - self.counted_at)  # if the clock was set back, the spending stays
        usd = usd_per_hour * seconds / 3600
        if known.exists:
            self.spent_usd += self.pending_usd + usd
            self.pending_usd, self.usd_per_hour = 0, usd_per_hour
            self.was = known.state
        else:
            if self.was not in ("absent", "creating"):
                lasted_s = min(seconds, known.gone_at - self.counted_at) if known.gone_at else seconds
                self.spent_usd = max(0, self.spent_usd + (self.usd_per_hour or usd_per_hour) * lasted_s / 3600)
                usd = 0
            self.pending_usd = self.pending_usd + usd if known.creating else 0
            self.was = "creating" if known.creating else "absent"
        self.elapsed_s += seconds
        self.counted_at = now
        return replace_file(Path(self.path), f"{now:.0f} {self.elapsed_s:.1f} {self.spent_usd:.6f} {self.was} "
                                             f"{self.pending_usd:.6f} {self.usd_per_hour:.6f}\n")

    def left_s(self, usd_per_hour):
        """Returns for how many seconds the budget lasts if a VM of this price exists."""
        left = [float("inf")]
        if self.max_hours is not None:
            left.append(3600 * self.max_hours - self.elapsed_s)
        if self.max_usd is not None:
            usd = self.max_usd - self.spent_usd - self.pending_usd
            if usd_per_hour > 0:
                left.append(3600 * usd / usd_per_hour)
            elif usd <= 0 < self.spent_usd:
                left.append(0)
        return min(left)

    def __str__(self):
        return f"{self.spent_usd:.2f} USD and {self.elapsed_s / 3600:.2f} hours"
