"""The loop of watch.sh: it looks at the VM, asks rules.py what to do, and does it. Whatever it does or waits for, it
counts the money, and ends at the budget."""
import math
import re
import shlex
import time
import traceback

from deploy.lib.calls import LINE, end_orphan
from deploy.lib.rules import GONE, Seen, decide, is_behind, not_asked_for, number
from deploy.lib.state import Tries, Vm, steady_time

LIMIT_S = {"setup": 1800, "push": 1800, "data": 7200}  # that a script may take
CREATE_S = 1200  # per zone
LOOK_S = 150  # per zone: gcloud itself gives up after two minutes without an answer
DELETION_S = 600  # for a deletion to end
DELETE_S = 60  # the last of the budget, which nothing but the deletion may use
COUNT_S = 5  # between two records of the spending
BACKOFF_S = (1, 10, 60, 300, 600)  # pauses after errors of this program


class End(BaseException):  # these three are no errors: `except Exception` does not stop them
    """The watch has ended with this exit status."""

    def __init__(self, status):
        super().__init__(status)
        self.status = status


class BudgetReached(BaseException):
    """The rest of the budget is needed to stop the run, fetch it and delete the VM."""


class ToldToStop(BaseException):
    """SIGINT or SIGTERM came."""


class Loop:
    """`prices` is {zone: USD per hour}. `call` runs a script, as Calls does, and waits by `wait`."""

    def __init__(self, settings, state, journal, prices, call, pause=time.sleep, now=steady_time):
        self.settings, self.state, self.journal, self.prices = settings, state, journal, prices
        self.call, self.pause, self.now = call, pause, now
        self.note, self.condition, self.show = journal.note, journal.note_change, journal.show
        self.error, self.was_absent = "", False  # why the last attempt failed; whether gcloud did not find the VM
        self.has_log = False  # whether the last rescue brought metrics and log home, or there are none
        self.is_ending, self.saved_at = False, 0.0

    # ------------------------------------------------------------------
    # The loop

    def run(self):
        """Returns the exit status of watch.sh. Raises ToldToStop."""
        self.end_orphan()
        self.state.vm.has_limit = False
        self.state.tries = Tries(settling=3 if self.state.creating else 0)
        if self.state.finished != shlex.join(self.settings.flags):
            self.state.finished = ""
        errors = pause_s = 0
        while True:
            try:
                self.wait(pause_s)
                if self.is_ending:
                    return self.end_budget()
                if self.state.finished:
                    self.delete_and_end(0)
                pause_s = 0 if self.poll() else self.settings.poll_s
            except End as end:
                return end.status
            except BudgetReached:
                self.is_ending, pause_s = True, 0
            except Exception as error:  # of this program: a VM that costs money is not left alone for that
                self.journal.add(traceback.format_exc())
                pause_s = BACKOFF_S[min(errors, len(BACKOFF_S) - 1)]
                errors += 1
                self.note(f"the watch itself failed ({error!r}); it goes on after {pause_s} s")

    def poll(self):
        """Looks at the VM once and acts on what it sees. Returns whether it is to be looked at again at once."""
        self.state.tries, actions = decide(self.settings, self.state, self.look())
        is_new = False
        for name, *arguments in actions:
            is_new = getattr(self, name)(*arguments) or is_new
        if self.state.tries.troubles >= self.settings.patience:
            self.replace(f"trouble {self.settings.patience} times in a row", is_futile=True)
        return is_new

    def wait(self, seconds):
        """Waits, counts, and raises BudgetReached."""
        until = self.now() + seconds
        while True:
            left_s = self.count() - self.reserve_s()
            if left_s <= 0 and not self.is_ending:
                raise BudgetReached
            step_s = min(until - self.now(), COUNT_S)
            if not self.is_ending:
                step_s = min(step_s, max(0.1, left_s))
            if step_s <= 0:
                return
            self.pause(step_s)

    def count(self):
        """Counts the spending and returns for how many seconds the budget lasts."""
        now = self.now()
        self.state.count(self.usd(), now)
        if not 0 <= now - self.saved_at < COUNT_S:
            self.save()
        return self.state.left_s(self.settings, self.usd())

    def usd(self):
        """Returns the VM's price an hour, or the dearest where its zone is not known."""
        return self.prices.get(self.state.vm.zone, max(self.prices.values(), default=0))

    def usd_text(self):
        return f"{self.usd():.2f} USD an hour" if self.prices else "? USD an hour"

    def reserve_s(self):
        """Returns how much of the budget is reserved to stop the run, fetch its newest checkpoint and delete the VM.
        A run whose mirror takes its checkpoints needs no copy here."""
        is_copied_here = not self.settings.mirror or self.state.vm.mirror_fails
        return self.settings.margin_s + (self.state.vm.transfer_s() if is_copied_here else 0)

    def save(self):
        """Writes the state down. Returns whether that worked."""
        self.saved_at = self.now()
        is_saved = self.state.save(self.settings.state / "state.json")
        if not is_saved:
            self.condition("disk", f"cannot write to {self.settings.state}: is the disk full?")
        return is_saved

    def record(self, script, group):
        """Writes down which script runs, for the next watch.sh if this one is killed."""
        self.state.script, self.state.group = script, group
        self.save()

    def end_orphan(self):
        """Ends the script that an earlier watch.sh left running."""
        if self.state.group and end_orphan(self.settings, self.state.script, self.state.group):
            self.note(f"the {self.state.script} that an earlier watch.sh left behind is ended")
        self.record("", 0)

    # ------------------------------------------------------------------
    # Looking

    def look(self):
        """Returns what is seen of the VM and its run. The state keeps the last certain answer: that gcloud fails once
        says nothing about the VM."""
        seen = self.look_up()
        if self.state.vm.state == "READY" and seen.state in ("READY", "unknown"):
            reason, run = self.error, self.probe()
            seen = seen._replace(run=run, error=reason if seen.state == "unknown" else self.error)
        return seen

    def look_up(self, limit_s=None):
        """Returns what gcloud says of the VM."""
        state, limit_s = self.state, limit_s or LOOK_S * len(self.settings.zones)
        result = self.call("lib/look", limit_s, "--what=vm", f"--zones={self.all_zones()}")
        fields = result.fields
        self.error = ""
        if result.status or fields.get("state") in (None, "", "unknown"):
            self.error = fields.get("error") or result.last_line
            return Seen("unknown", error=self.error, is_permanent=result.status == 2 or bool(fields.get("permanent")))
        if fields["state"] == "absent":
            if state.vm.exists and not self.was_absent:  # it may be overlooked once
                self.was_absent, self.error = True, "gcloud finds no VM; it is asked again"
            elif state.vm.exists and self.probe(min(60, limit_s)):
                self.error = "gcloud finds no VM, but it answers"
            else:
                self.forget_vm()
                self.was_absent = False
            return Seen("unknown" if self.error and state.vm.exists else "absent", error=self.error)
        seen = Seen(fields["state"], fields["health"], fields["type"], fields["spot"] == "True")
        if fields["id"] != state.vm.id:
            if not fields.get("remembered") and not state.creating:
                return seen._replace(is_ours=False)
            state.vm = Vm()
        state.vm.state, state.creating, self.was_absent = fields["state"], False, False
        state.vm.zone, state.vm.id, state.vm.ips = fields["zone"], fields["id"], fields["ips"] or state.vm.ips
        self.save()
        return seen

    def look_at_ours(self, limit_s=None):
        """As `look_up`, and ends the watch at a VM that is not the one that is asked for."""
        seen = self.look_up(limit_s)
        if text := not_asked_for(self.settings, seen):
            self.end(2, text)
        return seen

    def count_lost_creation(self):
        """Counts a creation of which nobody knows whether it made a VM as if it had: the VM may have deleted itself."""
        self.count()
        if self.state.creating:
            self.state.charge()
        self.state.pending_usd = 0

    def forget_vm(self):
        self.count()
        self.state.vm, self.state.existed = Vm(), False
        self.save()

    def ask_mirror(self, limit_s=LOOK_S):
        """Asks the bucket of the mirror what it has: the VM may have copied more since it was asked."""
        vm = self.state.vm
        if not self.settings.mirror.startswith("gs://"):
            return
        place = f"{self.settings.mirror.rstrip('/')}/{self.settings.run}"
        newest = self.call("lib/look", limit_s, "--what=mirror", f"--bucket={place}").fields.get("mirrored", "")
        if number(newest.removeprefix("step_")) >= number(vm.checkpoint.removeprefix("step_")) > 0:
            vm.checkpoint = vm.mirrored = newest
            self.save()

    def all_zones(self):
        """Returns the zones in which the VM may be, as a flag's value: also where an earlier watch created it."""
        return ",".join(dict.fromkeys([*filter(None, [self.state.vm.zone]), *self.settings.zones]))

    def address(self):
        return [f"--vm_ips={self.state.vm.ips}", f"--vm_id={self.state.vm.id}"]

    def probe(self, limit_s=120):
        """Asks the VM itself about its newest run and returns the answer, {name: value}, or None if there is none; then
        `error` says why. It needs no answer of gcloud."""
        vm = self.state.vm
        if not vm.ips:
            self.error = "its address is not known"
            return None
        result = self.call("lib/look", limit_s, "--what=run", *self.address())
        fields = result.fields
        if result.status or not fields.get("state"):
            self.error = result.last_line or "an empty answer"
            return None
        vm.run, vm.checkpoint, vm.mirrored = (fields.get(name, "") for name in ("run", "checkpoint", "mirrored"))
        vm.mirror_fails = bool(fields.get("mirror_error")) and is_behind(fields)
        vm.checkpoint_bytes = number(fields.get("checkpoint_bytes"))
        self.save()
        return fields

    # ------------------------------------------------------------------
    # The VM

    def create(self):
        """Creates the VM; before that, it writes down that one may exist. Returns whether there is one."""
        tries = self.state.tries
        self.count_lost_creation()
        self.state.creating = True
        if not self.save():  # nobody would count what it costs
            self.state.creating = False
            return False
        self.note(f"creating {self.settings.name}: {self.settings.type} in {', '.join(self.settings.zones)}")
        result = self.call("create", (CREATE_S + LOOK_S) * len(self.settings.zones), *self.limit_flags())
        if re.search(rf"^{self.settings.name} in \S+: READY", result.output, re.MULTILINE):
            self.count()
            self.state.charge()  # also for a VM that did not become healthy, and is deleted by now
        if result.status in (2, 4, 5, 6):  # it left none
            self.state.creating = False
            self.save()
        if result.status == 0:
            for line in result.output.splitlines():
                if line.startswith("warning: "):
                    self.note(line[:LINE])
            self.note(f"VM created: {result.last_line}")
            tries.misses = 0
            self.look_up()
            self.state.vm.has_limit = True
            self.state.vm.deletes_itself = f"{self.settings.name} deletes itself" in result.output
            self.save()
            return True
        if result.status == 2:
            self.end(1, f"giving up: {result.last_line}")
        elif result.status == 5:
            tries.misses = min(5, tries.misses + 1)
            tries.hold = 2 ** (tries.misses - 1)
            self.note(f"no VM: {result.last_line}; again after {tries.hold} polls")
        else:
            tries.settling = 0 if result.status == 6 else 3
            self.note(f"no VM (status {result.status}): {result.last_line}")
        return False

    def limit_flags(self):
        """Returns the flags for the VM's own limit: while this machine sleeps nobody else ends the budget."""
        left_s = self.state.left_s(self.settings, self.usd())
        if math.isinf(left_s):
            return []
        return [f"--max_hours={max(0.0, left_s) / 3600:.4f}", f"--margin_s={self.settings.margin_s:.0f}"]

    def set_limit(self):
        """Sets the own limit of a VM that exists already: it may have none, or that of another budget."""
        vm, flags = self.state.vm, self.limit_flags()
        vm.has_limit, text = True, ""
        if flags:
            result = self.call("lib/look", LOOK_S, "--what=limit", f"--zones={vm.zone}", *flags, *self.address())
            vm.has_limit, vm.deletes_itself = not result.status, result.last_line == "yes"
            if not vm.deletes_itself:
                text = (f"warning: {self.settings.name} may not delete itself ({result.last_line}): if this watch is "
                        "killed, only the next one or delete.sh ends the costs")
        self.condition("limit", text)
        self.save()

    def replace(self, why, is_futile=False):
        """Deletes a lost or useless VM, if its newest checkpoint is safe; the next look creates another."""
        vm, tries = self.state.vm, self.state.tries
        if vm.state in GONE:
            if vm.is_at_risk:
                self.ask_mirror()
            if vm.is_at_risk:
                self.note(f"{vm.checkpoint} was on the VM's disk alone and is lost; the mirror has "
                          f"{vm.mirrored or 'none'}")
        elif reason := self.rescue(self.stop_s()):
            self.condition("kept", f"{why}, but the VM is kept until the last of the budget: {reason}")
            return
        if is_futile:
            tries.futile += 1
            if tries.futile >= 3:
                self.give_up("the run did not start on any of three VMs")
        self.note(f"{why}: creating the VM again")
        if self.delete() not in (0, 3):
            self.note(f"not deleted: {self.error}")
        tries.troubles = tries.pending = 0

    def trouble(self, why):
        self.state.tries.troubles += 1
        if self.state.tries.troubles <= self.settings.patience:
            self.note(f"{why} ({self.state.tries.troubles} of {self.settings.patience})")

    def delete(self):
        """Deletes the VM, and no other of its name. Returns the status of delete.sh: 0 deleted, 3 there is none."""
        vm = self.state.vm
        flags = [f"--zones={vm.zone or self.all_zones()}"] + [f"--vm_id={vm.id}"] * bool(vm.id)
        result = self.call("delete", DELETION_S, "--yes", *flags)
        if result.status == 0:
            self.forget_vm()
        self.error = result.last_line
        return result.status

    def delete_until_absent(self):
        """Deletes the VM, however long that takes. gcloud must say several times that there is none: one that is being
        created may not be visible yet."""
        self.note(f"deleting the VM: each try waits for gcloud, up to {DELETION_S / 60:.0f} minutes")
        absent, wanted = 0, 3 if self.state.creating else 2
        while not self.state.vm.id:  # a VM of this name may be somebody else's
            if self.look_at_ours().state != "unknown":
                break
            self.condition("delete", f"VM NOT DELETED, IT MAY STILL COST MONEY; trying again: {self.error}")
            self.wait(self.settings.poll_s)
        while absent < wanted:
            status = self.delete()
            if status == 0:
                self.note("VM deleted")
            elif status == 3 and self.state.vm.exists and self.probe(60):
                self.condition("delete", "gcloud finds no VM, but it answers, and costs money; trying again")
            elif status == 3:
                absent += 1
            else:
                self.condition("delete", f"VM NOT DELETED, IT MAY STILL COST MONEY; trying again: {self.error}")
            if absent < wanted:
                self.wait(self.settings.poll_s)
        self.forget_vm()
        self.count_lost_creation()
        self.state.creating = False
        self.save()

    # ------------------------------------------------------------------
    # The run

    def prepare(self):
        """Sets the VM up and starts the run; every part is safe to run twice."""
        for verb in ["setup", "push"] + ["data"] * bool(self.settings.bucket):
            result = self.call(verb, LIMIT_S[verb])
            if result.status:
                self.failed(result, f"{verb} failed", "a setting is wrong")
                return
        self.start()

    def start(self):
        result = self.call("train", 900, "--wait_s=600", *self.limit_flags(), "--", *self.settings.flags)
        if result.status == 0:
            steps = [line for line in result.output.splitlines() if line.startswith("step")]
            self.note(f"run started: {steps[-1][:LINE] if steps else 'no step yet'}")
        elif result.status == 75:  # for example because the mirror cannot be reached: that is not the VM's fault
            self.note(f"the run did not start, and is started again: {result.last_line}")
        else:
            self.failed(result, f"the run did not start (status {result.status})", "the run does not accept its flags")

    def failed(self, result, trouble, mistake):
        """Status 2 is for what the user must mend, unless it was gcloud that refused to answer."""
        if result.status == 2 and self.look_up().state != "unknown":
            self.give_up(f"{mistake}: {result.last_line}")
        self.trouble(f"{trouble}: {result.last_line}")

    def restart(self):
        self.stop_run(150, "--kill")  # on a pod, some VMs may still run it
        self.start()

    def end_processes(self):
        if not self.stop_run(60, "--kill"):
            self.trouble("its processes could not be ended")

    def stop_run(self, limit_s, *flags):
        """Returns whether the run saved its state and ended, and the mirror got it, within `limit_s`."""
        wait_s = max(1, int(limit_s - min(30, limit_s / 4)))  # the rest is for ssh
        result = self.call("stop_run", max(15, limit_s), f"--wait_s={wait_s}", *flags, *self.address())
        if result.status:
            self.note(f"the run did not stop: {result.last_line}")
        return not result.status

    def stop_s(self):
        """Returns how long a stop may take: base_train waits up to half an hour for its mirror."""
        return 2000 + self.state.vm.transfer_s()

    def fetch(self, limit_s):
        """Brings metrics and log of the run that was started here home, and its newest checkpoint unless the mirror
        has it. Returns whether that worked; if not, `error` says why."""
        vm, flags = self.state.vm, [f"--to={self.settings.to}", *self.address()]
        if vm.mirrored == vm.checkpoint:
            flags.append("--no_checkpoints")
        result = self.call("fetch", max(5, limit_s), self.settings.run, *flags)
        is_there = (self.settings.to / self.settings.run / vm.checkpoint).is_dir()
        if result.status == 0 and "--no_checkpoints" not in flags and is_there:
            vm.fetched = vm.checkpoint
            self.save()
        self.error = result.last_line
        return not result.status

    def rescue(self, limit_s):
        """Stops the run and makes sure that its newest whole checkpoint is elsewhere than on the VM. Returns "", or why
        that is impossible now."""
        vm, deadline = self.state.vm, self.now() + limit_s
        self.has_log = vm.run != self.settings.run
        seen = self.probe(min(limit_s, 120))
        if seen is None:
            error = self.error
            if vm.is_at_risk:
                self.ask_mirror(max(5, min(deadline - self.now(), LOOK_S)))
            return f"{error}; {vm.checkpoint} is on its disk alone" if vm.is_at_risk else ""
        self.has_log = vm.run != self.settings.run
        if not vm.run:
            return ""
        if seen["state"] in ("running", "orphans"):
            left = deadline - self.now()
            self.stop_run(left - min(0.6 * left, vm.transfer_s() + 30))
            self.probe(max(5, min(deadline - self.now(), 120)))
        if vm.run != self.settings.run:  # a name that the VM gave, and nobody here
            return (f"{vm.run}, which was not started here, has {vm.checkpoint} on its disk alone: fetch.sh brings it"
                    if vm.is_at_risk else "")
        self.has_log = self.fetch(deadline - self.now())
        if vm.is_at_risk:
            return f"{vm.checkpoint} is on its disk alone and could not be fetched: {self.error}"
        if not self.has_log:
            self.note(f"metrics and log could not be fetched: {self.error}")
        where = "here" if vm.is_home else "in the mirror" if vm.checkpoint else "nowhere: there is none"
        self.note(f"the newest checkpoint, {vm.checkpoint or 'none'}, is {where}")
        return ""

    # ------------------------------------------------------------------
    # The end

    def end(self, status, why):
        self.note(why)
        raise End(status)

    def bring_home(self):
        """As `rescue`, and tries again where only metrics and log are missing: one lost connection must not cost them.
        The number of tries is limited, because the VM costs money."""
        for _ in range(max(1, self.settings.patience)):
            reason = self.rescue(self.stop_s())
            if reason or self.has_log:
                break
            self.wait(self.settings.poll_s)
        return reason

    def finish(self):
        if reason := self.bring_home():
            self.condition("kept", f"the run could not be fetched; trying again, while the VM costs money: {reason}")
        else:
            self.state.finished = shlex.join(self.settings.flags)
            self.save()
            self.delete_and_end(0)

    def give_up(self, why):
        self.note(f"giving up: {why}")
        if self.state.vm.state == "READY":
            log = self.call("logs", 60, "--tail=30").output
            self.journal.add("\n".join(line[:LINE] for line in log.splitlines()[-32:]))
        while reason := self.bring_home():
            self.condition("kept", f"the VM is kept until the last of the budget: {reason}")
            self.wait(self.settings.poll_s)
            if self.look_up().state in ("absent", *GONE):
                self.note(f"the VM is gone: {reason}")
                break
        self.delete_and_end(1)

    def delete_and_end(self, status):
        self.delete_until_absent()
        raise End(status)

    def end_budget(self):
        """Stops the run, brings home what is on the VM alone, and deletes the VM. Returns 7."""
        self.note(f"budget: {self.state.spent} are spent, and the rest is needed to stop, fetch and delete")
        # If nobody counted for a while, the budget may be overrun already; a checkpoint is still worth the margin.
        deadline = self.now() + max(self.count(), self.settings.margin_s)
        last = deadline - min(DELETE_S, self.settings.margin_s / 4)
        try:
            seen = self.look_at_ours(min(LOOK_S, (last - self.now()) / 4))
            if seen.state == "unknown":
                self.note(f"gcloud does not answer; the VM is asked itself: {seen.error}")
            if seen.state not in ("absent", *GONE):
                self.save_until(last)
        except Exception as error:
            self.journal.add(traceback.format_exc())
            self.note(f"the watch itself failed ({error!r}): the VM is deleted")
        self.delete_until_absent()
        return 7

    def save_until(self, last):
        """Tries to save the run until the time `last`."""
        while (reason := self.rescue(max(10, last - self.now()))) or not self.has_log:
            reason = reason or f"metrics and log: {self.error}"
            self.condition("kept", reason)
            if self.now() + self.settings.poll_s + 15 >= last:
                self.note(f"the last of the budget is needed to delete the VM. LOST: {reason}")
                return
            self.wait(self.settings.poll_s)
            if self.look_at_ours(min(LOOK_S, (last - self.now()) / 4)).state in ("absent", *GONE):
                return
