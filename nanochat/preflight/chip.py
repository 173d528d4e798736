"""The first checks of a TPU: the machine, the collectives, and each kernel beside its definition. chip_runs.py has the
others, which train.

A check is a function of a Setting that yields Findings. It runs in a process of its own, because each starts a runtime.
"""
import glob
import json
import math
import os
import re
import resource
import shutil
import socket
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from nanochat.device.collectives import (
    all_gather,
    all_reduce_in_groups,
    all_reduce_sum,
    exchange_in_groups,
    gather_in_groups,
    reduce_scatter_sum,
    scatter_sum_in_groups,
)
from nanochat.device.programs import one_program
from nanochat.device.ranks import Dist, compute_init, prepare_libtpu, prepare_xla_environment
from nanochat.device.tpu import count_tpu_chips, detect_accelerator, parse_accelerator
from nanochat.preflight.hlo import REPOSITORY
from nanochat.preflight.timeline import transfer_s
from nanochat.run.hosts import describe, metadata
from nanochat.run.processes import begin_with_parent, expected_world_size, run_as_ranks
from nanochat.train.flags import Flags, parse_flags
from nanochat.train.language import make_model, make_step
from nanochat.train.plan import make_plan

MIN_FREE_GB = {"tpu": 20, "xla": 1}  # on disk
# Variables that a VM, Colab, Kaggle or this program sets. Others change the compiler or the runtime.
KNOWN_VARIABLES = {
    "PJRT_DEVICE", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES",
    "TPU_PROCESS_ADDRESSES", "TPU_PROCESS_BOUNDS", "TPU_VISIBLE_CHIPS", "TPU_CHIPS_PER_PROCESS_BOUNDS",
    "TPU_CHIPS_PER_HOST_BOUNDS", "TPU_HOST_BOUNDS", "TPU_SKIP_MDS_QUERY", "TPU_RUNTIME_METRICS_PORTS"}


@dataclass(frozen=True)
class Setting:
    """What a check needs to know."""
    flags: Flags  # of base_train: those asked for, without what earlier checks have found broken
    device_type: str  # "tpu", or "xla", where all checks run in a small size
    folder: Path  # for its files
    foreign: tuple = ()  # of foreign_variables()
    hosts: int = 1
    is_first: bool = True  # of the hosts: it has the records of the runs, and tells what came of them
    mirror: str | None = None  # of the runs, if there are several hosts
    trainer: str = "scripts.base_train"
    preflight: str = "scripts.tpu_preflight"

    @property
    def chips(self):
        """How many chips all hosts have."""
        return expected_world_size(self.device_type, self.hosts)

    @property
    def own_chips(self):
        """How many chips this host has."""
        return self.chips // self.hosts

    @property
    def accelerator(self):
        """The name of the TPU, None on a CPU."""
        return detect_accelerator() if self.device_type == "tpu" else None


@dataclass(frozen=True)
class Finding:
    """What a check has found about one thing."""
    what: str
    holds: bool
    figure: str = ""
    expected: str = ""
    breaks: str = ""  # what does not work if it does not hold: "flash", "chunked", "int8", or "run": no run at all
    factor: float | None = None  # what was measured over the preflight's estimate; of the category before a : in `what`
    parts: dict | None = None  # of this estimate: {category: seconds}


def compared(what, found, expected, form, holds=True, parts=None):
    """Returns the Finding of a figure beside the one that the preflight expects, both written in this form."""
    return Finding(what, holds, form.format(found), form.format(expected), factor=found / expected, parts=parts)


# The machine


def machine(setting):
    """Whether the machine is as a run needs it. It starts no runtime."""
    yield Finding("no foreign variables", not setting.foreign, ", ".join(setting.foreign), "none: unset them")
    if setting.device_type == "tpu":
        yield from chips_of_all_sources()
    pids = holders()
    yield Finding("nobody else holds the chips", not pids, f"{len(pids)} processes", "0", "run")
    yield from versions(setting)
    chips_here = setting.own_chips if setting.device_type == "tpu" else 1
    free_memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for what, size, needed_gb, breaks in (
            ("free disk", shutil.disk_usage(setting.folder).free, MIN_FREE_GB[setting.device_type], "run"),
            ("free memory of the host", free_memory, 2 * chips_here, ""),
            ("/dev/shm", shutil.disk_usage("/dev/shm").free, 0.06, "")):
        yield Finding(what, size >= 1e9 * needed_gb, f"{size / 1e9:.1f} GB", f"{needed_gb} GB", breaks)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield Finding("open files of a process", files >= 1024, f"{files:,}", "1,024")
    is_late = time.time() > Path(__file__).stat().st_mtime
    yield Finding("clock", is_late, time.strftime("%Y-%m-%d %H:%M"), "later than this program's files")


def foreign_variables():
    """Returns the names of variables that change the compiler or the runtime, and that nothing here sets. Call it
    first: torch_xla and jax, which a plan may import, set some."""
    return tuple(sorted(name for name in os.environ.keys() - KNOWN_VARIABLES
                        if os.environ[name] and re.match("LIBTPU_INIT_ARGS$|XLA_FLAGS$|PJRT_|TPU_", name)))


def chips_of_all_sources():
    """Whether all that count the chips of this host see as many."""
    from torch_xla._internal import tpu
    counts = {"PCI bus": count_tpu_chips(), "torch_xla": tpu.num_available_chips()}
    name = os.environ.get("TPU_ACCELERATOR_TYPE") or metadata("attributes/accelerator-type")
    if name:
        tpu_slice = parse_accelerator(name, "accelerator-type")
        counts[tpu_slice.accelerator] = tpu_slice.chips // tpu_slice.hosts
    agree = len(set(counts.values())) == 1 and 0 not in counts.values()
    yield Finding("chips", agree, ", ".join(f"{count} by {by}" for by, count in counts.items()), "the same by all",
                  "run")


def holders(dev="/dev", proc="/proc"):
    """Returns the ids of the other processes that have a chip open, as far as this user may see them."""
    found = set()
    for link in glob.glob(f"{proc}/[0-9]*/fd/*"):  # Path.glob fails if a process ends meanwhile
        try:
            held = os.readlink(link)
        except OSError:  # it has ended, or is somebody else's
            continue
        if re.fullmatch(rf"{dev}/(accel|vfio/)[0-9]+", held):
            found.add(int(link.split("/")[-3]))
    return found - {os.getpid()}


def versions(setting):
    """Whether the packages that decide what a chip runs are those of pyproject.toml, and Python has them."""
    about = describe(setting.flags, setting.device_type)
    yield Finding("Python", (3, 11) <= sys.version_info < (3, 13), about["Python"], "3.11 or 3.12", "flash")
    pins = (REPOSITORY / "pyproject.toml").read_text()
    for package, pinned in re.findall(r'"(libtpu|torch|torch_xla|jax)==([^";]+)', pins):
        version = about[package].partition("+")[0]  # a local version, as in 2.9.1+cpu, is the same code
        yield Finding(package, version == pinned, version, pinned)


# Collectives

TIMED_BYTES = {"tpu": 64_000_000, "xla": 64_000}
TIMED_RUNS = 10


def collectives(setting):
    """Whether the ranks start, and each collective that training uses gives what the CPU computes."""
    prepare_xla_environment(setting.device_type)
    prepare_libtpu(setting.device_type)
    status = run_as_ranks(try_collectives, setting.device_type, setting.folder, begin=begin_with_parent)
    found = [json.loads(path.read_text()) for path in setting.folder.glob("rank_*.json")]
    problem = "" if status == 0 else last_error(setting.folder / "collectives.log")
    yield Finding("ranks that end", status == 0 and len(found) == setting.own_chips,
                  problem or str(len(found)), str(setting.own_chips), "run")
    if not found:
        return
    for name in found[0]["right"]:
        wrong = sum(not of_rank["right"][name] for of_rank in found)
        yield Finding(name, not wrong, f"wrong on {wrong} of {len(found)} ranks", "as on the CPU", "run")
    if setting.accelerator and setting.chips > 1:
        seconds = max(of_rank["seconds"] for of_rank in found)
        tpu = parse_accelerator(setting.accelerator).tpu
        expected_s = transfer_s("all-reduce", TIMED_BYTES["tpu"], setting.chips, tpu)
        yield compared("collectives: 64 MB", 1000 * seconds, 1000 * expected_s, "{:.2f} ms")


def try_collectives(device_type, folder):
    """As a rank: writes {"right": {name of a collective: whether its result is right}, "seconds": of an all-reduce of
    TIMED_BYTES}. Returns the exit status."""
    dist = compute_init(device_type)
    right = {}
    for name, call, expected in collectives_of(dist):
        with one_program(dist, name, collective=True):
            result = call()
        right[name] = torch.equal(result.cpu(), expected)
    large = torch.zeros(TIMED_BYTES[device_type] // 4).to(dist.device)
    for _ in range(3):  # the first compiles, and the second may wait for a rank that still does
        begun = time.monotonic()
        with one_program(dist, "timed", collective=True):
            for _ in range(TIMED_RUNS):
                all_reduce_sum([large], dist)
        large[:1].cpu()
        seconds = (time.monotonic() - begun) / TIMED_RUNS
    (folder / f"rank_{dist.rank}.json").write_text(json.dumps({"right": right, "seconds": seconds}))
    return 0


def collectives_of(dist):
    """Returns [(name, function that calls the collective, the result on this rank)]."""
    ranks = dist.world_size
    every = 1 + torch.arange(ranks * 2 * ranks * 3.0).view(ranks, 2 * ranks, 3)  # the tensor of each rank
    own = every[dist.rank].to(dist.device)
    half = max(1, ranks // 2)
    groups = tuple(tuple(range(start, start + half)) for start in range(0, ranks, half))
    group = next(group for group in groups if dist.rank in group)
    of_group = every[list(group)]
    place = group.index(dist.rank)

    def reduced():
        total = own.clone()
        all_reduce_sum([total], dist)
        return total

    exchanged = torch.cat([tensor.chunk(half)[place] for tensor in of_group])
    return [
        ("all-reduce", reduced, every.sum(0)),
        ("reduce-scatter", partial(reduce_scatter_sum, own, dist), every.sum(0).chunk(ranks)[dist.rank]),
        ("all-gather", partial(all_gather, own, dist), every.flatten(0, 1)),
        ("all-gather in groups", partial(gather_in_groups, own, groups), of_group.flatten(0, 1)),
        ("exchange in groups", partial(exchange_in_groups, own, groups, 0, 0), exchanged),
        ("sum in groups", partial(all_reduce_in_groups, "sum", own, groups), of_group.sum(0)),
        ("maximum in groups", partial(all_reduce_in_groups, "max", own, groups), of_group.amax(0)),
        ("reduce-scatter in groups", partial(scatter_sum_in_groups, own, groups), of_group.sum(0).chunk(half)[place])]


# Kernels

VOCAB_SIZE = 2048
LAYERS = ("--depth=2", "--num_iterations=1", "--window_pattern=SL")
# {case: flags}: 20 rows of 1,024 are several chunks of the loss; 8,192 positions need attention in segments
SHAPES = {"short rows": ("--device_batch_size=20", "--max_seq_len=1024", "--model_dim=256", "--num_heads=2"),
          "long rows": ("--device_batch_size=1", "--max_seq_len=8192", "--model_dim=256", "--num_heads=2"),
          "heads of 64": ("--device_batch_size=4", "--max_seq_len=1024", "--model_dim=256", "--num_heads=4")}
SHAPES_ON_CPU = {"short rows": ("--device_batch_size=2", "--max_seq_len=128", "--model_dim=128", "--num_heads=1"),
                 "heads of 64": ("--device_batch_size=2", "--max_seq_len=64", "--model_dim=128", "--num_heads=2")}
# On XLA, `current` is the definition itself, also with int8 products.
CASES = (("current", "bfloat16"), ("chunked", "bfloat16"), ("chunked", "int8"), ("flash", "bfloat16"),
         ("flash", "int8"))
TIMES_CPU = 3  # an error may be this many times that of bfloat16 on the CPU
SMALLEST_ERROR = 0.02  # below it, every error will do
CPU = Dist("cpu", torch.device("cpu"))
FEW = 100  # numbers of a weight: each gradient is a sum of terms that cancel, of which only the sign is judged
FEW_ERROR = 1.5  # with a wrong sign it is 2


def kernels(setting):
    """Whether each kernel gives the loss of a small model, and the gradients of all its weights, that the definition
    gives on the CPU. So attention, loss, layer, embedding and int8 products are compared, forward and backward."""
    if setting.device_type == "xla":
        os.environ["CPU_NUM_DEVICES"] = "1"
        # On processors with products of bfloat16 XNNPACK says that it has them all, and lacks those of Pallas kernels.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_xnnpack=false"
    prepare_xla_environment(setting.device_type)
    prepare_libtpu(setting.device_type)
    dist = compute_init(setting.device_type)
    for shape, sizes in (SHAPES_ON_CPU if setting.device_type == "xla" else SHAPES).items():
        argv = (*LAYERS, *sizes)
        exact = gradients((*argv, "--kernel=current", "--compute_dtype=float32"), CPU)
        usual = {products: gradients((*argv, "--kernel=current", f"--products={products}"), CPU)
                 for products in ("bfloat16", "int8")}
        for kernel, products in CASES:
            if (kernel, shape) != ("flash", "heads of 64"):  # Pallas kernels have heads of 128
                breaks = "int8" if products == "int8" else "run" if kernel == "current" else kernel
                what = f"{kernel}, {shape}, {products}"
                try:
                    found = gradients((*argv, f"--kernel={kernel}", f"--products={products}"), dist)
                except Exception as error:  # the compiler's, the runtime's, the kernel's: each means that it fails
                    yield Finding(what, False, anonymous(str(error)), "it compiles and runs", breaks)
                else:
                    name, error, limit = worst_of(found, usual[products], exact)
                    yield Finding(what, error <= limit, f"{name} off by {error:.2%}", f"{limit:.2%}", breaks)


def worst_of(found, usual, exact):
    """Returns the name of the gradient whose error is largest beside its limit, the error, and the limit. Each argument
    is {name: tensor}: of the kernel, of the definition in bfloat16 on the CPU, and of the definition in fp32."""
    rows = []
    for name, tensor in exact.items():
        if not tensor.any():
            continue
        error, of_usual = (float((of_it[name] - tensor).norm() / tensor.norm()) for of_it in (found, usual))
        least = FEW_ERROR if 1 < tensor.numel() < FEW else SMALLEST_ERROR
        rows.append((name, error if math.isfinite(error) else math.inf, max(least, TIMES_CPU * of_usual)))
    return max(rows, key=lambda row: row[1] / row[2])


def gradients(argv, dist):
    """Returns {name: tensor} of the loss and the gradient of each weight, by one micro-step of training."""
    flags = parse_flags(("--compute_dtype=bfloat16", *argv) if "--compute_dtype=float32" not in argv else argv)
    rows, length = flags.batch.device_batch_size, flags.model.max_seq_len
    plan = make_plan(flags.replace(total_batch_size=rows * length), VOCAB_SIZE, dist.device_type, 1)
    generator = torch.Generator().manual_seed(0)
    model = make_model(plan).init_weights()
    with torch.no_grad():
        for p in model.parameters():  # some begin at 0, and others would have no gradient
            if p.dim() > 1:
                p.copy_(torch.randn(p.shape, generator=generator) / p.size(-1) ** 0.5)
    tokens = torch.randint(VOCAB_SIZE, (rows, length + 1), generator=generator, dtype=torch.int32)
    training = make_step(plan, model.to(dist.device), dist)
    training.materialise()
    batch = {"rows": tokens.to(dist.device)}
    with one_program(dist, "micro_step"):
        training.micro_step(batch)
    found = {name: p.main_grad.detach().float().cpu() for name, p in training.optimizer.parameters.items()}
    return {"loss": training.sums["loss"].detach().float().cpu(), **found}


def last_error(log):
    """Returns the last line of a log that names an error, "" if none does."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if "rror" in line]
    return anonymous(lines[-1]) if lines else ""


def anonymous(text):
    """Returns the beginning of a message, without what may be a name, an address or a key: paths, names with @ or with
    dots, long words with digits, and the machine's and the user's names."""
    for name in (socket.gethostname(), Path.home().name):
        text = re.sub(rf"\b{re.escape(name)}\b", "…", text)
    text = re.sub(r"\S*(?:/|@|\w\.\w)\S*|(?=\S*\d)[\w-]{16,}", "…", text)
    return " ".join(text.split())[:200]
