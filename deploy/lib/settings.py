"""The settings of watch.sh, which it hands over in variables WATCH_NAME=value after reading config.env and flags."""
import os
from dataclasses import dataclass
from pathlib import Path

NOT_PASSED_ON = ("NAME", "WORKER", "WAIT_S", "POLL_S", "DRY_RUN")  # settings that each script has for itself


@dataclass(frozen=True)
class Settings:
    name: str
    type: str
    zones: tuple
    spot: bool
    flags: tuple  # the run's
    verb_flags: tuple  # what every other script gets
    has_bucket: bool
    max_usd: float | None
    max_hours: float | None
    usd_per_hour: float | None
    margin_s: float
    poll_s: float
    patience: int
    stall_s: int
    keep_vm: bool
    again: bool  # also if this run has finished or was given up
    state: Path
    to: Path
    webhook: str
    price_api_key: str
    price_api: str

    @property
    def run(self):
        """The run's name, as base_train reads it: --run=NAME or --run NAME. It refuses two different ones."""
        name = "dummy"
        for flag, following in zip(self.flags, [*self.flags[1:], ""], strict=True):
            if flag.startswith("--run="):
                name = flag.partition("=")[2]
            elif flag == "--run":
                name = following
        return name

    @property
    def has_mirror(self):
        return any(flag.replace("-", "_").startswith("__checkpoint_mirror") for flag in self.flags)


def read_settings(flags):
    """Returns the Settings that watch.sh has put into the environment. `flags` are those of the run."""

    def value(name):
        return os.environ.get(f"WATCH_{name}", "")

    def number_or_none(name):
        return float(value(name)) if value(name) else None

    verb_flags = []
    for entry in value("SETTINGS").split():
        name = entry.rstrip("=")
        if value(name) and name not in NOT_PASSED_ON:
            flag = f"--{name.lower()}"
            if entry.endswith("="):
                flag += f"={value(name)}"
            verb_flags.append(flag)
    return Settings(
        name=value("NAME"), type=value("TYPE"), zones=tuple(value("ZONES").replace(",", " ").split()),
        spot=not value("ON_DEMAND"), flags=tuple(flags), verb_flags=tuple(verb_flags),
        has_bucket=bool(value("BUCKET")), max_usd=number_or_none("MAX_USD"), max_hours=number_or_none("MAX_HOURS"),
        usd_per_hour=number_or_none("USD_PER_HOUR"), margin_s=float(value("MARGIN_S")), poll_s=float(value("POLL_S")),
        patience=int(value("PATIENCE")), stall_s=int(value("STALL_S")), keep_vm=bool(value("KEEP_VM")),
        again=bool(value("AGAIN")),
        state=Path(value("STATE")), to=Path(value("TO")), webhook=value("WEBHOOK"),
        price_api_key=value("PRICE_API_KEY"), price_api=value("PRICE_API"))
