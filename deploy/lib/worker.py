"""The state machine that keeps one run alive on one VM: it creates the VM, starts the run and replaces what is lost."""
import math
import random

from deploy.lib.actions import GONE, LOOK_S, is_behind, number
from deploy.lib.calls import LINE

# Seconds that a script may take; the budget's keeper ends it earlier if the money is spent.
LIMIT_S = {"setup": 1800, "push": 1800, "data": 7200}
CREATE_S = 1200  # per zone


class End(Exception):
    """The watch has ended with this exit status."""

    def __init__(self, status):
        super().__init__(status)
        self.status = status


class Worker:
    """`pause(seconds)` waits, and raises when the worker has to end. `usd()` is the VM's price as a text. `left_s()` is
    how long the budget lasts."""

    def __init__(self, settings, actions, pause, usd, left_s):
        self.settings, self.actions, self.pause, self.usd, self.left_s = settings, actions, pause, usd, left_s
        self.known, self.note = actions.known, actions.journal.note
        self.call, self.journal = actions.call, actions.journal
        self.troubles = self.futile = self.pending = self.crashes = 0  # failed checks; VMs; polls; ends of the run
        self.misses = self.hold = 0  # rounds without capacity; polls until the next
        self.refusals = 0  # times in a row that gcloud could not say for a reason that no waiting mends
        self.furthest, self.step = -1, ""
        self.settling = 0  # how many more times gcloud must say that there is no VM before another is created

    def run(self):
        """Returns the exit status of watch.sh."""
        self.actions.end_orphan()
        self.settling = 3 if self.known.creating else 0
        try:
            while True:
                self.poll()
                self.pause(self.settings.poll_s)
        except End as end:
            return end.status

    def poll(self):
        """Looks at the VM once and acts on its state. Raises End."""
        state = self.actions.look_up()
        self.refuse_another_vm(state)
        if state == "unknown":
            self.be_unsure()
        else:
            self.refusals = 0
            self.journal.note_change("lookup", "")
            if state == "absent":
                self.make_if_settled()
            elif state == "READY":
                self.settling = self.pending = 0
                self.look()
            elif state == "STOPPED" and not self.settings.spot:
                self.note(f"giving up: somebody stopped {self.settings.name}")
                self.say_kept()
                raise End(1)
            elif state in GONE:
                self.replace(state)
            else:
                self.pending += 1
                if self.pending >= 3 * self.settings.patience:
                    self.replace(f"{state} for {3 * self.settings.patience} polls")
        if self.troubles >= self.settings.patience:
            self.replace(f"trouble {self.settings.patience} times in a row", is_futile=True)

    def refuse_another_vm(self, state):
        if state in ("absent", "unknown"):
            return
        if (self.actions.type, self.actions.is_spot) != (self.settings.type, self.settings.spot):
            self.note(f"{self.settings.name} exists as {self.actions.type}, spot: {self.actions.is_spot}. "
                      "Give its --type and --on_demand, or another name")
            raise End(2)

    def be_unsure(self):
        """gcloud gave no answer. The run may go on nevertheless, so it is looked at where its address is known."""
        if self.actions.is_permanent and not self.known.exists and not self.known.creating:
            self.refusals += 1
            if self.refusals >= 2:
                self.note(f"giving up: {self.actions.error}")
                raise End(1)
        self.journal.note_change(
            "lookup", f"cannot tell the state of {self.settings.name}; waiting: {self.actions.error}")
        if self.known.state == "READY" and (seen := self.actions.probe()):
            self.watch_mirror(seen)

    # ------------------------------------------------------------------
    # The VM

    def make_if_settled(self):
        if self.settling:
            self.settling -= 1
            self.note(f"a creation was interrupted; waiting whether it made a VM ({self.settling} more checks)")
            return
        if self.hold > 0:
            self.hold -= 1
            return
        self.make()

    def make(self):
        """Creates the VM and starts the run. That a VM may exist is written down before the creation begins."""
        self.known.creating = True
        if not self.actions.save():  # nobody would count what it costs
            self.known.creating = False
            return
        self.note(f"creating {self.settings.name}: {self.settings.type} in {', '.join(self.settings.zones)}")
        result = self.call("create", (CREATE_S + LOOK_S) * len(self.settings.zones), "--rounds=1", *self.limit_flags())
        if result.status in (2, 5, 6):  # it made none
            self.known.creating = False
            self.actions.save()
        if result.status == 0:
            for line in result.output.splitlines():
                if line.startswith("warning: "):
                    self.note(line[:LINE])
            self.note(f"VM created: {result.last_line}")
            self.misses = 0
            if self.actions.look_up() == "READY":
                self.delete_twins()
                self.look()  # and not prepare: gcloud may have overlooked a VM on which the run goes on
        elif result.status == 2:
            self.note(f"giving up: {result.last_line}")
            raise End(1)
        elif result.status == 5:
            self.misses = min(5, self.misses + 1)
            self.hold = int(2 ** (self.misses - 1) * random.uniform(0.5, 1.5))
            self.note(f"no VM: {result.last_line}; again after {self.hold} polls")
        else:
            self.settling = 0 if result.status == 6 else 3
            self.note(f"no VM (status {result.status}): {result.last_line}")

    def delete_twins(self):
        """Deletes a second VM of the same name in another zone: gcloud may have overlooked the first when the second
        was created. The older one stays, because it may have a run."""
        if len(self.settings.zones) == 1:
            return
        found = []
        for zone in self.settings.zones:
            fields = self.call("lib/look", LOOK_S, "--what=vm", f"--zones={zone}").fields
            if fields.get("state", "absent") not in ("absent", "unknown"):
                found.append((fields["state"] in GONE, fields["created"], zone))
        for _, _, zone in sorted(found)[1:]:
            self.note(f"there is a second VM {self.settings.name}, in {zone}: it is deleted")
            self.actions.delete(zone=zone)
        if len(found) > 1:
            self.actions.look_up()

    def replace(self, why, is_futile=False):
        """Deletes a lost or useless VM, if its newest checkpoint is safe; the next check creates another."""
        if self.known.state in GONE:
            if self.actions.is_at_risk():
                self.actions.ask_mirror()
            if self.actions.is_at_risk():
                self.note(f"{self.known.checkpoint} was on the VM's disk alone and is lost; the mirror has "
                          f"{self.known.mirrored or 'none'}")
        elif reason := self.actions.rescue(self.stop_s()):
            self.journal.note_change("kept", f"{why}, but the VM is kept until the last of the budget: {reason}")
            return
        if is_futile:
            self.futile += 1
            if self.futile >= 3:
                self.give_up("the run did not start on any of three VMs")
        self.note(f"{why}: creating the VM again")
        if self.actions.delete() not in (0, 3):
            self.note(f"not deleted: {self.actions.error}")
        self.troubles = self.pending = 0

    def stop_s(self):
        """Returns how long a stop may take: base_train waits up to half an hour for its mirror."""
        return 2000 + self.known.transfer_s()

    def trouble(self, why):
        self.troubles += 1
        if self.troubles <= self.settings.patience:
            self.note(f"{why} ({self.troubles} of {self.settings.patience})")

    # ------------------------------------------------------------------
    # The run

    def look(self):
        """Looks at the run and acts on its state. The run counts for more than what gcloud says of the VM's health."""
        seen = self.actions.probe()
        unhealthy = "" if self.actions.health == "HEALTHY" else f"unhealthy: {self.actions.health}"
        if seen is None:
            self.trouble(unhealthy or f"no answer from the VM: {self.actions.error}")
            return
        state, self.step = seen["state"], seen.get("steps", "")
        if seen.get("run") != self.settings.run:
            if state == "running":
                self.journal.note_change("other run", f"another run is running: {seen.get('run')}")
                return
            state = "none"
        is_stuck = state == "running" and number(seen.get("log_age_s")) >= self.settings.stall_s
        if unhealthy and (is_stuck or state not in ("running", "ended")):
            self.trouble(unhealthy)
            return
        self.journal.note_change("health", f"{unhealthy}, but the run goes on" if unhealthy else "")
        self.journal.note_change("kept", "")
        self.watch_mirror(seen)
        if is_stuck:
            self.crashed(f"hangs: no line in its log for {seen['log_age_s']} s,", seen)
        elif state == "running":
            self.troubles = self.futile = 0
            self.journal.show(f"running, step {self.step}")
            if self.known.checkpoint_bytes and not self.known.bytes_per_s:
                self.actions.measure_rate()
        elif state == "none":
            self.prepare()
        elif state == "orphans":
            self.note("the run has ended, but some of its processes still run")
            if not self.actions.stop_run(60, "--kill"):
                self.trouble("its processes could not be ended")
        elif state == "ended":
            self.ended(seen, unhealthy)
        else:
            self.crashed(state, seen)

    def ended(self, seen, unhealthy):
        """Acts on the status with which the run has ended."""
        status = seen.get("exit", "")
        if status == "0":
            self.note(f"finished: step {self.step}")
            if reason := self.actions.rescue(self.stop_s()):
                self.note(f"the run could not be fetched; trying again, while the VM costs money: {reason}")
                return
            self.finish(0)
        if status == "2":
            self.give_up(f"the run does not accept its flags{because(seen)}")
        if unhealthy:
            self.trouble(unhealthy)
        elif status == "75":
            self.note(f"the run saved its state and ended at step {self.step or 'none'}: starting it again")
            self.restart()
        else:
            self.crashed(f"ended {status}", seen)

    def watch_mirror(self, seen):
        """Reports a mirror that is behind: until it has caught up, the newest checkpoint is on the VM's disk alone."""
        error, text = seen.get("mirror_error", ""), ""
        if self.known.checkpoint and (error or is_behind(seen)):
            text = (f"the mirror is behind: it has {self.known.mirrored or 'no checkpoint'}, the VM's disk alone has "
                    f"{self.known.checkpoint}{error and f' ({error})'}")
        self.journal.note_change("mirror", text)

    def prepare(self):
        """Sets the VM up and starts the run; every part is safe to run twice."""
        for verb in ["setup", "push"] + ["data"] * self.settings.has_bucket:
            result = self.call(verb, LIMIT_S[verb])
            if result.status:
                self.failed(result, f"{verb} failed", "a setting is wrong")
                return
        self.start()

    def failed(self, result, trouble, mistake):
        """Status 2 is for what the user must mend, unless it was gcloud that refused to answer."""
        if result.status == 2 and self.actions.look_up() != "unknown":
            self.give_up(f"{mistake}: {result.last_line}")
        self.trouble(f"{trouble}: {result.last_line}")

    def start(self):
        result = self.call("train", 900, "--wait_s=600", *self.limit_flags(), "--", *self.settings.flags)
        if result.status == 0:
            steps = [line for line in result.output.splitlines() if line.startswith("step")]
            self.note(f"run started: {steps[-1][:LINE] if steps else 'no step yet'}")
        elif result.status == 75:  # for example because the mirror cannot be reached: that is not the VM's fault
            self.note(f"the run did not start, and is started again: {result.last_line}")
        else:
            self.failed(result, f"the run did not start (status {result.status})", "the run does not accept its flags")

    def limit_flags(self):
        """Returns the flags for the VM's own limit: while this machine sleeps nobody else ends the budget."""
        left_s = self.left_s()
        if math.isinf(left_s):
            return []
        return [f"--max_hours={max(0.0, left_s) / 3600:.4f}", f"--margin_s={self.settings.margin_s:.0f}"]

    def restart(self):
        self.actions.stop_run(150, "--kill")  # on a pod, some VMs may still run it
        self.start()

    def crashed(self, how, seen):
        """Starts the run again, unless it ended three times without getting further."""
        step = number(self.step.partition("/")[0])
        if step > self.furthest:
            self.furthest, self.crashes = step, 0
        self.crashes += 1
        self.note(f"the run {how} at step {self.step or 'none'} ({self.crashes} of 3){because(seen)}")
        if self.crashes >= 3:
            self.give_up(f"it ended three times and got no further than step {self.furthest}")
        self.restart()

    # ------------------------------------------------------------------
    # The end

    def give_up(self, why):
        self.note(f"giving up: {why}")
        if self.known.state == "READY":
            log = self.call("logs", 60, "--tail=30").output
            self.journal.add("\n".join(line[:LINE] for line in log.splitlines()[-32:]))
        while reason := self.actions.rescue(self.stop_s()):
            self.journal.note_change("kept", f"the VM is kept until the last of the budget: {reason}")
            self.pause(self.settings.poll_s)
        self.finish(1)

    def finish(self, status):
        if self.settings.keep_vm:
            self.say_kept()
        else:
            self.actions.delete_until_absent(self.pause)
        raise End(status)

    def say_kept(self):
        self.note(f"{self.settings.name} is kept and costs {self.usd()} USD an hour: delete.sh {self.settings.name}")


def because(seen):
    """Returns the last error in the run's log, as the end of a line, or ""."""
    return f": {seen['error']}" if seen.get("error") else ""
