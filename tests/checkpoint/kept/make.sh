#!/usr/bin/env bash
# How the checkpoints in this folder were made, with commit b2430fc, on 2026-11-28: bash make.sh, from that checkout, with
# a tokenizer of the 256 bytes in $KEPT/tokenizer and shards of two small sets of C++ in $KEPT/data and $KEPT/own.
set -euo pipefail
export NANOCHAT_BASE_DIR=$KEPT WANDB_MODE=disabled PJRT_DEVICE=CPU CPU_NUM_DEVICES=1 PYTHONPATH=$PWD
common=(--device_type=xla --depth=2 --model_dim=8 --num_heads=1 --max_seq_len=64 --device_batch_size=2
  --total_batch_size=256 --num_lanes=2 --eval_tokens=1024 --eval_every=-1 --sample_every=-1 --log_every=1
  --save_every=3 --num_iterations=6 --tokenizer_dir="$KEPT/tokenizer" --val_dir="$KEPT/data")
train() { python3 -m scripts.base_train "${common[@]}" "$@"; }
train --run=plain --data_dir="$KEPT/data"
train --run=fim --data_dir="$KEPT/data" --fim_rate=0.5
train --run=mixture --data_mix="$KEPT/mixture.toml"
train --run=ending --data_dir="$KEPT/data" --decay_from=plain/step_000003
train --run=with_optimizer --data_dir="$KEPT/data" --init_from=plain/step_000003 --init_optimizer
train --run=ngrams --data_dir="$KEPT/data" --ngram_rows=16
train --run=own_values --data_dir="$KEPT/data" --value_embeddings=own
python3 -m scripts.prepare_puzzles --box=2x2 --train=40 --val=12
python3 -m scripts.puzzle_train --run=sudoku --device_type=xla --hidden=8 --heads=1 --mixer=mlp --prefix=4 \
  --recursions=1 --cycles=2 --supervision_steps=4 --optimizer=muon --lr=0.003 --loss=softmax --ema=0.9 --warmup_steps=2 \
  --total_batch_size=8 --eval_puzzles=12 --sample_every=-1 --eval_every=-1 --save_every=3 --log_every=1 \
  --num_iterations=6
