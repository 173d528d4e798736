"""What preemptions cost a run: the time that it takes, and the best time between two checkpoints. Preemptions come
without notice, at random, with a mean rate (a Poisson process)."""
import math
from dataclasses import asdict, dataclass

# Measured with a checkpoint of 3.2 GB on two CPU cores (dev/LOG.md, "surviving faults"):
HELD_S_PER_BYTE = 5.6 / 3.2e9  # the loop waits for the copy of the state
SAFE_S_PER_BYTE = 17.9 / 3.2e9  # until the checkpoint is on disk; before that, a preemption loses what it holds


@dataclass(frozen=True)
class Preemptions:
    per_day: float
    restart_s: float  # from a preemption until the run trains again: a new VM, setup, compiling, loading
    held_s: float  # for which a save holds the loop
    safe_s: float  # from a save until its checkpoint is on disk

    def slowdown(self, save_every_s):
        """Returns the expected wall time over the time of training alone, with a checkpoint after every `save_every_s`
        seconds of training: M e^(R/M) (e^((τ + δ) / M) - 1) / τ (Daly 2006, doi 10.1016/j.future.2004.11.016).
        It is infinite where nearly no interval ends without a preemption.
        """
        mean_s = 86400 / self.per_day
        try:
            return (mean_s * math.exp((self.restart_s + self.safe_s) / mean_s)
                    * math.expm1((save_every_s + self.held_s) / mean_s) / save_every_s)
        except OverflowError:
            return math.inf

    def best_save_every_s(self):
        """Returns the seconds of training between checkpoints that cost the least: √(2 δ M) (Young 1974, doi
        10.1145/361147.361115)."""
        return math.sqrt(2 * self.held_s * 86400 / self.per_day)


def report_preemptions(own, checkpoint_bytes, save_every_s, hours):
    """Returns a JSON object: the expected hours of a run that takes `hours` undisturbed, and its goodput, with its own
    time between checkpoints and with the best.

    own: with the preemptions_per_day and restart_minutes of PreflightFlags. checkpoint_bytes: say how long saving
    takes.
    """
    model = Preemptions(own.preemptions_per_day, 60 * own.restart_minutes, HELD_S_PER_BYTE * checkpoint_bytes,
                        SAFE_S_PER_BYTE * checkpoint_bytes)
    best_s = model.best_save_every_s()
    run_s = 3600 * hours
    # Without checkpoints save_every_s is infinite, and the whole run is the interval that must go through.
    slowdown = model.slowdown(min(save_every_s, run_s))
    best_slowdown = model.slowdown(min(best_s, run_s))
    return {**asdict(model), "save_every_s": save_every_s, "goodput": 1 / slowdown, "hours": hours * slowdown,
            "best_save_every_s": best_s, "best_goodput": 1 / best_slowdown}
