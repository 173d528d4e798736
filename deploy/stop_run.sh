#!/usr/bin/env bash
# Stops the run on a VM with SIGTERM and waits until it has saved a checkpoint, copied it to its mirror and ended.
#
#   deploy/stop_run.sh HOST    HOST: an IP, an ssh host, a list of them (a,b), or the VM's name
#
# At the end it says where the newest checkpoint is: on this disk alone, or in the mirror, too.
#
#   --wait_s N                 how long to wait (default 1900: the run waits for its mirror for half an hour; 120 with
#                              --kill)
#   --kill                     after that, end the run's remaining processes with kill -9
#   --vm_ips A,B --vm_id ID    the addresses and the id of the VM HOST, so that gcloud need not be asked
#   --worker N|all             which VM of a pod (default all)
me=$0; while [ -L "$me" ]; do l=$(readlink "$me"); case $l in /*) me=$l ;; *) me=$(dirname "$me")/$l ;; esac; done
. "$(dirname "$me")/lib/common.sh" || exit 2
WAIT_S="" KILL="" VM_IPS="" VM_ID=""
parse "KILL VM_IPS VM_ID" "$@"
[ -n "$WAIT_S" ] || WAIT_S=$([ -n "$KILL" ] && echo 120 || echo 1900)
if [ -n "$VM_IPS" ]; then aim; else resolve; fi

script STOP <<'END'
wait_s=$1 kill=$2 run=$(current) deadline=$(($(date +%s) + $1))
where() { # prints the newest whole checkpoint, and where it is
  local seen newest
  seen=$(probe)
  field() { printf '%s\n' "$seen" | sed -n "s/^$1=//p"; }
  newest=$(field checkpoint)
  if [ -z "$newest" ]; then echo "newest checkpoint: none"
  elif [ "$newest" = "$(field mirrored)" ]; then echo "newest checkpoint: $dir/$newest, and in $(field mirror)"
  else echo "newest checkpoint: $dir/$newest, on this disk alone"; fi
}
load_env
dir=$BASE/checkpoints/$run
running || { echo "nothing is running; $(where)"; exit 0; }
signal_run
while left=$((deadline - $(date +%s))); ! ended $((left > 20 ? 20 : left > 0 ? left : 0)); do
  [ $left -gt 0 ] || break
  echo "run $run saves its state and waits for its mirror, $left s at most; $(where)"
done
if running; then
  [ -n "$kill" ] || fail "run $run has not ended after $wait_s s; --kill ends it without a checkpoint; $(where)"
  kill -KILL -- "-$(tr -d ' ' <"$D/runs/pgid")"
  ended 10 || fail "cannot kill run $run"
fi
echo "run $run ended with status $(cat "$D/runs/$run.exit" 2>/dev/null || echo killed); $(where)"
END
stop() { retry vm "$1" "$STOP" "$WAIT_S" "$KILL"; }
each stop
