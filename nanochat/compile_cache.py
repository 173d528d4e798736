"""torch_xla's persistent compile cache, used only where this version can load what it stored.

    $NANOCHAT_BASE_DIR/xla_cache/can_load.json   what is known: {"torch_xla 2.9.0 on tpu": false}
    $NANOCHAT_BASE_DIR/xla_cache/rank_0/         the programs of a rank, if so

torch_xla 2.9.0 stores its programs and fails to load them (pytorch/xla issue 9094). There the cache would cost time and
disk and save nothing, so a probe comes first, once for each version. It runs on a CPU device, for a TPU too: what fails
in 2.9.0 is torch_xla's own call, the same for every device, and a process that opens the chips and is killed for being
late can keep them from the ranks. Where the probe says yes and a TPU cannot after all, the ranks see it at the second
start and the cache is off from the third on.
"""
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from nanochat.common import get_base_dir, require_writable_dir

MAX_BYTES = 4 << 30  # of all ranks together; the oldest programs go first
PROBE_TIMEOUT_S = 120
_PATH_VARIABLE = "XLA_PERSISTENT_CACHE_PATH"  # torch_xla's


def prepare(device_type, report=print):
    """Switches the cache on or off for the ranks that this process starts next, and says which and why.

    NANOCHAT_COMPILE_CACHE=off in the environment switches it off without a probe.
    """
    os.environ.pop(_PATH_VARIABLE, None)
    if os.environ.get("NANOCHAT_COMPILE_CACHE") == "off":
        report("compile cache: off, as NANOCHAT_COMPILE_CACHE says")
        return
    folder = require_writable_dir(get_base_dir() / "xla_cache")
    can_load = _read(folder).get(_key(device_type))
    if can_load is None:
        report("compile cache: trying whether this torch_xla can load what it stores (once)")
        try:
            can_load = probe()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            report(f"compile cache: off, because the probe failed ({error})")
            return
        remember(device_type, can_load)
    if can_load:
        bytes_kept = prune(folder, MAX_BYTES)
        os.environ[_PATH_VARIABLE] = str(folder / "rank_0")
        report(f"compile cache: on, {bytes_kept / 1e6:,.0f} MB in {folder}")
    else:
        report(f"compile cache: off, because torch_xla {_version()} cannot load what it stores")


def use_folder_of(rank):
    """Where ranks are processes, gives this one a folder of its own; call before it computes anything."""
    if path := os.environ.get(_PATH_VARIABLE):
        os.environ[_PATH_VARIABLE] = str(Path(path).with_name(f"rank_{rank}"))


def describe_use(device_type):
    """What the cache did for this process so far, in words; and remembers if it can only store."""
    if not os.environ.get(_PATH_VARIABLE):
        return ""
    import torch_xla.debug.metrics as met
    loaded, failed = (met.counter_value(name) or 0 for name in ("PersistentCacheHit",
                                                                "PersistentCacheDeserializeFailure"))
    if failed and not loaded:
        remember(device_type, False)
        return f"; {failed} stored ones could not be loaded, so the compile cache is off from the next start on"
    return f"; loaded {loaded} from the compile cache"


def probe():
    """Whether torch_xla loads a program that it stored before, tried in a process of its own on a CPU device."""
    with tempfile.TemporaryDirectory() as scratch:
        environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1", _PATH_VARIABLE: scratch,
                       "XLA_PERSISTENT_CACHE_READ_ONLY": "0", "XLA_COMPILATION_CACHE_SIZE": "1"}
        answer = subprocess.run([sys.executable, "-c", "from nanochat.compile_cache import _probe; _probe()"],
                                cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True,
                                timeout=PROBE_TIMEOUT_S, check=True)
    return json.loads(answer.stdout)["PersistentCacheHit"] > 0


def _probe():
    """In a process whose memory holds one program: runs two, and the first of them again."""
    import torch
    import torch_xla
    import torch_xla.debug.metrics as met
    for size in (2, 3, 2):
        torch.arange(size).to(torch_xla.device()).square().sum().item()
    print(json.dumps({"PersistentCacheHit": met.counter_value("PersistentCacheHit") or 0}))


def remember(device_type, can_load):
    """Notes for later starts what was found out."""
    folder = get_base_dir() / "xla_cache"
    unfinished = folder / "can_load.unfinished"
    unfinished.write_text(json.dumps({**_read(folder), _key(device_type): can_load}))
    unfinished.replace(folder / "can_load.json")


def prune(folder, max_bytes):
    """Deletes the oldest programs of all ranks in `folder` until `max_bytes` hold the rest; returns the bytes left."""
    entries = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in folder.glob("rank_*/*"))
    total = sum(size for _, size, _ in entries)
    for _, size, path in entries:
        if total <= max_bytes:
            break
        path.unlink()
        total -= size
    return total


def _read(folder):
    try:
        return json.loads((folder / "can_load.json").read_text())
    except (OSError, ValueError):
        return {}


def _version():
    return importlib.metadata.version("torch_xla")


def _key(device_type):
    return f"torch_xla {_version()} on {device_type}"
