"""All reads from and writes to a place: a folder of this machine, a bucket of Google Cloud Storage (gs://…) or, read
only, a data set of Hugging Face's Hub (hf://…). Only this file decides by the address.

    list_files("gs://bucket/folder")               # {path in the folder: its StoredFile}; on this machine its Path
    read_range(file, 0, 100)                       # yields bytes 0 to 99 of a StoredFile, in parts
    copy_files([("/tmp/name", "gs://bucket/folder/name")])   # there or back, several at a time
    delete_file("gs://bucket/folder/name")

All raise BadInput if the place refuses for good, Interruption for a failure that may pass, and OSError for files of
this machine.
"""
import math
import os
import re
import shutil
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from nanochat.common import BadInput, expand_path
from nanochat.data import gcs, hub_files
from nanochat.data.remote import Interruption, Retries, StoredFile, download, side_by_side

COPIES_AT_ONCE = 4
BLIP_S = 3  # for which a copy is retried at once, so that an odd failure costs one file and not the whole copy
PIECE_BYTES = 4 << 20  # of a file that is copied to a folder
PARTIAL = ".partial"  # ends the names of files that are being copied to a folder


def data_place(text):
    """Returns the value of a flag that names a folder in a bucket, on the Hub or on this machine. Raises BadInput if it
    is none of them."""
    is_place = re.match(r"gs://[a-z0-9][a-z0-9._-]*(/|$)", text) or hub_files.PLACE.fullmatch(text)
    if is_place and text.isprintable():
        return text.rstrip("/")
    if re.match(r"(?:gs|hf)//|[a-z][a-z0-9+.-]*:", text, re.IGNORECASE):
        raise BadInput("it is neither gs://BUCKET/FOLDER, hf://datasets/ORG/NAME/FOLDER nor a folder of this machine: "
                       "correct it (a path with a colon is written in full)")
    return str(expand_path(text))


def is_remote(place):
    """Returns whether a folder, as data_place returns it or None, is in a bucket or on the Hub."""
    return str(place).startswith(("gs://", "hf://"))


def _server_of(url):
    return hub_files if url.startswith("hf://") else gcs


def list_files(place):
    """Returns {path in the folder: file} of all files in it, at every depth; none if there is no such folder. Files in
    a bucket or on the Hub are StoredFiles, those of this machine Paths."""
    if not is_remote(place):
        return _files_in(place)
    return {file.url.removeprefix(f"{place}/"): file for file in _server_of(place).list_files(place)}


def _files_in(folder):
    """Does the work of list_files for a folder of this machine. Raises OSError if the folder itself cannot be read."""
    with suppress(FileNotFoundError):
        os.listdir(folder)  # os.walk hides errors
    found = {}
    seen = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        inside = Path(place).relative_to(folder)
        found |= {str(inside / name): Path(place, name) for name in names}
        seen.add(os.path.realpath(place))
        # Hidden folders may be large, and links may lead back.
        folders[:] = [name for name in folders
                      if name[0] != "." and os.path.realpath(os.path.join(place, name)) not in seen]
    return found


def read_range(file, begin, end):
    """Yields the bytes of a StoredFile from `begin` to `end`, in parts. A broken connection may end it early."""
    return _server_of(file.url).read_range(file, begin, end)


def copy_files(pairs, timeout_s=math.inf):
    """Copies files, [(source, target)], a few at a time; raises the first error. A source is a StoredFile or a path, a
    target a URL or a path. A file appears in the target's folder only once it is whole. After timeout_s, a copy from
    path to path ends within the file."""
    deadline = time.monotonic() + timeout_s
    side_by_side(lambda pair: _copy_file(*pair, deadline), pairs, COPIES_AT_ONCE)


def _copy_file(source, target, deadline):
    if is_remote(target):
        Retries(target, BLIP_S).call(gcs.upload, source, target)
    elif isinstance(source, StoredFile):
        with open(target, "wb") as copy:
            download(partial(read_range, source), copy.fileno(), 0, source.size, Retries(source.url, BLIP_S))
    else:
        _copy_in_pieces(Path(source), Path(target), deadline)


def _copy_in_pieces(source, target, deadline):
    unfinished = target.with_name(target.name + PARTIAL)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished.unlink(missing_ok=True)  # a copy that was too slow may still have it open
        with open(source, "rb") as file, open(unfinished, "wb") as copy:
            while piece := file.read(PIECE_BYTES):
                if time.monotonic() > deadline:  # it writes no longer beside the next copy
                    raise Interruption("the copy took too long")
                copy.write(piece)
        unfinished.replace(target)
    except OSError as error:
        error.filename = error.filename or str(unfinished)
        with suppress(OSError):
            unfinished.unlink()
        raise


def delete_file(url):
    """Deletes the file of this URL or path, if it is there, and its folder if that is empty then."""
    if is_remote(url):
        return gcs.delete_file(url)
    Path(url).unlink(missing_ok=True)
    with suppress(OSError):
        Path(url).parent.rmdir()


def delete_folder(place):
    """Deletes a folder, as data_place returns it, with all files in it, if it is there."""
    if is_remote(place):
        for path in list_files(place):
            delete_file(f"{place}/{path}")
    elif Path(place).exists():
        shutil.rmtree(place)
