"""Copies of data from a bucket to the VM, with gcloud storage, and of results from the VM to the laptop."""
import shutil

import pytest

from tests.deploy.conftest import train

pytestmark = pytest.mark.slow


def test_data_copies_what_is_missing_or_differs_and_never_a_mixture_of_two_tokenizers(laptop, cloud):
    vm = laptop.vm(env=cloud.env(laptop.root / "vm_gcloud"))
    (vm.root / "bin/gcloud").symlink_to(laptop.gcloud)
    assert "gs://" in laptop.run("data.sh", vm.ip, status=2)
    assert "folder parquet in gs://b/x" in laptop.run("data.sh", vm.ip, "--bucket=gs://b/x", status=1, timeout_s=120)
    for number in range(5):
        cloud.put("b", f"x/parquet/base_data_v3/base_data_v3/shard_{number:05d}.parquet", b"%d" % number * 1000)
    cloud.put("b", "x/parquet/val/shard_00000.parquet", b"v" * 500)
    cloud.put("b", "x/other/readme.txt", b"not ours")
    cloud.put("b", "x/tokenizer/tokenizer_65k/tokenizer.json", b"{}")
    base = vm.home / ".cache/nanochat"
    laptop.run("data.sh", vm.ip, "--bucket=gs://b/x/", "--no_tokenizer", timeout_s=120)
    shards = base / "parquet/base_data_v3/base_data_v3"
    assert [path.read_bytes() for path in sorted(shards.iterdir())] == [b"%d" % n * 1000 for n in range(5)]
    assert (base / "parquet/val/shard_00000.parquet").read_bytes() == b"v" * 500
    assert [path.name for path in base.iterdir()] == ["parquet"]

    (base / "tokenizer").mkdir()
    (base / "tokenizer/tokenizer.pkl").write_bytes(b"an older one")
    (shards / "shard_00001.parquet").write_bytes(b"truncated")
    cloud.requests.clear()
    laptop.run("data.sh", vm.ip, "--bucket=gs://b/x", timeout_s=120)
    assert (shards / "shard_00001.parquet").read_bytes() == b"1" * 1000
    assert [path.name for path in (base / "tokenizer").rglob("*")] == ["tokenizer_65k", "tokenizer.json"]
    before, = base.glob("tokenizer.before.*")
    assert (before / "tokenizer.pkl").read_bytes() == b"an older one"
    assert sum("alt=media" in request for request in cloud.requests) == 2


def test_fetch_brings_metrics_log_and_the_newest_checkpoint_home_once(laptop, vm):
    (vm.home / ".bashrc").write_text("echo Welcome to this VM\necho state=none\n")  # no part of an answer
    train(laptop, vm, "--run=d16", "--num_iterations=4", "--save_every=2")
    laptop.run("logs.sh", vm.ip)
    to = laptop.root / "home"
    (to / "d16/incoming.999999999/step_000004").mkdir(parents=True)  # of a fetch.sh that was killed
    laptop.run("fetch.sh", vm.ip, f"--to={to}")
    assert sorted(path.name for path in (to / "d16").iterdir()) == ["metrics.jsonl", "run.log", "step_000004"]
    assert (to / "d16/step_000004/model.safetensors").read_text() == "weights of step 4"
    assert not (vm.run_dir("d16") / "run.log").exists(), "a copy of the log, which would be cut on a full disk"
    output = laptop.run("fetch.sh", vm.ip, "d16", f"--to={to}", "--all")
    assert "step_000004 is here" in output and (to / "d16/step_000002").is_dir()
    assert "no run other" in laptop.run("fetch.sh", vm.ip, "other", f"--to={to}", status=1)
    assert "run    d16 ended" in laptop.run("status.sh", vm.ip)

    (vm.run_dir("d16") / "step_000004/model.safetensors").write_text("weights of another run")
    (vm.run_dir("d16") / "metrics.jsonl").write_text("metrics of another run\n")
    assert "from another run of this name" in laptop.run("fetch.sh", vm.ip, f"--to={to}")
    assert (to / "d16/step_000004/model.safetensors").read_text() == "weights of another run"
    [kept] = to.glob("d16/other_step_000004.*/model.safetensors")
    assert kept.read_text() == "weights of step 4" and len([*to.glob("d16/other_metrics.jsonl.*")]) == 1


def test_fetch_takes_the_newest_by_number_and_one_that_is_deleted_meanwhile_is_replaced_by_the_next(laptop, vm):
    train(laptop, vm, "--run=a", "--num_iterations=2")
    laptop.run("logs.sh", vm.ip)
    folder, results = vm.run_dir("a"), laptop.root / "results"
    for step in ("step_999999", "step_1000000", "step_1000001.tmp", "step_1000002.aside"):
        shutil.copytree(folder / "step_000002", folder / step)
    assert "checkpoint step_1000000" in laptop.run("status.sh", vm.ip)
    vm.program(vm.root / "bin/cksum", f'/usr/bin/cksum "$@"\n[ ! -d {folder}/step_1000000 ] || '
                                      f"mv {folder}/step_1000000 {folder}/step_1000003")
    assert "looking again" in laptop.run("fetch.sh", vm.ip, f"--to={results}")
    assert [path.name for path in results.glob("a/step_*")] == ["step_1000003"]
