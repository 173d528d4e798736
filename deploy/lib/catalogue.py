"""What TPUs have and cost, by nanochat/device/tpu.py and its table prices.csv.

    python3 -m deploy.lib.catalogue TYPE ZONES ON_DEMAND USD_PER_HOUR

prints, as assignments for the shell, what a type of TPU has and costs: see `facts` in gcloud.sh.
"""
import shlex
import sys

from nanochat.common import BadInput
from nanochat.device import tpu


def hourly_prices(settings, say):
    """Returns {zone: USD per hour of the VM} for every zone of the settings, or None if no price is known. Says
    which zones the table lacks."""
    chips = tpu.parse_accelerator(settings.type, "--type").chips  # first: it refuses a type that does not exist
    if settings.usd_per_hour is not None:
        return dict.fromkeys(settings.zones, settings.usd_per_hour)
    found = {}
    for zone in settings.zones:
        price = tpu.chip_price(settings.type, settings.spot, zone)
        if price is None:
            return None
        usd = price.usd_per_chip_hour
        if not price.is_known:
            say(f"the price in {zone} is not known: {chips * usd:.2f} USD an hour counts, the dearest of the table")
        found[zone] = chips * usd
    return found


def main():
    name, zones, on_demand, usd = sys.argv[1:]
    tpu_slice = tpu.parse_accelerator(name, "--type")
    prices = {zone: tpu.chip_price(name, not on_demand, zone) for zone in zones.split(",")}
    unknown, note = [zone for zone, price in prices.items() if zone and price and not price.is_known], ""
    if not usd and all(prices.values()):
        usd = f"{tpu_slice.chips * max(price.usd_per_chip_hour for price in prices.values()):.2f}"
        note = f"the price in {' '.join(unknown)} is not known: the dearest of the type counts" if unknown else ""
    facts = {"CHIPS": tpu_slice.chips, "HOSTS": tpu_slice.hosts, "VERSION": tpu_slice.tpu.runtime_version, "USD": usd,
             "USD_NOTE": note}
    for name, value in facts.items():
        print(f"{name}={shlex.quote(str(value))}")


if __name__ == "__main__":
    try:
        main()
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
