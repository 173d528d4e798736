#!/usr/bin/env bash
# Starts a run on a VM, detached from ssh, and returns as soon as the run has printed its first step or an error.
#
#   deploy/train.sh HOST -- --run=d16 --depth=16 --device_batch_size=8
#   deploy/train.sh HOST --again               repeats the last command line; the run resumes
#
# The flags after -- are those of python -m scripts.base_train. It first checks code, packages, .tpu_env, PJRT_DEVICE,
# chips, disk, data and tokenizer. On a pod the run starts on every VM or on none. RUN.log is in ~/nanochat.d/runs/.
#
#   --max_hours N              the VM has a new limit of its own: it stops its runs and, if HOST is its name, deletes
#                              itself before this time is over, whatever is on its disk
#   --margin_s N               how long before that it begins to stop (default 600, at most half of the time)
#   --min_free_gb N            refuse to start with less free disk than this (default 20)
#   --wait_s N                 return after this time (default 600); the run continues
#   --dry_run                  only check the flags after -- and say what would be done
#
# Exit status 6: another run is running. If the run ends at once, its own exit status is returned.
me=$0; while [ -L "$me" ]; do l=$(readlink "$me"); case $l in /*) me=$l ;; *) me=$(dirname "$me")/$l ;; esac; done
. "$(dirname "$me")/lib/common.sh" || exit 2
MIN_FREE_GB=20 AGAIN="" MAX_HOURS="" MARGIN_S=600 VM_ZONE=""
parse "AGAIN MIN_FREE_GB MAX_HOURS MARGIN_S DRY_RUN" "$@"
resolve
[ -z "$MAX_HOURS" ] || [ "$WORKER" = all ] || die 2 "--max_hours is for all workers: leave out --worker"
[ -z "$AGAIN" ] || [ ${#FLAGS[@]} = 0 ] || die 2 "--again repeats the last command: leave out ${FLAGS[*]}"
[ -n "$AGAIN" ] || [ ${#FLAGS[@]} -gt 0 ] || die 2 "the run has no flags: train.sh HOST -- --run=NAME …, or --again"
if [ -n "$DRY_RUN" ]; then
  [ -n "$AGAIN" ] || check_flags "$VM_TYPE"
  say "+ ssh ${TARGETS[*]}: check code, packages, chips, disk, data and tokenizer, and start in the background:" \
    "$([ -n "$AGAIN" ] && echo "its last command" || echo "base_train $(quote ${FLAGS[@]+"${FLAGS[@]}"})")"
  [ -z "$MAX_HOURS" ] || say "the VM ends the run after $MAX_HOURS hours${VM_ZONE:+ and deletes itself}"
  exit 0
fi
script CHECK <<'END'
next=$D/runs/start.$1 again=$2 min_free_gb=$3; shift 3
code=$(cd -P ~/nanochat 2>/dev/null && pwd) || fail "no code on this VM: push.sh first"
[ -x "$D/venv/bin/python" ] && [ -f ~/.tpu_env ] || fail "packages or ~/.tpu_env are missing: setup.sh first"
running && fail "another run is running: $(current), process $(cat "$D/runs/pid"); stop_run.sh ends it" 6
load_env
run=dummy own_data="" device="" previous="" config="" named=""
if [ -n "$again" ]; then
  [ -f "$D/runs/$(current).flags" ] || fail "no run was started on this VM: give its flags after --"
  eval "set -- $(cat "$D/runs/$(current).flags")"
fi
for flag in "$@"; do
  [ "$previous" != --run ] || run=$flag
  case $flag in
    --run=*) run=${flag#*=} named=1 ;;
    --run) named=1 ;;
    --config*) config=1 ;;
    --device[_-]type*) device=1 ;;
    --data[_-]dir* | --synthetic[_-]data*) own_data=1 ;;
  esac
  previous=$flag
done
[[ $run =~ ^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$ ]] ||
  fail "--run=$run: only letters, digits, . - and _, at most 100, and no . or - first" 2
[ -z "$config" ] || [ -n "$named" ] || fail "--config may name a run: give --run as a flag, too" 2
case $BASE in /*) ;; *) fail "NANOCHAT_BASE_DIR=$BASE in ~/.tpu_env does not begin with /" ;; esac

if [ -z "$device" ]; then  # unless the flags name a device
  [ "${PJRT_DEVICE:-}" = TPU ] || fail "PJRT_DEVICE is '${PJRT_DEVICE:-}' in ~/.tpu_env: it would train on the CPU"
  chips=$(shopt -s nullglob; set -- /dev/accel[0-9]*; [ $# -gt 0 ] || set -- /dev/vfio/[0-9]*; echo $#)
  [ "$chips" -gt 0 ] || fail "no TPU chips in /dev: delete the VM and create it again"
  [ ! -f "$D/chips" ] || [ "$chips" = "$(cat "$D/chips")" ] || fail "$chips chips in /dev, setup saw $(cat "$D/chips")"
  device=--device_type=tpu
else device=""; fi
mkdir -p "$BASE"
free_gb=$(($(df -Pk "$BASE" | awk 'NR == 2 { print $4 }') / 1000000))
[ "$free_gb" -ge "$min_free_gb" ] || fail "$free_gb GB free for $BASE, less than --min_free_gb $min_free_gb"
[ -n "$own_data" ] || [ -n "$(find -L "$BASE/parquet/base_data_v3" -name '*.parquet' -print -quit 2>/dev/null)" ] ||
  fail "no parquet shards in $BASE/parquet/base_data_v3: data.sh first, or --data_dir, or --synthetic_data"
[ -n "$(find -L "$code/tokenizer" "$BASE/tokenizer" -size +100k -print -quit 2>/dev/null)" ] ||
  fail "no tokenizer: push.sh"
find "$D/runs" -maxdepth 1 -type d -name 'start.*' -mmin +60 -exec rm -r {} +
mkdir -p "$next"
echo "$run" >"$next/run"
printf '%q ' "$@" >"$next/flags"
{ printf '# %s, code %s\n' "$(date -u +%FT%TZ)" "$(cat "$code/COMMIT" 2>/dev/null)"
  printf 'set -a; eval "$(tr -d "\\r" <~/.tpu_env)"; set +a\ncd %q\necho $$ >%q\n' "$code" "$D/runs/pid"
  printf 'exec %q -u -m scripts.base_train' "$D/venv/bin/python"; printf ' %q' "$@" $device; echo; } >"$next/command"
tail -n 1 "$next/command"
END

script START <<'END'
[ -z "${2:-}" ] || set_limit "${@:2}"  # first: no run starts without its limit
cd "$D/runs"
setsid -f flock -w 3 "$D/run.lock" bash -c '
  run=$(cat "$1/run")
  mv "$1/flags" "$run.flags"; mv "$1/command" "$run.command"
  rm -f pid "$run.exit"
  echo "$run" >current; ps -o pgid= -p $$ >pgid
  echo "=== $(head -n 1 "$run.command")" >>"$run.log"; wc -c <"$run.log" >offset
  echo "$1" >token; rm -r "$1"
  bash "$run.command" >>"$run.log" 2>&1; echo $? >"$run.exit"' bash "start.$1" </dev/null >/dev/null 2>&1
for _ in $(seq 25); do [ ! -d "start.$1" ] && [ -s pid ] && exit 0; sleep 0.2; done
rm -r "start.$1"; fail "another run is running: $(current)" 6
END

script FOLLOW <<'END'
run=$D/runs/$(current) pid=$(cat "$D/runs/pid")
timeout "$1" tail -s 0.3 -F --pid="$pid" -c "+$(($(cat "$D/runs/offset") + 1))" "$run.log" 2>/dev/null |
  if [ "$2" = 0 ]; then sed -u '/^step /q'; else cat >/dev/null; fi || true
if kill -0 "$pid" 2>/dev/null; then
  [ "$2" != 0 ] || echo "the run continues in the background: logs.sh and status.sh show it, stop_run.sh ends it"
else
  ended 30 || fail "its main process ended, others still run: stop_run.sh --kill ends them"
  echo "the run ended with status $(cat "$run.exit"): $(tail -n 1 "$run.log")"
  exit "$(cat "$run.exit")"
fi
END

script STOP <<'END'
[ "$(cat "$D/runs/token")" != "start.$1" ] || stop_run 60  # only the run that this command started
END
START="$(cat "$LIB/limit.sh")
$START"
token=$$.$RANDOM limit=()
[ -z "$MAX_HOURS" ] || limit_after "$MAX_HOURS" "${VM_ZONE:+projects/$PROJECT/locations/$VM_ZONE/nodes/${ARGS[0]}}"
# `each` and `retry` call these by name.
# shellcheck disable=SC2317,SC2329
{ check() { retry vm "$1" "$CHECK" "$token" "$AGAIN" "$MIN_FREE_GB" ${FLAGS[@]+"${FLAGS[@]}"}; }
start() { vm "$1" "$START" "$token" ${limit[@]+"${limit[@]}"}; }
stop() { vm "$1" "$STOP" "$token"; }
follow() { retry vm "$1" "$FOLLOW" "$WAIT_S" "$1"; }; alive() { vm "$1" 'running'; }; }
each check || exit
each start || { status=$?; say "not started everywhere: stopping it"; each stop || true; exit $status; }
status=0; first_of follow || status=$?
[ $status != 130 ] || { say "no longer following; the run goes on: logs.sh shows it, stop_run.sh ends it"; exit 130; }
if [ ${#TARGETS[@]} -gt 1 ] && { [ $status != 0 ] || ! each alive; }; then
  say "not running everywhere: stopping it"; each stop || true; exit $((status ? status : 1))
fi
exit $status
