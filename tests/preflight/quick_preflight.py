"""In place of tpu_preflight: the report of a run that takes quick_trainer 1.2 times as long for products, 0.9 for
attention, 1.5 for collectives and 0.8 for the update."""
import json
import sys
from pathlib import Path

(path,) = [Path(word.removeprefix("--json=")) for word in sys.argv if word.startswith("--json=")]
attention_s = 0.010 if "long" in path.name else 0.005
parts_s = {"products": 0.020, "attention": attention_s, "collectives": 0.005}
report = {"programs": {"micro_step": {"estimated_s": sum(parts_s.values()), "parts_s": parts_s},
                       "update": {"estimated_s": 0.025, "parts_s": parts_s}},
          "peak_bytes": 8 << 30, "usable_hbm_bytes": 15 << 30}
unfinished = path.with_suffix(".unfinished")
unfinished.write_text(json.dumps(report))
unfinished.rename(path)
