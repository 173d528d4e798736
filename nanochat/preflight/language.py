"""Traces the programs of base_train, with what only a GPT knows of them."""
from collections import Counter
from fractions import Fraction

import torch

from nanochat.data.loader import RankRows, SyntheticLoader
from nanochat.device.ranks import Dist
from nanochat.infer.loss_eval import bits_per_byte
from nanochat.preflight.trace import Programs, fill_with_placeholders
from nanochat.train.language import NEXT_TOKEN, make_model, make_step
from nanochat.train.plan import make_plan
from nanochat.train.prepare import run_directory
from nanochat.train.start import run_tokenizer
from nanochat.train.step import Objective
from nanochat.train.teacher import DistillationLoss, find_teacher, make_teacher


def trace_run(flags, chips):
    """Returns the Programs of a run with base_train's Flags on `chips` TPU chips, and its {name: TracedProgram}. Call
    prepare_environment() before."""
    import torch_xla
    tokenizer = run_tokenizer(flags)
    plan = make_plan(flags, tokenizer.n_vocab, "tpu", chips)
    dist = Dist("tpu", torch_xla.device(), world_size=chips)
    objective = NEXT_TOKEN
    with torch.device("meta"):
        model = make_model(plan)
        found = find_teacher(flags, plan, tokenizer, run_directory(flags))
        if found:
            teacher = make_teacher(found, plan, dist)
    if found:
        objective = Objective(DistillationLoss(found, fill_with_placeholders(teacher)), teacher=teacher)
    training = make_step(plan, fill_with_placeholders(model), dist, objective)
    rows = plan.device_batch_size
    length = plan.config.max_seq_len
    batches = {}
    shares = {"evaluate": branch_shares(plan.config, length)}
    for first, _, name in plan.stages:
        batches[name] = {"rows": torch.zeros(plan.rows(first), plan.seq_len(first) + 1, dtype=torch.int32)}
        shares[name] = branch_shares(plan.config, plan.seq_len(first))

    def evaluate():
        readers = plan.mesh.readers
        # Two batches: Programs.trace keeps the second one's program.
        shape = RankRows(rows, length, readers=readers, num_lanes=flags.data.num_lanes)
        loader = SyntheticLoader(tokenizer.n_vocab, shape, num_rows=2 * rows * readers)
        bits_per_byte(training.model, loader, tokenizer.token_bytes(), dist, copies=plan.mesh.tensor)

    programs = Programs(plan, training, shares)
    return programs, programs.trace(batches, evaluate)


def branch_shares(config, length):
    """Returns the branch_shares of ops_of for a loop over the layers, with rows of `length`: the attention kernel has
    a branch for each window, the shortest first; the backward pass one for layers that add value embeddings, and one
    for the others."""
    windows = Counter(min(window or length, length) for window in config.windows())
    adding = Fraction(sum(config.adds_values()), config.n_layer)
    return {"branch_computations": [Fraction(windows[size], config.n_layer) for size in sorted(windows)],
            "true_computation": [adding, 1 - adding]}
