# shellcheck shell=bash disable=SC2034
# The budget, the time limits and the journal of watch.sh, which sources this file.

note() { # writes a line to the journal and the webhook; its address may be secret, so curl gets it over stdin
  echo "$(date -u +%FT%TZ) $*" | tee -a "$STATE/journal" || true  # a full disk here must not end watch.sh
  [ -n "$WEBHOOK" ] || return 0
  printf 'url = "%s"\ndata = "{\\"text\\": \\"%s\\"}"\n' "$WEBHOOK" "$(echo "$NAME: $*" | tr -d '"\134')" |
    curl -s -m 10 -H 'Content-Type: application/json' -o /dev/null -K - || true
}

# trouble WHY counts a failed check of the VM.
trouble() { troubles=$((troubles + 1)); note "$1 ($troubles of $PATIENCE)"; }

# limit SECONDS COMMAND runs COMMAND in a process group of its own, and kills the group when the time is over.
CHILD=""
limit() {
  local deadline=$((SECONDS + $1)) status=0
  shift
  set -m
  "$@" </dev/null &
  CHILD=$!
  set +m
  while kill -0 $CHILD 2>/dev/null; do
    if [ $SECONDS -ge $deadline ]; then kill -- -$CHILD; sleep 3; kill -KILL -- -$CHILD; break; fi
    sleep 0.2
  done 2>/dev/null
  wait $CHILD 2>/dev/null || status=$?
  CHILD=""
  return $status
}

# open_books reads the spending of earlier starts of watch.sh: the time of the last count, the seconds and USD until
# then, and the VM's state. A VM that existed then may have cost money since, although nobody counted.
open_books() {
  COUNTED_AT=$(date +%s) ELAPSED_S=0 SPENT=0 WAS=absent
  [ ! -s "$STATE/spent" ] || read -r COUNTED_AT ELAPSED_S SPENT WAS <"$STATE/spent"
  [ "$WAS" != absent ] || COUNTED_AT=$(date +%s)
  note "watching $NAME: $TYPE in $ZONES, ${USD:-?} USD an hour, at most ${MAX_USD:-any} USD and ${MAX_HOURS:-any}" \
    "hours; spent so far: $(spent)"
}

spent() { echo "$(calc "$SPENT") USD and $(calc "$ELAPSED_S / 3600") hours"; }
count() { # adds the time since the last count, and the VM's price for it
  local now
  now=$(date +%s)
  [ "$now" -ge "$COUNTED_AT" ] || COUNTED_AT=$now  # if the clock was set back, the spending stays
  if [ "$WAS$VM_STATE" != absentabsent ]; then  # a VM that existed at either end is charged for the whole interval
    SPENT=$(awk "BEGIN { print $SPENT + ${USD:-0} * ($now - $COUNTED_AT) / 3600 }")
  fi
  ELAPSED_S=$((ELAPSED_S + now - COUNTED_AT)) COUNTED_AT=$now WAS=$VM_STATE
  echo "$COUNTED_AT $ELAPSED_S $SPENT $WAS" >"$STATE/spent.next" || note "cannot write to $STATE: is the disk full?"
  [ ! -s "$STATE/spent.next" ] || mv "$STATE/spent.next" "$STATE/spent"
}

# tick counts, sets LEFT_S to the seconds before MARGIN_S, and ends run and VM when none are left.
tick() {
  count
  LEFT_S=$(awk -v usd="${MAX_USD:-1e6}" -v hours="${MAX_HOURS:-1e3}" "BEGIN {
    left = 3600 * hours - $ELAPSED_S; paid = (usd - $SPENT) * 3600 / ${USD:-0.01}
    print int((paid < left ? paid : left) - $MARGIN_S) }")
  [ "$LEFT_S" -le 0 ] || return 0
  note "budget: $(spent) are spent, and the rest is needed to stop, fetch and delete"
  if [ "$VM_STATE" = READY ]; then
    call $((MARGIN_S / 3)) stop_run || note "the run did not stop in time"
    call $((MARGIN_S / 3)) fetch "${FETCH[@]}" || note "the run could not be fetched"
  fi
  KEEP_VM=""
  end 7
}

# end STATUS deletes the VM, however long that takes, unless --keep_vm was given, and exits with STATUS.
end() {
  local status gone=0
  [ -z "$KEEP_VM" ] || { note "$NAME is kept and costs ${USD:-?} USD an hour: delete.sh $NAME"; gone=2; }
  while [ $gone -lt 2 ]; do  # gcloud must report it absent twice: a VM that is being created may not be visible yet
    status=0
    call 600 delete --yes || status=$?
    case $status in
      0) note "VM deleted" ;;
      3) gone=$((gone + 1)) ;;
      *) note "VM NOT DELETED, IT MAY STILL COST MONEY; trying again: $(last_line delete)" ;;
    esac
    [ $gone = 2 ] || sleep "$POLL_S"
  done
  [ -n "$KEEP_VM" ] || VM_STATE=absent
  count
  note "watch.sh ends; spent: $(spent)"
  rm -f "$STATE/pid"
  [ "$1" != 0 ] || rm -f "$STATE/spent"  # the next run has a budget of its own
  exit "$1"
}

# left_alone STATUS WHY exits without touching the VM: on SIGINT, on SIGTERM and when watch.sh itself has failed.
left_alone() {
  trap - INT TERM
  [ -z "$CHILD" ] || kill -- "-$CHILD" 2>/dev/null || true
  note "$2. $NAME ($VM_STATE) is left as it is, at ${USD:-?} USD an hour:" \
    "watch.sh resumes the watch, delete.sh deletes it"
  rm -f "$STATE/pid"
  exit "$1"
}
on_exit() {
  local status=$?
  rm -rf "$TMP"
  [ ! -f "$STATE/pid" ] || left_alone 70 "watch.sh failed with status $status"
}
