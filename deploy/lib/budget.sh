# shellcheck shell=bash disable=SC2034
# What watch.sh knows of money, of time limits and of telling; sourced by it.

note() { # to the journal, and to the webhook, whose address may be a secret: it goes over stdin
  echo "$(date -u +%FT%TZ) $*" | tee -a "$STATE/journal" || true  # a full disk here must not end the watch
  [ -n "$WEBHOOK" ] || return 0
  printf 'url = "%s"\ndata = "{\\"text\\": \\"%s\\"}"\n' "$WEBHOOK" "$(echo "$NAME: $*" | tr -d '"\134')" |
    curl -s -m 10 -H 'Content-Type: application/json' -o /dev/null -K - || true
}

trouble() { troubles=$((troubles + 1)); note "$1 ($troubles of $PATIENCE)"; }

# limit SECONDS COMMAND: in a process group of its own, of which nothing is left when the time is over.
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

# What was spent is kept over restarts of watch.sh: when it was counted last, the seconds and USD up to then, and
# whether there was a VM, which then may have cost while nobody counted.
open_books() {
  COUNTED_AT=$(date +%s) ELAPSED_S=0 SPENT=0 WAS=absent
  [ ! -s "$STATE/spent" ] || read -r COUNTED_AT ELAPSED_S SPENT WAS <"$STATE/spent"
  [ "$WAS" != absent ] || COUNTED_AT=$(date +%s)
  note "watching $NAME: $TYPE in $ZONES, ${USD:-?} USD an hour, at most ${MAX_USD:-any} USD and ${MAX_HOURS:-any}" \
    "hours, of which $(spent) are spent"
}

spent() { echo "$(calc "$SPENT") USD and $(calc "$ELAPSED_S / 3600") hours"; }
count() { # adds the time since the last count, and what the VM has cost
  local now
  now=$(date +%s)
  [ "$now" -ge "$COUNTED_AT" ] || COUNTED_AT=$now  # the clock was set back: nothing that is spent becomes unspent
  if [ "$WAS$VM_STATE" != absentabsent ]; then  # a VM at either end of the interval has cost all of it
    SPENT=$(awk "BEGIN { print $SPENT + ${USD:-0} * ($now - $COUNTED_AT) / 3600 }")
  fi
  ELAPSED_S=$((ELAPSED_S + now - COUNTED_AT)) COUNTED_AT=$now WAS=$VM_STATE
  echo "$COUNTED_AT $ELAPSED_S $SPENT $WAS" >"$STATE/spent.next" || note "cannot write to $STATE: is the disk full?"
  [ ! -s "$STATE/spent.next" ] || mv "$STATE/spent.next" "$STATE/spent"
}

# tick: counts, sets LEFT_S, and ends it all in time for the budget.
tick() {
  count
  LEFT_S=$(awk -v usd="${MAX_USD:-1e6}" -v hours="${MAX_HOURS:-1e3}" "BEGIN {
    left = 3600 * hours - $ELAPSED_S; paid = (usd - $SPENT) * 3600 / ${USD:-0.01}
    print int((paid < left ? paid : left) - $MARGIN_S) }")
  [ "$LEFT_S" -le 0 ] || return 0
  note "budget: $(spent) are spent, and the end needs its share"
  if [ "$VM_STATE" = READY ]; then
    call $((MARGIN_S / 3)) stop_run || note "the run did not stop in time"
    call $((MARGIN_S / 3)) fetch "${FETCH[@]}" || note "the run could not be fetched"
  fi
  KEEP_VM=""
  end 7
}

# end STATUS: leaves no VM that costs, however long that takes, unless it was told to.
end() {
  local status gone=0
  [ -z "$KEEP_VM" ] || { note "$NAME is kept and costs ${USD:-?} USD an hour: delete.sh $NAME"; gone=2; }
  while [ $gone -lt 2 ]; do  # twice: one that is being made, or made again, may not be known everywhere at once
    status=0
    call 600 delete --yes || status=$?
    case $status in
      0) note "VM deleted" ;;
      3) gone=$((gone + 1)) ;;
      *) note "VM NOT DELETED, IT MAY STILL COST; trying again: $(last_line delete)" ;;
    esac
    [ $gone = 2 ] || sleep "$POLL_S"
  done
  [ -n "$KEEP_VM" ] || VM_STATE=absent
  count
  note "the end, after $(spent)"
  rm -f "$STATE/pid"
  [ "$1" != 0 ] || rm -f "$STATE/spent"  # the next run has a budget of its own
  exit "$1"
}

# On SIGINT, SIGTERM and on a failure of watch.sh itself, which no state of the world should cause.
left_alone() { # STATUS WHY
  trap - INT TERM
  [ -z "$CHILD" ] || kill -- "-$CHILD" 2>/dev/null || true
  note "$2. $NAME ($VM_STATE) is left as it is, at ${USD:-?} USD an hour:" \
    "watch.sh takes it up again, delete.sh ends it"
  rm -f "$STATE/pid"
  exit "$1"
}
on_exit() {
  local status=$?
  rm -rf "$TMP"
  [ ! -f "$STATE/pid" ] || left_alone 70 "watch.sh failed with status $status"
}
