"""What base_train does between two steps: it measures the validation text, and prints samples.

LanguageTask.events (language.py) hands these functions to the trainer. Each gets the LanguageTask.
"""
import math
from contextlib import closing
from functools import partial

import torch

from nanochat.data.lanes import PADDING
from nanochat.device.ranks import print0
from nanochat.infer.engine import Engine
from nanochat.infer.loss_eval import HeldOutRows, NotRead, bits_per_byte, with_suffixes
from nanochat.infer.sample import BrokenModel

FIM_EVAL_PART = 4  # one row of middles is evaluated for each four rows of the validation text
SAMPLE_PROMPTS = ("#include <", "template <typename T>\nclass", "int main(int argc, char** argv) {")
SAMPLE_TOKENS = 48


def evaluate(task, training, dist, step, is_cut_short):
    """Returns the bits per byte of the validation text, and with --fim_rate of middles in it; {} if a stop cuts it
    short (the resumed run repeats it), and with a warning if a rank cannot read the text."""
    try:
        return _evaluate(task, partial(_measure, task, training.compiled_model, dist, is_cut_short))
    except NotRead as error:
        print0(f"warning: no evaluation at step {step}: {error}")
        return {}


def _evaluate(task, measure):
    # The ranks divide the same rows, so the result does not depend on their number.
    seq_len = task.plan.config.max_seq_len
    # All sets and the middles share --eval_tokens: a set has FIM_EVAL_PART parts of them, the middles one.
    parts = len(task.validation_sets) * FIM_EVAL_PART + (task.flags.data.fim_rate > 0)
    all_rows = task.flags.record.eval_tokens // seq_len
    num_rows = max(all_rows * FIM_EVAL_PART // parts, 1)
    tokens = f"{len(task.validation_sets) * num_rows * seq_len:,} tokens of the validation text"
    num_middle_rows = 0
    if task.flags.data.fim_rate:
        num_middle_rows = max(all_rows // parts, 1)
        tokens += f", and {num_middle_rows * seq_len:,} as fill-in-the-middle"
    print0(f"evaluating {tokens}")
    metrics = {}
    for name, data in task.validation_sets.items():
        text = measure(data, num_rows, f" of {name}" if name else "")
        if not text:
            return {}
        if not metrics:  # the first set is that of the run
            metrics = {"val_bytes": text.num_bytes}
            if text.num_bytes:
                metrics["val_bpb"] = text.bits_per_byte
        if name:
            metrics[f"val_bpb_{name}"] = text.bits_per_byte
    if num_middle_rows:
        first_set = next(iter(task.validation_sets.values()))
        middles = measure(first_set, num_middle_rows, " of the middles", fim_rate=1.0,
                          view=partial(with_suffixes, task.tokenizer))
        if not middles:
            return {}
        metrics |= {"fim_bpb": middles.bits_per_byte, "fim_bytes": middles.num_bytes}
    return metrics


def _measure(task, model, dist, is_cut_short, data, num_rows, what, fim_rate=0.0, view=None):
    """Returns the Evaluation of `num_rows` of the validation text of the DataFlags `data`, with `fim_rate` of the
    documents rewritten; None if it is cut short. view: see bits_per_byte; what: see HeldOutRows. Raises NotRead."""
    plan = task.plan
    rows = task.rank_rows(dist, batch_size=plan.device_batch_size, seq_len=plan.config.max_seq_len,
                          seed=task.flags.run.seed + 1)
    batches = math.ceil(num_rows / (plan.device_batch_size * plan.mesh.readers))
    open_loader = partial(task.open_rows, "val", data, rows, fim_rate, num_rows=num_rows)
    padding = torch.full((rows.batch_size, rows.seq_len + 1), PADDING, dtype=torch.int32)
    with closing(HeldOutRows(open_loader, padding, batches, what)) as held_out:
        held_out.require_all(dist)
        return bits_per_byte(model, held_out, task.tokenizer.token_bytes(), dist, is_cut_short, view,
                             copies=plan.mesh.tensor)


@torch.no_grad()
def sample(task, training, dist, step, is_cut_short):
    """Prints completions. Every rank makes them, so none waits for another."""
    engine = Engine(training.model, task.tokenizer, dist)  # a new one holds no state of older weights
    max_tokens = min(SAMPLE_TOKENS, task.plan.config.max_seq_len // 2)
    for prompt in SAMPLE_PROMPTS:
        if is_cut_short():
            break
        try:
            text = engine.complete(prompt, max_tokens=max_tokens, seed=step)
        except BrokenModel as error:
            print0(f"warning: no sample at step {step}: {error}")
            break
        print0(f"--- sample at step {step}\n{prompt}{text}\n---")
    return {}
