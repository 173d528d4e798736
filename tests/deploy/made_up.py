"""A VM, a run and a clock that are made up, for the rules of watch.sh: a test runs days of them in a moment."""
from deploy.lib.calls import TIMED_OUT, Result
from deploy.lib.loop import Loop
from deploy.lib.settings import Settings
from deploy.lib.state import Journal, State, Vm

READY = {"state": "READY", "health": "HEALTHY", "zone": "us-west4-a", "id": "1", "created": "2026", "type": "v6e-4",
         "ips": "192.0.2.1", "spot": "True", "remembered": "1"}
RUNNING = {"state": "running", "run": "d16", "steps": "00100/00500", "log_age_s": "3", "checkpoint": "step_000100",
           "mirrored": "step_000100", "mirror_behind_s": "0", "checkpoint_bytes": "1000"}


def replace(settings, **changes):
    """Returns Settings with these changes."""
    return Settings(**{**vars(settings), **changes})


class World:
    """Answers the calls of a Loop. A test changes `vm`, `run` and `fails`; `done` are the calls."""

    def __init__(self, folder):
        self.now, self.done, self.fails = 1_000_000.0, [], {}
        self.vm, self.run, self.copies = dict(READY), dict(RUNNING), 0
        self.price = 2.0  # an hour
        self.in_bucket = ""  # what the mirror's bucket has
        self.settings = Settings(
            name="nano", type="v6e-4", zones=("us-west4-a",), spot=True, flags=("--run=d16",), passed_on=(), bucket="",
            max_usd=None, max_hours=100, usd_per_hour=2, margin_s=600, poll_s=60, patience=3, stall_s=1800,
            state=folder / "state", to=folder / "results", webhook="")
        self.settings.state.mkdir()
        self.journal = Journal(self.settings.state, "nano")
        known = Vm(state="READY", id="1", zone="us-west4-a", ips="192.0.2.1", run="d16", has_limit=True)
        self.state = State(vm=known, counted_at=self.now, existed=True)

    def __call__(self, verb, limit_s, *flags):
        what = flags[0].removeprefix("--what=") if verb == "lib/look" else verb
        self.done.append(what)
        self.now += 5
        failure = self.fails.get(what)
        if callable(failure):
            failure = failure(flags)
        if failure == TIMED_OUT:
            self.now += limit_s
        if not self.vm and what == "run":
            failure = 255
        if failure is not None:
            return Result(failure, f"error: {what} failed")
        return Result(0, getattr(self, f"answer_{what}")(flags))

    @staticmethod
    def lines(values):
        return "".join(f"{name}={value}\n" for name, value in values.items())

    def answer_vm(self, flags):
        return self.lines(self.vm) if self.vm else "state=absent\n"

    def answer_run(self, flags):
        return self.lines(self.run)

    def answer_create(self, flags):
        self.vm = dict(READY, id=str(int(self.state.vm.id or 0) + 1))
        self.run = {"state": "none", "run": ""}
        return "nano is ready\n"

    def answer_train(self, flags):
        self.run = dict(RUNNING)
        return "step 00001/00500 | loss 5\n"

    def answer_stop_run(self, flags):
        self.run |= {"state": "ended", "exit": "75", "checkpoint": "step_000111"}
        return "run d16 ended\n"

    def answer_fetch(self, flags):
        if "--no_checkpoints" not in flags:
            (self.settings.to / "d16" / self.run["checkpoint"]).mkdir(parents=True, exist_ok=True)
        return "run d16 is here\n"

    def answer_delete(self, flags):
        if not self.vm:
            self.fails["delete"] = 3
        self.vm = None
        return "nano is deleted\n"

    def answer_limit(self, flags):
        return "yes\n"

    def answer_mirror(self, flags):
        return f"mirrored={self.in_bucket}\n"

    answer_setup = answer_push = answer_logs = lambda self, flags: "\n"

    def pause(self, seconds):
        self.now += seconds

    def loop(self):
        prices = {"us-west4-a": self.price}
        return Loop(self.settings, self.state, self.journal, prices, self, self.pause, lambda: self.now)

    def text(self):
        return self.journal.path.read_text()


def polls(loop, count):
    for _ in range(count):
        while loop.poll():
            pass
        loop.wait(60)
