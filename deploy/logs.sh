#!/usr/bin/env bash
# Follows the log of the newest run on a VM until the run ends, and exits with the run's exit status.
#
#   deploy/logs.sh HOST        Ctrl-C ends this command only; the run continues
#
#   --tail N                   how many of the existing lines to print first (default 50)
#   --worker N|all             which VM of a pod (default 0); all: each line with its worker
me=$0; while [ -L "$me" ]; do l=$(readlink "$me"); case $l in /*) me=$l ;; *) me=$(dirname "$me")/$l ;; esac; done
. "$(dirname "$me")/lib/common.sh" || exit 2
TAIL=50 WORKER=0
parse "TAIL" "$@"
resolve

script FOLLOW <<'END'
run=$(current) pid=$(cat "$D/runs/pid" 2>/dev/null || echo 999999999)
[ -n "$run" ] || fail "no run was started on this VM"
tail -s 0.5 -n "$1" -F --pid="$pid" "$D/runs/$run.log" 2>/dev/null
ended 30 || fail "run $run: its main process ended, others still run; stop_run.sh --kill ends them"
status=$(cat "$D/runs/$run.exit" 2>/dev/null) || fail "run $run was killed, or the VM restarted"
echo "run $run ended with status $status" >&2
exit "$status"
END
if [ ${#TARGETS[@]} = 1 ]; then vm 0 "$FOLLOW" "$TAIL"; exit; fi
# shellcheck disable=SC2317,SC2329  # first_of calls it by name, and itself names the workers other than 0
follow() {
  if [ "$1" = 0 ]; then vm 0 "$FOLLOW" "$TAIL" 2>&1 | sed 's/^/[worker 0] /'; else vm "$1" "$FOLLOW" "$TAIL"; fi
}
LAST_LINES_S=5 first_of follow
