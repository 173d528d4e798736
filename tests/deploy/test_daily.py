"""The scripts of daily use, against a real sshd: push, setup, train, logs, status, stop_run."""
import json
import os
import re
import signal
import subprocess
import time

import pytest

from tests.deploy.conftest import ROOT, eventually, train


@pytest.fixture
def checkout(tmp_path):
    """A small copy of the repository that a test may change."""
    root = tmp_path / "checkout"
    root.mkdir()
    for name in ("deploy", "nanochat", "scripts", "pyproject.toml", ".tpu_env.example"):
        subprocess.run(["cp", "-r", ROOT / name, root / name], check=True)
    (root / "tokenizer").mkdir()
    (root / "tokenizer/tokenizer.tiktoken").write_bytes(os.urandom(200_000))
    subprocess.run("git init -q && git add -A && git -c user.name=a -c user.email=a@b commit -qm a",
                   shell=True, cwd=root, check=True)
    return root


def test_push_with_nothing_but_an_ip(laptop, checkout):
    vm = laptop.vm(set_up=False)
    for name in ("nanochat/__pycache__/x.pyc", "nanochat/big.parquet", "scripts/nohup.out", "scripts/run.log",
                 ".tpu_env", "tokenizer/data.jsonl", "data/shard_00000.parquet"):
        path = checkout / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("must not travel")
    output = laptop.run("push.sh", vm.ip, root=checkout)
    code = (vm.home / "nanochat").resolve()
    pushed = {str(path.relative_to(code)): path for path in code.rglob("*") if path.is_file()}
    assert {"nanochat/common.py", "pyproject.toml", "tokenizer/tokenizer.tiktoken"} <= set(pushed)
    assert not [name for name, path in pushed.items() if b"must not travel" in path.read_bytes()]
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=checkout, text=True).strip()
    assert (vm.home / "nanochat/COMMIT").read_text().startswith(commit)
    assert "kB packed" in output and "~/nanochat is now" in output


def test_push_again_replaces_the_code_and_keeps_other_files(laptop, checkout):
    vm = laptop.vm()
    (vm.home / "nanochat").mkdir()
    (vm.home / "nanochat/mine.txt").write_text("a clone made by hand")
    laptop.run("push.sh", vm.ip, root=checkout)
    assert (vm.home / "nanochat.before_push/mine.txt").exists()
    (checkout / "nanochat/common.py").write_text("changed = True\n")
    laptop.run("push.sh", vm.ip, root=checkout)
    assert (vm.home / "nanochat/nanochat/common.py").read_text() == "changed = True\n"
    assert "-dirty-" in (vm.home / "nanochat/COMMIT").read_text()
    assert "packages are as pinned" in laptop.run("setup.sh", vm.ip)
    assert (vm.home / "nanochat/.tpu_env").read_text() == (ROOT / ".tpu_env.example").read_text()


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


def test_push_over_a_lost_connection_tries_again(laptop, checkout):
    vm = laptop.vm()
    (vm.home / "drop_connection").touch()
    output = laptop.run("push.sh", vm.ip, root=checkout)
    assert "no connection (attempt 1 of 4)" in output
    assert (vm.home / "nanochat/nanochat/common.py").exists()


def test_push_onto_a_full_disk_leaves_the_old_code_whole(laptop, checkout):
    vm = laptop.vm(disk_mb=4, set_up=False)
    laptop.run("push.sh", vm.ip, root=checkout)
    (checkout / "tokenizer/tokenizer.pkl").write_bytes(os.urandom(3_000_000))
    (checkout / "nanochat/common.py").write_text("changed = True\n")
    output = laptop.run("push.sh", vm.ip, root=checkout, status=1)
    assert "is the disk full?" in output
    seen = vm.shell("ls ~/nanochat.d/releases; cat ~/nanochat/nanochat/common.py")
    releases, _, code = seen.partition("\n")
    assert "part" not in releases and code == (ROOT / "nanochat/common.py").read_text()


def test_push_refuses_more_than_50_mb_and_names_the_largest(laptop, checkout):
    with open(checkout / "tokenizer/token_bytes.pt", "wb") as file:
        file.write(os.urandom(51_000_000))
    assert "tokenizer/token_bytes.pt" in laptop.run("push.sh", "127.0.0.1", root=checkout, status=2)


def test_a_changed_host_key_of_a_bare_ip_is_explained(laptop, checkout):
    vm = laptop.vm()
    laptop.run("push.sh", vm.ip, root=checkout)
    subprocess.run(f"sed -i 's/ .*/ /; s#$#{open(laptop.home / '.ssh/google_compute_engine.pub').read().strip()}#' "
                   f"{laptop.home}/.ssh/known_hosts; rm -f {laptop.home}/.ssh/nc-*", shell=True, check=True)
    assert f"ssh-keygen -R {vm.ip}" in laptop.run("push.sh", vm.ip, root=checkout, status=1)


def test_setup_installs_missing_packages_once(laptop):
    vm = laptop.vm(set_up=False)
    (vm.root / "bin/python3.11").write_text(
        f"""#!/bin/bash
case "$*" in
  "-m venv"*) mkdir -p "$3/bin"; cp {vm.root}/venv_python "$3/bin/python" ;;
  *) exec {os.sys.executable} "$@" ;;
esac
""")
    output = laptop.run("setup.sh", vm.ip, "--type=v5litepod-8", "--wandb_project=cpp")
    assert "torch==2.9.1" in (vm.home / "nanochat.d/venv/pins").read_text()
    assert "libtpu==0.0.21" in (vm.home / "nanochat.d/venv/pins").read_text()
    assert "pip install" in output and "torch_xla sees 8 chips; ready" in output
    assert "export WANDB_PROJECT=cpp" in (vm.home / ".tpu_env").read_text()
    assert (vm.home / ".tpu_env").stat().st_mode & 0o777 == 0o600
    (vm.home / ".tpu_env").write_text((vm.home / ".tpu_env").read_text() + "export MINE=1\n")
    output = laptop.run("setup.sh", vm.ip)
    assert "packages are as pinned" in output and "pip" not in output
    assert "export MINE=1" in (vm.home / ".tpu_env").read_text()


def test_setup_installs_python_3_11_where_the_image_lacks_it(laptop):
    vm = laptop.vm()
    real = (vm.root / "bin/python3.11").read_text()
    (vm.root / "bin/real").write_text(real)
    vm.program(vm.root / "bin/python3.11", "exit 127")
    vm.program(vm.root / "bin/apt-get",
               f'echo "$*" >>~/apt; case "$*" in *install*) cp {vm.root}/bin/real {vm.root}/bin/python3.11 ;; esac')
    assert "installing Python 3.11" in laptop.run("setup.sh", vm.ip)
    assert "install python3.11 python3.11-venv" in (vm.home / "apt").read_text()
    vm.program(vm.root / "bin/python3.11", "exit 127")
    vm.program(vm.root / "bin/apt-get", "echo E: no such package; exit 100")
    assert "E: no such package" in laptop.run("setup.sh", vm.ip, status=1)


def test_setup_takes_python_3_12_and_in_need_3_10_but_no_other(laptop):
    vm = laptop.vm(set_up=False)
    vm.program(vm.root / "bin/python3.11", "exit 127")
    vm.program(vm.root / "bin/apt-get", "echo E: no such package; exit 100")
    python = f"""echo "$0 $*" >>~/started
case "$*" in
  "-m venv"*) mkdir -p "$3/bin"; cp {vm.root}/venv_python "$3/bin/python" ;;
  *) exec {os.sys.executable} "$@" ;;
esac"""
    vm.program(vm.root / "bin/python3.13", python)
    assert "there is no 3.10 to 3.12" in laptop.run("setup.sh", vm.ip, status=1)
    assert not (vm.home / "started").exists()
    for name in ("python3.10", "python3.12"):
        vm.program(vm.root / "bin" / name, python)
        subprocess.run(["rm", "-rf", vm.home / "nanochat.d/venv", vm.home / "started"], check=True)
        assert "torch_xla sees 8 chips; ready" in laptop.run("setup.sh", vm.ip)
        assert f"{name} -m venv" in (vm.home / "started").read_text()


def test_a_key_file_from_windows(laptop):
    vm = laptop.vm()
    (laptop.home / "key").write_bytes(b"deadbeef\r\n")
    laptop.run("setup.sh", vm.ip, f"--wandb_key_file={laptop.home}/key")
    assert "export WANDB_API_KEY=deadbeef\n" in (vm.home / ".tpu_env").read_text()


def test_setup_fails_when_chips_are_missing(laptop):
    vm = laptop.vm(chips=4)
    assert "sees 4 chips, 8 expected" in laptop.run("setup.sh", vm.ip, "--type=v5litepod-8", status=1)
    (laptop.home / "config.env").write_text("TYPE=v5litepod-8\n")  # of another VM: this one is named by its IP
    assert "sees 4 chips; ready" in laptop.run("setup.sh", vm.ip)


def test_the_wandb_key_is_in_no_process_list_no_log_and_no_tarball(laptop, checkout):
    """All command lines of the whole machine are recorded while setup, push and train run."""
    key = "deadbeef" * 5
    vm = laptop.vm()
    watch = f"while sleep 0.01; do cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '; done >{vm.root}/seen"
    watcher = subprocess.Popen(["bash", "-c", watch], start_new_session=True)
    try:
        env = {"WANDB_API_KEY": key}
        (checkout / ".tpu_env").write_text(f"export WANDB_API_KEY={key}\n")
        output = laptop.run("push.sh", vm.ip, root=checkout, env=env) + laptop.run("setup.sh", vm.ip, env=env)
        output += laptop.run("train.sh", vm.ip, "--min_free_gb=0", "--", "--run=a", "--synthetic_data=1", "--step_s=0",
                             env=env)
    finally:
        os.killpg(watcher.pid, signal.SIGKILL)
        watcher.wait()
    assert f"export WANDB_API_KEY={key}" in (vm.home / ".tpu_env").read_text()
    assert (vm.home / ".tpu_env").stat().st_mode & 0o777 == 0o600
    assert key not in output
    assert "flock" in (vm.root / "seen").read_text(errors="replace")
    assert key not in (vm.root / "seen").read_text(errors="replace")
    found = subprocess.run(["grep", "-rl", key, vm.home], capture_output=True, text=True).stdout.split()
    assert set(found) == {str(vm.home / ".tpu_env")}


def test_a_trace_of_setup_shows_no_key(laptop):
    key, vm = "deadbeef" * 5, laptop.vm()
    traced = subprocess.run(["bash", "-x", ROOT / "deploy/setup.sh", vm.ip], capture_output=True, text=True,
                            env={**laptop.env, "WANDB_API_KEY": key}, timeout=60)
    assert traced.returncode == 0 and key not in traced.stderr + traced.stdout
    assert key in (vm.home / ".tpu_env").read_text()


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


def test_train_refuses_a_vm_that_is_not_set_up(laptop, vm):
    """Each line breaks what is checked before the lines above it."""
    for broken, message in (("rm -r .cache", "data.sh first"),
                            ("echo 4 >nanochat.d/chips", "8 chips in /dev, setup saw 4"),
                            ("sed -i s/=TPU/=CPU/ .tpu_env", "PJRT_DEVICE is 'CPU'"),
                            ("echo NANOCHAT_BASE_DIR=data >>.tpu_env", "NANOCHAT_BASE_DIR=data"),
                            ("rm .tpu_env", "setup.sh first"),
                            ("rm -r nanochat", "push.sh first")):
        subprocess.run(broken, shell=True, cwd=vm.home, check=True)
        assert message in train(laptop, vm, "--run=a", status=1)


def test_train_refuses_a_machine_without_chips_and_a_full_disk(laptop, vm):
    assert "less than --min_free_gb" in laptop.run("train.sh", vm.ip, "--min_free_gb=999999", "--", "--run=a", status=1)
    for name in ("../a", ".a", ""):
        assert "only" in train(laptop, vm, f"--run={name}", status=2)
    assert "only" in train(laptop, vm, "--run", "..", status=2)
    assert "--config may name a run" in train(laptop, vm, "--config=run.toml", status=2)
    without = laptop.vm(chips=0)
    without.give_code()
    (without.home / ".tpu_env").write_text("export PJRT_DEVICE=TPU\n")
    assert "no TPU chips" in train(laptop, without, "--run=a", status=1)


def test_train_prints_the_error_of_a_run_that_ends_at_once(laptop, vm):
    assert "error: --bad_input=1 is bad" in train(laptop, vm, "--run=a", "--bad_input=1", status=2)
    output = train(laptop, vm, "--run=a", "--crash_at=1", status=1)
    assert "status 1: RuntimeError: crash at step 1" in output


def test_stop_run_kills_a_run_that_does_not_stop_only_with_kill(laptop, vm):
    train(laptop, vm, "--run=a", "--num_iterations=100000")
    trainer = int((vm.home / "nanochat.d/runs/pid").read_text())
    vm.shell(f"kill -STOP {trainer}")
    assert "--kill ends it" in laptop.run("stop_run.sh", vm.ip, "--wait_s=1", status=1)
    assert "ended with status" in laptop.run("stop_run.sh", vm.ip, "--wait_s=1", "--kill")
    assert not vm.trainers()


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


def test_status_shows_errors_and_a_full_disk_and_no_warnings(laptop, vm):
    train(laptop, vm, "--run=a", "--num_iterations=1")
    laptop.run("stop_run.sh", vm.ip)
    log = vm.home / "nanochat.d/runs/a.log"
    before = log.read_text()
    warnings = ["mirror: copied step_000100 to gs://b", "warning: wandb: error: no network",
                "wandb: WARNING Saving files failed, error: retrying", "UserWarning: an error: maybe",
                "\x1b[34m\x1b[1mwandb\x1b[0m: \x1b[33mWARNING\x1b[0m error: a network error: retrying"]
    log.write_text(before + "\n".join(warnings) + "\n")
    assert "  error  " not in laptop.run("status.sh", vm.ip)
    for error in ("warning: No space left on device: the checkpoint is written again", "RuntimeError: it broke",
                  "error: the run is over", "wandb.errors.UsageError: no key"):
        log.write_text(before + "\n".join([error, *warnings]) + "\n")
        assert f"  error  {error}" in laptop.run("status.sh", vm.ip)


def test_status_shows_a_mirror_that_falls_behind(laptop, vm):
    train(laptop, vm, "--run=d16", "--num_iterations=4", "--save_every=2")
    laptop.run("logs.sh", vm.ip)
    state = {"mirror": "gs://b/c/d16", "newest_saved": "step_000004", "newest_copied": "step_000004",
             "behind_since": None, "error": None}

    def status(content):
        (vm.run_dir("d16") / "mirror.json").write_text(content)
        return laptop.run("status.sh", vm.ip), vm.shell(f"unset NANOCHAT_BASE_DIR; . {ROOT}/deploy/lib/on_vm.sh; probe")

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
        shown, probed = status(damaged)
        assert "  mirror " not in shown and "mirror_behind_s=0\n" in probed and "checkpoint=step_000004\n" in probed


def test_processes_left_of_a_run_are_seen_and_ended(laptop, vm):
    vm.program(vm.home / "nanochat.d/venv/bin/python", "echo 'step 00001/00009'; sleep 1; sleep 300 & exit 3")
    train(laptop, vm, "--run=a")
    eventually(lambda: "a orphans" in laptop.run("status.sh", vm.ip))
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


def test_a_host_of_the_ssh_configuration(laptop, checkout):
    vm = laptop.vm()
    with open(laptop.home / ".ssh/config", "a") as config:
        config.write(f"Host box\n  HostName {vm.ip}\n  User root\n")
    assert "~/nanochat is now" in laptop.run("push.sh", "box", root=checkout)
    assert "no run yet" in laptop.run("status.sh", "box")
