"""Draws the metrics of one or more runs: an HTML file without references, the same pictures as PNGs, a printed summary.

    python3 -m scripts.report RUN [RUN …]

RUN is the name of a run, its directory, or a copy of its metrics.jsonl. Panels that no run has metrics for are left
out. Broken lines mark interruptions. It needs matplotlib: pip install '.[report]'
"""
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nanochat.analysis import figures
from nanochat.analysis.advice import flags_of
from nanochat.analysis.measured import markdown_block, read_preflight
from nanochat.analysis.summary import format_table, make_page, summarise
from nanochat.common import BadInput, expand_path, flag, read_flags, read_named, require_writable_dir, run_script
from nanochat.device import tpu
from nanochat.record.history import read_run


@dataclass(frozen=True)
class Flags:
    runs: list = flag(None, "name of a run, its directory, or its metrics.jsonl", positional=True, nargs="+",
                      metavar="RUN")
    completion: Path | None = flag(None, "also draw completion.png: the loss beside the text of FILE", metavar="FILE",
                                   of=expand_path)
    preflight: Path | None = flag(None, "also print the measurements beside FILE of tpu_preflight --json",
                                  metavar="FILE", of=expand_path)
    out_dir: Path | None = flag(None, "the report's folder; default: report/ in the first run's", of=expand_path)
    accelerator: str | None = flag(None, "also print what the runs cost on this TPU, such as v5litepod-8")
    zone: str | None = flag(None, "zone whose prices count, such as us-west4-a; default: the dearest")
    on_demand: bool = flag(False, "prices on demand instead of spot")
    usd_per_chip_hour: float | None = flag(None, "price of a chip, instead of the table's", of=float, at_least=0)

    def usd_per_hour(self):
        """Returns the price of the TPU in USD an hour, None without --accelerator. Raises BadInput if it is unknown."""
        if self.accelerator is None:
            return None
        if self.usd_per_chip_hour is None:
            tpu.require_known_zone(tpu.parse_accelerator(self.accelerator).accelerator, self.zone)
        usd = tpu.usd_per_hour(self.accelerator, not self.on_demand, self.usd_per_chip_hour, self.zone)
        if usd is None:
            raise BadInput(f"no price of --accelerator={self.accelerator} is known: give --usd_per_chip_hour")
        return usd


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    if len(flags.runs) > len(figures.COLOURS):
        raise BadInput(f"{len(flags.runs)} runs are too many for one picture: give at most {len(figures.COLOURS)}")
    figures.require_packages("matplotlib")
    usd_per_hour = flags.usd_per_hour()
    estimate = read_preflight(flags.preflight) if flags.preflight else None
    runs = [read_run(name) for name in flags.runs]
    out_dir = require_writable_dir(flags.out_dir or runs[0].directory / "report")
    summary = summarise(runs, usd_per_hour)
    print(format_table(summary))
    pictures = figures.draw_all(runs, out_dir)
    if flags.completion:
        text = read_named("completion", flags.completion).decode(errors="replace")
        panels = [partial(figures.LOSS.draw, runs), partial(figures.draw_text, text)]
        pictures.append(figures.save_figure(out_dir / "completion.png", "Loss, and a completion", panels))
    title = " and ".join(run.name for run in runs)
    (out_dir / "report.html").write_text(make_page(title, summary, pictures), encoding="utf-8")
    print(f"\n{out_dir / 'report.html'} and {len(pictures)} pictures: {', '.join(path.name for path in pictures)}")
    if estimate:
        print("\n" + markdown_block(runs[0], flags_of(runs[0]), estimate))


if __name__ == "__main__":
    run_script(main)
