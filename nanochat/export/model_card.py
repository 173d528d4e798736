"""The model card of an exported checkpoint, README.md: what the model is, what it saw, what it reached, what it cannot
do. Everything in it comes from the checkpoint, the metrics of its run and the manifest of its corpus; what is not known
is said to be unknown."""
import json
from collections import Counter
from dataclasses import fields
from pathlib import Path

from nanochat.common import BadInput, get_base_dir
from nanochat.data.shards import DEFAULT_DIRS, fingerprint, open_text, saved_text_flags
from nanochat.model.config import CONFIG_FLAGS
from nanochat.model.rates import OptimConfig

MANIFEST = "manifest.json"  # of scripts/prepare_data.py
CURVE_ROWS = 20
CODE_TAGS = "\ntags: [code, cpp]"
# The flags that say how the model was trained, and nothing of the machine, its folders or accounts.
RECIPE = (*CONFIG_FLAGS, "num_iterations", "target_flops", "target_param_data_ratio", "total_batch_size", "batch_ramp",
          "seq_len_ramp", "fim_rate", "compute_dtype", "seed", *(field.name for field in fields(OptimConfig)))


def read_manifest(path):
    """Returns the manifest of a corpus. Raises BadInput if the file is none."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        _data_of(manifest)  # which fails for anything that is no manifest
        return manifest
    except OSError as error:
        raise BadInput(f"--manifest={path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadInput(f"--manifest={path} is not the manifest of a corpus: name the {MANIFEST} that prepare_data "
                       "wrote beside its shards") from None


def find_manifest(meta):
    """Returns the manifest beside the data that the checkpoint was trained on, or None if other data, or none, is there
    now."""
    data_dir = Path(meta.flags.get("data_dir") or get_base_dir() / DEFAULT_DIRS["train"])
    path = data_dir.parent / MANIFEST
    try:
        if not path.is_file() or fingerprint(open_text(saved_text_flags(meta.flags))) != meta.data_fingerprint:
            return None
        return read_manifest(path)
    except (BadInput, OSError):
        return None


def write_card(name, model, tokenizer, meta, *, run, manifest, is_scaled, curve):
    """Returns the text of the card.

    run: the Run of the metrics up to the checkpoint, or None; manifest: that of the corpus, or None; is_scaled: the
    folder has a modeling file of its own; curve: the name of the picture of the curve, or None.
    """
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
    code = "transformers' own NanoChat" if not is_scaled else "NanoChat, extended by the code in this folder"
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
    trust = ", trust_remote_code=True" if is_scaled else ""
    note = """

`trust_remote_code=True` runs `modeling_nanochat_scaled.py`, which is in this folder: transformers' own NanoChat has no
scales of the residual stream, attention windows, gates or value embeddings.""" if is_scaled else ""
    return f"""## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # where this file is
tokenizer = AutoTokenizer.from_pretrained(folder{trust})
model = AutoModelForCausalLM.from_pretrained(folder{trust})
inputs = tokenizer("int main(int argc", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```{note}

The tokenizer puts `<|bos|>`, with which every document began in training, before the text. It reads the name of a
special token in a text as that token; `split_special_tokens=True` makes it text. Text is Unicode: bytes that are not
UTF-8, which nanochat-tpu itself encodes one by one, cannot be given. Made and tested with transformers 5.23.0."""


def _fill_in_the_middle(tokenizer, meta):
    rate = meta.flags.get("fim_rate") or 0
    if "<|fim_middle|>" not in tokenizer.special_tokens:
        return "## Fill in the middle\n\nThe tokenizer has no tokens for it."
    learnt = f"In training, this share of the documents was arranged like this: {rate:g} (`--fim_rate`)." if rate else \
        "**This checkpoint was not trained to fill in the middle**: the tokens exist, but it has never seen them."
    return f"""## Fill in the middle

```
<|bos|><|fim_prefix|>text before the cursor<|fim_suffix|>text after it<|fim_middle|>what the model writes<|file_sep|>
```

{learnt}

The middle ends with `<|file_sep|>`, and a document with the `<|bos|>` of the next; `generate` stops at both.
The tokenizer writes `<|bos|>` itself. Splits are at characters, not at tokens."""


def _data(meta, manifest):
    if manifest is None:
        return f"""## Data

The corpus is not known here: its manifest was not at hand at the export. The fingerprint of the shards is
`{meta.data_fingerprint}`."""
    return _data_of(manifest)


def _data_of(manifest):
    val = set(manifest.get("val_projects") or ())
    sources = [source for source in manifest["sources"] if source.get("project", source["name"]) not in val]
    licences = sum((Counter(source["licences"]) for source in sources), Counter())
    total = (manifest.get("totals") or {}).get(Path(DEFAULT_DIRS["train"]).name, {})
    num_files = total.get("files", total.get("documents", 0))  # with --pack=project a document is not one file
    rows = "\n".join(f"| {_cell(name)} | {count:,} |" for name, count in licences.most_common())
    projects = "\n".join(
        f"| {_cell(source['name'])} | {_cell(source.get('version') or '')} | {source.get('documents', 0):,} | "
        f"{source.get('bytes', 0):,} | {_cell(', '.join(source['licences']))} |" for source in sources)
    held_out = f"\n\nHeld out for validation, whole projects: {_cell(', '.join(sorted(val)))}." if val else ""
    return f"""## Data

C and C++ of {len(sources)} projects: {num_files:,} files with {total.get("bytes", 0):,} bytes, after exact and near
duplicates were dropped.{held_out}

The licences are those that the files and packages state, counted before duplicates were dropped; "unknown" states none.

| licence | files |
|---|---|
{rows}

<details><summary>The projects, with version, files and bytes before duplicates were dropped</summary>

| project | version | files | bytes | licences |
|---|---|---|---|---|
{projects}

</details>"""


def _cell(text):
    """Returns the text as a cell of a table."""
    return " ".join(str(text).replace("|", "\\|").split())


def _recipe(meta):
    if _is_imported(meta):
        return f"## Recipe\n\nNot known here. Tokenizer sha256 `{meta.tokenizer_sha256}`."
    # None, "" and -1 say that a flag was not given.
    given = {name: meta.flags[name] for name in RECIPE if meta.flags.get(name) not in (None, "", -1, -1.0)}
    flags = " ".join(f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()
                     if value is not False)
    teacher = Path(meta.flags.get("teacher") or "")
    distilled = f"""

It also learned from the predictions of the model {"/".join(teacher.parts[-2:])}: weight {meta.flags["kd_weight"]:g}
at temperature {meta.flags["kd_temperature"]:g}, in the first {meta.flags["kd_until"]:.0%} of the steps.\
""" if teacher.parts else ""
    return f"""## Recipe

```
base_train {flags}
```{distilled}

Matrices by Muon, the rest by AdamW; the learning rate rises, stays, and falls linearly. Tokenizer sha256
`{meta.tokenizer_sha256}`."""


def _metrics(run, curve):
    if run is None:
        return "## Metrics\n\nThe metrics of the run were not at hand at the export."
    shown = {"val_bpb": "validation, bits per byte", "fim_bpb": "middles, bits per byte", "loss": "loss, nats a token"}
    columns = {name: dict(zip(*run.series(name), strict=True)) for name in shown if len(run.series(name)[0])}
    if not columns:
        return "## Metrics\n\nThe run recorded none."
    steps = sorted(next(iter(columns.values())))
    # CURVE_ROWS steps at equal distances, the first and the last among them; fewer where there are not so many.
    kept = sorted({steps[round(i * (len(steps) - 1) / (CURVE_ROWS - 1))] for i in range(CURVE_ROWS)})
    tokens = run.work(kept)
    rows = "\n".join(f"| {step:,} | {count:,.0f} | " + " | ".join(
        f"{values[step]:.4f}" if step in values else "" for values in columns.values()) + " |"
        for step, count in zip(kept, tokens, strict=True))
    picture = f"![The curve of the run]({curve})\n\n" if curve else ""
    return f"""## Metrics

{picture}| step | tokens | {" | ".join(shown[name] for name in columns)} |
|---|---|{"---|" * len(columns)}
{rows}"""


def _limits(model, meta):
    base = "" if _is_imported(meta) else """- It is a base model: it continues text and was not tuned to follow orders.
- It imitates the code it saw, with its mistakes and insecure habits. What it writes needs review, a compiler and tests.
- What its corpus does not have is foreign to it: other programming languages, and English beyond comments.
"""
    return f"""## Limits

{base}- It may repeat text that it was trained on, to which that text's licence applies.
- Prompt and completion together are at most {model.config.max_seq_len:,} tokens. Beyond that it was not trained.
- The licence of these weights is for the person who publishes them to state: nothing here states it."""
