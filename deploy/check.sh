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
exec flock -n "$D/run.lock" "$D/venv/bin/python" -u -m scripts.tpu_check --out_dir="$D" "$@"
END
script SEND <<'END'
cd "$D/check"
for name in check.json check.toml; do
  [ ! -f "$name" ] || { echo "$(stat -c %s "$name") $name"; cat "$name"; }
done
echo end
END
status=0
# shellcheck disable=SC2317,SC2329  # first_of calls it by name
check() { vm "$1" "$CHECK" ${FLAGS[@]+"${FLAGS[@]}"}; }
LAST_LINES_S=10 first_of check || status=$?
case $status in 0 | 1 | 3) ;; *) exit $status ;; esac
READ=(files "$TO" check.json check.toml)
retry vm 0 "$SEND"
CHIPS=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat}/chips  # where tpu_preflight looks
[ ! -f "$TO/check.json" ] || { mkdir -p "$CHIPS"; cp "$TO/check.json" "$CHIPS/${TO##*/}.json"; }
say "what it found is in $TO"
exit $status
