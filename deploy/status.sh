#!/usr/bin/env bash
# Shows the state, price so far, run, step, loss, speed, time left, disk, checkpoint and last error of a VM.
#
#   deploy/status.sh [HOST]    HOST: an IP, an ssh host or a VM's name (default: NAME of deploy/config.env)
#
#   --worker N|all             which VM of a pod (default all: the first writes log and checkpoints, so the others have
#                              a line each)
#
# Exit status 1: the VM is not READY or cannot be reached; 2: gcloud refused for a reason that no waiting mends;
# 3: there is no such VM; 4: gcloud could not say whether there is one.
me=$0; while [ -L "$me" ]; do l=$(readlink "$me"); case $l in /*) me=$l ;; *) me=$(dirname "$me")/$l ;; esac; done
. "$(dirname "$me")/lib/common.sh" || exit 2
parse "" "$@"
need_room
HOST=${ARGS[0]:-$NAME}
if [ -z "$HOST" ] || [ ${#ARGS[@]} -gt 1 ]; then die 2 "one HOST is needed: status.sh HOST, or NAME in deploy/config.env"; fi

field() { sed -n "s/^$1=//p" "$TMP/probe"; }
# ask I puts what from_vm.py lets through of the answer of host I into the file that field reads.
ask() {
  local READ=(fields)
  limited 60 vm "$1" probe >"$TMP/probe" 2>"$TMP/ssh" ||
    { echo "unreachable: $(tail -n 1 "$TMP/ssh" | grep . || echo it gave no reason)"; return 1; }
  cat "$TMP/ssh" >&2
  [ -n "$(field state)" ] || { echo "unreachable: an empty answer"; return 1; }
}
seconds() { date -u -d "$1" +%s 2>/dev/null || date -u -j -f %Y-%m-%dT%H:%M:%S "${1%%.*}" +%s; }  # GNU, BSD

vm_line() { # prints what gcloud says of the VM of this name
  local hours=0
  find_vm "$1"
  printf '%s  %s' "$1" "$VM_STATE"
  [ "$VM_STATE" != unknown ] || printf ' (%s)' "$VM_ERROR"
  case $VM_STATE in
    absent) echo "; list.sh looks in all zones"; return 3 ;;
    unknown) echo; [ -z "$VM_PERMANENT" ] || return 2; return 4 ;;
  esac
  facts_of_vm "$VM_TYPE" "$VM_SPOT" "$VM_ZONE"
  hours=$(calc "($(date +%s) - $(seconds "$VM_CREATED")) / 3600")
  printf ' %s  %s%s  %s  %s' "$VM_HEALTH" "$VM_TYPE" "${VM_SPOT:+ spot}" "$VM_ZONE" "$VM_IPS"
  printf '  %s h  %s USD at %s an hour\n' "$hours" "$([ -z "$USD" ] || calc "$hours * $USD")" "${USD:-?}"
  [ "$VM_STATE" = READY ]
}

mirror_trouble() { # prints what is wrong with the mirror, or nothing
  local behind_s
  behind_s=$(field mirror_behind_s)
  [ "${behind_s:-0}" = 0 ] || printf '   BEHIND for %s min: %s' $((behind_s / 60)) \
    "$(field mirror_error | grep . || echo the newest checkpoint is on the VM alone)"
}

worker_line() { # worker_line I prints one line about worker I of a pod
  local line
  printf '  worker %s (%s)  ' "$1" "${TARGETS[$1]}"
  ask "$1" || return
  line="no run yet"
  [ "$(field state)" = none ] || line="$(field run) $(field state)$(field exit | sed 's/./ with status &/')"
  echo "$line   $(field disk) GB free$(field error | sed 's/^/   error  /')"
}

other_workers() { # prints a line for every worker of a pod but the first
  local i status=0
  for i in "${!TARGETS[@]}"; do [ "$i" = 0 ] || worker_line "$i" || status=$?; done
  return $status
}

run_lines() {
  ask 0 | sed 's/^/  /' || return
  [ "$(field state)" != none ] || { echo "  no run yet, $(field disk) GB free"; return 0; }
  echo "  run    $(field run) $(field state)$(field exit | sed 's/./ with status &/')   code $(field code)"
  awk -v steps="$(field steps)" -v step="$(field step)" -v loss="$(field loss)" -v speed="$(field tokens_per_s)" \
    -v mfu="$(field mfu)" -v left="$([ "$(field state)" != running ] || field time_left_s)" 'BEGIN {
      split(steps, of, "/")
      if (step == "") { print "  step   none yet: compiling takes minutes"; exit }
      printf "  step   %d%s   loss %.4f", step, of[2] ? " of " of[2] + 0 : "", loss
      printf "   %d tokens/s", speed
      if (mfu != "") printf "   MFU %.1f%%", 100 * mfu
      if (left != "") printf "   %d h %02d min left", left / 3600, left % 3600 / 60
      print "" }'
  echo "  disk   $(field disk) GB free   checkpoint $(field checkpoint | grep . || echo none yet)$(
    [ -z "$(field checkpoint)" ] || echo ", $(field checkpoint_age) min old")"
  [ -z "$(field mirror)" ] ||
    echo "  mirror $(field mirrored | grep . || echo nothing yet) in $(field mirror)$(mirror_trouble)"
  [ -z "$(field error)" ] || echo "  error  $(field error)"
}

status=0
VM_IPS=$HOST VM_ID=""
if is_vm "$HOST"; then vm_line "$HOST" || exit; else echo "$HOST"; fi
aim
run_lines || status=$?
other_workers || status=$?
exit $status
