"""Takes the place of a VM's venv/bin/python: the scripts see a base_train that does not train.

It also prints the number of chips for setup.sh. Its own flags are --step_s, --crash_at=STEP (every time),
--hang_at=STEP (once), --bad_input and --checkpoint_bytes. A file `refuses` in the mirror's folder lets copies fail.
"""
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path


def count_chips():
    print(os.environ.get("FAKE_CHIPS", "8"))


def newest(directory):
    return max(directory.glob("step_*"), default=None)


def train(flags):
    if "bad_input" in flags:
        print("error: --bad_input=1 is bad: leave it out", file=sys.stderr)
        return 2
    run, steps = flags.get("run", "dummy"), int(flags.get("num_iterations", 5))
    mirror = Path(flags["checkpoint_mirror"]) if "checkpoint_mirror" in flags else None
    base = Path(os.environ.get("NANOCHAT_BASE_DIR") or Path.home() / ".cache/nanochat")
    run_dir = base / "checkpoints" / run
    run_dir.mkdir(parents=True, exist_ok=True)
    if mirror and not newest(run_dir) and newest(mirror):
        shutil.copytree(newest(mirror), run_dir / newest(mirror).name)
        shutil.copy(mirror / "metrics.jsonl", run_dir / "metrics.jsonl")
    first = int(newest(run_dir).name[5:]) if newest(run_dir) else 0
    stop = []
    state = {"mirror": str(mirror), "newest_saved": None, "newest_copied": None, "behind_since": None, "error": None}

    def on_signal(*_):
        if stop:
            os._exit(1)  # as base_train: a second signal ends it at once
        stop.append(1)

    signal.signal(signal.SIGTERM, on_signal)

    def copy(name):
        """Copies a checkpoint to the mirror, and writes mirror.json as base_train does."""
        state["newest_saved"] = name
        if (mirror / "refuses").exists():
            state["behind_since"] = state["behind_since"] or time.time()
            state["error"] = "403 the account may not write"
        else:
            # A kill can come between any two lines: as in the real mirror, a copy that can be seen is whole, and the
            # metrics up to its step are there before it.
            shutil.copy(run_dir / "metrics.jsonl", mirror / "metrics.part")
            (mirror / "metrics.part").rename(mirror / "metrics.jsonl")
            if not (mirror / name).exists():
                shutil.rmtree(mirror / "copy.part", ignore_errors=True)
                shutil.copytree(run_dir / name, mirror / "copy.part")
                (mirror / "copy.part").rename(mirror / name)
            state.update(newest_copied=name, behind_since=None, error=None)
        (run_dir / "mirror.json.part").write_text(json.dumps(state))
        (run_dir / "mirror.json.part").rename(run_dir / "mirror.json")

    def save(step):
        part = run_dir / f"part_{step:06d}"
        part.mkdir(exist_ok=True)
        (part / "model.safetensors").write_text(f"weights of step {step}")
        (part / "optimizer").write_bytes(bytes(int(flags.get("checkpoint_bytes", 0))))
        part.rename(run_dir / f"step_{step:06d}")
        if mirror:
            mirror.mkdir(parents=True, exist_ok=True)
            copy(f"step_{step:06d}")

    kept = run_dir / "metrics.jsonl"
    records = kept.read_text().splitlines() if kept.exists() else []
    kept.write_text("".join(line + "\n" for line in records if json.loads(line)["step"] <= first))
    print(f"plan: run {run}, {steps} steps, from step {first}, PJRT_DEVICE={os.environ.get('PJRT_DEVICE')}", flush=True)
    for step in range(first + 1, steps + 1):
        time.sleep(float(flags.get("step_s", 0.05)))
        if step == int(flags.get("crash_at", -1)):
            raise RuntimeError(f"crash at step {step}, as asked")
        if step == int(flags.get("hang_at", -1)) and not (run_dir / "hung").exists():
            (run_dir / "hung").touch()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(10000)
        record = {"step": step, "time": time.time(), "loss": 5 / step, "tokens_per_s": 175000.0, "mfu": 0.312,
                  "time_left_s": 3661.0}
        with open(kept, "a") as file:
            file.write(json.dumps(record) + "\n")
        print(f"step {step:05d}/{steps:05d} | loss {5 / step:.4f}", flush=True)
        if step == steps or step % int(flags.get("save_every", 1000)) == 0:
            save(step)
        if stop:
            if not (run_dir / f"step_{step:06d}").exists():
                save(step)
            while mirror and (mirror / "refuses").exists():  # it waits for the mirror
                time.sleep(0.1)
            if mirror:
                copy(f"step_{step:06d}")
            print("preempted: state saved", flush=True)
            return 75
    return 0


def check(flags):
    folder = Path(flags["out_dir"]) / "check"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "check.json").write_text("{}")
    (folder / "check.toml").write_text(f"depth = {flags['depth']}")
    print("kernels: NOT as expected")
    return 1


if __name__ == "__main__":
    if sys.argv[1] == "-c":
        count_chips()
    elif sys.argv[1:3] == ["-m", "pip"]:
        print("pip", *sys.argv[3:])
    elif sys.argv[1:4] == ["-u", "-m", "scripts.tpu_check"]:
        sys.exit(check(dict(flag[2:].split("=", 1) for flag in sys.argv[4:])))
    else:
        assert sys.argv[1:4] == ["-u", "-m", "scripts.base_train"], sys.argv
        sys.exit(train(dict(flag[2:].split("=", 1) for flag in sys.argv[4:])))
