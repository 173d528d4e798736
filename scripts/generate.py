"""Completes C++ from a checkpoint:

    python3 -m scripts.generate --checkpoint=RUN --prompt='int main(' --max_tokens=100
    python3 -m scripts.generate --checkpoint=RUN --prompt_file=half_written.cpp --num_samples=3 --temperature=0.5
    head -20 some.cpp | python3 -m scripts.generate

The completion goes to standard output, everything else to standard error.
"""
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from nanochat.common import BadInput, expand_path, flag, read_flags, run_script
from nanochat.device.ranks import compute_cleanup, compute_init, prepare_xla_environment
from nanochat.infer.engine import Engine
from nanochat.infer.load import ModelFlags, find_checkpoint, load_model, resolve_inference_device_type


@dataclass(frozen=True)
class PromptFlags:
    prompt: str | None = flag(None, "text to complete")
    prompt_file: Path | None = flag(None, "file whose text to complete", of=expand_path)
    echo: bool = flag(False, "print the prompt before each completion")

    def read(self):
        """Returns the prompt, as bytes. Raises BadInput if it cannot be read."""
        if self.prompt is not None and self.prompt_file is not None:
            raise BadInput("--prompt and --prompt_file are both given: give one of them")
        if self.prompt is not None:
            return os.fsencode(self.prompt)  # the bytes of the command line, which need not be UTF-8
        if self.prompt_file is None:
            return sys.stdin.buffer.read()
        try:
            return self.prompt_file.read_bytes()
        except OSError as error:
            raise BadInput(f"--prompt_file={self.prompt_file} cannot be read: {error.strerror}") from None


@dataclass(frozen=True)
class SamplingFlags:
    num_samples: int = flag(1, "number of completions", at_least=1)
    max_tokens: int = flag(-1, "tokens per completion; -1: 256, at most half of the context", at_least=1, unset=-1)
    temperature: float = flag(0.8, "0: always the likeliest token", at_least=0)
    top_k: int = flag(50, "draw from the k likeliest tokens; 0: from all", at_least=0)
    top_p: float = flag(1.0, "draw from the likeliest tokens that have this probability together", above=0, at_most=1)
    stop: list = flag(None, "text before which to stop, as in --stop=$'\\n}'; may be repeated", action="append")
    seed: int = flag(0, "the same seed gives the same text", at_least=0)


def main(argv=None):
    of_model, of_prompt, sampling = read_flags(argv, __doc__, {
        ModelFlags: "model", PromptFlags: "prompt (without any: standard input)", SamplingFlags: "sampling"})
    device_type = resolve_inference_device_type(of_model.device_type)
    prepare_xla_environment(device_type)
    path = find_checkpoint(of_model.checkpoint)
    prompt = of_prompt.read()
    dist = compute_init(device_type)
    model, tokenizer, meta = load_model(path, dist, tokenizer_dir=of_model.tokenizer_dir,
                                        quantize=of_model.quantize)
    print(f"{path}: step {meta.step}, on {dist.device}", file=sys.stderr)

    def show(text):
        print(text, end="", flush=True)

    def say_cut(num_tokens, num_read):
        print(f"the prompt has {num_tokens:,} tokens: only the last {num_read:,} are read, because the model sees "
              f"{model.config.max_seq_len:,} together with those of --max_tokens", file=sys.stderr)

    shown_prompt = prompt.decode(errors="replace") if of_prompt.echo else ""
    options = asdict(sampling) | {"stop": sampling.stop or [], "on_cut": say_cut}
    engine = Engine(model, tokenizer, dist)
    if sampling.num_samples == 1:
        show(shown_prompt)
        samples = engine.completions(prompt, on_text=lambda sample, text: show(text), **options)
        show("\n")
    else:  # they are generated together, so they are shown at the end
        samples = engine.completions(prompt, **options)
        for i, sample in enumerate(samples):
            show(f"--- sample {i + 1} of {len(samples)}, seed {sampling.seed + i}\n{shown_prompt}{sample.text}\n")
    took = engine.timings
    print(f"{took.predicted_tokens} tokens in {took.predicted_ms / 1000:.1f} s, {took.prompt_tokens} of the prompt in "
          f"{took.prompt_ms / 1000:.1f} s{', compilation included' if dist.is_xla else ''}", file=sys.stderr)
    compute_cleanup(dist)


if __name__ == "__main__":
    run_script(main)
