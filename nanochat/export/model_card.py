"""The model card of an exported checkpoint, README.md: from the checkpoint, the metrics of its run and the manifest of
its corpus. The rest is called unknown."""
import json
from collections import Counter
from dataclasses import fields
from pathlib import Path

from nanochat.common import BadInput, get_base_dir
from nanochat.data.shards import DEFAULT_DIRS, fingerprint, open_text, saved_text_flags
from nanochat.data.tokenizer import FIM_TOKENS
from nanochat.model.models import CONFIG_FLAGS, describe
from nanochat.model.rates import OptimConfig
from nanochat.record.history import read_run

# The flags of the training, without those of the machine, its folders and accounts.
RECIPE = (*CONFIG_FLAGS, "num_iterations", "target_param_data_ratio", "total_batch_size", "seq_len_ramp", "fim_rate",
          "compute_dtype", "products", "seed", *(field.name for field in fields(OptimConfig)))
METRICS = {"val_bpb": "validation, bits per byte", "fim_bpb": "middles, bits per byte", "loss": "loss, nats a token"}
NEW = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [code, cpp]
---

# {name}

A base model of {parameters:,} parameters for C and C++: {architecture}. It imitates its training code, mistakes
included, and may repeat it. The person who publishes these weights must state their licence: nothing here states it.
"""
IMPORTED = """

# {name}: trained on with nanochat-tpu

These weights began with those of {model}, whose card is above. The licence that it states is {licence}.
"""
TRAINING = """
{gaps} Trained with nanochat-tpu for {step:,} steps. Last metrics: {metrics}. Recipe, without the flags of the machine:

    {command}

Data, with the licences that its sources state:

{data}
"""


def write_card(path, model, meta, tokenizer):
    """Returns the text of the card of the checkpoint at `path`, or what to add to that of imported weights."""
    name = path.parent.name
    if meta.source and not meta.flags:  # as imported
        return ""
    beginning = NEW.format(name=name, parameters=sum(p.numel() for p in model.parameters()),
                           architecture=describe(model.config))
    if meta.source:
        beginning = IMPORTED.format(name=name, model=meta.source["model"], licence=meta.source["licence"] or "none")
    given = {name: meta.flags.get(name) for name in RECIPE}
    command = [f"--{name}={value}" for name, value in given.items() if value not in (None, "", -1)]
    return beginning + TRAINING.format(
        gaps=describe_gaps(tokenizer, meta.flags.get("fim_rate", 0)), step=meta.step,
        metrics=last_metrics(path, meta.step), command=" ".join(["base_train", *command]), data=describe_data(meta))


def describe_gaps(tokenizer, share):
    """Returns how to fill in the middle, in the tokenizer's own names. share: of the documents of the training."""
    if not share:
        return "It was not trained to fill in the middle."
    prefix, suffix, middle = (tokenizer.decode([tokenizer.special(name)]) for name in FIM_TOKENS[:3])
    around = (f"{suffix}text after{prefix}text before" if tokenizer.suffix_first else
              f"{prefix}text before{suffix}text after")
    return f"Fill in the middle: `{around}{middle}`. `{tokenizer.decode([tokenizer.middle_end])}` ends the middle."


def last_metrics(path, step):
    """Returns the last value of each metric of the run up to the checkpoint, with its step."""
    try:
        run = read_run(str(path.parent))
    except BadInput:
        return "unknown"
    found = []
    for name, label in METRICS.items():
        known = [(at, value) for at, value in zip(*run.series(name), strict=True) if at <= step]
        found += [f"{label} {value:.4f} (step {at:,})" for at, value in known[-1:]]
    return ", ".join(found) or "unknown"


def describe_data(meta):
    """Returns a line for each source of the corpus, by the manifest of prepare_data beside the data."""
    data_dir = Path(meta.flags.get("data_dir") or get_base_dir() / DEFAULT_DIRS["train"])
    lines = []
    try:
        manifest = json.loads((data_dir.parent / "manifest.json").read_text())
        if fingerprint(open_text(saved_text_flags(meta.flags))) != meta.data_fingerprint:
            raise ValueError("the data was replaced")
        for source in manifest["sources"]:
            # What was held out, a project or a part of a data set, is no data of the training.
            if source.get("project", source["name"]) not in (manifest.get("val_projects") or ()):
                licences = Counter(source["licences"]) - Counter(source.get("held_out_licences"))
                stated = ", ".join(f"{licence}: {count:,} files" for licence, count in licences.most_common())
                lines.append(" ".join(f"- {source['name']} {source.get('version') or ''} ({stated})".split()))
    except (BadInput, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "Unknown: the manifest of the corpus was missing at the export."
    return "\n".join(lines)
