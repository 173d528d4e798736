#!/usr/bin/env bash
# Copies a run from a VM into checkpoints/RUN here: metrics, log and the newest checkpoint.
#
#   deploy/fetch.sh HOST [RUN]     RUN: the newest run of the VM unless it is given
#
# A checkpoint that is here already is not copied again. What is here of another run of this name is kept beside it. An
# interrupted copy leaves nothing under a checkpoint's name.
#
#   --to DIR                   copy into DIR/RUN (default: checkpoints/ beside deploy/)
#   --all                      every checkpoint, not only the newest
#   --no_checkpoints           only metrics and log
#   --vm_ips A,B --vm_id ID    the addresses and the id of the VM HOST, so that gcloud need not be asked
me=$0; while [ -L "$me" ]; do l=$(readlink "$me"); case $l in /*) me=$l ;; *) me=$(dirname "$me")/$l ;; esac; done
. "$(dirname "$me")/lib/common.sh" || exit 2
TO=$ROOT/checkpoints ALL="" NO_CHECKPOINTS="" WORKER=0 VM_IPS="" VM_ID=""
parse "TO ALL NO_CHECKPOINTS VM_IPS VM_ID" "$@"
[ ${#ARGS[@]} -lt 3 ] || die 2 "one run at a time, and not ${ARGS[*]}"
RUN=${ARGS[1]:-}
if [ -n "$VM_IPS" ]; then aim; else ARGS=(${ARGS[0]:+"${ARGS[0]}"}); resolve; fi
run_on_vm() { local READ=(only run); limited 120 retry vm 0 'current'; }
RUN=${RUN:-$(run_on_vm)}
case $RUN in .* | -* | *[!A-Za-z0-9._-]*) die 2 "$RUN is no name of a run: only letters, digits, . - and _" ;; esac
[ -n "$RUN" ] || die 1 "no run was started on this VM; name an older one: fetch.sh HOST RUN"

script LIST <<'END'
load_env
cd "$BASE/checkpoints/$1" 2>/dev/null || fail "no run $1 in $BASE/checkpoints"
checkpoints . | { [ -n "$2" ] && cat || tail -n 1; } |
  while read -r step; do (cd "$step" 2>/dev/null && echo "$step $(eval "$3")") || true; done
END

script SEND <<'END'
load_env
cd "$BASE/checkpoints/$1"
log=$D/runs/$1.log
shift
send() { printf '%s %s\n' "$1" "$2"; head -c "$1" "${3:-$2}"; }  # send SIZE NAME [FILE]
for name in "$@"; do
  if [ "$name" = run.log ]; then
    [ ! -f "$log" ] || send "$(stat -c %s "$log")" run.log "$log"
  elif [ -e "$name" ]; then
    find "$name" -type f -printf '%s %p\n' | while read -r size path; do send "$size" "$path"; done
  fi
done
echo end
END

# Prints a checksum of the small files of a checkpoint, here and on the VM: they say which run it is from.
SUM="find . -type f -size -2048 -exec cksum {} + | LC_ALL=C sort -k 3 | cksum | tr -d ' '"
# aside NAME keeps what is here under this name beside it.
aside() {
  local other
  other=other_$1.$(date +%s)
  say "$1 here is from another run of this name: it is kept as $TO/$RUN/$other"
  mv "$TO/$RUN/$1" "$TO/$RUN/$other"
}
# get NAMES copies these files and folders into a new folder and then renames each to its place. The first line of
# metrics and log says which run they are from.
get() {
  local new=$TO/$RUN/incoming.$$ old READ=(files "$TO/$RUN/incoming.$$" "$@")
  for old in "$TO/$RUN"/incoming.*; do  # of this process, or of a fetch.sh that was killed
    case $old in "$new") ;; *) ! kill -0 "${old##*.}" 2>/dev/null || continue ;; esac
    rm -rf "$old"
  done
  vm 0 "$SEND" "$RUN" "$@" || return
  for name in "$@"; do
    [ -e "$new/$name" ] || continue
    old=$TO/$RUN/$name
    [ ! -f "$old" ] || [ "$(head -n 1 "$old")" = "$(head -n 1 "$new/$name")" ] || aside "$name" || return
    mv "$new/$name" "$TO/$RUN/" || return
  done
  rm -rf "$new"
}

listed() { local READ=(only checkpoints); limited 600 retry vm 0 "$LIST" "$RUN" "$ALL" "$SUM"; }
# fetch_steps copies the checkpoints in $steps. It returns 1 if the run has deleted one meanwhile.
fetch_steps() {
  local step sum deleted=0
  while read -r step sum; do
    [ -n "$step" ] || continue
    if [ -d "$TO/$RUN/$step" ]; then
      if [ "$(cd "$TO/$RUN/$step" && eval "$SUM")" = "$sum" ]; then say "$step is here"; continue; fi
      aside "$step" || exit
    fi
    say "$step …"
    retry get "$step" </dev/null || exit
    [ -d "$TO/$RUN/$step" ] || deleted=1
  done < <(printf '%s\n' "$steps")
  return $deleted
}

steps=$(listed)
retry get metrics.jsonl run.log
for round in 1 2 3 ""; do
  [ -n "$round" ] || die 1 "the run deletes checkpoints faster than they are copied: stop_run.sh, then fetch.sh again"
  [ -z "$NO_CHECKPOINTS" ] || break
  if fetch_steps; then break; fi
  say "the run has deleted a checkpoint before it was copied: looking again"
  steps=$(listed)
done
say "run $RUN is in $TO/$RUN"
