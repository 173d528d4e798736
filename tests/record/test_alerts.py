"""Alerts of runs, which a server on this machine receives."""
from tests.deploy.conftest import hook  # noqa: F401


def test_a_run_that_nobody_watches_says_what_becomes_of_it(train, hook):  # noqa: F811
    def texts():
        """What has come since the last call, without the name of the machine."""
        found = [posted["text"].partition(": ")[2] for posted in hook.posted]
        hook.posted.clear()
        return found

    flags = ("--device_type=cpu", "--synthetic_data", "--eval_every=-1", "--total_batch_size=64", "--log_every=1")
    train(*flags, "--num_iterations=2", WEBHOOK=hook.url)
    assert texts() == ["run test started at step 0", "run test finished"]
    train(*flags, "--num_iterations=20", "--embedding_lr=1e38", "--matrix_lr=1e38", run="bad", WEBHOOK=hook.url)
    found = texts()
    assert any("run bad: step" in text and "is not finite" in text for text in found) and len(found) < 8
    train("--device_type=cpu", "--data_dir=/nowhere", run="refused", status=2, WEBHOOK=hook.url)
    [refused] = texts()
    assert refused.startswith("run refused failed: ") and "/nowhere" in refused


def test_a_webhook_that_refuses_costs_a_warning_which_does_not_show_it(train):
    output = train("--device_type=cpu", "--synthetic_data", "--eval_every=-1", "--num_iterations=2",
                   "--total_batch_size=64", WEBHOOK="http://127.0.0.1:9/secret")
    assert "warning: $WEBHOOK" in output.stdout and "secret" not in output.stdout + output.stderr
