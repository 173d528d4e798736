"""What a chip costs: the table prices.csv, by type of TPU, region, and spot or on demand.

deploy/lib/gcloud.sh reads the same table. Prices change: scripts that print a cost have a flag that overrides it.
"""
import csv
from functools import cache
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_name("prices.csv")


class Price(NamedTuple):
    usd_per_chip_hour: float
    is_known: bool  # False: this region is not in the table, and the price is that of the dearest one that is


def region_of(zone):
    """Returns the region of a zone: us-west4 for us-west4-a."""
    return zone.rpartition("-")[0]


@cache
def _read_table():
    """Returns {(type, kind): {region: USD per chip-hour}}. Lines that begin with # are comments."""
    table = {}
    with open(TABLE, encoding="utf-8") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            table.setdefault((row["type"], row["kind"]), {})[row["region"]] = float(row["usd_per_chip_hour"])
    return table


def chip_price(accelerator, spot, zone=None):
    """Returns the Price of one chip of an accelerator such as "v5litepod-8" in this zone. Without a zone, and in one
    that the table does not know, it is the dearest of that type. Returns None if no price of the type is known."""
    by_region = _read_table().get((accelerator.partition("-")[0], "spot" if spot else "on_demand"))
    if not by_region:
        return None
    usd = by_region.get(region_of(zone or ""))
    return Price(max(by_region.values()), False) if usd is None else Price(usd, True)
