"""Public weights in: a model of the Llama family, as on Hugging Face's Hub, becomes the checkpoint of step 0 of a run.

Its Meta has no flags, and a `source`. SOURCE has the small files that came along.
"""
import json
import math
import os
import re
import shutil
import time
import zipfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from nanochat.checkpoint import on_disk
from nanochat.checkpoint.meta import Meta
from nanochat.checkpoint.on_disk import META, MODEL, OPTIMIZER, SOURCE, SUMS
from nanochat.checkpoint.pieces import Layout
from nanochat.common import BadInput, Outage, expand_path, is_disk_full, require_file
from nanochat.data.hub_files import pinned
from nanochat.data.hub_tokenizer import HubTokenizer
from nanochat.data.remote import patiently
from nanochat.data.storage import copy_files, data_place, is_remote, list_files
from nanochat.export.llama import CARD, CONFIG, SMALL_FILES, matches, read_config, their_names, their_shapes
from nanochat.model.weights import shapes
from nanochat.run.processes import exclusive_use

WEIGHT_FILES = ("model*.safetensors",)
DOWNLOAD = ".download"  # in the run's folder: what a kill leaves there, the next attempt continues
OUTAGE_S = 60
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # of safetensors, as torch names them


def import_model(place, directory, max_seq_len=None):
    """Makes a checkpoint in a run's directory. Returns its path and its Meta. Raises BadInput, and Outage.

    place: a folder, gs://BUCKET/FOLDER, ORG/NAME or ORG/NAME@COMMIT. max_seq_len: as in read_config.
    """
    with exclusive_use(directory):
        if on_disk.list_checkpoints(directory):
            raise BadInput(f"--run={directory.name} has checkpoints: choose another --run")
        on_disk.clean_partial(directory)
        unfinished = on_disk.partial_dir(directory, 0)
        unfinished.mkdir()
        try:
            meta = _write_checkpoint(unfinished, open_source(place, directory / DOWNLOAD), max_seq_len)
            on_disk.publish(unfinished, on_disk.final_dir(directory, 0))
        except OSError as error:
            if is_disk_full(error):
                raise
            raise BadInput(f"{place} cannot be imported ({_line(error)}): copy the whole model again") from None
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(directory / DOWNLOAD, ignore_errors=True)
        return on_disk.final_dir(directory, 0), meta


def _write_checkpoint(folder, source, max_seq_len):
    """Writes the files of a checkpoint to the folder, and returns its Meta. What can be refused without the weights is
    refused before they are fetched."""
    source.fetch(SMALL_FILES)
    small = {path.name: path.read_bytes() for path in source.paths(SMALL_FILES)}
    found, config = _read_config(source, small, max_seq_len)
    with zipfile.ZipFile(folder / SOURCE, "w") as file:
        for name, content in small.items():
            file.writestr(zipfile.ZipInfo(name), content)  # without the time: the same files make the same bytes
    try:
        tokenizer = HubTokenizer(small)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(f"{source.name}: its tokenizer files cannot be used ({type(error).__name__}: {_line(error)}): "
                       "copy them again, or give a model with a BPE whose text comes back") from None
    if tokenizer.n_vocab > config.vocab_size:
        raise BadInput(f"{source.name}: its tokenizer has the id {tokenizer.n_vocab - 1}, but {CONFIG} says vocab_size "
                       f"{config.vocab_size}: give files that belong together")
    source.fetch(WEIGHT_FILES)
    stored = find_tensors(source)
    dtype = _require_tensors(source, stored, config)
    sizes = {name: 4 * math.prod(shape) for name, shape in shapes(config).items()}
    layout = Layout.of(sizes, {})
    on_disk.check_disk_space(folder.parent, layout.num_bytes, copies=1)
    for file, names in layout.files.items():
        if file != OPTIMIZER:
            _write_tensors(folder / file, names, config, stored)
    meta = Meta(0, asdict(config), tokenizer.sha256, data_fingerprint="", flags={}, rng="", time=time.time(), source={
        "model": source.name, "commit": source.commit, "licence": licence_of(small.get(CARD, b"")),
        "model_type": found["model_type"], "dtype": dtype})
    for name, text in (layout.indexes() | {META: json.dumps(meta.to_json(), indent=1)}).items():
        (folder / name).write_text(text)
    (folder / SUMS).write_text(on_disk.sums_text(sorted(folder.iterdir())))
    for path in folder.iterdir():
        on_disk.sync_to_disk(path)
    return meta


def _read_config(source, small, max_seq_len):
    """Returns the object in config.json, and its LlamaConfig."""
    try:
        found = json.loads(small[CONFIG])
        return found, read_config(found, max_seq_len)
    except KeyError as error:
        raise BadInput(f"{source.name} has no {error.args[0]}: give the folder of a whole model") from None
    except BadInput as error:
        raise BadInput(f"{source.name}/{CONFIG}: {error}") from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(f"{source.name}/{CONFIG} is no config of a model ({error}): copy it again") from None


def licence_of(card):
    """Returns the licence that a model card (bytes) states in the lines at its top, or ""."""
    top = re.match(r"---\s*\n(.*?)\n---", card.decode("utf-8-sig", errors="replace"), re.DOTALL)
    lines = re.sub(r"(^license:) *\r?\n *- *", r"\1 ", top[1] if top else "", flags=re.MULTILINE)  # the first of a list
    stated = dict(re.findall(r"^(license\w*): *[\"']?(.*?)[\"']? *\r?$", lines, re.MULTILINE))
    licence = stated.get("license", "")
    return stated.get("license_name", licence) if licence == "other" else licence


# Where the files are


class Source(NamedTuple):
    """A folder with a model's files."""
    folder: Path
    name: str
    commit: str  # of the Hub, or ""
    fetch: Callable  # fetch(patterns) brings the files of such names into the folder

    def paths(self, patterns):
        """Returns the paths of the files of such names. Raises BadInput or OSError unless each is an ordinary file in
        the folder."""
        found = [self.folder / name for name in sorted(os.listdir(self.folder)) if matches(name, patterns)]
        for path in found:
            require_file(path)
            if path.resolve().parent != self.folder.resolve():
                raise BadInput(f"{path} is a link out of its folder: copy the model with cp -rL")
        return found


def open_source(place, scratch):
    """Returns the Source of a place, see import_model; its files are fetched into the folder `scratch` if they are not
    on this machine. Raises BadInput."""
    if is_remote(place):
        place = pinned(data_place(place))
        return Source(scratch, os.path.basename(place), "", partial(_from_bucket, place, scratch))
    folder = expand_path(place)
    if folder.is_dir():
        return Source(folder, folder.resolve().name, "", lambda patterns: None)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(@\w[\w.-]*)?", place):
        raise BadInput(f"{place} is no folder, no gs://BUCKET/FOLDER and no ORG/NAME of the Hub: correct it")
    from huggingface_hub import HfApi
    name, _, commit = place.partition("@")
    commit = _ask_hub(HfApi().model_info, name, revision=commit or None).sha
    return Source(scratch, name, commit, partial(_from_hub, name, commit, scratch))


def _from_hub(name, commit, folder, patterns):
    from huggingface_hub import snapshot_download
    _ask_hub(snapshot_download, name, revision=commit, local_dir=folder, allow_patterns=list(patterns))


def _ask_hub(function, name, **options):
    from huggingface_hub import errors
    try:
        return function(name, **options)
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.GatedRepoError,
            errors.HFValidationError) as error:
        raise BadInput(f"{name}: the Hub refuses it ({_line(error)}): correct the name, or set HF_TOKEN if the model "
                       "is not for everybody") from None
    except (OSError, errors.HTTPError) as error:
        if is_disk_full(error):
            raise
        raise Outage(f"{name}: the Hub has not answered ({_line(error)}): start the same command again later, or give "
                     "a folder") from None


def _from_bucket(url, folder, patterns):
    def copy():
        copy_files([(file, folder / path) for path, file in list_files(url).items()
                    if "/" not in path and matches(path, patterns)])

    folder.mkdir(exist_ok=True)
    patiently(url, OUTAGE_S, copy)


def _line(error):
    return " ".join(str(error).split())[:200]


# The weights


class Stored(NamedTuple):
    """A tensor in a file of safetensors."""
    path: Path
    shape: tuple
    dtype: str  # as in DTYPES, or another

    def read(self, name):
        """Returns the tensor in fp32. Raises BadInput unless all values are finite."""
        with _opened(self.path) as file:
            tensor = file.get_tensor(name).float()
        if not all(map(math.isfinite, tensor.aminmax())):  # which gives a NaN if there is one
            raise BadInput(f"{self.path}: {name} has values that are not finite: copy the file again")
        return tensor


@contextmanager
def _opened(path):
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise BadInput(f"{path} is no whole file of safetensors ({_line(error)}): copy it again") from None


def find_tensors(source):
    """Returns {name: Stored} of all tensors in the files of a Source. Raises BadInput if a tensor is in two of them."""
    stored = {}
    for path in source.paths(WEIGHT_FILES):
        with _opened(path) as tensors:
            for name in tensors.keys():
                if name in stored:
                    raise BadInput(f"{name} is in {stored[name].path} and in {path}: take away what is not the model's")
                tensor = tensors.get_slice(name)
                stored[name] = Stored(path, tuple(tensor.get_shape()), tensor.get_dtype())
    if not stored:
        pickles = sorted(path.name for path in source.folder.glob("*.bin"))
        also = f" (but {pickles[0]}, a pickle, which may run any program)" if pickles else ""
        raise BadInput(f"{source.name} has no {MODEL}{also}: give a model with safetensors")
    return stored


def _require_tensors(source, stored, config):
    """Returns the dtype of the tensors, {name: Stored}, by its name. Raises BadInput unless they are those of the
    config."""
    def refuse(problem):
        raise BadInput(f"{source.name}: {problem}: its {CONFIG} and its weights do not belong together, or a file is "
                       "incomplete")

    expected = their_shapes(config)
    head, embedding = (their_names(name, config)[0] for name in ("lm_head", "wte"))
    extra = stored.keys() - expected.keys() - ({head} if config.tied_head else set())
    if extra:
        refuse(f"{min(extra)} is unknown")
    for name, shape in expected.items():
        if name not in stored:
            refuse(f"{name} is missing")
        if stored[name].shape != shape:
            refuse(f"{name} has the shape {stored[name].shape} instead of {shape}")
    dtypes = sorted({tensor.dtype for tensor in stored.values()})
    if len(dtypes) > 1 or dtypes[0] not in DTYPES:
        raise BadInput(f"{source.name}: its weights are of {' and '.join(dtypes)}, and all must be of one of "
                       f"{', '.join(DTYPES)}")
    if head in stored and config.tied_head and not torch.equal(stored[head].read(head),
                                                               stored[embedding].read(embedding)):
        refuse(f"tie_word_embeddings is true, and {head} differs from the embedding")
    return DTYPES[dtypes[0]]


# safetensors itself writes only whole tensors. Here a stack of layers is written layer by layer, so that memory holds
# one tensor of the source at a time.
def _write_tensors(path, names, config, stored):
    """Writes a file of safetensors with weights of these names in fp32. stored: {name in transformers: Stored}."""
    header = {}
    end = 0
    for name in names:
        begin, end = end, end + 4 * math.prod(shapes(config)[name])
        header[name] = {"dtype": "F32", "shape": shapes(config)[name], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            for theirs in their_names(name, config):
                file.write(stored[theirs].read(theirs).numpy())
