"""The model card of an exported checkpoint, README.md: the model's architecture, data, metrics and limits. All of it
comes from the checkpoint, the metrics of its run and the manifest of its corpus; the rest is called unknown."""
import json
from collections import Counter
from dataclasses import fields
from pathlib import Path

from nanochat.common import BadInput, get_base_dir, read_named
from nanochat.data.shards import DEFAULT_DIRS, fingerprint, open_text, saved_text_flags
from nanochat.model.config import CONFIG_FLAGS
from nanochat.model.rates import OptimConfig

MANIFEST = "manifest.json"  # of scripts/prepare_data.py
CURVE_ROWS = 20
CODE_TAGS = "\ntags: [code, cpp]"
# The flags of the training, without those of the machine, its folders and accounts.
RECIPE = (*CONFIG_FLAGS, "num_iterations", "target_flops", "target_param_data_ratio", "total_batch_size", "batch_ramp",
          "seq_len_ramp", "fim_rate", "fim_context", "compute_dtype", "products", "seed",
          *(field.name for field in fields(OptimConfig)))


def read_manifest(path):
    """Returns the manifest of a corpus. Raises BadInput for any other file."""
    try:
        manifest = json.loads(read_named("manifest", path))
        _data_of(manifest)  # fails for anything else
        return manifest
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadInput(f"--manifest={path} is not the {MANIFEST} of a corpus, which prepare_data writes") from None


def find_manifest(meta):
    """Returns the manifest beside the checkpoint's training data, or None if that data is gone or replaced."""
    data_dir = Path(meta.flags.get("data_dir") or get_base_dir() / DEFAULT_DIRS["train"])
    path = data_dir.parent / MANIFEST
    try:
        if not path.is_file() or fingerprint(open_text(saved_text_flags(meta.flags))) != meta.data_fingerprint:
            return None
        return read_manifest(path)
    except (BadInput, OSError):
        return None


def write_card(name, model, tokenizer, meta, *, run, manifest, is_scaled, curve):
    """Returns the text of the card. run: the History up to the checkpoint; curve: the name of its picture; is_scaled:
    whether the folder has its own modeling file. run, manifest and curve may be None."""
    sections = [_head(name, model, meta, is_scaled), _usage(is_scaled), _fill_in_the_middle(tokenizer, meta),
                _data(meta, manifest), _recipe(meta), _metrics(run, curve), _limits(model, meta)]
    return "\n\n".join(sections) + "\n"


def _is_imported(meta):
    return not meta.flags


def _head(name, model, meta, is_scaled):
    config = model.config
    parameters = sum(p.numel() for p in model.parameters())
    if _is_imported(meta):
        origin = "imported from karpathy/nanochat with"
        tags = ""
    else:
        origin = "pre-trained with"
        tags = CODE_TAGS
    code = "NanoChat, extended by the code in this folder" if is_scaled else "transformers' own NanoChat"
    return f"""---
library_name: transformers
pipeline_tag: text-generation{tags}
---

# {name}

A language model of {parameters:,} parameters, {origin} nanochat-tpu (step {meta.step:,}).

- Architecture: {code}: {config.describe()}.
- Besides: rotary positions, QK-norm, ReLU², RMSNorm without parameters.
- Context: {config.max_seq_len:,} tokens.
- Tokenizer: a byte-level BPE of {config.vocab_size:,} tokens.
- Weights: fp32."""


def _usage(is_scaled):
    trust = note = ""
    if is_scaled:
        trust = ", trust_remote_code=True"
        note = """

`trust_remote_code=True` runs `modeling_nanochat_scaled.py` of this folder: transformers' own NanoChat has no scales of
the residual stream, attention windows, gates or value embeddings."""
    return f"""## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # where this file is
tokenizer = AutoTokenizer.from_pretrained(folder{trust})
model = AutoModelForCausalLM.from_pretrained(folder{trust})
inputs = tokenizer("int main(int argc", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```{note}

The tokenizer puts `<|bos|>` before the text, as before every document in training. It reads the name of a special token
in a text as that token; `split_special_tokens=True` makes it text. It takes Unicode only: nanochat-tpu itself encodes
bytes that are not UTF-8 one by one. Made and tested with transformers 5.23.0."""


def _fill_in_the_middle(tokenizer, meta):
    rate = meta.flags.get("fim_rate") or 0
    if "<|fim_middle|>" not in tokenizer.special_tokens:
        return "## Fill in the middle\n\nThe tokenizer has no tokens for it."
    training = "**This checkpoint was not trained to fill in the middle**: it has never seen these tokens."
    if rate:
        training = f"In training, this share of the documents had this form: {rate:g} (`--fim_rate`)."
    return f"""## Fill in the middle

```
<|bos|><|fim_prefix|>text before the cursor<|fim_suffix|>text after it<|fim_middle|>what the model writes<|file_sep|>
```

{training}

The middle ends with `<|file_sep|>`, and a document with the `<|bos|>` of the next; `generate` stops at both.
The tokenizer writes `<|bos|>` itself. Splits are at characters, not at tokens."""


def _data(meta, manifest):
    if manifest is None:
        return f"""## Data

Unknown: the manifest of the corpus was missing at the export. The fingerprint of the shards is
`{meta.data_fingerprint}`."""
    return _data_of(manifest)


def _data_of(manifest):
    # A source is listed if training read it: not a project that was held out, and of a data set the part that was not.
    val = set(manifest.get("val_projects") or ())
    divided = [source["name"] for source in manifest["sources"] if source.get("held_out_documents")]
    licences = Counter()
    sources = []
    for source in manifest["sources"]:
        if source.get("project", source["name"]) not in val:
            # A part of a data set may be held out.
            own = Counter(source["licences"]) - Counter(source.get("held_out_licences"))
            licences += own
            cells = [source["name"], source.get("version") or "", _trained_on(source, "documents"),
                     _trained_on(source, "bytes"), ", ".join(own)]
            sources.append(f"| {' | '.join(map(_cell, cells))} |")
    total = (manifest.get("totals") or {}).get(Path(DEFAULT_DIRS["train"]).name, {})
    num_files = total.get("files", total.get("documents", 0))  # with --pack=project a document is not one file
    rows = "\n".join(f"| {_cell(name)} | {count:,} |" for name, count in licences.most_common())
    held_out = ""
    for what, names in (("whole projects", val), ("parts of data sets", divided)):
        if names:
            held_out += f"\n\nHeld out for validation, {what}: {_cell(', '.join(sorted(names)))}."
    listed = "\n".join(sources)
    return f"""## Data

C and C++: {num_files:,} files with {total.get("bytes", 0):,} bytes, without exact and near duplicates. Number of
sources: {len(sources)}.{held_out}

The files and packages state these licences, or none ("unknown"). The counts include duplicates.

| licence | files |
|---|---|
{rows}

<details><summary>The sources, with version, files and bytes, duplicates included</summary>

| source | version | files | bytes | licences |
|---|---|---|---|---|
{listed}

</details>"""


def _trained_on(source, what):
    """Returns how many documents or bytes of a source were not held out, as text."""
    return f"{source.get(what, 0) - source.get(f'held_out_{what}', 0):,}"


def _cell(text):
    """Returns the text as a cell of a table."""
    return " ".join(str(text).replace("|", "\\|").split())


def _recipe(meta):
    if _is_imported(meta):
        return f"## Recipe\n\nUnknown. Tokenizer sha256 `{meta.tokenizer_sha256}`."
    command = ["base_train"]
    for name in RECIPE:
        value = meta.flags.get(name)
        if value is True:
            command.append(f"--{name}")
        elif value is not False and value not in (None, "", -1):  # which stand for a flag that was not given
            command.append(f"--{name}={value}")
    distilled = ""
    if meta.flags.get("teacher"):
        teacher = "/".join(Path(meta.flags["teacher"]).parts[-2:])
        distilled = f"""

It also learned from the predictions of the model {teacher}: weight {meta.flags["kd_weight"]:g}
at temperature {meta.flags["kd_temperature"]:g}, in the first {meta.flags["kd_until"]:.0%} of the steps."""
    begun = ""
    if meta.flags.get("decay_from"):
        begun = f"\n\nIt is an ending of a longer run: the learning rates fell from {meta.flags['decay_from']} on."
    elif meta.flags.get("init_from"):
        begun = f"\n\nIt began with the weights of the model {meta.flags['init_from']}."
    return f"""## Recipe

```
{" ".join(command)}
```{distilled}{begun}

Matrices by Muon, the rest by AdamW; the learning rate rises, stays, and falls linearly. Tokenizer sha256
`{meta.tokenizer_sha256}`."""


def _metrics(run, curve):
    if run is None:
        return "## Metrics\n\nUnknown: the metrics of the run were missing at the export."
    shown = {"val_bpb": "validation, bits per byte", "fim_bpb": "middles, bits per byte", "loss": "loss, nats a token"}
    columns = {}  # {name: {step: text}}
    for name in shown:
        steps, values = run.series(name)
        if len(steps):
            columns[name] = dict(zip(steps, map("{:.4f}".format, values), strict=True))
    measured = run.series("fim_bytes")[1]
    if len(measured):
        shown["fim_bpb"] += f" (of {int(measured[-1]):,} bytes)"
    if not columns:
        return "## Metrics\n\nThe run recorded none."
    steps = sorted(next(iter(columns.values())))
    # CURVE_ROWS steps at equal distances with the first and the last one, or all if there are fewer.
    kept = sorted({steps[round(i * (len(steps) - 1) / (CURVE_ROWS - 1))] for i in range(CURVE_ROWS)})
    rows = []
    for step, tokens in zip(kept, run.work(kept), strict=True):
        cells = [texts.get(step, "") for texts in columns.values()]
        rows.append(" | ".join([f"| {step:,}", f"{tokens:,.0f}", *cells]) + " |")
    picture = f"![The curve of the run]({curve})\n\n" if curve else ""
    titles = [shown[name] for name in columns]
    table = "\n".join([f"| step | tokens | {' | '.join(titles)} |", f"|---|---|{'---|' * len(titles)}", *rows])
    return f"## Metrics\n\n{picture}{table}"


def _limits(model, meta):
    base = ""
    if not _is_imported(meta):
        base = """- It is a base model: it continues text and was not tuned to follow instructions.
- It imitates its training code, mistakes and insecure habits included. Its output needs review, a compiler and tests.
- It does not know other programming languages, nor English beyond comments.
"""
    return f"""## Limits

{base}- It may repeat text of its training, to which that text's licence applies.
- Prompt and completion together are at most {model.config.max_seq_len:,} tokens, the length of its training.
- The person who publishes these weights must state their licence: nothing here states it."""
