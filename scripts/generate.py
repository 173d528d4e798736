"""Completes C++ from a checkpoint:

    python3 -m scripts.generate --checkpoint=RUN --prompt='int main(' --max_tokens=100
    python3 -m scripts.generate --checkpoint=RUN --prompt_file=half_written.cpp --num_samples=3 --temperature=0.5
    head -20 some.cpp | python3 -m scripts.generate

The completion goes to standard output, everything else to standard error.
"""
import sys
import time
from pathlib import Path

from nanochat.common import ArgumentParser, BadInput, run_script
from nanochat.device.ranks import (
    DEVICE_TYPES,
    compute_cleanup,
    compute_init,
    prepare_xla_environment,
    resolve_device_type,
)
from nanochat.infer.engine import Engine
from nanochat.infer.load import find_checkpoint, load_model


def parse_args(argv=None):
    parser = ArgumentParser(prog="python3 -m scripts.generate", description=__doc__)
    add = parser.add_argument_group("model").add_argument
    add("--checkpoint", default="", help="a run (its newest checkpoint), RUN/step_000100 or a path; none: the newest")
    add("--tokenizer_dir", help="default: $NANOCHAT_BASE_DIR/tokenizer if it exists, else the shipped one")
    add("--device_type", default="auto", help="one of " + ", ".join(DEVICE_TYPES))
    add = parser.add_argument_group("prompt (without any: standard input)").add_argument
    add("--prompt", help="text to complete")
    add("--prompt_file", help="file whose text to complete")
    add("--echo", action="store_true", help="print the prompt before each completion")
    add = parser.add_argument_group("sampling").add_argument
    add("--num_samples", type=int, default=1, help="number of completions")
    add("--max_tokens", type=int, default=-1, help="tokens per completion; -1: 256, at most half of the context")
    add("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    add("--top_k", type=int, default=50, help="draw from the k likeliest tokens; 0: from all")
    add("--top_p", type=float, default=1.0, help="draw from the likeliest tokens that have this probability together")
    add("--stop", action="append", default=[], help="text before which to stop, as in --stop=$'\\n}'; may be repeated")
    add("--seed", type=int, default=0, help="the same seed gives the same text")
    return parser.parse_args(argv)


def read_prompt(args):
    """Returns the prompt that the flags name, as bytes or str. Raises BadInput if it cannot be read."""
    if args.prompt is not None and args.prompt_file is not None:
        raise BadInput("--prompt and --prompt_file are both given: give one of them")
    if args.prompt is not None:
        return args.prompt
    if args.prompt_file is None:
        return sys.stdin.buffer.read()
    try:
        return Path(args.prompt_file).read_bytes()
    except OSError as error:
        raise BadInput(f"--prompt_file={args.prompt_file} cannot be read: {error.strerror}") from None


def main(argv=None):
    args = parse_args(argv)
    device_type = resolve_device_type(args.device_type)
    prepare_xla_environment(device_type)
    path = find_checkpoint(args.checkpoint)
    prompt = read_prompt(args)
    dist = compute_init(device_type)
    model, tokenizer, meta = load_model(path, dist, tokenizer_dir=args.tokenizer_dir)
    print(f"{path}: step {meta.step}, on {dist.device}", file=sys.stderr)

    def show(text):
        print(text, end="", flush=True)

    shown_prompt = ""
    if args.echo:
        shown_prompt = prompt if isinstance(prompt, str) else prompt.decode(errors="replace")
    start = time.monotonic()
    options = dict(num_samples=args.num_samples, max_tokens=args.max_tokens, temperature=args.temperature,
                   top_k=args.top_k, top_p=args.top_p, stop=args.stop, seed=args.seed)
    engine = Engine(model, tokenizer, dist)
    if args.num_samples == 1:
        show(shown_prompt)
        texts = engine.completions(prompt, on_text=lambda sample, text: show(text), **options)
        show("\n")
    else:  # they are generated together, so they are shown at the end
        texts = engine.completions(prompt, **options)
        for i, text in enumerate(texts):
            show(f"--- sample {i + 1} of {len(texts)}, seed {args.seed + i}\n{shown_prompt}{text}\n")
    num_tokens = sum(len(tokenizer.encode(text)) for text in texts)
    print(f"{num_tokens} tokens in {time.monotonic() - start:.1f} s, compilation included", file=sys.stderr)
    compute_cleanup(dist)


if __name__ == "__main__":
    run_script(main)
