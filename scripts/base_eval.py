"""Prints the bits per byte of a checkpoint on any parquet files with a `text` column:

    python3 -m scripts.base_eval --checkpoint=RUN --data_dir=some/parquet --eval_tokens=1000000
"""
from nanochat.common import ArgumentParser, BadInput, run_script
from nanochat.data.loader import DataLoader
from nanochat.data.shards import list_shards
from nanochat.device.ranks import DEVICE_TYPES, compute_init, prepare_xla_environment, resolve_device_type
from nanochat.infer.load import find_checkpoint, load_model
from nanochat.run.meta import load_meta
from nanochat.train.loss_eval import bits_per_byte


def parse_args(argv=None):
    parser = ArgumentParser(prog="python3 -m scripts.base_eval", description=__doc__)
    add = parser.add_argument
    add("--checkpoint", default="", help="a run (its newest checkpoint), RUN/step_000100 or a path; none: the newest")
    add("--data_dir", help="folder of parquet shards; default: $NANOCHAT_BASE_DIR/parquet/val")
    add("--tokenizer_dir", help="default: $NANOCHAT_BASE_DIR/tokenizer if it exists, else the shipped one")
    add("--eval_tokens", type=int, default=2**20, help="tokens to evaluate")
    add("--max_seq_len", type=int, default=-1, help="positions per row; -1: as in training")
    add("--device_batch_size", type=int, default=8, help="rows at a time")
    add("--device_type", default="auto", help="one of " + ", ".join(DEVICE_TYPES))
    add("--kernel", default="auto", help="attention and loss, as in base_train")
    add("--seed", type=int, default=1, help="seed of the data order")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    device_type = resolve_device_type(args.device_type)
    prepare_xla_environment(device_type)
    path = find_checkpoint(args.checkpoint)
    trained_len = load_meta(path).config["max_seq_len"]
    seq_len = trained_len if args.max_seq_len == -1 else args.max_seq_len
    if not 1 <= seq_len <= trained_len:
        raise BadInput(f"--max_seq_len={seq_len} must be from 1 to the model's {trained_len}")
    if args.eval_tokens < seq_len or args.device_batch_size < 1:
        raise BadInput(f"--eval_tokens={args.eval_tokens} must be at least one row of {seq_len}, and "
                       f"--device_batch_size={args.device_batch_size} at least 1")
    shards = list_shards(args.data_dir, "val")
    dist = compute_init(device_type)
    model, tokenizer, meta = load_model(path, dist, tokenizer_dir=args.tokenizer_dir, kernel=args.kernel)
    with DataLoader(shards, tokenizer, batch_size=args.device_batch_size, seq_len=seq_len, seed=args.seed) as loader:
        bpb, num_bytes = bits_per_byte(model, loader, args.eval_tokens // seq_len, tokenizer.token_bytes(), dist)
    print(f"{path} (step {meta.step}): {bpb:.4f} bits per byte over {num_bytes:,} bytes")


if __name__ == "__main__":
    run_script(main)
