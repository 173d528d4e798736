"""The scripts on laptops and VMs in trouble: full disks, greetings, other people's settings of ssh, odd names."""
import os
import shutil
import signal
import subprocess
import time

import pytest

from deploy.lib.state import State, Vm, steady_time
from tests.deploy.conftest import ROOT, eventually, train

pytestmark = pytest.mark.slow


def full(*folders):
    """Returns the beginning of a command line that runs a command where these folders have no room for any file."""
    fill = "mount -t tmpfs -o size=4k x {0} && head -c 9999 /dev/zero >{0}/x"
    mounts = "; ".join(fill.format(folder) for folder in folders)
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'({mounts}) 2>/dev/null; exec "$@"', "sh"]


def output_of(process, status=0):
    output = process.communicate(timeout=100)[0]
    assert process.returncode == status, output
    return output


# -----------------------------------------------------------------------------
# The laptop


def test_a_full_temporary_folder_changes_nothing(laptop, vm, cloud):
    train(laptop, vm, "--run=a", "--num_iterations=2")
    folder, results = laptop.root / "full", laptop.root / "results"
    folder.mkdir()
    env = {"TMPDIR": str(folder)}
    output_of(laptop.start("fetch.sh", vm.ip, f"--to={results}", env=env, under=full(folder)))
    assert (results / "a/step_000002").is_dir()
    assert "run    a ended" in output_of(laptop.start("status.sh", vm.ip, env=env, under=full(folder)))


def test_a_vm_can_be_deleted_where_no_folder_has_room_for_a_file(laptop, cloud):
    laptop.run("create.sh", "nano", "--zones=us-a", "--poll_s=1")
    folder = laptop.root / "full"
    folder.mkdir()
    env = {"TMPDIR": str(folder), "HOME": str(folder)}
    under = full(folder, "/dev/shm", "/var/tmp")
    assert "no room" in output_of(laptop.start("push.sh", "127.0.0.1", env=env, under=under), 1)
    delete = laptop.start("delete.sh", "nano", "--yes", "--zones=us-a", env=env, under=under)
    assert "nano is deleted" in output_of(delete)
    assert not cloud.nodes


def test_setting_the_clock_spends_nothing(monkeypatch):
    state = State(vm=Vm(state="READY"), counted_at=steady_time())
    monkeypatch.setattr(time, "time", lambda: 4e9)  # the year 2096
    state.count(1.0, steady_time())
    assert state.spent_usd < 0.1


@pytest.mark.parametrize("home", ["a home with spaces", "h" * 100])
def test_a_home_of_any_name_serves(laptop, vm, home):
    folder = laptop.root / home
    folder.mkdir()
    shutil.copytree(laptop.home / ".ssh", folder / ".ssh")
    assert "step 00001" in train(laptop, vm, "--run=a", env={"HOME": str(folder)})


def test_settings_of_ssh_are_the_users(laptop, vm):
    config = laptop.home / ".ssh/config"
    config.write_text("Host *\n  RemoteCommand tmux\n  RequestTTY yes\n" + config.read_text().partition("\n")[2])
    assert "no run yet" in laptop.run("status.sh", vm.ip)
    (laptop.home / ".ssh/known_hosts").unlink()
    for socket in (laptop.home / ".ssh").glob("nc-*"):
        subprocess.run(["ssh", "-O", "exit", "-o", f"ControlPath={socket}", vm.ip], capture_output=True)
    config.write_text(f"{config.read_text()}  StrictHostKeyChecking yes\n")
    assert "unreachable" in laptop.run("status.sh", vm.ip, status=1)


def test_an_interrupted_creation_leaves_no_gcloud_behind(laptop, cloud):
    cloud.held = True
    marker = laptop.root / "gcloud_pid"
    laptop.let_gcloud(f'case "$*" in *" create "*) echo $$ >{marker}; exec sleep 300 ;; esac')
    create = laptop.start("create.sh", "nano", "--zones=us-a", "--poll_s=1")
    pid = int(eventually(lambda: marker.exists() and marker.read_text().strip(), 60))
    os.kill(create.pid, signal.SIGTERM)
    assert "may still be created" in output_of(create, 1)
    eventually(lambda: not os.path.exists(f"/proc/{pid}"))
    assert "began less than 10 minutes ago" in laptop.run("delete.sh", "nano", "--zones=us-a", "--yes", status=3)
    [memory] = (laptop.home / ".local/state/nanochat/vms").glob("*/*/nano")
    os.utime(memory, (0, 0))
    laptop.run("delete.sh", "nano", "--zones=us-a", "--yes", status=3)
    assert not memory.exists()


# -----------------------------------------------------------------------------
# The VM


def test_a_run_on_a_full_disk_is_told_to_stop(laptop, vm):
    vm.shell("mkdir -p ~/nanochat.d/runs && mount -t tmpfs -o size=1m x ~/nanochat.d/runs")
    train(laptop, vm, "--run=a", "--num_iterations=100000")
    vm.shell("head -c 9900000 /dev/zero >~/nanochat.d/runs/filler || true")
    laptop.start("stop_run.sh", vm.ip, "--wait_s=5")
    eventually(lambda: not vm.trainers())


def test_an_environment_file_of_windows_with_an_unknown_name_and_a_failure_at_its_end_is_read(laptop, vm):
    (vm.home / ".tpu_env").write_text("export PJRT_DEVICE=TPU\r\nexport EXTRA=$NOT_DEFINED:1\r\n"
                                      "NANOCHAT_BASE_DIR='~/.cache/nanochat'\r\n[ -f nothing ] && . nothing\r\n")
    assert "PJRT_DEVICE=TPU\n" in train(laptop, vm, "--run=a")
    assert vm.shell(f". {ROOT}/deploy/lib/on_vm.sh; load_env; echo $BASE") == f"{vm.home}/.cache/nanochat\n"


def test_a_limit_ends_the_run_on_every_host_of_a_pod(laptop):
    vms = [laptop.vm(f"w{i}").prepare() for i in range(2)]
    hosts = ",".join(vm.ip for vm in vms)
    laptop.run("train.sh", hosts, "--min_free_gb=0", "--poll_s=0.2", "--max_hours=1", "--", "--run=a",
               "--num_iterations=100000", "--step_s=0.2")
    for vm in vms:
        vm.set_clock(3590)
    eventually(lambda: not any(vm.trainers() for vm in vms))
    one_worker = laptop.run("train.sh", hosts, "--worker=1", "--max_hours=1", "--", "--run=a", status=2)
    assert "leave out --worker" in one_worker
