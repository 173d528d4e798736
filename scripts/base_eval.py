"""Prints the bits per byte of a checkpoint on any parquet files with a `text` column:

    python3 -m scripts.base_eval --checkpoint=RUN --data_dir=some/parquet --eval_tokens=1000000

--fim evaluates middles of that text instead, by kind: with the text after them, and without it.
"""
from dataclasses import dataclass
from functools import partial

from nanochat.checkpoint.on_disk import find_checkpoint
from nanochat.common import BadInput, flag, read_flags, run_script
from nanochat.data.cache import check_cache
from nanochat.data.fim import KINDS, Infilling, check_fim
from nanochat.data.lanes import NUM_LANES
from nanochat.data.shards import TextFlags, open_text
from nanochat.device.ranks import prepare_xla_environment, print0, resolve_device_type
from nanochat.infer.flags import CheckpointFlags, resolve_inference_device_type
from nanochat.infer.on_mesh import MeshFlags, run_on_mesh
from nanochat.infer.prompt import fills_gaps


@dataclass(frozen=True)
class Flags(TextFlags, CheckpointFlags):
    fim: bool = flag(False, "evaluate middles, of a model trained with --fim_rate")
    eval_tokens: int = flag(2**20, "tokens to evaluate, each document at most once", at_least=1, at_most=2**28)
    max_seq_len: int = flag(-1, "positions per row; -1: as in training", at_least=1, unset=-1)
    device_batch_size: int = flag(8, "rows at a time", at_least=1)
    kernel: str = flag("auto", "attention and loss, as in base_train")
    quantize: str = flag("none", "int8: as in scripts.generate; --device_type=auto then means the CPU")
    seed: int = flag(1, "seed of the data order", at_least=0)


def main(argv=None):
    flags, of_mesh = read_flags(argv, __doc__, {Flags: "flags", MeshFlags: "mesh"})
    from nanochat.infer.load import load_language_meta
    if flags.quantize == "none":
        device_type = resolve_device_type(flags.device_type)
    else:
        device_type = resolve_inference_device_type(flags.device_type)
    prepare_xla_environment(device_type)
    path = find_checkpoint(flags.checkpoint)
    config = load_language_meta(path).model_config
    seq_len = config.max_seq_len
    if flags.max_seq_len != -1:
        seq_len = flags.max_seq_len
    if seq_len > config.context:
        raise BadInput(f"--max_seq_len={seq_len} is more than the {config.context} positions of the model")
    if flags.eval_tokens < seq_len:
        raise BadInput(f"--eval_tokens={flags.eval_tokens} is less than one row of {seq_len}")
    shards = open_text(flags, "val")
    if remote := check_cache(shards, NUM_LANES):
        print(f"data: {remote}", flush=True)
    mesh = of_mesh.mesh(config, device_type, flags.kernel)
    return run_on_mesh(partial(evaluate_checkpoint, flags, path, seq_len, shards, mesh), mesh, device_type)


def evaluate_checkpoint(flags, path, seq_len, shards, mesh, dist):
    """Evaluates the checkpoint at `path` on rows of `seq_len` tokens, as one rank of a Mesh; rank 0 prints."""
    from nanochat.data.loader import DataLoader, RankRows
    from nanochat.infer.load import load_model
    from nanochat.infer.loss_eval import bits_per_byte
    model, tokenizer, meta = load_model(path, dist, tokenizer_dir=flags.tokenizer_dir, kernel=flags.kernel,
                                        quantize=flags.quantize, mesh=mesh)
    about = f"{path} (step {meta.step})"

    def evaluate(infilling=None, view=None):
        # Ranks along tensor read the same rows, so mesh.tensor ranks count each row.
        rows = RankRows(flags.device_batch_size, seq_len, mesh.reader(dist.rank), mesh.readers, flags.seed)
        with DataLoader(shards, tokenizer, rows, num_rows=flags.eval_tokens // seq_len, infilling=infilling) as loader:
            return bits_per_byte(model, loader, tokenizer.token_bytes(), dist, view=view, copies=mesh.tensor)

    if flags.fim:
        check_fim("--fim", tokenizer, seq_len)
        print0(f"{about}: bits per byte of middles")
        if not fills_gaps(meta):
            print0("note: it was trained without --fim_rate, so it never saw a suffix before its middle")
        return print_middles(tokenizer, flags.seed, evaluate)
    found = evaluate()
    whole = ""
    if found.is_whole_text:
        whole = " (the whole text, which is shorter than --eval_tokens)"
    print0(f"{about}: {found.bits_per_byte:.4f} bits per byte over {found.num_bytes:,} bytes{whole}")
    if tokenizer.losses:
        print0(f"note: these are the bytes of the files. Not all text comes back from its tokens: {tokenizer.losses}")


def print_middles(tokenizer, seed, evaluate):
    """Prints the bits per byte of middles of each kind. evaluate: see evaluate_checkpoint."""
    from nanochat.infer.loss_eval import with_suffixes, without_suffixes
    print0(f"{'middles':<12}{'bytes':>12}{'with suffix':>13}{'without':>10}")
    for kind in KINDS:
        found = []
        for view in (with_suffixes, without_suffixes):
            found.append(evaluate(Infilling(1.0, seed, (kind,)), view=partial(view, tokenizer)))
        suffix, without = (of.bits_per_byte for of in found)
        print0(f"{kind:<12}{found[0].num_bytes:>12,}{suffix:>13.4f}{without:>10.4f}   the suffix changes them by "
               f"{suffix / without - 1:+.1%}")


if __name__ == "__main__":
    run_script(main, "evaluating")
