"""Parquet files of data: on this machine, or elsewhere (gs://… or hf://…) with a cache on this machine's disk.

    files = data_files("gs://my-bucket/parquet/val", cache_gb=20)    # RemoteFiles; of a folder here, LocalFiles
    files[0].open_footer()                # a pyarrow file that has the footer, at its place
    files[0].open_row_group(3, ["text"])  # … this column of row group 3; and the file's metadata
    files[0].read_ahead(3, ["text"])      # fetches that in the background

Raises BadInput if it is refused for good, Outage if a place has not been reached for OUTAGE_S, and Failure if the disk
is full.
"""
import hashlib
import math
import os
import re
import shutil
import threading
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from nanochat.common import (
    BadInput,
    Failure,
    Outage,
    get_base_dir,
    is_disk_full,
    require_file,
    require_writable_dir,
    say,
)
from nanochat.data import remote
from nanochat.data.hub_files import pinned
from nanochat.data.remote import Interruption, Retries, StoredFile, download, outage, patiently, side_by_side
from nanochat.data.storage import is_remote, list_files, read_range

CACHE_GB = 20.0
CACHE_DIR = "bucket_cache"  # under the base directory
LOCK_TIMEOUT_S = remote.OUTAGE_S  # for another process that fetches the same part
ROOM_TIMEOUT_S = 60  # for others that make room in the cache
TAIL_BYTES = 64 << 10  # of a file, in which most footers are
FOOTERS_AT_ONCE = 16
NUM_FETCHES = 8  # in the background of a process, at the same time
PADDING_BYTES = 100  # which pyarrow reads after a column of old files of parquet-mr, whose sizes are too small
BLOCK_BYTES = 4096  # of the disk; a part fills its first and last one incompletely
EVICTED_SHARE = 0.1  # of the limit; each eviction makes this much free, because it lists all parts
TRIES = 5  # to open a part; more than two only if the cache is so small that others evict the part at once


@dataclass
class LocalFile:
    """A file on this machine, with the methods of RemoteFile. They open the whole file: pyarrow reads what it needs."""
    commit = ""
    path: Path
    seen: tuple | None = field(default=None, compare=False)  # its size and time of change when it was first opened

    def __str__(self):
        return str(self.path)

    @property
    def name(self):
        return self.path.name

    def open_footer(self):
        require_file(self.path)
        file = pa.OSFile(str(self.path))
        stat = os.fstat(file.fileno())
        found = stat.st_size, stat.st_mtime_ns  # not the inode, because gcsfuse numbers a file anew now and then
        self.seen = self.seen or found
        if found != self.seen:
            file.close()
            raise BadInput(f"{self} was replaced or changed after it was opened: put it back, or begin a new run with "
                           "the data as it is now")
        return file

    def open_row_group(self, row_group, columns):
        return self.open_footer(), None

    def read_ahead(self, row_group, columns):
        pass


@dataclass(frozen=True)
class RemoteFile:
    """A file in a bucket or on the Hub, as it was when it was listed. It waits up to outage_s for an answer."""
    stored: StoredFile
    cache_gb: float = CACHE_GB
    outage_s: float = remote.OUTAGE_S

    def __str__(self):
        return self.stored.url

    @property
    def name(self):
        return self.stored.url.rpartition("/")[2]

    @property
    def parent(self):
        return self.stored.url.rpartition("/")[0]

    @property
    def commit(self):
        return self.stored.commit

    def open_footer(self):
        """Returns a pyarrow file of the same size, which holds only the footer."""
        size = self.stored.size
        tail = max(0, size - TAIL_BYTES)
        file = self._open(tail, size)
        if size < 8:
            return file
        # The last 8 bytes are the footer's length and PAR1. If the footer begins before the tail, fetch all of it.
        file.seek(size - 8)
        footer = size - 8 - int.from_bytes(file.read(4), "little")
        if 0 <= footer < tail and file.read(4) == b"PAR1":
            file = self._open(footer, size)
        file.seek(0)
        return file

    def open_row_group(self, row_group, columns):
        """Returns a pyarrow file that holds only these columns of a row group, and the metadata from the footer."""
        with self.open_footer() as file:
            metadata = pq.read_metadata(file)
        begin, end = column_range(metadata, row_group, columns)
        if end > self.stored.size:
            raise pa.ArrowInvalid(f"it ends at {self.stored.size:,} bytes")  # as pyarrow does for a file on disk
        return self._open(begin, min(end + PADDING_BYTES, self.stored.size)), metadata

    def read_ahead(self, row_group, columns):
        """Fetches columns of a row group in the background."""
        def work():
            # One attempt only: whoever needs the row group will retry, and report what is wrong.
            with _fetches, suppress(BadInput, Failure, pa.ArrowException, OSError):
                replace(self, outage_s=0).open_row_group(row_group, columns)

        threading.Thread(target=work, name="read-ahead", daemon=True).start()

    def _open(self, begin, end):
        folder = _cache_folder(get_base_dir())
        key = f"{self.stored.url} {self.stored.generation} {begin} {end}"
        path = folder / hashlib.sha256(key.encode()).hexdigest()[:32]
        for _ in range(TRIES):
            try:
                # The file's time records the last read, for evictions. An open file stays readable once it is deleted.
                if _is_whole(path, end):
                    os.utime(path)
                    return pa.OSFile(str(path))
                # The process that has the lock fetches the part, and those that wait for it find it there. All parts
                # share 256 locks, so that the folder does not fill with locks.
                with _lock(folder / f"{path.name[:2]}.lock", LOCK_TIMEOUT_S):
                    if not _is_whole(path, end):
                        self._fetch(path, begin, end)
            except Timeout as error:
                raise Outage(f"{self}: another process has held {error.lock_file} for too long: start the same command "
                             "again") from None
            except Interruption as error:
                raise outage(self, self.outage_s, error) from None
            except FileNotFoundError:  # evicted meanwhile
                continue
            except OSError as error:
                if is_disk_full(error):
                    raise Failure(f"the disk is full ({error.strerror}), so {self} cannot be read: free some space for "
                                  f"{folder}, or lower --data_cache_gb={self.cache_gb:g}") from None
                raise Failure(f"the cache {folder} cannot be used ({error}): mend this, or delete it while nothing "
                              "runs") from None
        raise Failure(f"the cache {folder} is too small for all processes that use it: raise --data_cache_gb, or run "
                      "fewer")

    def _fetch(self, path, begin, end):
        unfinished = path.with_suffix(".partial")
        try:
            _reserve(unfinished, begin, end, self.cache_gb * 1e9)
            with unfinished.open("r+b") as file:
                download(partial(read_range, self.stored), file.fileno(), begin, end, Retries(self, self.outage_s))
                os.fsync(file.fileno())
            with _room_lock(unfinished.parent):  # so that _parts_in counts it under one of the names
                unfinished.rename(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise


def _is_whole(path, end):
    return path.exists() and path.stat().st_size == end


def fetch_footers(files):
    """Fetches the footers of the RemoteFiles among `files` into the cache, many at the same time."""
    files = [file for file in files if isinstance(file, RemoteFile)]
    side_by_side(lambda file: file.open_footer().close(), files, FOOTERS_AT_ONCE)


def choose_shards(place, paths):
    """Returns those of the relative `paths` in the folder `place` that are its shards: *.parquet in the folder, or in
    the first level of folders below it that has some, because `gcloud storage cp -r` nests what it copies. A folder
    further down may be the validation set's. Says once how many parquet files are left out."""
    # Jupyter's copies and AppleDouble files are hidden; _delta_log and _temporary are Delta Lake's and Spark's own.
    tables = [path for path in paths if re.search(r"\.(parquet|parq|pq)$", path, re.IGNORECASE)
              and not re.search(r"(?:^|/)(?:\.|_[^/]*/)", path)]
    depths = [path.count("/") for path in tables if path.endswith(".parquet")]
    chosen = [path for path in tables if path.endswith(".parquet") and path.count("/") == min(depths)]
    if left_out := sorted(set(tables) - set(chosen)):
        more = " …" if len(left_out) > 1 else ""
        _say_once(f"warning: {len(chosen)} of {len(tables)} parquet files in {place} are read, and not "
                  f"{left_out[0]}{more}: move the others beside them, and end their names in .parquet")
    return chosen


_say_once = cache(say)


def column_range(metadata, row_group, names):
    """Returns the places in the file where these columns of a row group begin and end."""
    begins = []
    ends = []
    columns = metadata.row_group(row_group)
    for column in map(columns.column, range(columns.num_columns)):
        if column.path_in_schema in names:
            begin = column.data_page_offset
            if column.has_dictionary_page and column.dictionary_page_offset:
                begin = min(begin, column.dictionary_page_offset)
            begins.append(begin)
            ends.append(begin + column.total_compressed_size)
    return min(begins), max(ends)


# The cache, $NANOCHAT_BASE_DIR/bucket_cache
#
# Lanes read row groups in a random order, so the unit of fetching is a row group: whole files would be fetched again
# and again. All processes of the machine share the cache: together they keep its limit, and fetch each part once. A
# part is a sparse file that has the bytes at their place, so pyarrow reads it like the file itself. Only whole parts
# are read. The cache evicts the part that was not read for longest.

_fetches = threading.Semaphore(NUM_FETCHES)


@cache
def _cache_folder(base_dir):
    return require_writable_dir(base_dir / CACHE_DIR)


def _lock(path, timeout_s):
    return FileLock(path, timeout=timeout_s, fallback_to_soft=False)  # a kill would leave the lock of the fallback


def _room_lock(folder):
    return _lock(folder / "room.lock", ROOM_TIMEOUT_S)


# The file `bytes` holds the size of all parts together, so that a fetch does not have to list them. It is an upper
# bound: a killed process has counted a part that it did not finish. An eviction lists the parts and counts anew.
def _reserve(partial, begin, end, limit):
    """Makes the file `partial`, with room on the disk for its bytes from `begin` to `end`. Evicts parts if the cache
    would exceed `limit` bytes."""
    folder = partial.parent
    counter = folder / "bytes"
    n_bytes = end - begin + 2 * BLOCK_BYTES
    with _room_lock(folder):
        try:
            used = int(counter.read_text())
        except (OSError, ValueError):
            used = limit
        if used + n_bytes > limit:
            used = _evict(folder, max(0, (1 - EVICTED_SHARE) * limit - n_bytes))
        counter.write_text(str(used + n_bytes))
        with partial.open("wb") as file:
            # This allocates blocks, not only a size: so a full disk shows here, and `bytes` counts what the disk gives.
            if end > begin:
                os.posix_fallocate(file.fileno(), begin, end - begin)


def _parts_in(folder):
    """Returns [(time of the last read, bytes on the disk, path)] of the cache, in any order."""
    found = []
    for entry in os.scandir(folder):
        if re.fullmatch(r"[0-9a-f]{32}(\.partial)?", entry.name):
            try:
                stat = entry.stat()
            except FileNotFoundError:
                continue
            found.append((stat.st_mtime_ns, stat.st_blocks * 512, entry.path))
    return found


def _evict(folder, limit):
    """Deletes the parts that were not read for longest until all have at most `limit` bytes. Returns how many."""
    parts = sorted(_parts_in(folder))
    used = sum(n_bytes for _, n_bytes, _ in parts)
    for _, n_bytes, path in parts:
        if used <= limit:
            break
        Path(path).unlink(missing_ok=True)
        used -= n_bytes
    return used


def check_cache(shards, num_lanes):
    """Returns a line about the Shards in a bucket and their cache, None if none is in a bucket. Raises BadInput if the
    cache is too small for the lanes, or the disk for the cache."""
    shards = [shard for shard in shards if isinstance(shard.file, RemoteFile)]
    if not shards:
        return None
    folder = _cache_folder(get_base_dir())
    limit = shards[0].file.cache_gb * 1e9
    n_bytes = sum(shard.n_bytes for shard in shards)
    largest = max(shard.largest_group_bytes for shard in shards)
    needed = min(n_bytes, 2 * num_lanes * (largest + 2 * BLOCK_BYTES))
    if needed > limit:
        raise BadInput(f"--data_cache_gb={limit / 1e9:g} is too small: each of {num_lanes} lanes holds two row groups, "
                       f"of up to {largest / 1e6:,.1f} MB: give at least {math.ceil(needed / 1e7) / 100:g}, or write "
                       "smaller row groups")
    free = shutil.disk_usage(folder).free
    available = free + sum(used for _, used, _ in _parts_in(folder))
    if available < min(limit, n_bytes):
        raise BadInput(f"--data_cache_gb={limit / 1e9:g}, but there is only room for {available / 1e9:.3g} GB in "
                       f"{folder}: give less than that, or free some space")
    places = " and ".join(sorted({shard.file.parent for shard in shards}))
    return (f"{n_bytes / 1e9:,.3g} GB in {places}; a cache of up to {limit / 1e9:g} GB in {folder}, where "
            f"{free / 1e9:,.1f} GB are free")


# Listing


def data_files(place, cache_gb=CACHE_GB):
    """Returns the shards (choose_shards) in a folder: LocalFiles, or RemoteFiles as they were when this process first
    asked. Raises OSError if a folder of this machine cannot be read."""
    if not is_remote(place):
        os.listdir(place)  # a folder that is not there has no files for list_files
        files = list_files(place)
        return [LocalFile(files[path]) for path in choose_shards(place, files)]
    files = _remote_files(pinned(place.rstrip("/")))
    return [RemoteFile(files[path], cache_gb, remote.OUTAGE_S) for path in choose_shards(place, files)]


@cache
def _remote_files(url):
    return patiently(url, remote.OUTAGE_S, list_files, url)
