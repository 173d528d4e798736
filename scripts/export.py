"""Exports a checkpoint for other programs: a folder for Hugging Face's transformers, or a file for llama.cpp:

    python3 -m scripts.export --checkpoint=RUN --out=my_model
    python3 -m scripts.export --checkpoint=RUN --out=my_model.gguf

An incomplete export never has the name --out.
"""
import os
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from nanochat.checkpoint.on_disk import MODEL, find_checkpoint
from nanochat.common import BadInput, expand_path, flag, is_disk_full, not_empty, read_flags, run_script
from nanochat.data.tokenizer import TokenizerFlags
from nanochat.device.ranks import Dist
from nanochat.infer.prompt import fills_gaps

GGUF_KINDS = ("f16", "q8_0")


@dataclass(frozen=True)
class Flags(TokenizerFlags):
    out: Path | None = flag(None, "folder to make, or *.gguf", of=expand_path)
    gguf: str | None = flag(None, "the type of the matrices in a *.gguf; default: f16", choices=GGUF_KINDS)
    checkpoint: str = flag("", "a run (its newest checkpoint), RUN/step_000100 or a path; none: the newest",
                           of=not_empty)


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"}, gone={
        "format": "model.safetensors is in the folder that --out names, and --out=NAME.gguf is for llama.cpp",
        "force": "delete the old export, or name another --out"})
    import torch

    from nanochat.export import export, llama, llama_cpp, model_card
    from nanochat.infer.load import load_model
    if flags.out is None:
        raise BadInput("--out is needed: name the folder or file to make")
    is_gguf = flags.out.suffix.lower() == export.GGUF
    if flags.gguf and not is_gguf:
        raise BadInput(f"--gguf={flags.gguf} is for a file of llama.cpp, and --out={flags.out} does not end in .gguf")
    if is_gguf:
        llama_cpp.require_package()
    out = Path(os.path.abspath(flags.out))
    path = find_checkpoint(flags.checkpoint).absolute()
    if path in out.parents:
        raise BadInput(f"--out={out} is in the checkpoint {path}: name another place")
    model_bytes = sum(file.stat().st_size for file in path.glob(f"{Path(MODEL).stem}*.safetensors"))
    try:
        # A tenth more than the weights, for the tokenizer and the card.
        with export.new_place(out, 1.1 * model_bytes) as folder:
            model, tokenizer, meta = load_model(path, Dist("cpu", torch.device("cpu")),
                                                tokenizer_dir=flags.tokenizer_dir)
            export.check_exportable(model)
            if is_gguf:
                llama_cpp.write_gguf(folder / "model.gguf", path, model, tokenizer, meta, flags.gguf or "f16")
            else:
                card = model_card.write_card(path, model, meta, tokenizer)
                export.write_for_transformers(folder, path, model, tokenizer, meta, card)
    except (OSError, UnicodeError, SafetensorError) as error:
        if is_disk_full(error):
            raise  # run_script says so
        raise BadInput(f"--out={out} cannot be written ({error}): name another place") from None
    print(f"{path} (step {meta.step}) is exported to {out}")
    if is_gguf and tokenizer.suffix_first and fills_gaps(meta):
        print("In its gaps the suffix comes first: start llama-server with --spm-infill")
    if is_gguf and flags.gguf != "q8_0":
        print(f"Fewer bits a weight: llama-quantize {out} {out.with_suffix('')}-Q4_K_M.gguf Q4_K_M")
    elif not is_gguf:
        trust = "" if export.is_llama(model) else ", trust_remote_code=True"
        print(f'Load it with AutoModelForCausalLM.from_pretrained("{out}"{trust}); {out / llama.CARD} says more.')


if __name__ == "__main__":
    run_script(main, "exporting")
