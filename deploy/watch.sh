#!/usr/bin/env bash
# Keeps one run alive on one VM until it is finished, and creates the VM again when it is preempted or unhealthy.
#
#   nohup deploy/watch.sh NAME --zones=us-west4-a,us-west4-b --bucket=gs://my-bucket/nanochat --max_usd=50 -- \
#     --run=d16 --depth=16 --checkpoint_mirror=gs://my-bucket/nanochat/checkpoints >watch.log 2>&1 &
#
# The flags after -- are the run's. A new VM gets packages, code and data, and the run resumes from the mirror. When the
# run has ended with status 0, it is fetched and the VM is deleted. When it has ended three times without getting
# further, or a setting is wrong, watch.sh gives up: it prints the end of the log, fetches the run and deletes the VM.
#
#   --max_usd N, --max_hours N   the budget; one of them is required. Before it is spent, the run is stopped and fetched
#                                and the VM deleted
#   --margin_s N               the part of the budget that is reserved for that, in seconds (default 600)
#   --poll_s N                 seconds between two checks of the VM (default 60)
#   --patience N               after how many failed checks in a row the VM is created again (default 5)
#   --stall_s N                a run without a new log line for this long is started again (default 1800)
#   --keep_vm                  do not delete the VM at the end; it still costs money
#   --to DIR                   where fetch.sh puts the run (default: checkpoints/ beside deploy/)
#   --state DIR                journal and spending, which outlive a restart (default ~/.local/state/nanochat/NAME)
#   --dry_run                  only print what would be done
#   WEBHOOK=URL in config.env  an address that gets every line of the journal as {"text": …}
#
# Exit status 0: finished; 1: given up; 2: wrong use; 6: watched already; 7: budget spent; 70: watch.sh itself failed;
# 143: told to stop. A VM may remain, and cost money, after 2, 6, 70 and 143, and with --keep_vm except after 7.
. "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
MAX_USD="" MAX_HOURS="" MARGIN_S=600 POLL_S=60 PATIENCE=5 STALL_S=1800
KEEP_VM="" STATE="" WEBHOOK="" TO=$ROOT/checkpoints
parse "MAX_USD= MAX_HOURS= MARGIN_S= PATIENCE= STALL_S= KEEP_VM STATE= TO=" "$@"
NAME=${ARGS[0]:-$NAME}
[ -n "$NAME" ] || die 2 "the VM has no name: watch.sh NAME … -- FLAGS"
[ ${#FLAGS[@]} -gt 0 ] || die 2 "the run has no flags: watch.sh NAME … -- --run=NAME …"
[ -n "$MAX_USD$MAX_HOURS" ] || die 2 "the run has no budget: --max_usd or --max_hours"
facts "$TYPE"
[ -z "$MAX_USD" ] || [ -n "$USD" ] || die 2 "the price of $TYPE is not known: give --usd_per_hour"
RUN=$(printf '%s\n' "${FLAGS[@]}" | awk -F= '$1 == "--run" { if (NF == 1) getline; print $NF }' | tail -n 1)
RUN=${RUN:-dummy}
. "$LIB/budget.sh"
. "$LIB/repair.sh"
FETCH=(--to="$TO")
case " ${FLAGS[*]}" in
  *--checkpoint[_-]mirror*) FETCH+=(--no_checkpoints) ;;
  *) say "warning: without --checkpoint_mirror a preemption loses every checkpoint" ;;
esac
[ -z "$DRY_RUN" ] || { say "+ create, setup, push, data, train with ${PASS[*]} -- ${FLAGS[*]}"; exit 0; }
STATE=${STATE:-$HOME/.local/state/nanochat/$NAME}
mkdir -p "$STATE"
other=$(cat "$STATE/pid" 2>/dev/null || true)
case "$other $(ps -o command= -p "${other:-0}" 2>/dev/null || true)" in
  "$$ "*) ;;  # after a reboot the number may belong to another program, or to us
  *watch.sh*) die 6 "$NAME is watched by process $other" ;;
esac
echo $$ >"$STATE/pid"

probe_run() { WORKER=0 && aim && vm 0 probe; }
field() { sed -n "s/^$1=//p" "$STATE/probe"; }
look() { # checks the run on a healthy VM and acts on its state
  local state step
  if ! limit 120 probe_run >"$STATE/probe" 2>"$STATE/probe.log"; then
    trouble "no answer from the VM: $(last_line probe)"
    return
  fi
  [ -n "$(field state)" ] || { note "the VM's answer could not be stored: is the disk of $STATE full?"; return; }
  state=$(field state)$(field exit | sed 's/^/ /') step=$(field steps)
  case "$(field run) $state" in
    "$RUN "*) ;;
    *" running"*) note "another run is running: $(field run)"; return ;;
    *) state=none ;;
  esac
  case $state in
    running*)
      troubles=0 futile=0
      if [ "$(field log_age_s)" -ge "$STALL_S" ]; then crashed "hangs: no line in its log for $(field log_age_s) s,"
      else echo "$(date -u +%FT%TZ) running, step $step" || true; fi ;;
    none) prepare ;;
    orphans*)
      note "the run has ended, but some of its processes still run"
      call 300 stop_run --kill --wait_s=1 || trouble "its processes could not be ended" ;;
    "ended 0")
      note "finished: step $step"
      call "$LEFT_S" fetch "${FETCH[@]}" && end 0
      note "the run could not be fetched; trying again, while the VM costs money: $(last_line fetch)" ;;
    "ended 2") give_up "the run does not accept its flags" ;;
    "ended 75") note "the run was told to stop at step $step: starting it again"; restart ;;
    *) crashed "$state" ;;
  esac
}

misses=0 hold=0 troubles=0 futile=0 pending=0 crashes=0 furthest=-1 VM_STATE=absent
trap 'left_alone 143 "told to stop"' INT TERM
trap on_exit EXIT
open_books
while :; do
  lookup "$NAME"
  case $VM_STATE in
    absent | unknown) ;;
    *) [ "$VM_TYPE ${VM_SPOT:-False}" = "$TYPE $([ -n "$ON_DEMAND" ] && echo False || echo True)" ] || {
         note "$NAME exists as $VM_TYPE, spot: ${VM_SPOT:-False}. Give its --type and --on_demand, or another name"
         rm "$STATE/pid"; exit 2; } ;;
  esac
  tick
  case $VM_STATE in
    unknown) note "cannot tell the state of $NAME; waiting: $VM_ERROR" ;;
    absent) if [ "$hold" -gt 0 ]; then hold=$((hold - 1)); else make; fi ;;
    READY)
      pending=0
      if [ "$VM_HEALTH" = HEALTHY ]; then look; else trouble "unhealthy: $VM_HEALTH"; fi ;;
    PREEMPTED | TERMINATED) again "$VM_STATE" ;;
    STOPPED) if [ -n "$ON_DEMAND" ]; then KEEP_VM=1; give_up "somebody stopped $NAME"; else again "$VM_STATE"; fi ;;
    *) pending=$((pending + 1)); [ $pending -lt $((PATIENCE * 3)) ] || again "$VM_STATE for $pending polls" ;;
  esac
  if [ $troubles -ge "$PATIENCE" ]; then
    futile=$((futile + 1))
    [ $futile -lt 3 ] || give_up "the run did not start on any of three VMs"
    again "trouble $troubles times in a row"
  fi
  sleep "$POLL_S"
done
