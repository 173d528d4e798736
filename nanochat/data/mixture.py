"""Mixtures: a run's rows come from several sources, by weights that may change in stages. base_train --data_dir=FILE
reads a TOML file:

    [sources.stack]
    dir = "stack/parquet"        # a folder of shards, gs://… or hf://…; a relative one counts from the file's folder
    weight = 0.7
    [sources.own]
    dir = "own/base_data_v3"
    weight = 0.3
    val = "own/val"              # held-out text; runs without --val_dir are validated on that of each source

    [[stage]]                    # from 90% of the steps on
    from = 0.9
    weights = {stack = 0.5, own = 0.5}

A lane has a Lane for each source. The number of a row alone decides of which source it is, so rows depend neither on
the ranks nor on where a run resumes.
"""
import hashlib
import json
import math
import re
from bisect import bisect_right
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from nanochat.common import BadInput, read_toml
from nanochat.data.hub_files import require_commits
from nanochat.data.lanes import COUNTS, Lane, LaneState
from nanochat.data.loader import Loader, settings_of, shared_by_lanes
from nanochat.data.shards import fingerprint, open_text
from nanochat.data.storage import data_place, is_remote

NAME = r"(?!.*per_s$)[A-Za-z]\w*"  # of a source or validation set, whose tokens_NAME must not be tokens_per_s
GOLDEN = (math.sqrt(5) - 1) / 2
SILVER = math.sqrt(2) - 1
MAX_WEIGHT = 1e9


class MixtureSource(NamedTuple):
    """A folder of shards."""
    name: str
    place: str  # folder, gs://… or hf://…
    val: str | None = None  # the place of its held-out text
    shards: tuple = ()  # once it is open

    @property
    def num_documents(self):
        return sum(shard.num_documents for shard in self.shards)


class Stage(NamedTuple):
    """A part of the run with weights of its own."""
    begin: float  # fraction of the run's steps
    weights: tuple  # of the sources, which add up to 1

    def first_step(self, num_iterations):
        return round(self.begin * num_iterations)


class Mixture(NamedTuple):
    sources: tuple
    stages: tuple  # the first begins at 0

    @property
    def shards(self):
        return [shard for source in self.sources for shard in source.shards]

    @property
    def fingerprint(self):
        """A hex string that changes with the data and with all that decides which rows come from where."""
        # inf: sources once had a limit, and runs of then resume.
        parts = [(source.name, math.inf, fingerprint(source.shards)) for source in self.sources]
        return hashlib.sha256(json.dumps([parts, self.stages]).encode()).hexdigest()[:16]


# Reading the file


def read_mixture(path):
    """Returns the Mixture of a file, whose sources are not open. Raises BadInput."""
    try:
        if is_remote(path):
            raise BadInput("a mixture is a file of this machine, whose sources may be elsewhere: copy it here")
        return _mixture_of(read_toml(Path(path)), Path(path).parent)
    except BadInput as error:
        raise BadInput(f"--data_dir={path}: {error}") from None


def open_mixture(flags):
    """Returns the Mixture of DataFlags, with the Shards of its sources. Raises BadInput."""
    mixture = read_mixture(flags.mixture)
    opened = []
    for source in mixture.sources:
        try:
            opened.append(source._replace(shards=tuple(open_text(replace(flags, data_dir=source.place)))))
        except BadInput as error:
            raise BadInput(f"--data_dir={flags.mixture}: source {source.name}: {error}") from None
    return mixture._replace(sources=tuple(opened))


def _mixture_of(table, folder):
    sources = _section("the file", table, {"sources"}, {"stage"})["sources"]
    if not isinstance(sources, dict) or not sources:
        raise BadInput("it has no sources: add a section [sources.NAME] for each, with dir and weight")
    found = tuple(_source_of(name, source, folder) for name, source in sources.items())
    first = {name: source["weight"] for name, source in sources.items() if "weight" in source}
    stages = [Stage(0, _weights_of(first, sources))]
    later = table.get("stage", [])
    for stage in later if isinstance(later, list) else [later]:
        begin = _section("[[stage]]", stage, {"from", "weights"})["from"]
        if type(begin) is not float or not stages[-1].begin < begin < 1:
            raise BadInput(f"[[stage]] from = {begin}: stages begin one after the other, each at a fraction of the run "
                           f"above {stages[-1].begin} and below 1")
        stages.append(Stage(begin, _weights_of(stage["weights"], sources)))
    for place, name in enumerate(sources):
        if not any(stage.weights[place] for stage in stages):
            raise BadInput(f"source {name} has no weight at any time: give it one, or leave it out")
    return Mixture(found, tuple(stages))


def _section(what, found, needed, others=frozenset()):
    """Returns a section of the file, a dict. Raises BadInput if it is none, or has unknown keys or too few."""
    keys = found.keys() if isinstance(found, dict) else set()
    for problem, names in (("is unknown", keys - needed - others), ("is missing", needed - keys)):
        if names:
            raise BadInput(f"{what}: {min(names)} {problem}: it has {', '.join(sorted(needed | others))}")
    return found


def _source_of(name, source, folder):
    _section(f"source {name}", source, {"dir"}, {"weight", "val"})
    if not re.fullmatch(NAME, name):
        raise BadInput(f"source {name}: name it with letters, digits and _, not …per_s")
    places = {}
    for key in source.keys() & {"dir", "val"}:
        try:
            if not isinstance(source[key], str) or "\0" in source[key]:
                raise BadInput("it names no folder of shards")
            place = data_place(source[key])
            require_commits(place)
        except BadInput as error:
            raise BadInput(f"source {name}: {key} = {source[key]!r}: {error}") from None
        places[key] = place if is_remote(place) else str(folder / place)
    return MixtureSource(name, places["dir"], places.get("val"))


def _weights_of(weights, sources):
    """Returns the weights, {name: number}, as a tuple in the order of the sources that adds up to 1."""
    if not isinstance(weights, dict) or not weights or weights.keys() - sources.keys():
        raise BadInput(f"the weights {weights} are not of sources, which are {', '.join(sources)}: give some, such as "
                       "weight = 0.5 for a source, and weights = {NAME = 0.5} for a [[stage]]")
    for name, weight in weights.items():
        if type(weight) not in (int, float) or not 0 < weight <= MAX_WEIGHT:
            raise BadInput(f"the weight of {name} is {str(weight)[:20]}, which is not a number above 0 and of at most "
                           f"{MAX_WEIGHT:g}: leave a source out that is not to be read")
    total = sum(weights.values())
    return tuple(weights.get(name, 0) / total for name in sources)


# Rows


class MixtureLoader(Loader):
    """The endless Batches of a reader from a Mixture. first_rows: the row of the run with which each stage begins."""

    def __init__(self, mixture, tokenizer, rows, first_rows, *, state=None, infilling=None):
        self._mixture = mixture
        self._first_rows = first_rows
        sources = mixture.sources
        self._of_sources = [shared_by_lanes(source.shards, tokenizer, rows, infilling, len(sources))
                            for source in sources]
        settings = settings_of(mixture.shards, tokenizer, infilling) | {"data": mixture.fingerprint}
        super().__init__(settings, rows, sum(source.num_documents for source in sources), state=state)

    def _make_lane(self, number, state, row_tokens):
        states = state.sources or [()] * len(self._of_sources)
        lanes = [Lane(number, LaneState(*own), shared, row_tokens)
                 for shared, own in zip(self._of_sources, states, strict=True)]
        return MixedLane(number, state, lanes, self._source_of)

    def _source_of(self, number, row):
        """Returns the number of the source of row `row` of the lane `number`."""
        row_of_run = row * self.settings["num_lanes"] + number
        stage = bisect_right(self._first_rows, row_of_run) - 1
        return _choose(self._mixture.stages[stage].weights, spread(number, row, self.settings["num_lanes"]))

    @property
    def stats(self):
        """As Loader.stats, and `sources`: {name: (tokens, epochs)} of all readers, if they read as fast."""
        counts = super().stats
        counts["sources"] = {}
        for i, source in enumerate(self._mixture.sources):
            lanes = [LaneState(*state).sources for state in self._states.values()]
            states = [LaneState(*sources[i]) for sources in lanes if sources]
            tokens = sum(state.tokens for state in states) * self.readers
            documents = sum(state.documents for state in states) * self.readers
            counts["sources"][source.name] = tokens, documents / source.num_documents
        return counts


# Each round of rows, one from every lane, has a point in each of num_lanes equal cells, so that it has its share of
# every source. Neighbouring lanes are in distant cells, and a lane goes from cell to cell: so each step has its share,
# and each lane. Within the cells, all points of a round are at the same place, which moves by the golden ratio.
def spread(lane, row, num_lanes):
    """Returns a point from 0 to 1 for row `row` of a lane; those of rows in succession are spread evenly."""
    cell = (lane * _stride(num_lanes, GOLDEN) + row * _stride(num_lanes, SILVER)) % num_lanes
    return (cell + row * GOLDEN % 1) / num_lanes


def _choose(weights, point):
    """Returns the number of the source in whose interval the point from 0 to 1 is. The intervals are as long as the
    weights."""
    for source, weight in enumerate(weights):
        if weight:
            chosen = source
            if point < weight:
                break
            point -= weight
    return chosen  # the last one, if sums are rounded


@cache
def _stride(num_lanes, fraction):
    """Returns a step through all cells, of about this fraction of them."""
    stride = round(num_lanes * fraction)
    while math.gcd(stride, num_lanes) > 1:
        stride += 1
    return stride


class MixedLane:
    """Makes the rows of one lane of a mixture, as a Lane does. source_of(lane, row): see MixtureLoader."""

    def __init__(self, number, state, lanes, source_of):
        self.number = number
        self.lanes = lanes
        self.source_of = source_of
        self.rows = state.rows
        self.states = [lane.to_restore for lane in lanes]
        self.place = "nothing yet"

    def make_rows(self, count):
        rows = []
        states = []
        for _ in range(count):
            source = self.source_of(self.number, self.rows)
            self.place = self.lanes[source].place
            [row], [state] = self.lanes[source].make_rows(1)
            rows.append(row)
            self.states[source] = LaneState(*state)
            self.rows += 1
            sums = {name: sum(getattr(state, name) for state in self.states) for name in COUNTS}
            states.append(LaneState(self.rows, sources=tuple(self.states), **sums))
        return rows, states
