"""What came of it: reports of runs, advice about them, and ablations, which say whether an idea is better or was luck.
scripts/report.py, scripts/tpu_advice.py and scripts/ablate.py run it."""
