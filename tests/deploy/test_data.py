"""Copies of data from a bucket to the VM, with gcloud storage, and of results from the VM to the laptop."""
import pytest

from tests.deploy.cloud import Cloud


@pytest.fixture
def cloud():
    cloud = Cloud()
    yield cloud
    cloud.close()


def test_data_puts_every_file_in_its_place_and_fetches_only_what_is_missing(laptop, cloud):
    vm = laptop.vm(env=cloud.env(laptop.root / "vm_gcloud"))
    (vm.root / "bin/gcloud").symlink_to(laptop.gcloud)
    cloud.put("b", "x/parquet/base_data_v3/base_data_v3/shard_00000.parquet", b"0" * 1000)
    cloud.put("b", "x/parquet/base_data_v3/base_data_v3/shard_00001.parquet", b"1" * 2000)
    cloud.put("b", "x/parquet/val/shard_00000.parquet", b"v" * 500)
    cloud.put("b", "x/tokenizer/tokenizer_65k/tokenizer.tiktoken", b"t" * 300)
    cloud.put("b", "x/other/readme.txt", b"not ours")
    output = laptop.run("data.sh", vm.ip, "--bucket=gs://b/x/", timeout_s=120)
    assert "4 files, 4 missing" in output
    base = vm.home / ".cache/nanochat"
    assert (base / "parquet/base_data_v3/shard_00001.parquet").read_bytes() == b"1" * 2000
    assert (base / "parquet/val/shard_00000.parquet").read_bytes() == b"v" * 500
    assert (base / "tokenizer/tokenizer.tiktoken").stat().st_size == 300
    assert sorted(path.name for path in base.iterdir()) == ["parquet", "tokenizer"]

    (base / "parquet/base_data_v3/shard_00001.parquet").write_bytes(b"truncated")
    output = laptop.run("data.sh", vm.ip, "--bucket=gs://b/x", timeout_s=120)
    assert "4 files, 1 missing" in output
    assert (base / "parquet/base_data_v3/shard_00001.parquet").read_bytes() == b"1" * 2000
    output = laptop.run("data.sh", vm.ip, "--bucket=gs://b/x/other", status=1)
    assert "has neither *.parquet files nor a tokenizer folder" in output
    assert "gs://" in laptop.run("data.sh", vm.ip, status=2)


def test_fetch_brings_metrics_log_and_the_newest_checkpoint_home_once(laptop, vm):
    laptop.run("train.sh", vm.ip, "--min_free_gb=0", "--", "--run=d16", "--num_iterations=4", "--save_every=2")
    laptop.run("logs.sh", vm.ip)
    to = laptop.root / "home"
    laptop.run("fetch.sh", vm.ip, f"--to={to}")
    assert sorted(path.name for path in (to / "d16").iterdir()) == ["metrics.jsonl", "run.log", "step_000004"]
    assert (to / "d16/step_000004/model.safetensors").read_text() == "weights of step 4"
    output = laptop.run("fetch.sh", vm.ip, "d16", f"--to={to}", "--all")
    assert "step_000004 is here" in output and (to / "d16/step_000002").is_dir()
    assert "no run other" in laptop.run("fetch.sh", vm.ip, "other", f"--to={to}", status=1)
