# shellcheck shell=bash disable=SC2034,SC2154
# What watch.sh does when the VM or the run is missing, unhealthy or stuck; watch.sh sources this file.

PASS=(--type="$TYPE" ${ON_DEMAND:+--on_demand})
for setting in ZONES PROJECT BUCKET SSH_USER SSH_KEY WANDB_PROJECT WANDB_KEY_FILE USD_PER_HOUR; do
  [ -z "${!setting}" ] || PASS+=("--$(echo $setting | tr '[:upper:]' '[:lower:]')=${!setting}")
done
with_key() { export WANDB_API_KEY; exec "$@"; }
# call SECONDS SCRIPT FLAGS runs another script with our settings, limited in time. Its output goes to its own log.
call() {
  local seconds=$1 script=$2
  shift 2
  limit "$seconds" with_key "$HERE/$script.sh" "$NAME" "${PASS[@]}" "$@" >>"$STATE/$script.log" 2>&1
}
last_line() { tail -n 1 "$STATE/$1.log" 2>/dev/null || true; }

make() { # creates the VM and starts the run; the pauses grow while there is no capacity
  local status=0
  call "$LEFT_S" create --rounds=1 || status=$?
  case $status in
    0) note "VM created: $(last_line create)"; misses=0; prepare ;;
    2) give_up "$(last_line create)" ;;
    5) misses=$((misses < 5 ? misses + 1 : 5)) hold=$(backoff 1 $misses)
       note "no VM: $(last_line create); again after $hold polls" ;;
    *) note "no VM (status $status): $(last_line create)" ;;
  esac
}
prepare() { # sets the VM up and starts the run; every part is safe to run twice
  local script status=0
  for script in setup push ${BUCKET:+data}; do
    VM_STATE=READY
    tick
    call "$LEFT_S" "$script" || status=$?
    [ $status != 2 ] || give_up "$(last_line "$script")"
    [ $status = 0 ] || { trouble "$script failed: $(last_line "$script")"; return; }
  done
  go
}
go() { # starts the run
  local status=0
  call "$LEFT_S" train --wait_s="$MARGIN_S" -- "${FLAGS[@]}" || status=$?
  case $status in
    0) note "run started: $(grep '^step' "$STATE/train.log" | tail -n 1)" ;;
    2) give_up "the run does not accept its flags: $(last_line train)" ;;
    *) trouble "the run did not start (status $status): $(last_line train)" ;;
  esac
}
again() { # again WHY: deletes a lost or useless VM; the next check creates another
  note "$1: creating the VM again"
  call 600 delete --yes || note "not deleted: $(last_line delete)"
  troubles=0 pending=0
}
restart() { call 300 stop_run --kill || note "$(last_line stop_run)"; go; }  # on a pod, some VMs may still run it
crashed() { # crashed HOW: starts the run again, unless it ended three times without getting further
  local at
  at=$(printf %s "${step%%/*}" | sed 's/^0*//')
  at=${at:-0}
  if [ "$at" -gt "$furthest" ]; then furthest=$at crashes=0; fi
  crashes=$((crashes + 1))
  note "the run $1 at step ${step:-none} ($crashes of 3): $(field error)"
  [ $crashes -lt 3 ] || give_up "it ended three times and got no further than step $furthest"
  restart
}

give_up() {
  note "giving up: $1"
  if [ "$VM_STATE" = READY ]; then
    call 60 logs --tail=30 || true
    tail -n 32 "$STATE/logs.log" | tee -a "$STATE/journal" || true
    call "$LEFT_S" fetch "${FETCH[@]}" || note "the run could not be fetched"
  fi
  end 1
}
