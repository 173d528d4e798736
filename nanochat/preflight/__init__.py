"""The verdict of the TPU's compiler without a TPU: does a run fit into the memory, how long does a step take, and what
does it cost? scripts/tpu_preflight.py runs it."""
