"""In place of tpu_preflight: the report of a run that quick_trainer takes 1.1 and 0.8 times as long for."""
import json
import sys
from pathlib import Path

(path,) = [Path(word.removeprefix("--json=")) for word in sys.argv if word.startswith("--json=")]
report = {"programs": {"micro_step": {"estimated_s": 0.03 / 1.1}, "update": {"estimated_s": 0.02 / 0.8}},
          "peak_bytes": 8 << 30, "usable_hbm_bytes": 15 << 30}
unfinished = path.with_suffix(".unfinished")
unfinished.write_text(json.dumps(report))
unfinished.rename(path)
