"""Makes a checkpoint of a public model of the Llama family (Llama, SmolLM2, Qwen2, Qwen2.5-Coder, Qwen3):

    python3 -m scripts.import_hf ~/models/SmolLM2-135M --run=smollm2
    python3 -m scripts.import_hf gs://my-bucket/models/SmolLM2-135M --run=smollm2
    HF_TOKEN=… python3 -m scripts.import_hf ORG/NAME@COMMIT --run=smollm2      (without @COMMIT: the newest)

--checkpoint, --init_from and --teacher of the other scripts take it. docs/public.md says what is refused.
"""
from dataclasses import dataclass

from nanochat.common import BadInput, flag, not_empty, read_flags, run_script, say


@dataclass(frozen=True)
class Flags:
    place: str = flag(None, "a folder, gs://BUCKET/FOLDER or ORG/NAME of the Hub", positional=True, of=not_empty,
                      metavar="MODEL")
    run: str = flag("", "name of the run to make", of=not_empty)
    max_seq_len: int = flag(-1, "tokens of a row in training; default: the model's positions, at most 2,048",
                            at_least=1, unset=-1)


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    from nanochat.export.hub import import_model
    from nanochat.model.models import describe
    from nanochat.train.flags import Flags as TrainingFlags
    from nanochat.train.flags import RunFlags
    from nanochat.train.prepare import run_directory
    if not flags.run:
        raise BadInput("--run is needed: name the run to make")
    directory = run_directory(TrainingFlags(RunFlags(run=flags.run)))
    path, meta = import_model(flags.place, directory, None if flags.max_seq_len == -1 else flags.max_seq_len)
    source = meta.source
    say(f"{source['model']} is imported to {path}: {source['model_type']}, {source['dtype']}")
    say(f"model: {describe(meta.model_config)}")
    say(f"licence, as its model card states it: {source['licence'] or 'none is stated, so ask its makers'}")
    say(f"teach it your project: python3 -m scripts.adapt --checkpoint={flags.run} --source=FOLDER --run=NAME")


if __name__ == "__main__":
    run_script(main, "importing")
