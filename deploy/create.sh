#!/usr/bin/env bash
# Creates a TPU VM and waits until it is READY and HEALTHY.
#
#   deploy/create.sh NAME --zones=us-west4-a,us-west4-b --type=v5litepod-8
#
# The zones are tried in the given order, each once; watch.sh waits for capacity. A VM that does not become healthy in
# time is deleted. If a VM of this name exists, nothing is created.
#
#   --zones A,B                the zones to try, and in which to look for a VM of this name
#   --type TYPE                v5litepod-1/4/8 (default -8) or v6e-1/4/8; v5litepod-16, v4-32 … are pods (several VMs)
#   --on_demand                not a spot VM: it costs about four times as much and is not preempted
#   --max_hours N              the VM's own limit, from its creation on, over reboots: it stops its runs and deletes
#                              itself before this time is over, whatever is on its disk. It needs this machine no more
#   --margin_s N               how long before that it begins to stop (default 600, at most half of the time)
#   --wait_s N                 how long one VM may take to become healthy (default 900)
#   --project ID               the Google Cloud project (default: gcloud's own)
#   --ssh_user NAME            who may log in (default: your name here)
#   --ssh_key FILE             with this key (default ~/.ssh/google_compute_engine, created if it is missing)
#   --dry_run                  only print what would be done
#
# Exit status 5: no zone has capacity or quota; 6: the VM exists already; 4: gcloud could not say whether it exists;
# 2: also an error that no waiting mends, such as a zone that does not exist.
me=$0; while [ -L "$me" ]; do l=$(readlink "$me"); case $l in /*) me=$l ;; *) me=$(dirname "$me")/$l ;; esac; done
. "$(dirname "$me")/lib/common.sh" || exit 2
WAIT_S=900 MAX_HOURS="" MARGIN_S=600
parse "MAX_HOURS MARGIN_S DRY_RUN" "$@"
take_name
[ -n "$SSH_KEY" ] || die 2 "--ssh_key is empty, and the new VM needs a key: give --ssh_key=FILE"
if [ -e "$SSH_KEY" ] || [ -e "$SSH_KEY.pub" ]; then
  grep -qsE '^(ssh-|ecdsa-|sk-)' "$SSH_KEY.pub" ||
    die 2 "--ssh_key=$SSH_KEY: $SSH_KEY.pub is no public key, so nobody could log in: ssh-keygen -y writes one"
fi
facts "$TYPE"
need_room
settle "$NAME"
[ -n "$PROJECT" ] || die 4 "gcloud does not say what its project is: give --project"
ZONES=$(all_zones) lookup "$NAME"
[ "$VM_STATE" != unknown ] || cannot_tell "$NAME"
[ "$VM_STATE" = absent ] || die 6 "$NAME exists already: $VM_STATE $VM_HEALTH in $VM_ZONE"
say "$NAME: $TYPE, $CHIPS chips, $([ -n "$ON_DEMAND" ] && echo on demand || echo spot), ${USD:-unknown} USD an hour" \
  "${USD_NOTE:+($USD_NOTE)}"

files="" flags=(--accelerator-type="$TYPE" --version="$VERSION")
[ -n "$ON_DEMAND" ] || flags+=(--spot)
[ -z "$INTERNAL_IPS" ] || flags+=(--internal-ips)
if [ ! -f "$SSH_KEY.pub" ] && [ ! -f "$SSH_KEY" ] && [ -z "$DRY_RUN" ]; then
  say "creating the ssh key $SSH_KEY, without a passphrase"
  (umask 077 && mkdir -p "$(dirname "$SSH_KEY")" && ssh-keygen -q -t ed25519 -N "" -f "$SSH_KEY")
fi
if [ -f "$SSH_KEY.pub" ]; then
  echo "${SSH_USER:-$(id -un)}:$(tr -d '\r' <"$SSH_KEY.pub")" >"$TMP/keys"
  files="ssh-keys=$TMP/keys"
fi
[ -z "$MAX_HOURS" ] || files="$files${files:+,}startup-script=$TMP/startup"
[ -z "$files" ] || flags+=(--metadata-from-file="$files")

# write_limit ZONE writes the VM's startup script. It sets the limit at the first boot, and starts it at the others.
write_limit() {
  limit_after "$MAX_HOURS" "projects/$PROJECT/locations/$1/nodes/$NAME"
  created_s=$SECONDS
  { printf '#!/bin/bash\nexport HOME=~root\n'; cat "$LIB/on_vm.sh" "$LIB/limit.sh"
    # shellcheck disable=SC2016  # it is evaluated on the VM
    printf 'if [ -s ~/nanochat.d/limit ]; then bash ~/nanochat.d/limit start_limit; else set_limit %s; fi\n' \
      "$(quote "${limit[@]}")"; } >"$TMP/startup"
}
# check_limit sets the limit again, in case the startup script did not run, and tells whether the VM may delete itself.
check_limit() {
  local answer
  limit[0]=$((limit[0] + created_s - SECONDS))
  answer=$(ask_limit "${limit[@]}") || true
  [ "$answer" != yes ] || { say "$NAME deletes itself before $MAX_HOURS hours are over"; return 0; }
  say "warning: $NAME may not delete itself ($answer). At its limit it only ends its runs, and goes on to cost money" \
    "until this machine deletes it: watch.sh does, or delete.sh $NAME"
}

# try ZONE creates the VM there. It returns 0 when the VM is ready; otherwise it deletes the VM, sets REASON, returns 1.
try() {
  local zone=$1 creator status="" before="" deadline=$((SECONDS + WAIT_S))
  [ ! -f "$MEMORY/$PROJECT/$zone/$NAME" ] || before=1
  remember "$NAME" "$zone"
  set -m  # a process group, all of which can be ended: a gcloud that is left behind may still create the VM
  [ -z "$MAX_HOURS" ] || write_limit "$zone"
  gcloud_tpu "$zone" create "$NAME" "${flags[@]}" >/dev/null 2>"$TMP/create" &
  creator=$!
  set +m
  trap 'kill -- -$creator; die 1 "interrupted: $NAME may still be created in $zone: delete.sh $NAME"' INT TERM
  REASON="not ready and healthy after $WAIT_S s"
  while [ $SECONDS -lt $deadline ]; do
    sleep "$POLL_S"
    if [ -z "$status" ] && ! kill -0 $creator 2>/dev/null; then
      status=0
      wait $creator || status=$?
      if [ $status != 0 ]; then REASON=$(TPU_ERR=$(cat "$TMP/create") && why); break; fi
    fi
    ZONES=$zone lookup "$NAME"
    say "$NAME in $zone: $VM_STATE $VM_HEALTH$VM_ERROR"
    if [ "$VM_STATE $VM_HEALTH" = "READY HEALTHY" ]; then REASON=""; break; fi
    case $VM_STATE in PREEMPTED | TERMINATED) REASON="preempted at once"; break ;; esac
  done
  kill -- -$creator 2>/dev/null || true  # gcloud itself would notice only after a long pause
  wait $creator 2>/dev/null || true
  trap - INT TERM
  [ -n "$REASON" ] || { remember "$NAME" "$zone" "$VM_ID"; return 0; }
  # It is somebody else's VM, or one that gcloud overlooked a moment ago: it may train, so it is not deleted.
  ! grep -q -e ALREADY_EXISTS -e 'already exists' "$TMP/create" || die 6 "$NAME exists already in $zone"
  ZONES=$zone lookup "$NAME"
  case $VM_STATE:$before:$REASON in
    unknown:1:*) die 1 "$NAME may still exist in $zone, and cost money: delete.sh $NAME; $VM_ERROR" ;;
    absent:* | unknown:*) ;;
    *:1:* | *:quota | *:permanent) die 6 "$NAME exists already in $zone" ;;  # these made none
  esac
  # The next zone is tried only when this one holds no VM: two VMs would cost twice, and only one would be found.
  if [ "$VM_STATE" = absent ]; then
    case $REASON in stockout | quota | permanent) forget "$NAME" "$zone" ;; esac  # else it may still come
    return 1
  fi
  tpu "$zone" delete "$NAME" --async || [ "$(why)" = not_found ] ||
    die 1 "$NAME may still exist in $zone, and cost money: delete.sh $NAME; $(complaint)"
  return 1
}

refused="" seen=""
for zone in $(printf %s "$ZONES" | tr , ' '); do
  say "+ gcloud compute tpus tpu-vm create $NAME --zone=$zone $(quote "${flags[@]}")"
  [ -z "$DRY_RUN" ] || continue
  if try "$zone"; then
    facts "$TYPE" "$zone"
    [ -z "$MAX_HOURS" ] || check_limit
    say "$NAME is ready in $zone: $VM_IPS, ${USD:-unknown} USD an hour until it is deleted"
    exit 0
  fi
  TPU_ERR=$(cat "$TMP/create")
  case $REASON in
    auth) die 4 "credentials refused (gcloud auth login): $(complaint)" ;;
    quota) reason="no quota: $(complaint)" ;;
    permanent) reason=$(complaint) refused="$zone: $(complaint)" ;;
    stockout) reason="no capacity" seen=1 ;;
    other | not_found) reason=$(complaint) seen=1 ;;
    *) reason=$REASON seen=1 ;;
  esac
  say "$zone: $reason"
done
[ -z "$DRY_RUN" ] || exit 0
[ -z "$refused" ] || [ -n "$seen" ] || die 2 "$refused"
[ -n "$seen" ] || die 5 "no quota in any of $ZONES for $TYPE: request it in the console, or give other --zones"
die 5 "no VM in $ZONES"
