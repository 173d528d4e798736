"""Completes C++ from a checkpoint:

    python3 -m scripts.generate --checkpoint=RUN --prompt='int main(' --max_tokens=100
    python3 -m scripts.generate --checkpoint=RUN --prompt_file=half_written.cpp --num_samples=3 --temperature=0.5
    head -20 some.cpp | python3 -m scripts.generate

The completion goes to standard output, everything else to standard error.
"""
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nanochat.checkpoint.on_disk import find_checkpoint
from nanochat.common import BadInput, expand_path, flag, read_flags, read_named, run_script
from nanochat.device.ranks import prepare_xla_environment
from nanochat.infer.flags import ModelFlags, resolve_inference_device_type
from nanochat.infer.on_mesh import MeshFlags, run_on_mesh
from nanochat.infer.sample import Sampling

MESH_KERNEL = "chunked"  # it can compute with parts of the weights


@dataclass(frozen=True)
class PromptFlags:
    prompt: str | None = flag(None, "text to complete")
    prompt_file: Path | None = flag(None, "file to complete", of=expand_path)
    echo: bool = flag(False, "print the prompt before each completion")

    def read(self):
        """Returns the prompt, as bytes. Raises BadInput if it cannot be read."""
        if self.prompt is not None and self.prompt_file is not None:
            raise BadInput("--prompt and --prompt_file are both given: leave one out")
        if self.prompt is not None:
            return os.fsencode(self.prompt)  # the bytes of the command line, which need not be UTF-8
        if self.prompt_file is None:
            return sys.stdin.buffer.read()
        return read_named("prompt_file", self.prompt_file)


def main(argv=None):
    of_model, of_prompt, sampling, of_mesh = read_flags(argv, __doc__, {
        ModelFlags: "model", PromptFlags: "prompt (without any: standard input)", Sampling: "sampling",
        MeshFlags: "mesh"})
    from nanochat.infer.load import load_language_meta
    device_type = resolve_inference_device_type(of_model.device_type)
    prepare_xla_environment(device_type)
    path = find_checkpoint(of_model.checkpoint)
    mesh = of_mesh.mesh(load_language_meta(path).model_config, device_type, MESH_KERNEL)
    prompt = of_prompt.read()
    return run_on_mesh(partial(complete, of_model, path, prompt, of_prompt.echo, sampling, mesh), mesh,
                       device_type)


def complete(of_model, path, prompt, echo, sampling, mesh, dist):
    """Completes the bytes `prompt` with the checkpoint at `path`, as one rank of a Mesh: all draw the same tokens, rank
    0 prints them."""
    from nanochat.infer.engine import Engine
    from nanochat.infer.load import load_model
    model, tokenizer, meta = load_model(path, dist, tokenizer_dir=of_model.tokenizer_dir, quantize=of_model.quantize,
                                        kernel=MESH_KERNEL if mesh.divides_weights else "auto", mesh=mesh)

    def say(text):
        if dist.rank == 0:
            print(text, file=sys.stderr)

    def show(text):
        if dist.rank == 0:
            print(text, end="", flush=True)

    def say_cut(num_tokens, num_read):
        say(f"the prompt has {num_tokens:,} tokens: only the last {num_read:,} are read, because the model sees "
            f"{model.config.max_seq_len:,} including those of --max_tokens")

    say(f"{path}: step {meta.step}, on {mesh if mesh.divides_weights else dist.device}")
    shown_prompt = prompt.decode(errors="replace") if echo else ""
    engine = Engine(model, tokenizer, dist)
    if sampling.num_samples == 1:
        show(shown_prompt)
        engine.completions(prompt, sampling, lambda sample, text: show(text), say_cut)
        show("\n")
    else:  # generated together, so shown at the end
        samples = engine.completions(prompt, sampling, on_cut=say_cut)
        for i, sample in enumerate(samples):
            show(f"--- sample {i + 1} of {len(samples)}, seed {sampling.seed + i}\n{shown_prompt}{sample.text}\n")
    took = engine.timings
    compilation = ", compilation included" if dist.is_xla else ""
    say(f"{took.predicted_tokens} tokens in {took.predicted_ms / 1000:.1f} s, {took.prompt_tokens} of the prompt in "
        f"{took.prompt_ms / 1000:.1f} s{compilation}")


if __name__ == "__main__":
    run_script(main)
