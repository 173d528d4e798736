"""Copies of data from a bucket to the VM, with gcloud storage, and of results from the VM to the laptop."""
import pytest

from tests.deploy.cloud import Cloud


@pytest.fixture
def cloud():
    cloud = Cloud()
    yield cloud
    cloud.close()


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
    laptop.run("train.sh", vm.ip, "--min_free_gb=0", "--", "--run=d16", "--num_iterations=4", "--save_every=2")
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
