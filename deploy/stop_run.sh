#!/usr/bin/env bash
# Stops the run on a VM with SIGTERM and waits until it has saved a checkpoint and ended.
#
#   deploy/stop_run.sh HOST    HOST: an IP, an ssh host, a list of them (a,b), or the VM's name
#
#   --wait_s N                 how long to wait for the checkpoint (default 120)
#   --kill                     after that, end the run's remaining processes with kill -9
#   --worker N|all             which VM of a pod (default all)
#   --dry_run                  only print what would be done
me=$0; while [ -L "$me" ]; do l=$(readlink "$me"); case $l in /*) me=$l ;; *) me=$(dirname "$me")/$l ;; esac; done
. "$(dirname "$me")/lib/common.sh" || exit 2
WAIT_S=120 KILL=""
parse "KILL" "$@"
resolve ${ARGS[@]+"${ARGS[@]}"}

script <<'END'
wait_s=$1 kill=$2 run=$(current)
load_env
running || { echo "nothing is running"; exit 0; }
if ! stop_run "$wait_s"; then
  [ -n "$kill" ] || { echo "run $run has not ended after $wait_s s; --kill ends it without a checkpoint" >&2; exit 1; }
  kill -KILL -- "-$(tr -d ' ' <"$D/runs/pgid")"
  ended 10 || { echo "cannot kill run $run" >&2; exit 1; }
fi
echo "run $run ended with status $(cat "$D/runs/$run.exit" 2>/dev/null || echo killed);" \
  "newest checkpoint: $(ls -1d "$BASE/checkpoints/$run"/step_?????? 2>/dev/null | tail -n 1 | grep . || echo none)"
END
stop() { retry vm "$1" "$SCRIPT" "$WAIT_S" "$KILL"; }
each stop
