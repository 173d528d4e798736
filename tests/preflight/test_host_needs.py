"""What a host needs, by hand."""
import pytest

from nanochat.device import tpu
from nanochat.preflight.describe import describe_host
from nanochat.preflight.host_needs import estimate_host, memory_bytes, number_of_checkpoints, starting_bytes
from nanochat.train.flags import parse_flags
from nanochat.train.plan import make_plan

WIDTH, VOCABULARY = 1024, 65536
TABLE, LAYER = VOCABULARY * WIDTH, 12 * WIDTH**2
GATES = 16 * 3 * (WIDTH + 1)  # of depth 16


@pytest.fixture
def plan_on(monkeypatch):
    def plan(accelerator, *flags):
        monkeypatch.setenv("TPU_ACCELERATOR_TYPE", accelerator)
        return make_plan(parse_flags(flags), VOCABULARY, "tpu", tpu.parse_accelerator(accelerator).chips)

    return plan


@pytest.mark.parametrize("accelerator, flags, held", [
    ("v5litepod-8", "--depth=16", 4 * (16 * LAYER + 3 * TABLE + GATES)),
    # bf16 weights over 8, fp32 weights of the optimizer over 8, and a table
    ("v5litepod-8", "--depth=16 --mesh_fsdp=8", (2 + 4) / 8 * (16 * LAYER + 3 * TABLE) + 2 / 8 * GATES + 4 * TABLE),
    # 16 layers on 32 chips are padded to 32
    ("v5litepod-32", "--depth=16 --mesh_fsdp=8",
     2 / 8 * (16 * LAYER + 3 * TABLE + GATES) + 4 / 32 * (32 * LAYER + 3 * TABLE) + 4 * TABLE)])
def test_a_rank_that_starts_holds_whole_weights_or_its_parts_and_the_largest_table(plan_on, accelerator, flags, held):
    assert starting_bytes(plan_on(accelerator, *flags.split())) == pytest.approx(held, rel=1e-4)


@pytest.mark.parametrize("flags, steps, checkpoints", [
    ("", 10_000, 4), ("--keep_checkpoints=1", 10_000, 2), ("", 1500, 2), ("--save_every=-1", 10_000, 0),
    ("--save_every=-1 --save_every_minutes=5", 10_000, 4), ("--keep_every=2500", 10_000, 8)])
def test_the_disk_holds_those_that_stay_and_one_more(flags, steps, checkpoints):
    assert number_of_checkpoints(parse_flags(flags.split()).record, steps) == checkpoints


def test_a_host_is_compared_with_what_its_vm_has(plan_on, tmp_path):
    for split, size in (("train", 3000), ("val", 200)):
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.parquet").write_bytes(bytes(size))
    flags = ["--depth=16", "--num_iterations=10000", f"--data_dir={tmp_path}/train", f"--val_dir={tmp_path}/val"]
    pod = tpu.parse_accelerator("v5litepod-16")
    found = estimate_host(parse_flags(flags), plan_on(pod.accelerator, *flags), pod, 4_000_000_000)
    assert found["ranks"] == 4 and found["memory_bytes"] == 192e9 and found["data_bytes"] == 3200
    assert found["starting_bytes"] == pytest.approx(4 * 4 * (16 * LAYER + 3 * TABLE + GATES), rel=1e-4)
    assert found["saving_bytes"] == found["checkpoint_bytes"] and found["checkpoints_bytes"] == 16_000_000_000
    assert "TOO LITTLE" not in str(describe_host(found))
    memory, disk = describe_host(found | {"memory_bytes": 5e9, "disk_bytes": 14_000_000_000})
    assert memory.endswith("it has 5.0 GB, TOO LITTLE")
    assert disk.endswith("TOO LITTLE: attach another, or --keep_checkpoints=2")  # three of 4.0 GB
    assert describe_host(found | {"disk_bytes": 6_000_000_000})[1].endswith("TOO LITTLE: attach another")


@pytest.mark.parametrize("flags, size", [
    ("--synthetic_data", 0), ("--data_dir=gs://bucket/a --val_dir=gs://bucket/b --data_cache_gb=20", 20e9),
    ("--data_dir=/nowhere", None)])
def test_data_in_a_bucket_takes_its_cache(plan_on, flags, size):
    flags, pod = ["--depth=2", *flags.split()], tpu.parse_accelerator("v6e-8")
    found = estimate_host(parse_flags(flags), plan_on("v6e-8", *flags), pod, 10**9)
    assert found["data_bytes"] == size and found["memory_bytes"] == 1440e9


def test_every_tpu_that_can_be_asked_for_has_a_host():
    for accelerator in ("v4-8", "v4-32", "v5litepod-1", "v5litepod-4", "v5litepod-8", "v5litepod-64", "v5p-8", "v6e-1",
                        "v6e-4", "v6e-8", "v6e-256"):
        assert memory_bytes(tpu.parse_accelerator(accelerator)) > 40e9
