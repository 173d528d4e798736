"""Adapts a trained model to a C++ project of your own, and says what that gains on files which it did not train on:

    python3 -m scripts.adapt --checkpoint=RUN --source=~/src/project

It holds out a tenth of the text (200 kB at most). It trains on the rest and, for as many tokens, on the data of RUN, so
that the model forgets little. Training ends after --epochs or --minutes, or once the old text is more than 3% worse.
The result is the checkpoint that is best on the held-out files, of those before. After Ctrl-C during the training, the
same command resumes it.

RUN may be a public model (scripts.import_hf). Nobody knows its data: name shards like it with --data_dir and --val_dir,
or the C++ headers that are installed here stand for it. It learns to fill gaps, too, if its tokenizer has tokens to
spare.
"""
import json
import os
import shlex
import shutil
import time
from dataclasses import asdict, dataclass, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nanochat.checkpoint.on_disk import MODEL, find_checkpoint
from nanochat.common import (
    BadInput,
    flag,
    get_base_dir,
    locked,
    read_flags,
    require_writable_dir,
    run_script,
    work,
    written_whole,
)
from nanochat.data.hub_files import pinned
from nanochat.data.shards import DEFAULT_DIRS, TextFlags, open_shards, open_text, read_columns, whole_texts
from nanochat.data.storage import data_place, is_remote
from nanochat.data.tokenizer import FIM_TOKENS, load_tokenizer
from nanochat.device.ranks import resolve_device_type
from nanochat.record.history import read_run
from nanochat.record.metrics import METRICS_FILE, format_duration
from nanochat.run.processes import (
    begin_with_parent,
    expected_world_size,
    require_success,
    run_module,
    started_module,
)
from nanochat.run.stopping import EXIT_STATUS
from scripts.prepare_data import choose_held_out

HELD_OUT = 0.1  # of the project's text
HELD_OUT_CHARS = 200_000  # at most: evaluations read all of it, because the beginnings of files are mostly licences
SAMPLED_TEXTS = 200  # of the project, whose tokens are counted
EVAL_TOKENS = 2**17  # of the project and the old data together
EVALUATIONS = 4
MOST_LOSS = 1.03  # of the old text's bits per byte, × those before
EVALUATION_SHARE = 0.25  # of --minutes, for all evaluations together on a CPU
ROWS, ROW_TOKENS = 2, 512  # of a step with imported weights, on each device
FIM_RATE = 0.5  # of imported weights
SHOWN = 3  # completions
SHOWN_CHARS = 2000  # of the text before each
SHOWN_TOKENS = 32
KEPT = ("tokenizer_dir", "device_batch_size")  # flags of RUN
RATE = 0.15
RATES = ("matrix_lr", "embedding_lr", "unembedding_lr", "scalar_lr")
UNFINISHED_FILE = "training.json"  # of a training that has not ended: the flags of adapt, and those of base_train


@dataclass(frozen=True)
class Flags:
    checkpoint: str = flag("", "a run (its newest checkpoint), RUN/step_000100 or a path; default: the newest of all")
    source: str | None = flag(None, "your project: a folder, checkout or tarball; several with commas", required=True)
    run: str = flag("adapted", "name of the new run")
    data_dir: str | None = flag(None, "shards that the model was trained on; default: those of its run", of=data_place)
    val_dir: str | None = flag(None, "its validation shards; default: those of its run", of=data_place)
    epochs: float = flag(6.0, "passes over the project, at most", above=0, at_most=1000)
    minutes: float = flag(10.0, "minutes on a CPU with the evaluations, about and at most", above=0)
    rate: float = flag(RATE, "learning rates, relative to the highest of the first training; of the Llama family: 0.15 "
                       "is 1e-4", above=0, at_most=10)
    device_type: str = flag("auto", "devices to train on, as for base_train; without a TPU or GPU, imported weights "
                            "train in eager PyTorch (cpu)")


def divide(shards, folder):
    """Writes the files of the project in `shards` to folder/train and, about a tenth of the text, to folder/val."""
    files = {}
    for shard in shards:
        for text, source, path in read_columns(shard, "source", "path"):
            # A hash of the name decides what is held out: "unknown", as ever, so that the figures in docs/ stay true.
            name = f"unknown/{path}"
            files[f"{source}/{path}" if name in files else name] = text.decode(errors="replace")
    if len(files) < 2:
        raise BadInput("the project has a single C++ file that is no copy of another, and one must be held out: name a "
                       "larger project")
    sizes = {name: len(text) for name, text in files.items()}
    held_out = choose_held_out(sizes, min(HELD_OUT * sum(sizes.values()), HELD_OUT_CHARS))
    names = [name for name in files if name not in held_out]
    for split, chosen in (("train", names), ("val", held_out)):
        (folder / split).mkdir(parents=True, exist_ok=True)
        table = pa.table({"text": [files[name] for name in chosen]})
        pq.write_table(table, folder / split / "shard_00000.parquet", row_group_size=256)
    print(f"{len(names)} files to train on, {len(held_out)} held out", flush=True)


def old_data(flags, meta, path):
    """Returns {split: folder} of the shards that the model was trained and validated on, or None if nothing is known of
    imported weights. Raises BadInput."""
    from nanochat.train.flags import named_places
    if not (meta.flags or flags.data_dir or flags.val_dir):
        return None
    of_mixture = meta.flags.get("data_mix") or (meta.flags.get("data_dir") or "").endswith(".toml")
    if of_mixture and not flags.data_dir:
        raise BadInput(f"{path} was trained on a mixture: name the folder of its shards to train on with --data_dir")
    found = {}
    for split, name in (("train", "data_dir"), ("val", "val_dir")):
        place = getattr(flags, name) or meta.flags.get(name) or str(get_base_dir() / DEFAULT_DIRS[split])
        place = pinned(next(iter(named_places(place).values()), place))
        open_text(TextFlags(place), split)  # raises BadInput
        found[split] = place if is_remote(place) else os.path.abspath(place)
    return found


def batch_of(flags, meta):
    """Returns the tokens of a step, and of a row: those of RUN's training, or small ones for imported weights."""
    if meta.flags:
        return meta.total_batch_size, meta.model_config.max_seq_len
    row = min(ROW_TOKENS, meta.model_config.max_seq_len)
    return ROWS * row * expected_world_size(flags.device_type), row


def count_steps(flags, meta, own, tokenizer):
    """Returns the steps of the training, half of whose tokens are of the project, and the tokens of an evaluation. own:
    the Shards of the project."""
    from nanochat.train.describe import seconds_of_row
    from nanochat.train.flags import DeviceFlags
    work.begin("measuring how fast this machine is")
    tokens, row = batch_of(flags, meta)
    sample = list(islice(whole_texts(own), SAMPLED_TEXTS))
    of_sample = sum(map(len, tokenizer.encode_documents(sample)))
    own_tokens = of_sample * sum(shard.num_documents for shard in own) / max(1, len(sample))
    steps_per_epoch = own_tokens / (tokens / 2)
    steps = flags.epochs * steps_per_epoch
    time = ""
    eval_tokens = EVAL_TOKENS
    if flags.device_type in ("cpu", "xla"):
        config = meta.model_config.with_rows(row)
        dtype = DeviceFlags(compute_dtype=dtype_for(flags.device_type)).dtype_on(flags.device_type)
        # A process of its own, because 2 GB of its memory would stay in use. The first row warms up.
        with get_context("spawn").Pool(1, begin_with_parent) as process:
            seconds = min(process.starmap(seconds_of_row, [(config, dtype)] * 3)) / row  # of a token
        steps = max(EVALUATIONS, min(steps, (1 - EVALUATION_SHARE) * 60 * flags.minutes / (seconds * tokens)))
        # An evaluation takes a third of the time of training on its tokens.
        most = EVALUATION_SHARE * 60 * flags.minutes / (EVALUATIONS + 1) / (seconds / 3)
        eval_tokens = round(min(max(most, 8 * row), EVAL_TOKENS))
        evaluating = (EVALUATIONS + 1) * eval_tokens / 3
        time = f", in about {format_duration(seconds * (round(steps) * tokens + evaluating))}"
    work.begin("")
    steps = EVALUATIONS * max(1, round(steps / EVALUATIONS))  # so that the last one has its evaluation
    epochs = steps / steps_per_epoch
    print(f"{steps} steps of {tokens:,} tokens, {epochs:.1f} passes over the project, and {EVALUATIONS + 1} "
          f"evaluations of {eval_tokens:,} tokens{time}", flush=True)
    if epochs < 0.1:
        print(f"warning: {steps} steps see little of the project: raise --minutes={flags.minutes:g}", flush=True)
    return steps, eval_tokens


def device_for(device_type, meta):
    """Returns the device type to train on, for that of --device_type."""
    found = resolve_device_type(device_type)
    # In fp32, XLA takes a third longer for a step of SmolLM2-135M than eager PyTorch, and compiles for 59 s.
    return "cpu" if (device_type, found) == ("auto", "xla") and not meta.flags else found


def dtype_for(device_type):
    """Returns the --compute_dtype to train with on a device type. A CPU that has products in bfloat16 needs 4.5 s for a
    step of SmolLM2-135M with them, and 6.6 s in fp32."""
    import torch
    return "bfloat16" if device_type == "cpu" and torch.cpu._is_avx512_bf16_supported() else "auto"


def fim_rate_for(meta, tokenizer):
    """Returns the part of the documents that get a gap."""
    if meta.flags:
        return meta.flags.get("fim_rate", 0.0)
    return FIM_RATE if set(FIM_TOKENS) <= set(tokenizer.special_tokens) else 0.0


def training_flags(flags, path, meta, steps, folder, fim_rate, eval_tokens=EVAL_TOKENS):
    """Returns the flags of base_train, for so many steps from the checkpoint at `path`, which has the Meta. flags: of
    adapt, with the device type to train on. folder: of the mixture."""
    tokens, row = batch_of(flags, meta)
    every = max(1, steps // EVALUATIONS)
    found = [f"--run={flags.run}", f"--init_from={path}", f"--data_dir={folder / 'mix.toml'}",
             f"--num_iterations={steps}", "--warmdown_ratio=1", *rate_flags(flags, meta, steps),
             f"--total_batch_size={tokens}", f"--eval_every={every}", f"--eval_tokens={eval_tokens}",
             "--sample_every=-1", f"--save_every={every}", "--keep_checkpoints=100",
             f"--device_type={flags.device_type}", f"--compute_dtype={dtype_for(flags.device_type)}",
             f"--fim_rate={fim_rate:g}",
             # Each lane reads other files from their first line on. So few lanes see whole files in a short training,
             # and many would see beginnings, mostly licences.
             f"--num_lanes={expected_world_size(flags.device_type)}"]
    if not meta.flags:
        found += [f"--max_seq_len={row}", f"--device_batch_size={ROWS}"]
    for name in KEPT:
        if meta.flags.get(name) not in (None, ""):
            found.append(f"--{name}={meta.flags[name]}")
    return found


# A run that begins with another's weights has the rates of a long run, and decays within its own length. This one has
# the pace of the first training instead: its factor for the length, and its decay in a step.
def rate_flags(flags, meta, steps):
    """Returns the flags of the rates and the decay of a training of so many steps."""
    from nanochat.model.rates import run_lr_scale
    if meta.model_config.has_begun_rate:
        return [f"--lr_scale={flags.rate / RATE:g}"]
    saved = meta.flags
    rate_horizon = saved.get("rate_horizon", -1)  # see StartFlags
    horizon = next(n for n in (rate_horizon, saved["num_iterations"], meta.step) if n > 0)
    lr_scale = saved.get("lr_scale", 1.0)
    if rate_horizon:
        lr_scale *= run_lr_scale(meta.total_batch_size * horizon)
    found = [f"--lr_scale={lr_scale}", f"--weight_decay={saved['weight_decay'] * steps / horizon}"]
    for name in RATES:
        found.append(f"--{name}={saved[name] * flags.rate:g}")
    return found


def prepare(flags, path, meta, old, folder):
    """Prepares the project in `folder`, and returns the flags of its training."""
    tokenizer = load_tokenizer(meta.flags.get("tokenizer_dir"), path)
    flags = replace(flags, device_type=device_for(flags.device_type, meta))
    for name in ("project", "old"):
        shutil.rmtree(folder / name, ignore_errors=True)  # of a try that ended before it trained
    run_module("scripts.prepare_data", f"--source={flags.source}", f"--out_dir={folder / 'project'}", "--eval_only")
    divide(open_shards(sorted((folder / "project" / "val").glob("*.parquet"))), folder / "own")
    own = open_shards([folder / "own" / "train" / "shard_00000.parquet"])
    steps, eval_tokens = count_steps(flags, meta, own, tokenizer)
    if old is None:
        run_module("scripts.prepare_data", "--installed_headers", "--val_projects=torch/c10",
                   f"--out_dir={folder / 'old'}")
        old = {split: str(folder / "old" / os.path.basename(place)) for split, place in DEFAULT_DIRS.items()}
    mixture = {"own": {"train": "own/train", "val": "own/val"}, "old": old}
    lines = []
    for name, places in mixture.items():
        train, val = (json.dumps(places[split], ensure_ascii=False) for split in ("train", "val"))  # as TOML has texts
        lines.append(f"[sources.{name}]\ndir = {train}\nval = {val}\nweight = 1\n")
    (folder / "mix.toml").write_text("".join(lines), encoding="utf-8")
    return training_flags(flags, path, meta, steps, folder, fim_rate_for(meta, tokenizer), eval_tokens)


def evaluations(directory):
    """Returns three arrays: the steps of the evaluations of the run in this directory, and the bits per byte of the
    project and of the old text. They are empty before the first."""
    try:
        run = read_run(str(directory))
    except BadInput:  # it has no records yet
        return np.array([]), np.array([]), np.array([])
    steps, own = run.series("val_bpb_own")
    return steps, own, run.series("val_bpb_old")[1]


def loses_too_much(directory):
    """Returns whether the newest evaluation of the old text is MOST_LOSS times as high as the first."""
    old = evaluations(directory)[2]
    return len(old) > 0 and old[-1] > MOST_LOSS * old[0]


def train(training, directory):
    """Runs base_train with these flags until its end, or until the old text loses too much."""
    with started_module("scripts.base_train", *training) as process:
        while process.poll() is None and not loses_too_much(directory):
            time.sleep(1)
        if process.poll() is None:  # base_train saves whenever it evaluates, so the stop loses nothing
            print("the old text loses too much", flush=True)
            process.terminate()
            if process.wait() == EXIT_STATUS:
                return
    require_success("scripts.base_train", process.returncode)


def report(flags, directory, training, folder):
    """Says what the training, of these flags of base_train, has gained. directory: of its run. folder: of the
    project's text."""
    steps, own, old = evaluations(directory)
    if not len(steps) or steps[0]:
        raise BadInput("the first evaluation failed, so what was gained is unknown: see above")
    best = min(np.flatnonzero(old <= MOST_LOSS * old[0]), key=lambda place: own[place])
    for name, values in (("its held-out files", own), ("the old validation text", old)):
        change = values[best] / values[0] - 1
        print(f"{name}: {values[0]:.4f} -> {values[best]:.4f} bits per byte ({change:+.1%})")
    if not best:
        print("nothing was gained: keep the model as it is")
        return
    given = dict(word.removeprefix("--").split("=", 1) for word in training)
    tokenizer_dir = given.get("tokenizer_dir")
    checkpoint = f"step_{steps[best]:06d}"
    show_completions((Path(given["init_from"]), directory / checkpoint), tokenizer_dir, folder)
    command = ["python3", "-m", "scripts.serve", f"--checkpoint={flags.run}/{checkpoint}"]
    if tokenizer_dir:
        command.append(f"--tokenizer_dir={tokenizer_dir}")
    print(f"complete with it: {shlex.join(command)}")


def show_completions(paths, tokenizer_dir, folder):
    """Prints a line of a few held-out files, and how the models at `paths`, before and after, continue the text before
    it."""
    if not all((path / MODEL).exists() for path in paths):
        return  # a user may have moved the first model meanwhile
    from nanochat.device.ranks import compute_init
    from nanochat.infer.engine import Engine
    from nanochat.infer.load import load_model
    from nanochat.infer.sample import Sampling
    work.begin("writing examples with the model before and after")
    texts = whole_texts(open_shards([folder / "own" / "val" / "shard_00000.parquet"]))
    places = [place for place in map(middle_line, texts) if place][:SHOWN]
    dist = compute_init("cpu")
    lines = [[line.strip() for _, line in places]]
    for path in paths:
        model, tokenizer, _ = load_model(path, dist, tokenizer_dir=tokenizer_dir)
        engine = Engine(model, tokenizer, dist)
        sampling = Sampling(max_tokens=min(SHOWN_TOKENS, model.config.max_seq_len // 2), temperature=0)
        found = [engine.completions(before, sampling) for before, _ in places]
        lines.append([sample.text.strip().partition("\n")[0] for (sample,) in found])
    for line, before, after in zip(*lines, strict=True):
        print(f"a line of a held-out file: {line}\n  the model wrote before: {before}\n  it writes now: {after}")


def middle_line(text):
    """Returns the text before the first line of code in the second half of a file, and that line, or None."""
    lines = text.splitlines(keepends=True)
    for number in range(len(lines) // 2, len(lines)):
        if len(lines[number].strip()) > 20 and not lines[number].lstrip().startswith(("//", "*", "/*")):
            return "".join(lines[:number])[-SHOWN_CHARS:], lines[number]
    return None


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"}, gone={
        "fim_rate": "gaps are those of the model's own training: leave it out"})
    from nanochat.infer.load import load_language_meta
    from nanochat.train.flags import Flags as TrainFlags
    from nanochat.train.flags import RunFlags
    from nanochat.train.prepare import run_directory
    directory = run_directory(TrainFlags(RunFlags(flags.run)))
    folder = require_writable_dir(get_base_dir() / "adapt" / flags.run)
    unfinished = folder / UNFINISHED_FILE
    busy = f"--run={flags.run} is in use by another process: wait for its end, or choose another name"
    with locked(folder / ".lock", busy):
        if (directory / METRICS_FILE).exists():
            given = json.loads(unfinished.read_text()) if unfinished.exists() else {}
            if given.get("flags") != asdict(flags):
                raise BadInput(f"--run={flags.run} is there already ({directory}): choose another name, delete it, or, "
                               "if it has not ended, give the flags that it began with")
            training = given["training"]
        else:
            path = find_checkpoint(flags.checkpoint)
            meta = load_language_meta(path)
            training = prepare(flags, path, meta, old_data(flags, meta, path), folder)
            with written_whole(unfinished) as file:
                file.write_text(json.dumps({"flags": asdict(flags), "training": training}))
        if not loses_too_much(directory):
            train(training, directory)
        report(flags, directory, training, folder)
        unfinished.unlink()


if __name__ == "__main__":
    run_script(main)
