"""A rank's contact with the processes around it: it reports that it is alive, and learns when all stop."""
import statistics

from nanochat.common import work
from nanochat.run.agreement import RankAgreement, Requests
from nanochat.run.watchdog import Heartbeats, limit_s

COMPILING_STEPS = 3  # the first steps of a process may compile

# {phase of watchdog.PHASES: what a person reads}
DOING = {"step": "training", "compile": "compiling", "evaluate": "evaluating", "sample": "sampling", "save": "saving",
         "end": "ending the run"}


class Liveness:
    """One rank's heartbeats, and its part in the agreement of all ranks."""

    def __init__(self, run, dist, first_step):
        """run: a Run; first_step: where this process begins."""
        self._rank = dist.rank
        self._flags = run.flags.record
        # When rows become longer, the step waits for the loader to restart.
        self._slow_steps = {*range(first_step, first_step + COMPILING_STEPS), *run.plan.switches}
        self._heartbeats = Heartbeats(run.heartbeats_file)
        self._requests = Requests(run.requests_file)
        self._agreement = RankAgreement(self._requests, dist.rank, spans_hosts=dist.hosts > 1)
        self._step_seconds = []  # the mean of each of the last console lines

    @property
    def is_stopping(self):
        return self._agreement.is_stopping

    @property
    def is_preempted(self):
        """Whether this machine is about to end, according to its metadata server."""
        return self._requests.is_preempted

    def beat(self, phase, step):
        """Tells the watchdog that this rank begins `phase` (watchdog.PHASES), and its deadline."""
        if phase == "step" and step in self._slow_steps:
            phase = "compile"
        if self._rank == 0:
            work.begin(f"{DOING[phase]}, step {step}")
        usual_s = statistics.median(self._step_seconds) if self._step_seconds else 0
        # One step of each console line waits for the device to finish all of them.
        self._heartbeats.beat(self._rank, phase, step, limit_s(
            phase, self._flags.step_timeout_s, usual_s * self._flags.log_every))

    def agree(self, phase, step):
        """Lets the ranks agree whether to stop: is_stopping says so. Every rank calls it at the same points of its
        program."""
        self.beat(phase, step)
        self._agreement.agreed_to_stop()

    def note_step_seconds(self, seconds):
        self._step_seconds = [*self._step_seconds, seconds][-100:]

    def finish(self, step):
        """Reports that this rank runs no further step."""
        self.beat("end", step)
        self._agreement.finish()

    def begin_to_wait_for_mirror(self):
        """Reports that the run can end without loss from now on. Returns asked_from_now_on()."""
        self._requests.begin_to_wait_for_mirror()
        work.begin("waiting for WandB and the mirror")
        return self.asked_from_now_on()

    def asked_from_now_on(self):
        """Returns a function that says whether a stop was requested after this call. On a machine that is about to end
        it returns False: the system's SIGTERM must not end saving or copying before the machine does."""
        requests = self._requests
        times_asked = requests.times_asked
        return lambda: requests.times_asked > times_asked and not requests.is_preempted
