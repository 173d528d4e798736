"""What can be done with a VM: look at it, stop its run, bring its newest checkpoint home, delete it."""
import re
import time

from deploy.lib.calls import end_orphan
from deploy.lib.state import steady_time

GONE = ("PREEMPTED", "TERMINATED", "STOPPED")  # states in which nobody can reach the VM's disk any more
DELETE_S = 60  # the last of the budget, which nothing but the deletion may use
DELETION_S = 600  # for a deletion to end
MIRROR_BEHIND_S = 600  # a mirror that is behind for longer is reported
LOOK_S = 150  # per zone: gcloud itself gives up after two minutes without an answer


class Actions:
    """Both the worker and the keeper of the budget act through this class. `known` is theirs, and `call` a Calls."""

    def __init__(self, settings, known, journal, call, now=steady_time):
        self.settings, self.known, self.journal, self.call, self.now = settings, known, journal, call, now
        self.error = self.health = self.type = ""
        self.is_spot, self.is_permanent = True, False  # is_permanent: no waiting mends the error
        self.was_absent = False  # whether gcloud did not find the VM when it was asked last

    def save(self):
        """Writes down what is known, for the other process. Returns whether that worked."""
        is_saved = self.known.save(self.settings.state / "known.json")
        if not is_saved:
            self.journal.note_change("disk", f"cannot write to {self.settings.state}: is the disk full?")
        return is_saved

    # ------------------------------------------------------------------
    # Looking

    def look_up(self, limit_s=None, zones=None):
        """Asks gcloud and returns the VM's state, "absent", or "unknown" with the reason in `error`. `known` keeps the
        last certain answer: that gcloud fails once says nothing about the VM."""
        zones = zones or self.all_zones()
        flags = [f"--zones={zones}"]
        limit_s = limit_s or LOOK_S * len(self.settings.zones)
        result = self.call("lib/look", limit_s, "--what=vm", *flags)
        fields = result.fields
        state = fields.get("state") or "unknown"
        if result.status or state == "unknown":
            self.error = fields.get("error") or result.last_line
            self.is_permanent = result.status == 2 or bool(fields.get("permanent"))
            return "unknown"
        self.error, self.is_permanent = "", False
        if state == "absent":
            if self.known.exists and not self.was_absent:  # it may be overlooked once
                self.was_absent, self.error = True, "gcloud finds no VM; it is asked again"
                return "unknown"
            if self.known.exists and self.probe(min(60, limit_s)):
                self.error = "gcloud finds no VM, but it answers"
                return "unknown"
            self.forget_lost_vm()
            self.was_absent = False
        else:
            if fields["id"] != self.known.id:
                self.known.forget_vm()
            self.known.state, self.known.creating, self.was_absent = state, False, False
            self.known.zone, self.known.id = fields["zone"], fields["id"]
            self.known.ips = fields["ips"] or self.known.ips
            if state not in GONE:
                self.known.seen_at = self.now()
            self.health, self.type, self.is_spot = fields["health"], fields["type"], fields["spot"] == "True"
        self.save()
        return state

    def forget_lost_vm(self):
        """Forgets a VM that is gone, except when it was deleted: this machine may have slept for hours since."""
        if not self.known.exists:
            return
        fields = self.call("lib/look", LOOK_S, "--what=end", f"--zones={self.known.zone}").fields
        gone_at, seen_at = number(fields.get("deleted_at")), self.known.seen_at
        self.known.forget_vm()
        if 0 < seen_at <= gone_at <= self.now():
            self.known.gone_at = gone_at
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(gone_at))
            self.journal.note(f"gcloud's operations say that the VM was deleted at {at}: it has cost nothing since")

    def ask_mirror(self, limit_s=LOOK_S):
        """Asks the bucket of the mirror what it has: the VM may have copied more since it was asked."""
        if not self.settings.mirror.startswith("gs://"):
            return
        place = f"{self.settings.mirror.rstrip('/')}/{self.settings.run}"
        result = self.call("lib/look", limit_s, "--what=mirror", f"--bucket={place}")
        newest = result.fields.get("mirrored", "")
        if number(newest.removeprefix("step_")) >= number(self.known.checkpoint.removeprefix("step_")) > 0:
            self.known.checkpoint = self.known.mirrored = newest
            self.save()

    def all_zones(self):
        """Returns the zones in which the VM may be, as a flag's value: also where an earlier watch created it."""
        return ",".join(dict.fromkeys([*filter(None, [self.known.zone]), *self.settings.zones]))

    def address(self):
        return [f"--vm_ips={self.known.ips}", f"--vm_id={self.known.id}"]

    def probe(self, limit_s=120):
        """Asks the VM itself about its newest run and returns the answer, {name: value}, or None if there is none; then
        `error` says why. It needs no answer of gcloud."""
        if not self.known.ips:
            self.error = "its address is not known"
            return None
        result = self.call("lib/look", limit_s, "--what=run", *self.address())
        fields = result.fields
        if result.status or not fields.get("state"):
            self.error = result.last_line or "an empty answer"
            return None
        self.known.seen_at = self.now()
        self.known.run, self.known.checkpoint = fields.get("run", ""), fields.get("checkpoint", "")
        self.known.mirrored = fields.get("mirrored", "")
        self.known.mirror_fails = bool(fields.get("mirror_error")) and is_behind(fields)
        self.known.checkpoint_bytes = number(fields.get("checkpoint_bytes"))
        self.save()
        return fields

    def measure_rate(self):
        """Measures how fast bytes come from the VM to this machine, for the part of the budget that is reserved."""
        size, started = 20_000_000, self.now()
        result = self.call("lib/look", 300, "--what=rate", f"--bytes={size}", *self.address())
        if result.status or number(result.last_line.strip()) != size:
            return
        self.known.bytes_per_s = size / max(0.1, self.now() - started)
        self.save()
        self.journal.note(f"a checkpoint has {self.known.checkpoint_bytes / 1e9:.2f} GB, and "
                          f"{self.known.bytes_per_s / 1e6:.1f} MB a second arrive here: "
                          f"{self.reserve_s():.0f} s of the budget are reserved for its end")

    def reserve_s(self):
        """Returns how much of the budget is reserved to stop the run, fetch its newest checkpoint and delete the VM.
        A run whose mirror takes its checkpoints needs no copy here."""
        is_copied_here = not self.settings.mirror or self.known.mirror_fails
        return self.settings.margin_s + (self.known.transfer_s() if is_copied_here else 0)

    def is_home(self):
        """Returns whether the newest checkpoint was fetched to this machine."""
        return self.known.fetched == self.known.checkpoint != ""

    def is_at_risk(self):
        """Returns whether the newest whole checkpoint is, as far as anybody knows, on the VM's disk alone."""
        return bool(self.known.checkpoint) and self.known.checkpoint != self.known.mirrored and not self.is_home()

    # ------------------------------------------------------------------
    # Saving

    def stop_run(self, limit_s, *flags):
        """Returns whether the run saved its state and ended, and the mirror got it, within `limit_s`."""
        wait_s = max(1, int(limit_s - min(30, limit_s / 4)))  # the rest is for ssh
        result = self.call("stop_run", max(15, limit_s), f"--wait_s={wait_s}", *flags, *self.address())
        if result.status:
            self.journal.note(f"the run did not stop: {result.last_line}")
        return not result.status

    def fetch(self, limit_s):
        """Brings metrics and log of the run that was started here home, and its newest checkpoint unless the mirror
        has it. Returns whether that worked; if not, `error` says why."""
        flags = [f"--to={self.settings.to}", *self.address()]
        if self.known.mirrored == self.known.checkpoint:
            flags.append("--no_checkpoints")
        result = self.call("fetch", max(5, limit_s), self.settings.run, *flags)
        if result.status == 0 and "--no_checkpoints" not in flags:
            self.known.fetched = self.known.checkpoint
            self.save()
        self.error = result.last_line
        return not result.status

    def rescue(self, limit_s):
        """Stops the run and makes sure that its newest whole checkpoint is elsewhere than on the VM. Returns "", or why
        that is impossible now."""
        deadline = self.now() + limit_s
        seen = self.probe(min(limit_s, 120))
        if seen is None:
            error = self.error
            if self.is_at_risk():
                self.ask_mirror(max(5, min(deadline - self.now(), LOOK_S)))
            return f"{error}; {self.known.checkpoint} is on its disk alone" if self.is_at_risk() else ""
        if not self.known.run:
            return ""
        if seen["state"] in ("running", "orphans"):
            left = deadline - self.now()
            self.stop_run(left - min(0.6 * left, self.known.transfer_s() + 30))
            self.probe(max(5, min(deadline - self.now(), 120)))
        if self.known.run != self.settings.run:  # a name that the VM gave, and nobody here
            return (f"{self.known.run}, which was not started here, has {self.known.checkpoint} on its disk alone: "
                    f"fetch.sh brings it" if self.is_at_risk() else "")
        fetched = self.fetch(deadline - self.now())
        if self.is_at_risk():
            return f"{self.known.checkpoint} is on its disk alone and could not be fetched: {self.error}"
        if not fetched:
            self.journal.note(f"metrics and log could not be fetched: {self.error}")
        where = "nowhere: there is none"
        if self.is_home():
            where = "here"
        elif self.known.checkpoint:
            where = "in the mirror"
        self.journal.note(f"the newest checkpoint, {self.known.checkpoint or 'none'}, is {where}")
        return ""

    # ------------------------------------------------------------------
    # Deleting

    def delete(self, limit_s=DELETION_S, zone=None):
        """Deletes the VM and returns the status of delete.sh: 0 deleted, 3 there is none."""
        zones = zone or self.known.zone or self.all_zones()
        result = self.call("delete", limit_s, "--yes", f"--zones={zones}")
        if result.status == 0 and not zone:
            self.known.forget_vm()
            self.save()
        self.error = result.last_line
        return result.status

    def delete_until_absent(self, pause):
        """Deletes the VM, however long that takes. gcloud must say several times that there is none: one that is being
        created may not be visible yet."""
        self.journal.note(f"deleting the VM: each try waits for gcloud, up to {DELETION_S / 60:.0f} minutes")
        absent = 0
        wanted = 3 if self.known.creating else 2
        while absent < wanted:
            status = self.delete()
            if status == 0:
                self.journal.note("VM deleted")
            elif status == 3 and self.known.exists and self.probe(60):
                self.journal.note_change("delete", "gcloud finds no VM, but it answers, and costs money; trying again")
            elif status == 3:
                absent += 1
            else:
                self.journal.note_change(
                    "delete", f"VM NOT DELETED, IT MAY STILL COST MONEY; trying again: {self.error}")
            if absent < wanted:
                pause(self.settings.poll_s)
        self.forget_lost_vm()
        self.known.creating = False
        self.save()

    def end_orphan(self):
        """Ends the script that a killed watch.sh left behind."""
        if verb := end_orphan(self.settings):
            self.journal.note(f"the {verb}.sh that an earlier watch.sh left behind is ended")


def number(text):
    """Returns the whole number of at most 15 digits that a text is, or 0."""
    return int(text) if re.fullmatch("[0-9]{1,15}", text or "") else 0


def is_behind(fields):
    """Returns whether the mirror is behind for long, by the answer of `probe`."""
    return number(fields.get("mirror_behind_s")) >= MIRROR_BEHIND_S
