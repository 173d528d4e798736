#!/usr/bin/env bash
# Keeps one run alive on one VM until it is finished: makes the VM, and makes it again when it is preempted or sick.
#
#   nohup deploy/watch.sh NAME --zones=us-west4-a,us-west4-b --bucket=gs://my-bucket/nanochat --max_usd=50 -- \
#     --run=d16 --depth=16 --checkpoint_mirror=gs://my-bucket/nanochat/checkpoints >watch.log 2>&1 &
#
# What follows -- are the run's flags. A new VM is set up, gets the code and the data, and the run resumes from the
# mirror. Finished means: the run ended with status 0; then it is fetched and the VM deleted. Gives up, with the log's
# tail, when the run crashes at one step three times or its flags are wrong. Status 0 finished, 1 given up, 7 budget.
#
#   --max_usd N, --max_hours N   never exceeded: the run is stopped and fetched and the VM deleted in time
#   --margin_s N               what is kept of the budget for that (default 600)
#   --poll_s N                 how often to look (default 60)
#   --patience N               how often in a row a VM may be sick or silent before it is made again (default 5)
#   --keep_vm                  do not delete the VM at the end; it goes on costing
#   --to DIR                   where fetch.sh puts the run (default checkpoints/ beside deploy/)
#   --state DIR                journal and spending (default ~/.local/state/nanochat/NAME); kept over restarts
#   WEBHOOK=URL in config.env  gets {"text": …} for everything in the journal
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
MAX_USD="" MAX_HOURS="" MARGIN_S=600 POLL_S=60 PATIENCE=5 KEEP_VM="" STATE="" WEBHOOK="" TO=$ROOT/checkpoints
parse "MAX_USD= MAX_HOURS= MARGIN_S= PATIENCE= KEEP_VM STATE= TO=" "$@"
NAME=${ARGS[0]:-$NAME}
[ -n "$NAME" ] || die 2 "which VM? watch.sh NAME … -- FLAGS"
[ ${#FLAGS[@]} -gt 0 ] || die 2 "no flags for the run: watch.sh NAME … -- --run=NAME …"
facts "$TYPE" && type=$TYPE
[ -z "$MAX_USD" ] || [ -n "$USD" ] || die 2 "the price of $TYPE is not known: --usd_per_hour"
RUN=$(printf '%s\n' "${FLAGS[@]}" | awk -F= '$1 == "--run" { if (NF == 1) getline; print $NF }' | tail -n 1)
RUN=${RUN:-dummy}
. "$HERE/money.sh"
FETCH=(--to="$TO")
case " ${FLAGS[*]}" in
  *--checkpoint[_-]mirror*) FETCH+=(--no_checkpoints) ;;
  *) say "warning: without --checkpoint_mirror a preemption loses every checkpoint" ;;
esac
[ -z "$DRY_RUN" ] || { say "+ create, setup, push, data, train with ${PASS[*]} -- ${FLAGS[*]}"; exit 0; }
STATE=${STATE:-$HOME/.local/state/nanochat/$NAME}
mkdir -p "$STATE"
! kill -0 "$(cat "$STATE/pid" 2>/dev/null)" 2>/dev/null || die 6 "$NAME is watched by process $(cat "$STATE/pid")"
echo $$ >"$STATE/pid"

make() { # pauses grow while there is no capacity
  local status=0
  call create --rounds=1 || status=$?
  case $status in
    0) note "VM made: $(tail -n 1 "$STATE/create.log")"; misses=0; prepare ;;
    5) misses=$((misses < 5 ? misses + 1 : 5)); note "no VM: $(tail -n 1 "$STATE/create.log")"
       [ $misses = 1 ] || sleep $((POLL_S * (1 << misses) * (50 + RANDOM % 100) / 200)) ;;
    *) note "no VM (status $status): $(tail -n 1 "$STATE/create.log")" ;;
  esac
}
prepare() { # all of it may be done twice
  local script
  for script in setup push ${BUCKET:+data}; do
    VM_STATE=READY
    tick
    limit "$LEFT_S" call "$script" || { trouble "$script failed: $(tail -n 1 "$STATE/$script.log")"; return; }
  done
  go
}
go() {
  local status=0
  limit "$LEFT_S" call train --wait_s="$MARGIN_S" -- "${FLAGS[@]}" || status=$?
  [ $status != 0 ] || { note "run started: $(grep '^step' "$STATE/train.log" | tail -n 1)"; return; }
  trouble "the run did not start (status $status): $(tail -n 1 "$STATE/train.log")"
}
again() { # again WHY: this VM is lost, or no good
  note "$1: making the VM again"
  call delete --yes || note "not deleted: $(tail -n 1 "$STATE/delete.log")"
  troubles=0 pending=0
}
look() { # what the run on a healthy VM does
  field() { sed -n "s/^$1=//p" "$STATE/probe"; }
  if ! (WORKER=0 && aim && vm 0 probe) >"$STATE/probe" 2>"$STATE/probe.log"; then
    trouble "no answer from the VM: $(tail -n 1 "$STATE/probe.log")"
    return
  fi
  local state step
  state=$(field state)$(field exit | sed 's/^/ /') step=$(field steps)
  case "$(field run) $state" in
    "$RUN "*) ;;
    *" running"*) note "another run is going: $(field run)"; return ;;
    *) state=none ;;
  esac
  case $state in
    running*) troubles=0 futile=0; echo "$(date -u +%FT%TZ) running, step $step" ;;
    none) prepare ;;
    orphans) note "processes are left of a run that ended"; call stop_run --kill --wait_s=1 || trouble "still there" ;;
    "ended 0") note "finished: step $step"; call fetch "${FETCH[@]}" && end 0; note "could not fetch it; again soon" ;;
    "ended 2") give_up "the run does not accept its flags" ;;
    "ended 75") note "the run was told to stop at step $step: starting it again"; go ;;
    *)
      if [ "$step" = "$crash_step" ]; then crashes=$((crashes + 1)); else crashes=1 crash_step=$step; fi
      note "the run $state at step ${step:-none} ($crashes of 3): $(field error)"
      [ $crashes -lt 3 ] || give_up "it ended at step ${step:-none} three times"
      go ;;
  esac
}

misses=0 troubles=0 futile=0 pending=0 crashes=0 crash_step=x VM_STATE=absent
note "watching $NAME: $TYPE in $ZONES, ${USD:-?} USD an hour, at most ${MAX_USD:-any} USD and ${MAX_HOURS:-any} hours"
while :; do
  lookup "$NAME"
  TYPE=$type
  tick
  case $VM_STATE in
    unknown) note "cannot tell what $NAME is doing, and wait: $VM_ERROR" ;;
    absent) make ;;
    READY) if [ "$VM_HEALTH" = HEALTHY ]; then look; else trouble "sick: $VM_HEALTH"; fi ;;
    CREATING | STARTING | RESTARTING | REPAIRING)
      pending=$((pending + 1)); [ $pending -lt $((PATIENCE * 3)) ] || again "$VM_STATE for $pending polls" ;;
    *) again "$VM_STATE" ;;
  esac
  if [ $troubles -ge "$PATIENCE" ]; then
    futile=$((futile + 1))
    [ $futile -lt 3 ] || give_up "three VMs, and the run did not start on any"
    again "trouble $troubles times in a row"
  fi
  sleep "$POLL_S"
done
