"""The model card of an exported checkpoint, README.md: the model's architecture, data, metrics and limits. All of it
comes from the checkpoint, the metrics of its run and the manifest of its corpus; the rest is called unknown.
model_card.jinja is its text."""
import json
from collections import Counter
from dataclasses import fields
from pathlib import Path

from nanochat.common import BadInput, get_base_dir, read_named
from nanochat.data.shards import DEFAULT_DIRS, fingerprint, open_text, saved_text_flags
from nanochat.model.config import CONFIG_FLAGS
from nanochat.model.rates import OptimConfig
from nanochat.record.page import fill

MANIFEST = "manifest.json"  # of scripts/prepare_data.py
CURVE_ROWS = 20
# The flags of the training, without those of the machine, its folders and accounts.
RECIPE = (*CONFIG_FLAGS, "num_iterations", "target_flops", "target_param_data_ratio", "total_batch_size",
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
    return fill(
        Path(__file__).with_name("model_card.jinja"), name=name, config=model.config, meta=meta,
        parameters=sum(p.numel() for p in model.parameters()), is_imported=not meta.flags, is_scaled=is_scaled,
        has_middles="<|fim_middle|>" in tokenizer.special_tokens, data=manifest and _data_of(manifest), cell=_cell,
        number="{:,}".format, command=_command(meta), metrics=run and _metrics(run), curve=curve)


def _data_of(manifest):
    """Returns what the card says of the data, a dict."""
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
            sources.append(" | ".join(map(_cell, cells)))
    total = (manifest.get("totals") or {}).get(Path(DEFAULT_DIRS["train"]).name, {})
    num_files = total.get("files", total.get("documents", 0))  # with --pack=project a document is not one file
    return {"num_files": num_files, "nbytes": total.get("bytes", 0), "sources": sources,
            "licences": licences.most_common(), "held_out": {"whole projects": val, "parts of data sets": divided}}


def _trained_on(source, what):
    """Returns how many documents or bytes of a source were not held out, as text."""
    return f"{source.get(what, 0) - source.get(f'held_out_{what}', 0):,}"


def _cell(text):
    """Returns the text as a cell of a table."""
    return " ".join(str(text).replace("|", "\\|").split())


def _command(meta):
    """Returns the command that trained the model, as text."""
    command = ["base_train"]
    for name in RECIPE:
        value = meta.flags.get(name)
        if value is True:
            command.append(f"--{name}")
        elif value is not False and value not in (None, "", -1):  # which stand for a flag that was not given
            command.append(f"--{name}={value}")
    return " ".join(command)


def _metrics(run):
    """Returns the rows of the table of metrics, lists of texts, the names of the columns first; [] without any."""
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
        return []
    steps = sorted(next(iter(columns.values())))
    # CURVE_ROWS steps at equal distances with the first and the last one, or all if there are fewer.
    kept = sorted({steps[round(i * (len(steps) - 1) / (CURVE_ROWS - 1))] for i in range(CURVE_ROWS)})
    rows = [["step", "tokens", *(shown[name] for name in columns)]]
    for step, tokens in zip(kept, run.work(kept), strict=True):
        rows.append([f"{step:,}", f"{tokens:,.0f}", *(texts.get(step, "") for texts in columns.values())])
    return rows
