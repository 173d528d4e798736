"""What the demo leaves behind is found by its name."""
import re
import shlex
import shutil

from nanochat.checkpoint.on_disk import META, find_checkpoint
from nanochat.common import read_flags
from nanochat.infer.flags import ModelFlags
from scripts import demo
from scripts.serve import ServerFlags


def test_the_demo_ends_with_the_command_that_opens_its_model(base_dir, corpus_dir, monkeypatch, capsys):
    run_dir = base_dir / "demo/checkpoints/dummy"

    def leave(step, module, *flags, env):
        """Leaves behind what the script `module` does."""
        if module == "scripts.prepare_data":
            shutil.copytree(corpus_dir, base_dir / "demo/parquet")
        elif module == "scripts.base_train":
            (run_dir / "step_000002").mkdir(parents=True)
            (run_dir / "step_000002" / META).touch()
            (run_dir / "metrics.jsonl").write_text('{"step": 2, "time": 1.0, "val_bpb": 1.5}\n')

    monkeypatch.setattr(demo, "run", leave)
    demo.main([])
    [command] = re.findall("in your browser.*\n  python3 -m scripts.serve (.*)", capsys.readouterr().out)
    model, _ = read_flags(shlex.split(command), "", {ModelFlags: "", ServerFlags: ""})
    assert find_checkpoint(model.checkpoint).resolve() == run_dir / "step_000002"
