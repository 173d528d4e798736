"""Copies sources from data sets of Hugging Face's Hub to this machine."""
from pathlib import Path

from nanochat.common import BadInput, locked, written_whole
from nanochat.data.hub_files import PLACE
from nanochat.data.remote import OUTAGE_S, Interruption, Retries, download, outage, patiently
from nanochat.data.storage import list_files, read_range
from nanochat.record.progress import Progress


def fetch(url, cache_dir):
    """Returns the path of the copy in `cache_dir` of a folder or file on the Hub at a commit, and downloads what is
    missing of it. Raises BadInput and Outage."""
    name, commit, path = PLACE.fullmatch(url).groups()
    copy = Path(cache_dir, commit, name)  # called as on the Hub: a source has the name of its folder
    parent = url.rpartition("/")[0] if "." in path.rpartition("/")[2] else url  # of what may be a file
    busy = f"another process is downloading into {cache_dir}: wait for it or choose another --cache_dir"
    files = {}
    for file in patiently(url, OUTAGE_S, list_files, parent).values():
        inside = file.url.partition(f"@{commit}/")[2]
        if {"", ".", ".."} & {*inside.split("/")}:  # it could lead out of the folder
            raise BadInput(f"--source={url}: the Hub names a file {inside!r}: name another folder")
        if f"{file.url}/".startswith(f"{url}/"):
            files[copy / inside] = file
    if not files:
        raise BadInput(f"--source={url} has no files: correct the folder or the file")
    with locked(cache_dir / ".lock", busy):
        try:
            if missing := {path: file for path, file in files.items() if not path.exists()}:
                _download(url, missing)
        except Interruption as error:
            raise outage(url, OUTAGE_S, error) from None
    return copy / path.strip("/")


def _download(url, files):
    """Downloads {path: its StoredFile}."""
    with Progress(f"{url}: downloading {len(files)} files", sum(file.size for file in files.values())) as bar:
        def read(begin, end):
            for part in read_range(stored, begin, end):
                yield part
                bar.update(len(part))

        for path, stored in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(path) as unfinished, open(unfinished, "wb") as file:
                download(read, file.fileno(), 0, stored.size, Retries(stored.url, OUTAGE_S))
