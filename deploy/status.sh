#!/usr/bin/env bash
# Shows the state, price so far, run, step, loss, speed, time left, disk, checkpoint and last error of one or more VMs.
#
#   deploy/status.sh [HOST…]   HOST: an IP, an ssh host or a VM's name (default: NAME of deploy/config.env)
#
#   --watch                    repeat every --poll_s seconds (default 10) until Ctrl-C
#   --worker N                 which VM of a pod (default 0)
#
# Exit status 1: a VM is not READY or cannot be reached.
. "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
WATCH="" WORKER=0
parse "WATCH" "$@"
[ ${#ARGS[@]} -gt 0 ] || ARGS=(${NAME:+"$NAME"})
[ ${#ARGS[@]} -gt 0 ] || die 2 "no VM is named: status.sh HOST, or set NAME in deploy/config.env"

field() { sed -n "s/^$1=//p" "$TMP/probe"; }
number() { field record | sed -n "s/.*\"$1\": *\([-0-9.eE+]*\).*/\1/p"; }
seconds() { date -u -d "$1" +%s 2>/dev/null || date -u -j -f %Y-%m-%dT%H:%M:%S "${1%%.*}" +%s; }  # GNU, BSD

vm_line() { # prints what gcloud says of the VM of this name
  local hours=0
  lookup "$1"
  printf '%s  %s' "$1" "$VM_STATE"
  [ "$VM_STATE" != unknown ] || printf ' (%s)' "$VM_ERROR"
  case $VM_STATE in absent | unknown) echo; return 1 ;; esac
  ON_DEMAND=$([ "$VM_SPOT" = True ] || echo 1)
  facts "$VM_TYPE"
  hours=$(calc "($(date +%s) - $(seconds "$VM_CREATED")) / 3600")
  printf ' %s  %s%s  %s  %s' "$VM_HEALTH" "$VM_TYPE" "${VM_SPOT:+ spot}" "$VM_ZONE" "$VM_IPS"
  printf '  %s h  %s USD at %s an hour\n' "$hours" "$([ -z "$USD" ] || calc "$hours * $USD")" "${USD:-?}"
  [ "$VM_STATE" = READY ]
}

run_lines() {
  if ! vm 0 probe >"$TMP/probe" 2>"$TMP/ssh"; then echo "  unreachable: $(tail -n 1 "$TMP/ssh")"; return 1; fi
  [ "$(field state)" != none ] || { echo "  no run yet, $(field disk) GB free"; return 0; }
  echo "  run    $(field run) $(field state)$(field exit | sed 's/./ with status &/')   code $(field code)"
  awk -v steps="$(field steps)" -v step="$(number step)" -v loss="$(number loss)" -v speed="$(number tokens_per_s)" \
    -v mfu="$(number mfu)" -v left="$(number time_left_s)" 'BEGIN {
      split(steps, of, "/")
      if (step == "") { print "  step   none yet: compiling takes minutes"; exit }
      printf "  step   %d%s   loss %.4f", step, of[2] ? " of " of[2] + 0 : "", loss
      printf "   %d tokens/s", speed
      if (mfu != "") printf "   MFU %.1f%%", 100 * mfu
      if (left != "") printf "   %d h %02d min left", left / 3600, left % 3600 / 60
      print "" }'
  echo "  disk   $(field disk) GB free   checkpoint $(field checkpoint | grep . || echo none yet)$(
    [ -z "$(field checkpoint)" ] || echo ", $(field checkpoint_age) min old")"
  [ -z "$(field error)" ] || echo "  error  $(field error)"
}

show() {
  local host status=0
  for host in "${ARGS[@]}"; do
    if is_vm "$host"; then vm_line "$host" || { status=1; continue; }; else echo "$host"; fi
    (resolve "$host" && run_lines) || status=1
  done
  return $status
}

while [ -n "$WATCH" ]; do
  show >"$TMP/screen" 2>&1 || true
  clear 2>/dev/null || true
  date
  cat "$TMP/screen"
  sleep "$POLL_S"
done
show
