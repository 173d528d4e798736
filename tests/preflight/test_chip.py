"""The check of a chip: each of its checks is seen to fail. It runs on XLA's CPU devices."""
import json
import os
import shutil
import socket
from dataclasses import asdict, replace
from types import SimpleNamespace
from unittest import mock

import pytest

from nanochat.common import BadInput
from nanochat.data import storage
from nanochat.data.remote import Interruption
from nanochat.device.ranks import spawn_ranks
from nanochat.device.tpu import parse_accelerator
from nanochat.preflight import chip, chip_runs
from nanochat.preflight.chip import Finding, Setting
from nanochat.preflight.measured import find_checks, measurements
from nanochat.train.flags import Flags, parse_flags
from nanochat.train.plan import make_plan
from scripts import tpu_check
from tests.checkpoint.states import save
from tests.conftest import run_python
from tests.preflight import faulty

SMALL = ("--depth=1", "--model_dim=128", "--num_heads=1", "--max_seq_len=128", "--device_batch_size=2")


@pytest.fixture
def setting(tmp_path, byte_tokenizer_dir, monkeypatch):
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")
    return Setting(parse_flags([f"--tokenizer_dir={byte_tokenizer_dir}", *SMALL]), "xla", tmp_path)


def failed(findings):
    return {each.what: each for each in findings if not each.holds}


# The machine


def test_a_full_disk_is_named(setting, monkeypatch):
    assert "free disk" not in failed(chip.machine(setting))
    usage = shutil.disk_usage(setting.folder)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=900_000_000))
    found = failed(chip.machine(setting))["free disk"]
    assert found.breaks == "run" and found.figure == "0.9 GB"


def test_a_foreign_variable_is_named_and_what_the_program_sets_is_none(byte_tokenizer_dir):
    """A plan for a TPU imports jax, which sets variables. Of those, the check must know nothing."""
    program = """
from unittest import mock
from scripts import tpu_check

with (mock.patch.object(tpu_check, "resolve_device_type", return_value="tpu"),
      mock.patch.object(tpu_check, "check_all", side_effect=lambda setting, *_: print(setting.foreign) or {})):
    tpu_check.main()
"""
    of_tests = {name: "" for name in ("XLA_FLAGS", "PJRT_DYNAMIC_PLUGINS", "TPU_LIBRARY_PATH")}
    process = run_python("-c", program, *SMALL, f"--tokenizer_dir={byte_tokenizer_dir}", **of_tests,
                         TPU_ACCELERATOR_TYPE="v5litepod-8", PJRT_CPU_ASYNC_CLIENT="1")
    assert "\n('PJRT_CPU_ASYNC_CLIENT',)\n" in process.stdout, process.stderr


@pytest.mark.parametrize("name, by_pci, by_torch_xla, agree", [
    ("v5litepod-8", 8, 8, True), ("v5litepod-8", 8, 4, False), ("v6e-4", 4, 4, True), ("v4-8", 4, 4, True),
    ("v5litepod-1", 8, 8, False), ("v5litepod-4", 0, 0, False)])
def test_all_that_count_the_chips_must_agree(name, by_pci, by_torch_xla, agree, monkeypatch):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", name)
    monkeypatch.setattr(chip, "count_tpu_chips", lambda: by_pci)
    monkeypatch.setattr("torch_xla._internal.tpu.num_available_chips", lambda: by_torch_xla)
    (found,) = chip.chips_of_all_sources()
    assert found.holds == agree and found.breaks == "run" and str(by_pci) in found.figure


def test_another_process_that_holds_a_chip_is_seen(tmp_path):
    for pid, held in ((7, "/dev/vfio/0"), (8, "/dev/vfio/vfio"), (9, "/dev/null"), (os.getpid(), "/dev/accel0")):
        (tmp_path / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / str(pid) / "fd" / "3").symlink_to(held)
    assert chip.holders(proc=tmp_path) == {7}


def test_another_version_is_named(setting, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.0.30" if package == "libtpu" else "2.9.1+cpu")
    found = failed(chip.versions(setting))
    assert found["libtpu"].figure == "0.0.30" and found["libtpu"].expected == "0.0.21" and "torch" not in found


# Checks in processes of their own


@pytest.mark.slow
def test_a_collective_that_drops_a_rank_is_named(setting):
    found = tpu_check.run_limited("collectives", faulty.dropping_collectives, setting, 600)
    assert failed(found)["all-reduce"].breaks == "run"
    assert "reduce-scatter" not in failed(found) and len(found) > 5


@pytest.mark.parametrize("check, limit_s, what, figure", [
    pytest.param(faulty.failing_collectives, 600, "ranks that end", "No ba16c7433 device found",  # the runtime's words
                 marks=pytest.mark.slow),
    pytest.param(faulty.hanging_collectives, 8, "collectives ends", "hangs", marks=pytest.mark.slow),
    (faulty.NotThere(), 600, "collectives ends", "status 1")])
def test_a_check_that_does_not_start_or_end_is_named(check, limit_s, what, figure, setting):
    (found,) = tpu_check.run_limited("collectives", check, setting, limit_s)
    assert (found.what, found.breaks, found.holds) == (what, "run", False) and figure in found.figure


@pytest.mark.slow
def test_no_run_is_possible_if_the_first_training_hangs(setting):
    found = {"training": tpu_check.run_limited("training", faulty.hanging_collectives, setting, 8)}
    assert tpu_check.deliver(found, setting.flags, None, setting.folder) == tpu_check.NO_RUN


def test_torch_xla_that_sees_no_chips_is_refused_before_it_spawns(monkeypatch):
    """It would say that max_workers must be greater than 0."""
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setattr("torch_xla._internal.tpu.num_available_chips", lambda: 0)
    with pytest.raises(BadInput, match="sees none in /sys/bus/pci/devices: give"):
        spawn_ranks(print, begin=print)


@pytest.mark.slow
def test_a_kernel_with_a_wrong_sign_does_not_hold(setting):
    found = tpu_check.run_limited("kernels", faulty.kernels_with_wrong_sign, setting, 600)
    assert failed(found).keys() == {"flash, short rows, bfloat16", "flash, short rows, int8"} and len(found) == 5
    wrong = failed(found)["flash, short rows, bfloat16"]
    assert wrong.breaks == "flash" and "attn_q" in wrong.figure


@pytest.mark.slow
@pytest.mark.parametrize("check, is_slow", [(faulty.quick_host, False), (faulty.slow_host, True)])
def test_a_loader_that_is_slower_than_the_chips_is_named(check, is_slow, setting):
    directory = chip_runs.run_directory(setting, "4_micro_steps")
    directory.mkdir(parents=True)  # slow: 2 ranks, 2 rows of 129 tokens in a tenth of a second
    record = {"step": 20, "time": 0, "tokens_per_s": 12_000 if is_slow else 1000}
    (directory / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    loader, copy = tpu_check.run_limited("host", check, setting, 600)
    assert loader.what.startswith("host: ") and loader.holds != is_slow and "copy" in copy.what
    assert (loader.factor > 1) == is_slow


# Runs


@pytest.mark.parametrize("fault, what", [("", None), ("flash", "flash trains"), ("recompiles", "it compiles once")])
def test_a_run_that_differs_or_compiles_again_is_named(fault, what, setting, monkeypatch):
    monkeypatch.setenv("QUICK_FAULT", fault)
    setting = replace(setting, trainer="tests.preflight.quick_trainer")
    found = [*chip_runs.training(setting), *chip_runs.programs(setting)]
    assert list(failed(found)) == ([what] if what else [])
    figures = {each.what: each.figure for each in found}
    assert figures["micro_step"] == "36.0 ms" and figures["update"] == "20.0 ms"


def test_what_a_chip_takes_longer_than_estimated_becomes_the_factors_of_the_preflight(setting, monkeypatch):
    pytest.importorskip("libtpu")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    setting = replace(setting, device_type="tpu", trainer="tests.preflight.quick_trainer",
                      preflight="tests.preflight.quick_preflight")
    found = {"collectives": [Finding("collectives: 64 MB", True, factor=1.5)],
             "programs": [*chip_runs.programs(setting), *chip_runs.attention(setting)]}
    plan = make_plan(setting.flags, 265, "tpu", 8)
    path = setting.folder / "check.json"
    tpu_check.deliver(found, setting.flags, measurements(found, plan, "v5litepod-8"), setting.folder)
    ((_, factors),) = find_checks(path, plan, parse_accelerator("v5litepod-4"))
    assert factors == pytest.approx({"products": 1.2, "attention": 0.9, "collectives": 1.5, "update": 0.8,
                                     "memory": 9 / 8})


def test_a_resume_that_lost_a_byte_and_a_killed_rank_that_nobody_ended_are_named(setting, monkeypatch):
    """After runs that have left these files. tests/test_notebook.py has real ones, in which all checks hold."""
    for seed, name in enumerate(("whole", "stopped")):
        directory = chip_runs.run_directory(setting, name)
        directory.mkdir(parents=True)
        save(directory, seed)
    monkeypatch.setattr(chip_runs, "train", lambda *_, **changes: ("a run", "it trains"))
    monkeypatch.setattr(chip_runs, "train_until", lambda *_, **changes: (chip_runs.STOPPED, 1.0))
    monkeypatch.setattr(chip_runs, "has_logged", lambda *_: True)
    found = failed(chip_runs.survival(setting))
    assert found.keys() == {"with the same bits", "a killed rank is named"}
    assert "model" in found["with the same bits"].figure


# What it says at the end


@pytest.mark.parametrize("broken, status, instead", [
    ((), 0, {}), (("",), 1, {}), (("flash",), 1, {"kernel": "chunked"}), (("chunked",), 1, {}),
    (("flash", "chunked", "int8"), 1, {"kernel": "current", "products": "bfloat16"}), (("run",), 3, None)])
def test_the_status_and_the_flags_with_which_a_run_works(broken, status, instead, tmp_path):
    found = {"kernels": [Finding(f"part {part}", False, breaks=part) for part in broken]}
    asked = Flags().replace(depth=3, kernel="flash", products="int8")
    flags = asked.replace(**tpu_check.instead_of(found, SimpleNamespace(kernel="flash", products="int8")))
    assert tpu_check.deliver(found, flags, None, tmp_path) == status
    report = (tmp_path / "check.json").read_text()
    assert json.loads(report)["possible"] == (status != 3) and len(report) < 64_000
    config = tmp_path / "check.toml"
    assert config.exists() == (status != 3)
    assert status == 3 or parse_flags([f"--config={config}"]) == asked.replace(**instead)


def test_what_does_not_hold_on_another_host_is_told_with_its_place_and_corrects_no_estimate():
    found = [[asdict(Finding("collectives: 64 MB", holds, factor=2.0)), asdict(Finding("clock", True))]
             for holds in (True, False)]
    assert [(each.what, each.holds, each.factor) for each in tpu_check.of_all_hosts(found)] == [
        ("collectives: 64 MB", True, 2.0), ("clock", True, None), ("host 1: collectives: 64 MB", False, None)]


def test_copies_of_the_checks_that_cannot_be_deleted_are_said_and_lose_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(storage, "list_files", mock.Mock(side_effect=Interruption("503")))
    tpu_check.delete_copies("gs://b/m")
    assert "copies in gs://b/m are left (503)" in capsys.readouterr().out
    (tmp_path / "m/whole").mkdir(parents=True)
    for _ in range(2):
        tpu_check.delete_copies(str(tmp_path / "m"))
    assert not (tmp_path / "m").exists() and not capsys.readouterr().out


def test_a_message_has_no_names_addresses_or_keys():
    host = socket.gethostname()
    text = chip.anonymous(f"error: /home/ann/x.py by ann@host.example at 10.0.0.7:80, t1v-n-0a1b2c3d-w-0x and {host}: "
                          "wandb0123456789abcdef RESOURCE_EXHAUSTED: 3 MiB")
    assert "RESOURCE_EXHAUSTED: 3 MiB" in text and "error:" in text
    assert not [word for word in ("ann", "10.0", "t1v", "0123", host) if word in text]
