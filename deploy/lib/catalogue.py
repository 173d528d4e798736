"""Prices of TPUs: Google's public price list if there is a key for it, otherwise the table prices.csv.

    python3 -m deploy.lib.catalogue TYPE ZONES ON_DEMAND USD_PER_HOUR

prints, as assignments for the shell, what a type of TPU has and costs: see `facts` in gcloud.sh.
"""
import json
import shlex
import subprocess
import sys
import time
from urllib.parse import quote

from nanochat.common import BadInput
from nanochat.device import tpu

PRICE_API = "https://cloudbilling.googleapis.com/v1"
COMPUTE_ENGINE = "6F81-5844-456A"  # the service in whose price list v5e and v6e are (cloud.google.com/skus)
MOST_USD = 100  # an hour of a chip: none has cost a tenth of that
# How the list describes a chip, as SkyPilot reads it (sky/catalog/data_fetchers/fetch_gcp.py).
DESCRIPTIONS = {"v5litepod": "TpuV5e", "v6e": "TpuV6e", "v5p": "TpuV5p"}


def fetch_prices(prefix, spot, key, api=PRICE_API, limit_s=60):
    """Returns {region: USD per chip-hour} for chips such as "v5litepod" from Google's price list.

    Raises OSError or ValueError if there is no usable answer within `limit_s`.
    """
    found, page, deadline = {}, "", time.monotonic() + limit_s
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise OSError(f"no answer for {limit_s} s")
        # The key is secret, so curl gets the address over stdin.
        url = f"{api}/services/{COMPUTE_ENGINE}/skus?pageSize=5000&pageToken={quote(page)}&key={quote(key)}"
        curl = ["curl", "-sS", "-f", "-m", str(max(1, int(left))), "-K", "-"]
        process = subprocess.run(curl, input=f'url = "{url}"\n', capture_output=True, text=True, timeout=left + 10)
        if process.returncode:
            raise OSError(process.stderr.strip().replace(key, "KEY") or f"curl ended with {process.returncode}")
        answer = json.loads(process.stdout)
        for sku in answer.get("skus", []):
            text = sku["description"]
            is_spot = "Spot" in text or "Preemptible" in text
            if DESCRIPTIONS.get(prefix, "-") not in text or is_spot != spot:
                continue
            if sku["category"]["usageType"] not in ("OnDemand", "Preemptible") or "eserv" in text:
                continue  # a commitment for a year, or a reservation
            rate = sku["pricingInfo"][0]["pricingExpression"]["tieredRates"][-1]["unitPrice"]
            usd = int(rate.get("units") or 0) + int(rate.get("nanos", 0)) / 1e9
            if not 0 < usd < MOST_USD:
                raise ValueError(f"{usd:g} USD an hour is no price of a chip")
            for region in sku["serviceRegions"]:
                found[region] = max(usd, found.get(region, 0))
        page = answer.get("nextPageToken", "")
        if not page:
            return found


def hourly_prices(settings, say):
    """Returns {zone: USD per hour of the VM} for every zone of the settings, or None if no price is known. Says where
    the prices are from, unless all are in the table."""
    chips = tpu.parse_accelerator(settings.type, "--type").chips  # first: it refuses a type that does not exist
    if settings.usd_per_hour is not None:
        return dict.fromkeys(settings.zones, settings.usd_per_hour)
    listed = {}
    if settings.price_api_key:
        try:
            listed = fetch_prices(settings.type.partition("-")[0], settings.spot, settings.price_api_key,
                                  settings.price_api or PRICE_API)
            say(f"prices are from Google's list: {len(listed)} regions")
        except (OSError, ValueError, LookupError, TypeError, AttributeError, subprocess.SubprocessError) as error:
            say(f"Google's price list gave no answer, so the table of prices counts: {error}")
    found = {}
    for zone in settings.zones:
        usd = listed.get(tpu.region_of(zone))
        if usd is None:
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
