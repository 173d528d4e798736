"""What TPUs have and cost, by nanochat/device/tpu.py and its table prices.csv.

    python3 -m deploy.lib.catalogue TYPE ZONES ON_DEMAND USD_PER_HOUR

prints, as assignments for the shell, what a type of TPU has and costs: see `facts` in gcloud.sh.
"""
import shlex
import sys

from nanochat.common import BadInput
from nanochat.device import tpu


def hourly_prices(type_, zones, is_spot, usd_per_hour, say=lambda text: None):
    """Returns {zone: USD per hour of a VM} for every zone, or None if no price of the type is known. Says which zones
    the table lacks. `usd_per_hour`: what the user says, or None. Raises BadInput for a type that does not exist."""
    chips = tpu.parse_accelerator(type_, "--type").chips
    if usd_per_hour is not None:
        return dict.fromkeys(zones, usd_per_hour)
    prices = {zone: tpu.chip_price(type_, is_spot, zone) for zone in zones}
    if not all(prices.values()):
        return None
    found = {zone: chips * price.usd_per_chip_hour for zone, price in prices.items()}
    for zone, price in prices.items():
        if zone and not price.is_known:
            say(f"the price in {zone} is not known: {found[zone]:.2f} USD an hour counts, the dearest of the table")
    return found


def main():
    name, zones, on_demand, usd = sys.argv[1:]
    notes = []
    prices = hourly_prices(name, zones.split(","), not on_demand, float(usd) if usd else None, notes.append)
    tpu_slice = tpu.parse_accelerator(name)
    facts = {"CHIPS": tpu_slice.chips, "HOSTS": tpu_slice.hosts, "VERSION": tpu_slice.tpu.runtime_version,
             "USD": f"{max(prices.values()):.2f}" if prices else "", "USD_NOTE": "; ".join(notes)}
    for name, value in facts.items():
        print(f"{name}={shlex.quote(str(value))}")


if __name__ == "__main__":
    try:
        main()
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
