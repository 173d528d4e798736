# shellcheck shell=bash
# What watch.sh knows of money, of telling and of calling the other scripts; sourced by it.

note() { # to the journal, and to the webhook, whose address may be a secret: it goes over stdin
  echo "$(date -u +%FT%TZ) $*" | tee -a "$STATE/journal"
  [ -n "$WEBHOOK" ] || return 0
  printf 'url = "%s"\ndata = "{\\"text\\": \\"%s\\"}"\n' "$WEBHOOK" "$(echo "$NAME: $*" | tr -d '"\134')" |
    curl -s -m 10 -H 'Content-Type: application/json' -o /dev/null -K - || true
}

trouble() { troubles=$((troubles + 1)); note "$1 ($troubles of $PATIENCE)"; }

PASS=(--type="$TYPE" ${ON_DEMAND:+--on_demand})
for setting in ZONES PROJECT BUCKET SSH_USER SSH_KEY WANDB_PROJECT WANDB_KEY_FILE USD_PER_HOUR; do
  [ -z "${!setting}" ] || PASS+=("--$(echo $setting | tr '[:upper:]' '[:lower:]')=${!setting}")
done
# call SCRIPT FLAGS: another of our scripts, with our settings; what it says goes to its own log.
call() {
  local script=$1
  shift
  "$HERE/$script.sh" "$NAME" "${PASS[@]}" "$@" </dev/null >>"$STATE/$script.log" 2>&1
}

# limit SECONDS COMMAND
limit() {
  local deadline=$((SECONDS + $1)) pid status=0
  shift
  "$@" &
  pid=$!
  while kill -0 $pid 2>/dev/null; do
    [ $SECONDS -lt $deadline ] || { kill $pid; break; }
    sleep 1
  done
  wait $pid || status=$?
  return $status
}

# tick: adds what the VM has cost since the last tick to a file, sets LEFT_S, and ends it all in time for the budget.
tick() {
  local now start last spent
  now=$(date +%s)
  read -r start last spent 2>/dev/null <"$STATE/spent" || start=$now last=$now spent=0
  [ "$VM_STATE" = absent ] || spent=$(awk "BEGIN { print $spent + ${USD:-0} * ($now - $last) / 3600 }")
  echo "$start $now $spent" >"$STATE/spent"
  LEFT_S=$(awk -v usd="${MAX_USD:-1e6}" -v hours="${MAX_HOURS:-1e3}" "BEGIN {
    left = 3600 * hours - ($now - $start); paid = (usd - $spent) * 3600 / ${USD:-0.01}
    print int((paid < left ? paid : left) - $MARGIN_S) }")
  [ "$LEFT_S" -le 0 ] || return 0
  note "budget: $(calc "$spent") USD and $(calc "($now - $start) / 3600") hours are spent, and the end needs its share"
  if [ "$VM_STATE" = READY ]; then
    limit $((MARGIN_S / 3)) call stop_run || note "the run did not stop in time"
    limit $((MARGIN_S / 3)) call fetch "${FETCH[@]}" || note "the run could not be fetched"
  fi
  KEEP_VM=""
  end 7
}

# end STATUS: leaves no VM that costs, however long that takes, unless it was told to.
end() {
  while [ -z "$KEEP_VM" ] && [ "$VM_STATE" != absent ]; do
    if call delete --yes; then note "VM deleted"; else note "VM NOT DELETED: $(tail -n 1 "$STATE/delete.log")"; fi
    lookup "$NAME"
    [ "$VM_STATE" = absent ] || sleep "$POLL_S"
  done
  rm -f "$STATE/pid"
  exit "$1"
}

give_up() {
  note "giving up: $1"
  call logs --tail=30 || true
  tail -n 32 "$STATE/logs.log" | tee -a "$STATE/journal"
  call fetch "${FETCH[@]}" || note "the run could not be fetched"
  end 1
}
