"""What the demo leaves behind is found by its name."""
from nanochat.checkpoint.format import META, find_checkpoint
from scripts.demo import checkpoint_name


def test_the_demo_is_a_checkpoint_under_its_name_unless_the_user_has_a_run_of_this_name(base_dir):
    run_dir = base_dir / "demo" / "checkpoints" / "dummy"
    (run_dir / "step_000100").mkdir(parents=True)
    (run_dir / "step_000100" / META).touch()
    for _ in range(2):  # a second demo finds the link of the first
        assert checkpoint_name(run_dir) == "demo"
        assert find_checkpoint("demo").resolve() == run_dir / "step_000100"
    own = base_dir / "checkpoints" / "demo"
    own.unlink()
    own.mkdir()
    assert checkpoint_name(run_dir) == run_dir
    assert not own.is_symlink()
