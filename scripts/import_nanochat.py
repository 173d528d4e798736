"""Converts a checkpoint of karpathy/nanochat into one of this project, to complete, evaluate or export it:

    python3 -m scripts.import_nanochat --model=d32/model_000650.pt --tokenizer_dir=d32 --run=d32
    python3 -m scripts.generate --checkpoint=d32 --tokenizer_dir=d32 --prompt='The capital of France is'

It takes nanochat's models until January 2026, such as d20, d32 and d34 of 2025. Later ones have value embeddings with
their own gates, which the model here lacks.
"""
from dataclasses import asdict, dataclass
from pathlib import Path

from nanochat.checkpoint.meta import Meta
from nanochat.checkpoint.on_disk import list_checkpoints
from nanochat.checkpoint.saver import save_checkpoint
from nanochat.common import BadInput, expand_path, flag, read_flags, require_writable_dir, run_script
from nanochat.data.tokenizer import TokenizerFlags, check_tokenizer, load_tokenizer
from nanochat.export.from_nanochat import convert, read_meta, read_weights
from nanochat.train.flags import Flags as TrainFlags
from nanochat.train.flags import RunFlags
from nanochat.train.prepare import run_directory


@dataclass(frozen=True)
class Flags(TokenizerFlags):
    model: Path | None = flag(None, "nanochat's model_STEP.pt, with meta_STEP.json beside it", of=expand_path)
    run: str = flag("", "name of the run to make, of which this becomes the only checkpoint")


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    if flags.model is None or not flags.run:
        raise BadInput("--model and --run are needed: name nanochat's model_STEP.pt, and the run to make of it")
    run_dir = run_directory(TrainFlags(RunFlags(flags.run)))
    if list_checkpoints(run_dir):
        raise BadInput(f"--run={flags.run} has checkpoints already ({run_dir}): choose another name")
    step, config = read_meta(flags.model)
    tokenizer = load_tokenizer(flags.tokenizer_dir)
    check_tokenizer(tokenizer, config.vocab_size)
    state = convert(read_weights(flags.model), config, flags.model)
    # Without lanes and optimizer state no training can resume from it. is_pause: the time since then counts as no run's
    # lost time.
    meta = Meta(step=step, config=asdict(config), tokenizer_sha256=tokenizer.sha256, data_fingerprint="imported",
                flags={}, rng="", is_pause=True)
    path = save_checkpoint(require_writable_dir(run_dir), state, {}, meta, num_lanes=0)
    print(f"{flags.model} is now {path}: it can be completed, evaluated and exported, but not trained further")


if __name__ == "__main__":
    run_script(main)
