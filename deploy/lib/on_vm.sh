# shellcheck shell=bash disable=SC2034
# Functions on the VM (Linux): ssh.sh sends them before every script. ~/nanochat.d holds code releases, venv and runs.
set -euo pipefail
D=$HOME/nanochat.d
mkdir -p "$D/runs"
fail() { echo "$1" >&2; exit "${2:-1}"; }
running() { ! flock -n -s "$D/run.lock" true; }  # every process of a run holds the lock until it ends
ended() { # ended SECONDS: waits for the end of all processes of the run
  flock -w "$1" -s "$D/run.lock" true
}
current() { cat "$D/runs/current" 2>/dev/null || true; }
# note NAME prints the path of a small file that needs no disk and that no reboot survives.
# signal_run sends SIGTERM once: a second would end the run's wait for its mirror.
note() { echo "/dev/shm/nanochat.$1.$(stat -c %u "$D").$(echo "$D" | cksum | cut -d ' ' -f 1)"; }
signal_run() {
  local start sent
  start=$(cat "$D/runs/token" 2>/dev/null || echo unknown) sent=$(note stopping)
  [ "$(cat "$sent" 2>/dev/null)" != "$start" ] || return 0
  kill -TERM "$(cat "$D/runs/pid")" 2>/dev/null || true
  echo "$start" 2>/dev/null >"$sent" || true
}
stop_run() { signal_run; ended "$1"; }
load_env() {
  set -a +u  # a name that is not defined is empty there, as in a login shell
  # An editor of Windows ends lines with CR LF. What fails there ends nothing: `[ -f x ] && . x` may be its last line.
  [ ! -f ~/.tpu_env ] || eval "$(tr -d '\r' <~/.tpu_env)" || true
  set +a -u
  BASE=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat}
  case $BASE in [~]/*) BASE=$HOME/${BASE#??} ;; esac  # as base_train reads it
}

# checkpoints FOLDER prints the names of the whole checkpoints there, oldest first.
checkpoints() { find "$1" -maxdepth 1 -regex '.*/step_[0-9]+' -printf '%f\n' | sort -t _ -k 2 -n; }

# mirror_lines FILE prints what the mirror.json that base_train keeps says about the copies of the run's checkpoints.
mirror_lines() {
  python3 -c 'import json, sys, time
try: state = dict(json.load(open(sys.argv[1])))
except (OSError, ValueError, TypeError): state = {}
since = state.get("behind_since")
behind_s = max(1, int(time.time() - since)) if isinstance(since, (int, float)) else 0
for name, key in ("mirror", "mirror"), ("mirrored", "newest_copied"), ("mirror_error", "error"):
    print(name + "=" + " ".join(str(state.get(key) or "").split())[:300])
print(f"mirror_behind_s={behind_s}")' "$1" || true
}

# probe prints all that is known about the newest run, as NAME=value lines. state is none, running, ended, killed or
# orphans (the main process has ended, but others still hold the TPU).
probe() {
  local dir log newest state=none
  load_env
  log=$D/runs/$(current).log dir=$BASE/checkpoints/$(current)
  newest=$(checkpoints "$dir" | tail -n 1 | sed "s|^|$dir/|") || true
  if running && kill -0 "$(cat "$D/runs/pid")"; then state=running; elif ! ended 5; then state=orphans; fi
  [ $state != none ] || [ ! -f "$log" ] || state=killed
  [ $state != killed ] || [ ! -f "${log%.log}.exit" ] || state=ended
  echo "state=$state"
  echo "run=$(current)"
  echo "exit=$(cat "${log%.log}.exit" 2>/dev/null)"
  echo "code=$(cat ~/nanochat/COMMIT 2>/dev/null)"
  echo "steps=$(tail -c 100000 "$log" 2>/dev/null | grep -o '^step [0-9]*/[0-9]*' | tail -n 1 | tr -d 'step ')"
  echo "record=$(tail -n 100 "$dir/metrics.jsonl" 2>/dev/null | grep '"tokens_per_s"' | tail -n 1)"
  echo "disk=$(($(df -Pk "$HOME" | awk 'NR == 2 { print $4 }') / 1000000))"
  echo "checkpoint=${newest##*/}"
  echo "checkpoint_age=$((($(date +%s) - $(stat -c %Y "${newest:-/}")) / 60))"
  echo "checkpoint_bytes=$([ -z "$newest" ] || du -sb "$newest" | cut -f 1)"
  mirror_lines "$dir/mirror.json"
  echo "log_age_s=$(($(date +%s) - $(stat -c %Y "$log" || date +%s)))"
  echo "error=$(tail -c +"$(cat "$D/runs/offset" 2>/dev/null || echo 1)" "$log" 2>/dev/null |
    grep -vE '^[^ ]*wandb[^ .]*: ' | sed '/[Ww]arning: /{/[Nn]o space left/!d;}' |
    grep -E '(^|[^A-Za-z])([A-Za-z]*E|e)rror[: ]|Traceback|[Nn]o space left|Killed|RESOURCE_EXHAUSTED' |
    tail -n 1 | cut -c 1-200)"
} 2>/dev/null

# not_mirrored prints the newest checkpoint of each run whose mirror, if it has one, lacks it.
not_mirrored() {
  local dir newest
  for dir in "$BASE"/checkpoints/*/; do
    newest=$(checkpoints "$dir" 2>/dev/null | tail -n 1)
    [ -z "$newest" ] || [ "$newest" = "$(mirror_lines "${dir}mirror.json" | sed -n 's/^mirrored=//p')" ] ||
      echo "$(basename "$dir")/$newest"
  done
}
