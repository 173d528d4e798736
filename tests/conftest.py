"""Tests see no base directory, no WandB and no TPU but their own. Fixtures that train a tiny model."""
import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tests.warm import CHEAP_COMPILATION, TIMEOUT_S, WarmRanks

QUICK_START = Path(__file__).parent / "quick_start"

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and the processes that tests start would, too
signal.signal(signal.SIGINT, signal.default_int_handler)  # likewise, for a shell that started the tests with &

# Before anything imports torch_xla: one XLA device, on the CPU, in the process that runs the tests.
os.environ["PJRT_DEVICE"] = "CPU"
os.environ["CPU_NUM_DEVICES"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ.pop("NANOCHAT_BASE_DIR", None)  # a shell's, where another tokenizer may be; fixtures of a module see it
os.environ["XLA_FLAGS"] = CHEAP_COMPILATION
os.environ["OMP_NUM_THREADS"] = "1"  # threads that wait for one another cost more than these tiny products
# The processes that tests start import quickly, and so does this one.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(QUICK_START), os.environ.get("PYTHONPATH")]))
runpy.run_path(str(QUICK_START / "sitecustomize.py"))
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the project is compiled once, and not by each of these processes
sys.dont_write_bytecode = False

import pytest  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def xla_device():
    """PyTorch's autograd engine counts the devices at the first backward pass and never again.

    Here, because the process that only hands out the tests (make test) need not import torch_xla."""
    import torch_xla
    torch_xla.device()


# -----------------------------------------------------------------------------
# Which process runs a test, with pytest-xdist (make test)

# Each of these two sets of files shares warm processes.
WARM = [{"tests/checkpoint/test_pieces.py", "tests/data/test_bucket_runs.py", "tests/puzzles/test_puzzles.py",
         "tests/train/test_mesh.py", "tests/train/test_mixed_runs.py", "tests/train/test_teacher.py"},
        {"tests/test_warm.py", "tests/scripts/test_base_train.py", "tests/scripts/test_base_train_ends.py",
         "tests/scripts/test_base_train_refusals.py", "tests/train/test_start.py"}]
WARM_PROCESSES = 3  # at a time, because each grows to more than a gigabyte: it keeps what it compiled
# These compile for minutes, and share nothing with the other tests of their file.
COMPILATIONS = {"test_the_chips_compile_every_kernel_at_depth_2",
                "test_running_out_of_memory_is_foreseen_and_the_culprit_is_named"}
# What takes longest comes first, so that the others fill the time until all end.
LONG = ["warm ranks", "compilation", "tests/deploy/test_end_to_end.py", "tests/scripts/test_tpu_preflight.py",
        "tests/run/test_pod_runs.py", "tests/run/test_stopping.py", "tests/run/test_chaos.py",
        "tests/corpus/test_ray_cluster.py", "tests/test_bad_flags.py", "tests/judge/", "tests/scripts/test_ablate.py",
        "tests/export/test_export.py", "tests/infer/test_on_mesh.py", "tests/test_notebook.py",
        "tests/kernels/test_pallas_attention.py", "tests/model/test_gpt.py", "tests/serve/"]
DEPLOY = "tests/deploy/"  # its tests wait, and hardly compute
SERVE = "tests/serve/"  # its files share a model that is trained for them


def group_of(nodeid):
    """Returns the name of the group that this test belongs to. One process runs all tests of a group: those that train
    in warm processes, and those of each file, which may share fixtures. Tests of deploy/ share next to nothing."""
    path, _, test = nodeid.partition("::")
    for number, files in enumerate(WARM):
        if path in files:
            return f"warm ranks {number}"
    if test.partition("[")[0] in COMPILATIONS:
        return f"compilation {test}"
    if path.startswith(SERVE):
        return SERVE
    return nodeid if path.startswith(DEPLOY) else path


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks each test with its group, for --dist=loadgroup. Sorts the groups by LONG, with the tests of deploy/ spread
    among the others, the slow ones first: so a process waits while another computes."""
    def place(item):
        group = group_of(item.nodeid)
        is_quick = group.startswith(DEPLOY) and not item.get_closest_marker("slow")
        return next((at for at, name in enumerate(LONG) if group.startswith(name)), len(LONG)), is_quick

    places = {}
    for waits in (False, True):
        kind = sorted((item for item in items if item.nodeid.startswith(DEPLOY) == waits), key=place)
        places |= {item: at / len(kind) for at, item in enumerate(kind)}
    items.sort(key=places.get)
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item.nodeid)))


# -----------------------------------------------------------------------------
# For every test


@pytest.fixture(autouse=True)
def base_dir(tmp_path, monkeypatch):
    """An empty $NANOCHAT_BASE_DIR for each test. A device type that a test sets is undone, too."""
    path = tmp_path / "base"
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(path))
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    return path


@pytest.fixture(autouse=True)
def uploaders_end():
    """Fails a test that leaves a checkpoint on its way to a mirror: it would be in the bucket of the next test."""
    before = threading.enumerate()
    yield
    for thread in threading.enumerate():
        if thread.name == "mirror" and thread not in before:
            thread.join(10)
            assert not thread.is_alive(), "finish the Uploader of this test"


def save_byte_tokenizer(path, *merged):
    """Saves a tokenizer of the 256 bytes, these longer tokens, and the special ones, and returns the path."""
    from nanochat.data.tokenizer import Tokenizer
    from nanochat.data.tokenizer_files import SPECIAL_TOKENS
    ranks = {token: rank for rank, token in enumerate([*(bytes([byte]) for byte in range(256)), *merged])}
    path.mkdir(exist_ok=True)
    Tokenizer(ranks, r"[^\n]+|\n", {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}).save(path)
    return path


def write_headers(folder, parts, **options):
    """Writes headers that pyarrow installs as parquet shards, {name: which of them}, and returns the folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    texts = [path.read_text() for path in sorted(Path(pa.get_include()).glob("arrow/**/*.h"))]
    for name, part in parts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"text": texts[part]}), folder / f"{name}.parquet", row_group_size=8,
                       compression="zstd", **options)
    return folder


@pytest.fixture(scope="session")
def byte_tokenizer_dir(tmp_path_factory):
    """A tokenizer of the 256 bytes and the special tokens: models with it are small."""
    return save_byte_tokenizer(tmp_path_factory.mktemp("byte_tokenizer"))


@pytest.fixture(scope="session")
def corpus_dir(tmp_path_factory):
    """Parquet shards of real C++: `train/` with two files, `val/` with one."""
    return write_headers(tmp_path_factory.mktemp("corpus"), {
        "train/shard_00000": slice(30), "train/shard_00001": slice(30, 60), "val/shard_00000": slice(60, 70)})


@pytest.fixture(scope="session")
def headers_dir(tmp_path_factory):
    """Two shards of the C++ headers that pyarrow installs, of two sources, as prepare_data writes them."""
    from tests.data.headers import write_headers
    return write_headers(tmp_path_factory.mktemp("headers"))


# -----------------------------------------------------------------------------
# Training


def last_of_each(*flags):
    """Returns the flags, of those --name=value that have one name the last: a test's own come after the common ones."""
    return list({flag.partition("=")[0]: flag for flag in flags}.values())


def run_python(*arguments, devices=1, **env):
    """Runs Python in a process of its own, which has `devices` XLA devices, and returns the CompletedProcess."""
    environment = {key: value for key, value in os.environ.items() if key != "PJRT_DEVICE"}
    environment["WANDB_MODE"] = "disabled"
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S,
                          env={**environment, "CPU_NUM_DEVICES": str(devices), **env})


@pytest.fixture(scope="session")
def warm_ranks():
    """Returns the WarmRanks with so many devices. Of several, those that were used last stay."""
    started = {}  # the last used last

    def ranks_of(devices):
        started[devices] = started.pop(devices, None) or WarmRanks(devices)
        for unused in [*started][:-WARM_PROCESSES]:
            started.pop(unused).stop()
        return started[devices]

    yield ranks_of
    for ranks in started.values():
        ranks.stop()


@pytest.fixture(scope="session")
def tiny(byte_tokenizer_dir, corpus_dir):
    """Flags of a run that takes seconds. Its learning rates are low, so that rounding in another order, as on another
    number of devices, does not grow within its steps."""
    return ["--matrix_lr=0.0005", "--embedding_lr=0.02", "--unembedding_lr=0.00025", "--scalar_lr=0.03",
            "--device_type=xla", "--depth=2", "--model_dim=64", "--num_heads=2", "--max_seq_len=32",
            "--device_batch_size=2", "--total_batch_size=512", "--num_iterations=6", "--eval_tokens=1024",
            "--eval_every=3", "--sample_every=-1", "--save_every=-1", "--log_every=2",
            f"--tokenizer_dir={byte_tokenizer_dir}", f"--data_dir={corpus_dir}/train", f"--val_dir={corpus_dir}/val"]


# The flags of the other model for a run with the flags of `tiny`, whose learning rates are a GPT's
LLAMA = ("--arch=llama", "--head_dim=32", "--matrix_lr=0.02", "--embedding_lr=0.3", "--unembedding_lr=0.004",
         "--scalar_lr=0.05")
BOTH_MODELS = pytest.mark.parametrize("model", [(), pytest.param(LLAMA, marks=pytest.mark.slow)], ids=["gpt", "llama"])


def add_records(process, run_dir):
    """Adds to a CompletedProcess what the run has recorded, and returns it: `.records` are all lines of metrics.jsonl,
    `.losses` and `.bpb` (bits per byte) are by step, `.run_dir` has its checkpoints."""
    path, process.run_dir = run_dir / "metrics.jsonl", run_dir
    process.records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    process.losses = {record["step"]: record["loss"] for record in process.records if "loss" in record}
    process.bpb = {record["step"]: record["val_bpb"] for record in process.records if "val_bpb" in record}
    return process


@pytest.fixture
def train(base_dir, tiny, warm_ranks):
    """Runs base_train on a tiny model and returns the CompletedProcess, with what add_records adds.

    The process is warm, or new if Python's first arguments for it are given: new_process=("-m", "scripts.base_train").
    without: names of flags of `tiny` that are left out.
    """

    from scripts.base_train import main

    def run(*flags, run="test", devices=1, status=0, new_process=(), without=(), **env):
        common = [flag for flag in tiny if flag.partition("=")[0].removeprefix("--") not in without]
        flags = last_of_each(f"--run={run}", *common, *flags)
        if new_process:
            process = run_python(*new_process, *flags, devices=devices, **env)
        else:
            process = warm_ranks(devices).call(main, flags, **env)
        assert process.returncode == status, process.stdout[-2000:] + process.stderr[-4000:]
        return add_records(process, base_dir / "checkpoints" / run)

    return run


@pytest.fixture(scope="session")
def reference(tiny, warm_ranks, tmp_path_factory):
    """Returns an uninterrupted run with these flags, like `train`. Tests share it: its directory is not theirs."""
    from scripts.base_train import main

    @functools.cache
    def run(*flags, devices=1):
        base_dir = tmp_path_factory.mktemp("reference")
        process = warm_ranks(devices).call(main, last_of_each("--run=reference", *tiny, *flags),
                                           NANOCHAT_BASE_DIR=str(base_dir))
        assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
        return add_records(process, base_dir / "checkpoints" / "reference")

    return run
