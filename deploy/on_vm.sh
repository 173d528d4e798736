# shellcheck shell=bash disable=SC2034
# Runs on the VM (Linux) before every script that lib.sh sends there. ~/nanochat.d holds code releases, venv and runs.
set -euo pipefail
D=$HOME/nanochat.d
mkdir -p "$D/runs"
running() { ! flock -n -s "$D/run.lock" true; }  # every process of a run holds the lock for as long as it lives
ended() { flock -w "$1" -s "$D/run.lock" true; }
current() { cat "$D/runs/current" 2>/dev/null || true; }
stop_run() { kill -TERM "$(cat "$D/runs/pid")" 2>/dev/null || true; ended "$1"; }
load_env() {
  set -a
  # shellcheck source=/dev/null
  [ ! -f ~/.tpu_env ] || . ~/.tpu_env
  set +a
  BASE=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat}
}
