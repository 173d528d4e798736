"""The scripts of daily use, against a real sshd: setup, train, logs, status, stop_run."""
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.deploy.conftest import ROOT, eventually, train


def test_check_returns_its_status_and_brings_home_what_it_found(laptop, tmp_path):
    vm = laptop.vm()
    assert "push.sh first" in laptop.run("check.sh", vm.ip, "--", "--depth=3", status=2)
    (vm.home / "nanochat").mkdir()
    to = tmp_path / "found"
    output = laptop.run("check.sh", vm.ip, "--to", to, "--", "--depth=3", status=1)
    assert "kernels: NOT as expected" in output
    assert (to / "check.toml").read_text() == "depth = 3" and (to / "check.json").read_text() == "{}"
    assert (laptop.home / ".cache/nanochat/chips/found.json").read_text() == "{}"  # where tpu_preflight looks
    assert "--to" in laptop.run("check.sh", vm.ip, "--to", to, "--", "--depth=3", status=2)


@pytest.mark.slow
def test_a_check_that_failed_brings_nothing_home_and_not_what_an_earlier_one_found(laptop, tmp_path):
    vm = laptop.vm()
    (vm.home / "nanochat").mkdir()
    laptop.run("check.sh", vm.ip, "--to", tmp_path / "first", "--", "--depth=3", status=1)
    vm.program(vm.home / "nanochat.d/venv/bin/python", "echo 'error: host w1 has ended' >&2; exit 1")
    for _ in range(2):  # the folder is free again
        output = laptop.run("check.sh", vm.ip, "--to", tmp_path / "second", "--", "--depth=4", status=1)
        assert "host w1 has ended" in output and "the check has failed" in output and "what it found" not in output
    assert not (tmp_path / "second").exists()
    assert os.listdir(laptop.home / ".cache/nanochat/chips") == ["first.json"]


def python(vm):
    """Returns the text of a program like Python, which also writes down that it was started."""
    return f"""echo "$0 $*" >>~/started
case "$*" in
  "-m venv"*) mkdir -p "$3/bin"; cp {vm.root}/venv_python "$3/bin/python" ;;
  *) exec {sys.executable} "$@" ;;
esac"""


def test_setup_installs_missing_packages_once_and_keeps_what_the_user_wrote(laptop):
    vm = laptop.vm(set_up=False)
    vm.program(vm.root / "bin/python3.11", python(vm))
    output = laptop.run("setup.sh", vm.ip, "--type=v5litepod-8", "--wandb_project=cpp")
    assert "torch==2.9.1" in (vm.home / "nanochat.d/venv/pins").read_text()
    assert "libtpu==0.0.21" in (vm.home / "nanochat.d/venv/pins").read_text()
    assert "pip install" in output and "torch_xla sees 8 chips; ready" in output
    assert "export WANDB_PROJECT=cpp" in (vm.home / ".tpu_env").read_text()
    (vm.home / ".tpu_env").write_text((vm.home / ".tpu_env").read_text() + "export MINE=1\n")
    (laptop.home / "key").write_bytes(b"deadbeef\r\n")  # a file from Windows
    output = laptop.run("setup.sh", vm.ip, f"--wandb_key_file={laptop.home}/key")
    assert "packages are as pinned" in output and "pip" not in output
    lines = (vm.home / ".tpu_env").read_text().splitlines()
    assert {"export MINE=1", "export WANDB_API_KEY=deadbeef", "export WANDB_PROJECT=cpp"} <= set(lines)
    assert (vm.home / ".tpu_env").stat().st_mode & 0o777 == 0o600


def test_setup_installs_python_3_11_or_takes_3_12_and_in_need_3_10_but_no_other(laptop):
    vm = laptop.vm(set_up=False)
    for name in ("python3.10", "python3.11", "python3.12"):
        vm.program(vm.root / "bin" / name, "exit 127")
    vm.program(vm.root / "bin/python3.13", python(vm))
    vm.program(vm.root / "bin/apt-get", "echo E: no such package; exit 100")
    output = laptop.run("setup.sh", vm.ip, status=1)
    assert "E: no such package" in output and "there is no 3.10 to 3.12" in output
    assert not (vm.home / "started").exists()
    vm.program(vm.root / "real", python(vm))
    install = f'echo "$*" >>~/apt; case "$*" in *install*) cp {vm.root}/real {vm.root}/bin/python3.11 ;; esac'
    for name, apt in (("python3.10", "exit 100"), ("python3.12", "exit 100"), ("python3.11", install)):
        for other in ("python3.10", "python3.11", "python3.12"):
            vm.program(vm.root / "bin" / other, python(vm) if other == name != "python3.11" else "exit 127")
        vm.program(vm.root / "bin/apt-get", apt)
        subprocess.run(["rm", "-rf", vm.home / "nanochat.d/venv", vm.home / "started"], check=True)
        assert "torch_xla sees 8 chips; ready" in laptop.run("setup.sh", vm.ip)
        assert f"{name} -m venv" in (vm.home / "started").read_text()
    assert "install python3.11 python3.11-venv" in (vm.home / "apt").read_text()


def test_setup_fails_when_chips_are_missing(laptop):
    vm = laptop.vm(chips=4)
    assert "sees 4 chips, 8 expected" in laptop.run("setup.sh", vm.ip, "--type=v5litepod-8", status=1)
    (laptop.home / "config.env").write_text("TYPE=v5litepod-8\n")  # of another VM: this one is named by its IP
    assert "sees 4 chips; ready" in laptop.run("setup.sh", vm.ip)


def test_the_wandb_key_is_in_no_process_list_no_log_and_no_trace(laptop, vm):
    """All command lines of the whole machine are recorded while setup and train run."""
    key = "deadbeef" * 5
    record = f"while sleep 0.01; do cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '; done >{vm.root}/seen"
    watcher = subprocess.Popen(["bash", "-c", record], start_new_session=True)
    try:
        output = laptop.run("setup.sh", vm.ip, env={"WANDB_API_KEY": key})
        output += train(laptop, vm, "--run=a", env={"WANDB_API_KEY": key})
    finally:
        os.killpg(watcher.pid, signal.SIGKILL)
        watcher.wait()
    traced = subprocess.run(["bash", "-x", ROOT / "deploy/setup.sh", vm.ip], capture_output=True, text=True,
                            env={**laptop.env, "WANDB_API_KEY": key}, timeout=60)
    assert traced.returncode == 0 and key not in traced.stderr + traced.stdout + output
    assert f"export WANDB_API_KEY={key}" in (vm.home / ".tpu_env").read_text()
    assert "flock" in (vm.root / "seen").read_text(errors="replace")
    assert key not in (vm.root / "seen").read_text(errors="replace")
    found = subprocess.run(["grep", "-rl", key, vm.home], capture_output=True, text=True).stdout.split()
    assert set(found) == {str(vm.home / ".tpu_env")}


def test_train_starts_detached_and_returns_at_the_first_log_line(laptop, vm):
    log = vm.home / "nanochat.d/runs/start.a.log"  # of a run with the name start.a
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("old")
    os.utime(log, (0, 0))
    output = train(laptop, vm, "--run=d16", "--num_iterations=1000", "--text=two words; $(touch /tmp/no)")
    assert log.exists()
    assert "scripts.base_train --run=d16" in output and "step 00001/01000" in output
    assert "step 00100" not in output
    assert "another run" not in output and "another run is running: d16" in train(laptop, vm, "--run=other", status=6)
    assert "--device_type=tpu" in (vm.home / "nanochat.d/runs/d16.command").read_text()
    assert "code " in (vm.home / "nanochat.d/runs/d16.log").read_text().splitlines()[0]

    following = laptop.start("logs.sh", vm.ip)
    eventually(lambda: "step" in following.stdout.readline())
    stopped = laptop.run("stop_run.sh", vm.ip)
    assert "run d16 ended with status 75" in stopped and "checkpoints/d16/step_0" in stopped
    rest = following.communicate(timeout=100)[0]
    assert following.returncode == 75 and "preempted: state saved" in rest
    assert "nothing is running" in laptop.run("stop_run.sh", vm.ip)

    saved = vm.metrics("d16")[-1]["step"]
    output = laptop.run("train.sh", vm.ip, "--again", "--min_free_gb=0")
    assert f"from step {saved}" in output
    laptop.run("stop_run.sh", vm.ip)
    assert [record["step"] for record in vm.metrics("d16")] == list(range(1, vm.metrics("d16")[-1]["step"] + 1))


def test_two_starts_at_once_give_one_run(laptop, vm):
    flags = ["--min_free_gb=0", "--", "--run=a", "--num_iterations=1000"]
    both = [laptop.start("train.sh", vm.ip, *flags) for _ in range(2)]
    for process in both:
        process.communicate(timeout=100)
    assert len(vm.trainers()) == 1
    assert sorted(process.returncode for process in both) == [0, 6]


def test_train_refuses_what_cannot_train(laptop, vm):
    assert "less than --min_free_gb" in laptop.run("train.sh", vm.ip, "--min_free_gb=999999", "--", "--run=a", status=1)
    for flags in (["--run=../a"], ["--run", ".a"], ["--run="]):
        assert "only" in train(laptop, vm, *flags, status=2)
    assert "--config may name a run" in train(laptop, vm, "--config=run.toml", status=2)
    for broken, message in (("rm -r .cache", "data.sh first"),  # each is checked before the lines above it
                            ("echo 4 >nanochat.d/chips", "8 chips in /dev, setup saw 4"),
                            ("sed -i s/=TPU/=CPU/ .tpu_env", "PJRT_DEVICE is 'CPU'"),
                            ("echo NANOCHAT_BASE_DIR=data >>.tpu_env", "NANOCHAT_BASE_DIR=data"),
                            ("rm .tpu_env", "setup.sh first"),
                            ("rm -r nanochat", "push.sh first")):
        subprocess.run(broken, shell=True, cwd=vm.home, check=True)
        assert message in train(laptop, vm, "--run=a", status=1)
    assert "no TPU chips" in train(laptop, laptop.vm(chips=0).prepare(), "--run=a", status=1)


def test_train_prints_the_error_of_a_run_that_ends_at_once(laptop, vm):
    assert "error: --bad_input=1 is bad" in train(laptop, vm, "--run=a", "--bad_input=1", status=2)
    output = train(laptop, vm, "--run=a", "--crash_at=1", status=1)
    assert "status 1: RuntimeError: crash at step 1" in output


def test_status_shows_one_screen_for_a_running_and_for_a_crashed_run(laptop, vm):
    assert "no run yet" in laptop.run("status.sh", vm.ip)
    train(laptop, vm, "--run=d16", "--num_iterations=2000", "--step_s=0.2", "--save_every=1")
    output = laptop.run("status.sh", vm.ip)
    for part in ("d16 running", "of 2000", "175000 tokens/s", "MFU 31.2%", "1 h 01 min left", "GB free",
                 "checkpoint step_0000", "0 min old"):
        assert part in output, output
    laptop.run("stop_run.sh", vm.ip)
    output = laptop.run("status.sh", vm.ip)
    assert "ended with status 75" in output and "175000 tokens/s" in output and "min left" not in output
    train(laptop, vm, "--run=d17", "--crash_at=20", "--num_iterations=30")
    output = eventually(lambda: (text := laptop.run("status.sh", vm.ip)) and "ended" in text and text)
    assert "RuntimeError: crash at step 20" in output and "status 1" in output
    vm.kill()
    assert "unreachable" in laptop.run("status.sh", vm.ip, status=1)


@pytest.mark.slow
def test_status_shows_errors_and_a_full_disk_and_no_warnings(laptop, vm):
    train(laptop, vm, "--run=a", "--num_iterations=1")
    laptop.run("stop_run.sh", vm.ip)
    log = vm.home / "nanochat.d/runs/a.log"
    before = log.read_text()
    warnings = ["mirror: copied step_000100 to gs://b", "warning: wandb: error: no network",
                "wandb: WARNING Saving files failed, error: retrying", "UserWarning: an error: maybe",
                "\x1b[34m\x1b[1mwandb\x1b[0m: \x1b[33mWARNING\x1b[0m error: a network error: retrying"]
    log.write_text(before + "\n".join(warnings) + "\n")
    assert "\nerror=\n" in vm.probe() and "  error  " not in laptop.run("status.sh", vm.ip)
    for error in ("warning: No space left on device: the checkpoint is written again", "RuntimeError: it broke",
                  "error: the run is over", "wandb.errors.UsageError: no key"):
        log.write_text(before + "\n".join([error, *warnings]) + "\n")
        assert f"\nerror={error}\n" in vm.probe()
    assert f"  error  {error}" in laptop.run("status.sh", vm.ip)


@pytest.mark.slow
def test_status_shows_a_mirror_that_falls_behind(laptop, vm):
    train(laptop, vm, "--run=d16", "--num_iterations=4", "--save_every=2")
    laptop.run("logs.sh", vm.ip)
    state = {"mirror": "gs://b/c/d16", "newest_saved": "step_000004", "newest_copied": "step_000004",
             "behind_since": None, "error": None}

    def status(content):
        (vm.run_dir("d16") / "mirror.json").write_text(content)
        return laptop.run("status.sh", vm.ip), vm.probe()

    shown, probed = status(json.dumps(state))
    assert "  mirror step_000004 in gs://b/c/d16\n" in shown
    assert {"mirror=gs://b/c/d16", "mirrored=step_000004", "mirror_behind_s=0", "mirror_error="} <= set(
        probed.splitlines())
    assert int(re.search(r"checkpoint_bytes=(\d+)", probed)[1]) >= len("weights of step 4")
    state |= {"newest_copied": None, "behind_since": time.time() - 3600, "error": "403 Forbidden:\nstate=no"}
    shown, probed = status(json.dumps(state))
    assert "  mirror nothing yet in gs://b/c/d16   BEHIND for 60 min: 403 Forbidden: state=no\n" in shown
    assert 3600 <= int(re.search(r"mirror_behind_s=(\d+)", probed)[1]) < 3700 and "\nstate=no" not in probed
    for damaged in ("", "[1]", '{"mirror": ', '{"behind_since": "x"}'):
        (vm.run_dir("d16") / "mirror.json").write_text(damaged)
        assert {"mirror=", "mirror_behind_s=0", "checkpoint=step_000004"} <= set(vm.probe().splitlines())


@pytest.mark.slow
def test_processes_left_of_a_run_are_seen_and_ended(laptop, vm):
    vm.program(vm.home / "nanochat.d/venv/bin/python",
               "echo 'step 00001/00009'; until [ -e ~/end ]; do sleep 0.1; done; sleep 300 & exit 3")
    train(laptop, vm, "--run=a")
    (vm.home / "end").touch()
    eventually(lambda: "a orphans" in laptop.run("status.sh", vm.ip))
    assert "--kill ends it" in laptop.run("stop_run.sh", vm.ip, "--wait_s=1", status=1)
    laptop.run("stop_run.sh", vm.ip, "--kill", "--wait_s=1")
    assert "a ended with status 3" in laptop.run("status.sh", vm.ip)


def test_logs_ends_when_the_run_is_killed(laptop, vm):
    train(laptop, vm, "--run=a", "--num_iterations=100000")
    following = laptop.start("logs.sh", vm.ip)
    eventually(lambda: "step" in following.stdout.readline())
    os.kill(vm.trainers()[0], signal.SIGKILL)
    assert "run a ended with status 137" in following.communicate(timeout=100)[0] and following.returncode == 137
    train(laptop, vm, "--run=a", "--num_iterations=100000")
    following = laptop.start("logs.sh", vm.ip)
    vm.shell("kill -KILL -- -$(tr -d ' ' <~/nanochat.d/runs/pgid)")  # with all that could have noted its status
    assert "run a was killed, or the VM restarted" in following.communicate(timeout=100)[0]
    assert following.returncode == 1
