"""Copies of data from a bucket to the VM, with gcloud storage, and of results from the VM to the laptop."""
import pytest

from tests.deploy.cloud import Cloud


@pytest.fixture
def cloud():
    cloud = Cloud()
    yield cloud
    cloud.close()


@pytest.fixture
def bare_vm(laptop, cloud):
    """A VM without data, whose gcloud notes its calls in ~/calls."""
    vm = laptop.vm(env=cloud.env(laptop.root / "vm_gcloud"))
    vm.program(vm.root / "bin/gcloud", f'echo "$*" >>~/calls; exec {laptop.gcloud} "$@"')
    return vm


def put_tokenizer(cloud, folder, place):
    for path in folder.iterdir():
        cloud.put("b", f"{place}/{path.name}", path.read_bytes())


def test_data_puts_every_file_in_its_place_and_fetches_only_what_is_missing(laptop, cloud, bare_vm,
                                                                            byte_tokenizer_dir):
    vm = bare_vm
    for number in range(5):
        cloud.put("b", f"x/parquet/base_data_v3/base_data_v3/shard_{number:05d}.parquet", b"%d" % number * 1000)
    cloud.put("b", "x/parquet/val/shard_00000.parquet", b"v" * 500)
    cloud.put("b", "x/other/readme.txt", b"not ours")
    put_tokenizer(cloud, byte_tokenizer_dir, "x/tokenizer/tokenizer_65k")
    base = vm.home / ".cache/nanochat"
    whole = base / "incoming/parquet/base_data_v3/shard_00004.parquet"  # as an interrupted data.sh leaves it
    whole.parent.mkdir(parents=True)
    whole.write_bytes(b"4" * 1000)
    whole.with_name("shard_00003.parquet").write_bytes(b"3" * 10)

    output = laptop.run("data.sh", vm.ip, "--bucket=gs://b/x/", timeout_s=120)
    assert "9 files, 8 missing" in output
    shards = base / "parquet/base_data_v3"
    assert [path.read_bytes() for path in sorted(shards.iterdir())] == [b"%d" % n * 1000 for n in range(5)]
    assert (base / "parquet/val/shard_00000.parquet").read_bytes() == b"v" * 500
    assert (base / "tokenizer/vocabulary.tiktoken").stat().st_size > 1000
    assert sorted(path.name for path in base.iterdir()) == ["parquet", "tokenizer"]
    calls = (vm.home / "calls").read_text().splitlines()
    assert len(calls) == 4, "one call lists, and one for each folder copies"
    downloaded = " ".join(request for request in cloud.requests if "alt=media" in request)
    assert "shard_00003.parquet" in downloaded and "shard_00004.parquet" not in downloaded

    (shards / "shard_00001.parquet").write_bytes(b"truncated")
    output = laptop.run("data.sh", vm.ip, "--bucket=gs://b/x", timeout_s=120)
    assert "9 files, 1 missing" in output
    assert (shards / "shard_00001.parquet").read_bytes() == b"1" * 1000
    output = laptop.run("data.sh", vm.ip, "--bucket=gs://b/x/other", status=1)
    assert "has neither *.parquet files nor a tokenizer folder" in output
    assert "gs://" in laptop.run("data.sh", vm.ip, status=2)


def test_a_tokenizer_of_the_bucket_replaces_the_one_there_and_is_no_mixture_of_both(laptop, cloud, bare_vm,
                                                                                   byte_tokenizer_dir):
    vm = bare_vm
    cloud.put("b", "x/shard_00000.parquet", b"0" * 1000)
    put_tokenizer(cloud, byte_tokenizer_dir, "x/tokenizer_65k")
    base = vm.home / ".cache/nanochat"
    laptop.run("data.sh", vm.ip, "--bucket=gs://b/x", "--no_tokenizer", timeout_s=120)
    assert (base / "parquet/base_data_v3/shard_00000.parquet").exists() and not (base / "tokenizer").exists()
    (base / "tokenizer").mkdir()
    (base / "tokenizer/tokenizer.pkl").write_bytes(b"an older one")
    laptop.run("data.sh", vm.ip, "--bucket=gs://b/x", timeout_s=120)
    assert not (base / "tokenizer/tokenizer.pkl").exists() and (base / "tokenizer/vocabulary.tiktoken").exists()
    assert (base / "tokenizer.before/tokenizer.pkl").read_bytes() == b"an older one"


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
