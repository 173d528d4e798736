"""The model card of an exported checkpoint, README.md. All of it comes from the checkpoint, the metrics of its run and
the manifest of its corpus; the rest is called unknown."""
import json
from collections import Counter
from dataclasses import fields
from pathlib import Path

from nanochat.common import BadInput, get_base_dir
from nanochat.data.shards import DEFAULT_DIRS, fingerprint, open_text, saved_text_flags
from nanochat.data.tokenizer import FIM_TOKENS
from nanochat.model.models import CONFIG_FLAGS, describe
from nanochat.model.rates import OptimConfig

MANIFEST = "manifest.json"  # of scripts/prepare_data.py
# The flags of the training, without those of the machine, its folders and accounts.
RECIPE = (*CONFIG_FLAGS, "num_iterations", "target_param_data_ratio", "total_batch_size",
          "seq_len_ramp", "fim_rate", "compute_dtype", "products", "seed",
          *(field.name for field in fields(OptimConfig)))
OTHER_MODELS = ("teacher", "init_from", "decay_from")  # flags that name one
OF_TEACHER = ("kd_weight", "kd_temperature")
SHOWN = {"val_bpb": "validation, bits per byte", "fim_bpb": "middles, bits per byte", "loss": "loss, nats a token"}
PARTS = {"gpt": "QK-norm, ReLU², RMSNorm without parameters", "llama": "SwiGLU, RMSNorm with weights"}
NEEDS_CODE = " The folder's code computes what transformers' own NanoChat lacks."
CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [code, cpp]
---

# {name}

A base model of {parameters:,} parameters for C and C++, pre-trained with nanochat-tpu (step {step:,}): {architecture}.
Besides: rotary positions, {parts}, a byte-level BPE, weights in fp32.

- `AutoModelForCausalLM.from_pretrained(FOLDER{trust})` of transformers loads it; 5.23.0 is tested.{why_trust}
- {gaps}
- Last metrics: {metrics}.
- Tokenizer: sha256 `{tokenizer_sha256}`. Recipe:

```
{command}
```

## Data

{data}

## Limits

- It continues text of at most {max_seq_len:,} tokens, and was not tuned to follow instructions.
- It imitates its training code, mistakes and insecure habits included. Its output needs review, a compiler and tests.
- It may repeat text of its training, to which that text's licence applies.
- The person who publishes these weights must state their licence: nothing here states it.
"""
SINCE_IMPORT = """

# {name}: trained on with nanochat-tpu

These weights began with those of {model}, whose card is above. The licence that it states is {licence}. Then followed
{step:,} steps of training for C and C++. {gaps} Last metrics: {metrics}. Recipe:

```
{command}
```

{data}
"""


def find_manifest(meta):
    """Returns the manifest beside the checkpoint's training data, or None if that data is gone or replaced."""
    data_dir = Path(meta.flags.get("data_dir") or get_base_dir() / DEFAULT_DIRS["train"])
    path = data_dir.parent / MANIFEST
    try:
        if not path.is_file() or fingerprint(open_text(saved_text_flags(meta.flags))) != meta.data_fingerprint:
            return None
        manifest = json.loads(path.read_text())
        describe_data(manifest)  # fails for anything else
        return manifest
    except (BadInput, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def write_card(name, model, meta, tokenizer, *, run, manifest, is_scaled):
    """Returns the text of the card, or what to add to that of imported weights. run: the History up to the checkpoint,
    or None; manifest: of its corpus, or None; is_scaled: whether the folder has its own modeling file."""
    data = f"Unknown: the manifest of the corpus was missing at the export. Fingerprint: `{meta.data_fingerprint}`."
    since = dict(name=name, step=meta.step, metrics=describe_metrics(run) if run else "unknown",
                 gaps=describe_gaps(tokenizer, meta.flags.get("fim_rate", 0)), command=describe_recipe(meta),
                 data=describe_data(manifest) if manifest else data)
    if meta.source and not meta.flags:  # as imported
        return ""
    if meta.source:
        return SINCE_IMPORT.format(**since, model=meta.source["model"], licence=meta.source["licence"] or "none")
    return CARD.format(
        **since, parameters=sum(p.numel() for p in model.parameters()), architecture=describe(model.config),
        parts=PARTS[model.config.arch], max_seq_len=model.config.max_seq_len,
        trust=", trust_remote_code=True" if is_scaled else "", why_trust=NEEDS_CODE if is_scaled else "",
        tokenizer_sha256=meta.tokenizer_sha256)


def describe_gaps(tokenizer, share):
    """Returns how to fill in the middle, in the tokenizer's own names. share: of the documents of the training."""
    if not share:
        return "This training was not for filling in the middle."
    prefix, suffix, middle = (tokenizer.decode([tokenizer.special(name)]) for name in FIM_TOKENS[:3])
    around = (f"{suffix}text after{prefix}text before" if tokenizer.suffix_first else
              f"{prefix}text before{suffix}text after")
    return (f"Fill in the middle: `{around}{middle}`. "
            f"`{tokenizer.decode([tokenizer.middle_end])}` ends the middle. The share of documents that had this form "
            f"in training: {share:g}.")


def describe_data(manifest):
    """Returns the text about the corpus: its files, their sources, and the licences that these state."""
    # A source is listed if training read it: not a project that was held out, and of a data set the part that was not.
    held_out = set(manifest.get("val_projects") or ())
    rows = ["| source | version | files | licences, duplicates included |", "|---|---|---|---|"]
    for source in manifest["sources"]:
        if source.get("project", source["name"]) not in held_out:
            licences = Counter(source["licences"]) - Counter(source.get("held_out_licences"))
            files = source.get("documents", 0) - source.get("held_out_documents", 0)
            stated = ", ".join(f"{licence}: {count:,}" for licence, count in licences.most_common())
            cells = [source["name"], source.get("version") or "", f"{files:,}", stated]
            rows.append(f"| {' | '.join(map(cell, cells))} |")
    total = (manifest.get("totals") or {}).get(Path(DEFAULT_DIRS["train"]).name, {})
    size = f"{total.get('documents', 0):,} files with {total.get('bytes', 0):,} bytes"
    return "\n".join([f"{size}, without exact and near duplicates.",
                      f"Projects held out: {cell(', '.join(sorted(held_out))) or 'none'}.", "", *rows])


def cell(text):
    """Returns the text as a cell of a table."""
    return " ".join(str(text).replace("|", "\\|").split())


def describe_recipe(meta):
    """Returns the command that trained the model. Of another model it names the run and the step, and no folders."""
    command = ["base_train"]
    for name in (*RECIPE, *OTHER_MODELS, *(OF_TEACHER if meta.flags.get("teacher") else ())):
        value = meta.flags.get(name)
        if value is True:
            command.append(f"--{name}")
        elif value is not False and value not in (None, "", -1):  # which stand for a flag that was not given
            shown = "/".join(Path(value).parts[-2:]) if name in OTHER_MODELS else value
            command.append(f"--{name}={shown}")
    return " ".join(command)


def describe_metrics(run):
    """Returns the last value of each metric, with its step."""
    found = []
    for name, label in SHOWN.items():
        steps, values = run.series(name)
        if len(values):
            found.append(f"{label} {values[-1]:.4f} (step {steps[-1]:,})")
    return ", ".join(found) or "none"
