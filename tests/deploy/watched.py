"""An emulated cloud whose VMs are stand-ins, and the watch.sh that keeps a run on one of them."""
import json

from deploy.lib.state import State
from tests.deploy import conftest
from tests.deploy.cloud import Cloud


class World:
    """An emulated cloud that boots stand-in VMs, and the watch.sh that is tested."""

    def __init__(self, laptop):
        self.laptop, self.booted = laptop, {}
        self.cloud = Cloud(self.boot, lambda node: [vm.kill() for key, vm in self.booted.items() if key[0] == node])
        laptop.env.update(self.cloud.env(laptop.home / "gcloud"))
        (laptop.home / "config.env").write_text("POLL_S=0.2 MIN_FREE_GB=0 ZONES=us-a\n")
        self.mirror = laptop.root / "mirror"
        self.mirror.mkdir()
        self.state = laptop.home / ".local/state/nanochat/nano"
        self.vm_options = {"env": self.cloud.vm_env()}

    def boot(self, node, index):
        if (node, index) not in self.booted:
            self.booted[node, index] = vm = self.laptop.vm("nano", **self.vm_options)
            if script := self.cloud.startup_script(node):
                vm.start_up(script, self.cloud.vm_env())
        return self.booted[node, index].ip

    @property
    def vm(self):
        return list(self.booted.values())[-1]

    def watch(self, *flags, run=("--num_iterations=40",), env=None, under=(), **settings):
        """Starts watch.sh and returns its process. With --data_dir, train.sh does not look for parquet files."""
        settings = {"max_hours": 1, "margin_s": 30, "to": self.laptop.root / "results", **settings}
        settings = [f"--{name}={value}" for name, value in settings.items()]
        run = ["--run=d16", "--data_dir=x", "--save_every=5", f"--checkpoint_mirror={self.mirror}", *run]
        return self.laptop.start("watch.sh", "nano", *settings, *flags, "--", *run, env=env, under=under)

    def journal(self):
        path = self.state / "journal"
        return path.read_text() if path.exists() else ""

    def known(self):
        """Returns the State that watch.sh has written down."""
        return State.load(self.state / "state.json", 0)

    def wait(self, text, timeout_s=180):
        conftest.eventually(lambda: text in self.journal(), timeout_s)

    def end(self, process, status, timeout_s=240):
        output = process.communicate(timeout=timeout_s)[0]
        assert process.returncode == status, output
        return output

    def steps(self, run="d16"):
        """Returns the steps that have a loss in the fetched metrics."""
        lines = (self.laptop.root / "results" / run / "metrics.jsonl").read_text().splitlines()
        return [record["step"] for record in map(json.loads, lines) if "loss" in record]
