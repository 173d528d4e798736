#!/usr/bin/env bash
# Checks in ten minutes what of this program holds on a VM's chips, and copies check.json and check.toml here.
#
#   deploy/check.sh HOST [-- --depth=16 --device_batch_size=8]
#
# The flags after -- are those of python -m scripts.tpu_check, which says what is checked. push.sh and setup.sh come
# first; no data is needed. check.json has no names, keys or addresses: attach it to an issue. tpu_preflight here
# corrects its estimates by it from now on. On a pod all VMs check together, in 20 minutes, and need --checkpoint_mirror.
#
#   --to DIR                   copy into the new folder DIR (default: check.HOST here)
#
# Exit status: 0 all holds; 1 something does not, but a run is possible; 3 no run is possible; 6 a run has the chips.
me=$0; while [ -L "$me" ]; do l=$(readlink "$me"); case $l in /*) me=$l ;; *) me=$(dirname "$me")/$l ;; esac; done
. "$(dirname "$me")/lib/common.sh" || exit 2
TO=""
parse "TO" "$@"
resolve
TO=${TO:-check.${ARGS[0]:-$NAME}}
[ ! -e "$TO" ] || die 2 "--to=$TO exists: move it, or name another folder"

script CHECK <<'END'
load_env
! running || fail "a run is running: $(current); stop_run.sh ends it" 6
cd ~/nanochat 2>/dev/null || fail "no code on this VM: push.sh first" 2
[ -x "$D/venv/bin/python" ] || fail "packages are missing: setup.sh first" 2
rm -f "$D/check/check.json" "$D/check/check.toml"  # of an earlier check
echo $$ >"$(note "check.$1")"
exec flock -n -F "$D/run.lock" "$D/venv/bin/python" -u -m scripts.tpu_check --out_dir="$D" "${@:2}"
END
script STOP <<'END'
pid=$(cat "$(note "check.$1")" 2>/dev/null) || exit 0  # it did not begin here
kill "$pid" 2>/dev/null || true
ended 60 || fail "the check still runs here: process $pid"
END
script SEND <<'END'
cd "$D/check" 2>/dev/null && [ -f check.json ] || fail "the check has failed: its last lines say why"
for name in check.json check.toml; do
  [ ! -f "$name" ] || { echo "$(stat -c %s "$name") $name"; cat "$name"; }
done
echo end
END
status=0 token=$$.$RANDOM
# shellcheck disable=SC2317,SC2329  # first_of and each call them by name
{ check() { vm "$1" "$CHECK" "$token" ${FLAGS[@]+"${FLAGS[@]}"}; }; stop() { vm "$1" "$STOP" "$token"; }; }
# Ctrl-C and a failure have ended only what ran here.
give_up() { READ=(lines); rmdir "$TO" 2>/dev/null || true; each stop || true; exit "$1"; }
LAST_LINES_S=10 first_of check || status=$?
case $status in 0 | 1 | 3) ;; *) give_up $status ;; esac
READ=(files "$TO" check.json check.toml)
retry vm 0 "$SEND" || give_up $?
CHIPS=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat}/chips  # where tpu_preflight looks
[ ! -f "$TO/check.json" ] || { mkdir -p "$CHIPS"; cp "$TO/check.json" "$CHIPS/${TO##*/}.json"; }
say "what it found is in $TO"
exit $status
