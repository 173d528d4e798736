#!/usr/bin/env bash
# Trains on one GPU for MINUTES, compilation and evaluations included. Leaves in OUT the log, metrics.jsonl and the weights
# in bfloat16, in pieces of 16 MB:
#
#     MINUTES=9 bash dev/gpu_run.sh OUT --depth=12 --max_seq_len=2048 --device_batch_size=32 [flags of base_train]
#     cat OUT/weights.* > weights.safetensors    # wherever the pieces are
#
# The corpus is that of prepare_data in NANOCHAT_BASE_DIR. A first short run compiles, and measures how many steps the time
# allows, because a run plans its rates for all its steps. DEVICE=cpu tries it without a GPU. PYTHON: the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "$1")
shift
python=${PYTHON:-python3}
seconds=$((${MINUTES:-9} * 60))
name=gpu_$(date +%s)
checkpoints=$("$python" -c "from nanochat.common import get_base_dir; print(get_base_dir() / 'checkpoints')")
mkdir -p "$out"
export WANDB_MODE=disabled

train() {  # name, steps, steps between evaluations, further flags
  "$python" -m scripts.base_train --run="$1" --device_type="${DEVICE:-cuda}" --num_iterations="$2" --eval_every="$3" \
    "${@:4}" 2>&1 | tee -a "$out/log"
}

train "${name}_probe" 12 12 --save_every=-1 --log_every=4 "$@"
of_step=$("$python" - "$checkpoints/${name}_probe/metrics.jsonl" <<'END'
import json, sys
records = [json.loads(line) for line in open(sys.argv[1])]
print([record["step_ms"] for record in records if "step_ms" in record][-1] / 1000)
END
)
# The run's start and evaluations take at most what the probe's took, and the weights half a minute.
steps=$("$python" -c "print(max(12, int(($seconds - 2 * $SECONDS - 30) / $of_step)))")
every=$("$python" -c "print(max(1, round(60 / $of_step)))")
echo "a step takes $of_step s: $steps steps, an evaluation after each $every" | tee -a "$out/log"
train "$name" "$steps" "$every" --save_every=1000000 "$@"  # at the end
cp "$checkpoints/$name/metrics.jsonl" "$out"
"$python" -m scripts.export --checkpoint="$name" --format=safetensors --out="$checkpoints/$name/weights.safetensors"
"$python" - "$checkpoints/$name/weights.safetensors" "$out" <<'END'
import sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save
data = save({name: tensor.to(torch.bfloat16) for name, tensor in load_file(sys.argv[1]).items()})
for number, begin in enumerate(range(0, len(data), 16_000_000)):
    Path(sys.argv[2], f"weights.{number:03}").write_bytes(data[begin:begin + 16_000_000])
END
echo "$SECONDS of $seconds s were used" | tee -a "$out/log"
