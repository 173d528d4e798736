"""The flags of base_train, and what follows from them at once."""
import os
from dataclasses import fields

import torch

from nanochat.common import ArgumentParser, BadInput
from nanochat.device.ranks import DEVICE_TYPES
from nanochat.model.optim import OptimConfig


def parse_args(argv=None, description=None):
    """The flags as a namespace. `description`: what --help begins with."""
    parser = ArgumentParser(prog="python3 -m scripts.base_train", description=description)
    add = parser.add_argument_group("run").add_argument
    add("--run", default="dummy", help="name of the run, of its checkpoints' folder and in WandB; dummy: no WandB")
    add("--device_type", default="auto", help="one of " + ", ".join(DEVICE_TYPES))
    add("--resume", default="auto", choices=["auto", "never"],
        help="auto: continue the run of this name if it has a checkpoint; never: move the old run aside")
    add("--preflight", action="store_true",
        help="first compile the run's programs for this TPU, in a process of its own; exit with 3 if they do not fit")
    add("--seed", type=int, default=0, help="of the weights and of the data order")
    add("--no_compile", action="store_true", help="no torch.compile (on CUDA; XLA and cpu have none anyway)")
    add("--wandb_project", default=os.environ.get("WANDB_PROJECT", "nanochat"), help="WandB project")
    add = parser.add_argument_group("data").add_argument
    add("--data_dir", help="folder of parquet shards for training; default: $NANOCHAT_BASE_DIR/parquet/base_data_v3")
    add("--val_dir", help="folder of parquet shards for validation; default: $NANOCHAT_BASE_DIR/parquet/val")
    add("--tokenizer_dir", help="default: $NANOCHAT_BASE_DIR/tokenizer if it is there, else the one that is shipped")
    add("--tokenizer_threads", type=int, default=2, help="threads that tokenize ahead, per rank")
    add("--skip_bad_shards", action="store_true", help="leave out what cannot be read of a corrupt shard")
    add("--synthetic_data", action="store_true", help="random tokens: tries a machine without data")
    add = parser.add_argument_group("model (everything follows from the depth)").add_argument
    add("--depth", type=int, default=16, help="number of layers")
    add("--max_seq_len", type=int, default=1024, help="positions a row")
    add("--model_dim", type=int, default=-1, help="width; -1: 64 × depth, rounded up to whole heads of 128")
    add("--num_heads", type=int, default=-1, help="attention heads; -1: width / 128")
    add("--num_kv_heads", type=int, default=-1, help="key and value heads (grouped-query attention); -1: num_heads")
    add("--window_pattern", default="L", help="attention windows, a letter a layer, repeated: L all, S half of them")
    add("--softcap", type=float, default=15.0, help="bound of the logits; 0: none")
    add("--kernel", default="auto", help="attention and loss: auto, current, chunked, flash (TPU), cce (CUDA)")
    add("--compute_dtype", default="auto", choices=["auto", "bfloat16", "float32"],
        help="of activations and products; auto: bfloat16 on tpu and cuda, float32 on a CPU")
    add("--activation_checkpointing", action="store_true", help="compute activations again in the backward pass")
    add = parser.add_argument_group("batch and horizon (the first of these that is set counts)").add_argument
    add("--num_iterations", type=int, default=-1, help="optimizer steps")
    add("--target_flops", type=float, default=-1.0, help="train until this many FLOPs are spent")
    add("--target_param_data_ratio", type=float, default=20.0, help="train on this many tokens a matrix parameter")
    add("--device_batch_size", type=int, default=8, help="rows in a micro-step on one device")
    add("--total_batch_size", type=int, default=-1, help="tokens in an optimizer step; -1: from the depth")
    add("--batch_ramp", default="", help="STEP:FACTOR,…: from that step on the batch is FACTOR × total_batch_size, in "
        "whole micro-steps, and the learning rates are √FACTOR as high")
    add = parser.add_argument_group("optimizer").add_argument
    for field in fields(OptimConfig):
        add(f"--{field.name}", type=field.type, default=field.default, help=field.metadata["help"])
    add("--shard_optimizer", default="auto", choices=["auto", "on", "off"],
        help="each rank keeps and updates its part of the optimizer's state; auto: on XLA")
    add = parser.add_argument_group("evaluation, samples, checkpoints, logs").add_argument
    add("--eval_every", type=int, default=250, help="steps between evaluations, also at the end; -1: never")
    add("--eval_tokens", type=int, default=10 * 2**20, help="tokens of an evaluation, whatever the world size")
    add("--sample_every", type=int, default=1000, help="steps between samples, also at the end; -1: never")
    add("--save_every", type=int, default=1000, help="steps between checkpoints, also at the end; -1: never")
    add("--save_every_minutes", type=float, default=-1.0, help="minutes between checkpoints; -1: no matter how many")
    add("--keep_checkpoints", type=int, default=3, help="how many checkpoints stay on disk")
    add("--keep_every", type=int, default=-1, help="checkpoints of steps that this divides stay for good; -1: none")
    add("--checkpoint_mirror", help="gs://… or a directory: copies of checkpoints, from which a new VM goes on")
    add("--log_every", type=int, default=10, help="steps between lines of the log")
    add("--step_timeout_s", type=float, default=600.0, help="a step that takes longer, and 20 times the median, ends "
        "the run; -1: never")
    add("--max_bad_steps", type=int, default=10, help="stop after so many non-finite steps in a row; -1: never")
    add("--profile_steps", default="", help="BEGIN:END, such as 10:13: a trace of the steps after BEGIN up to END, for "
        "TensorBoard, in the run's folder")
    return parser.parse_args(argv)


def compute_dtype(args, device_type):
    if args.compute_dtype == "auto":
        return torch.bfloat16 if device_type in ("tpu", "cuda") else torch.float32
    return getattr(torch, args.compute_dtype)


def optim_config(args):
    return OptimConfig(**{field.name: getattr(args, field.name) for field in fields(OptimConfig)})


def is_sharded(args, device_type):
    """Whether the ranks share the optimizer's state. Raises BadInput where they cannot."""
    is_xla = device_type in ("tpu", "xla")
    if args.shard_optimizer == "on" and not is_xla:
        raise BadInput(f"--shard_optimizer=on, but this runs on {device_type}: it is for XLA devices, use auto")
    return is_xla and args.shard_optimizer != "off"
