"""The units of the data, and the order in which each lane reads them.

    units = Units(open_shards(paths), num_lanes=64, seed=0)
    unit = units.get(3, 0)                            # the first of lane 3
    units.read(unit, unit.first, 0, 1 << 20)          # its first TextPieces

A TextPiece (shards.py) is (document, its number in the document, is_last, text): a long document has several.
"""
from bisect import bisect_left
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from nanochat.data.shards import TEXT, Shard, read_pieces

KEPT_BYTES = 64 << 20  # decoded text stays in memory if all shards together are smaller than this


class Unit(NamedTuple):
    """Documents of a row group."""
    shard: Shard
    row_group: int
    first: int  # document
    stop: int  # the document after the last


class Units:
    """A unit is a row group, or a slice of one if there are fewer row groups than lanes. Every epoch has all units, in
    a random order of its own. The lanes take turns at the units of all epochs, one after the other.
    """

    def __init__(self, shards, num_lanes, seed):
        self.num_lanes = num_lanes
        self.seed = seed
        self.units = []
        row_groups = []
        for shard in shards:
            for row_group, n_documents in enumerate(shard.row_group_documents):
                if n_documents:
                    row_groups.append((shard, row_group, n_documents))
        # Reading a slice decodes the row group up to it: so there are only as many slices as give each lane a unit.
        slices = -(-num_lanes // len(row_groups))
        for shard, row_group, n_documents in row_groups:
            cuts = np.linspace(0, n_documents, min(slices, n_documents) + 1).astype(int).tolist()
            for first, stop in zip(cuts[:-1], cuts[1:], strict=True):
                self.units.append(Unit(shard, row_group, first, stop))
        self._order = lru_cache(maxsize=4)(self._order_of_epoch)
        # Small data is read again and again, in slices, so it stays in memory.
        n_bytes = sum(shard.n_bytes for shard in shards)
        self._kept = {}  # (digest of the shard, row group): its TextPieces
        self._room = KEPT_BYTES if n_bytes < KEPT_BYTES else 0

    def _order_of_epoch(self, epoch):
        # Raw bits, because NumPy guarantees only for these that they do not change from version to version.
        bits = np.random.Philox(np.random.SeedSequence([self.seed, epoch])).random_raw(len(self.units))
        return np.argsort(bits, kind="stable")

    def get(self, lane, number):
        """Returns the Unit that `lane` reads as its `number`-th, from 0."""
        # Lanes take turns at one sequence, epoch after epoch. With 5 units and 2 lanes, lane 0 has the units 0, 2 and 4
        # in the order of the first epoch, and then 1 and 3 in that of the second: nothing is left over between epochs.
        epoch, index = divmod(number * self.num_lanes + lane, len(self.units))
        return self.units[self._order(epoch)[index]]

    def read_ahead(self, lane, number):
        """Prefetches the row group of a unit from its bucket."""
        unit = self.get(lane, number)
        if (unit.shard.digest, unit.row_group) not in self._kept:
            unit.shard.file.read_ahead(unit.row_group, [TEXT])

    def number_in_epoch(self, lane):
        """Returns how many units of `lane` are in the first epoch."""
        return len(range(lane, len(self.units), self.num_lanes))

    def read(self, unit, document, first_piece, max_bytes):
        """Returns TextPieces, of about max_bytes, from `document` (its number in the row group) to the end of the
        unit at most, and the document to go on with: that of the last piece, if it has more (read_pieces)."""
        pieces = self._keep(unit.shard, unit.row_group)
        if pieces is None:
            return read_pieces(unit.shard, unit.row_group, document, unit.stop, first_piece, max_bytes)
        begin = bisect_left(pieces, (document, first_piece))
        return pieces[begin:bisect_left(pieces, (unit.stop, 0))], unit.stop

    def _keep(self, shard, row_group):
        """Returns all TextPieces of a row group and keeps them in memory, or None if there is no room for them."""
        # Several workers may come here at the same time without a lock: at worst two decode the same row group.
        key = shard.digest, row_group
        if key not in self._kept and self._room > 0:
            stop = shard.row_group_documents[row_group]
            pieces, end = read_pieces(shard, row_group, 0, stop, max_bytes=self._room)
            self._room -= sum(len(piece.text) for piece in pieces)
            if end == stop:
                self._kept[key] = pieces
        return self._kept.get(key)
