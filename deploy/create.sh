#!/usr/bin/env bash
# Creates a TPU VM and waits until it is READY and HEALTHY.
#
#   deploy/create.sh NAME --zones=us-west4-a,us-west4-b --type=v5litepod-8
#
# The zones are tried in turn; one without capacity is tried again after a pause, one without quota is not. A VM that
# does not become healthy in time is deleted. If a VM of this name is there already, nothing is made (status 6).
#
#   --type TYPE                v5litepod-1/4/8 (default -8), v6e-1/4/8; v5litepod-16, v4-32 … are pods
#   --on_demand                not a spot VM: about four times the price, and it stays
#   --rounds N                 how often to go through the zones (default 3)
#   --backoff_s N              pause after a round, doubled each time, give or take a half (default 60)
#   --wait_s N                 for one VM to become ready (default 900)
#   --project ID               default: gcloud's own
#   --ssh_user, --ssh_key      who may log in (default: your name; ~/.ssh/google_compute_engine, made if it is missing)
#   --dry_run                  say what would be done
. "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
ROUNDS=3 BACKOFF_S=60 WAIT_S=900
parse "ROUNDS= BACKOFF_S=" "$@"
NAME=${ARGS[0]:-$NAME}
[ -n "$NAME" ] || die 2 "which name? create.sh NAME, or NAME in deploy/config.env"
facts "$TYPE"
lookup "$NAME"
[ "$VM_STATE" != unknown ] || die 4 "cannot tell whether $NAME is there: $VM_ERROR"
[ "$VM_STATE" = absent ] || die 6 "$NAME is there already: $VM_STATE $VM_HEALTH in $VM_ZONE"
say "$NAME: $TYPE, $CHIPS chips, $([ -n "$ON_DEMAND" ] && echo on demand || echo spot), ${USD:-unknown} USD an hour"

flags=(--accelerator-type="$TYPE" --version="$VERSION")
[ -n "$ON_DEMAND" ] || flags+=(--spot)
if [ ! -f "$SSH_KEY.pub" ] && [ ! -f "$SSH_KEY" ] && [ -z "$DRY_RUN" ]; then
  say "making the ssh key $SSH_KEY, without a passphrase"
  (umask 077 && mkdir -p "$(dirname "$SSH_KEY")" && ssh-keygen -q -t ed25519 -N "" -f "$SSH_KEY")
fi
if [ -f "$SSH_KEY.pub" ]; then
  echo "${SSH_USER:-$(id -un)}:$(cat "$SSH_KEY.pub")" >"$TMP/keys"
  flags+=(--metadata-from-file="ssh-keys=$TMP/keys")
fi

# try ZONE: 0 when the VM is ready; otherwise 1, with REASON, and nothing is left in the zone.
try() {
  local zone=$1 creator status="" deadline=$((SECONDS + WAIT_S))
  GCLOUD_ERR=$TMP/create tpu "$zone" create "$NAME" "${flags[@]}" >/dev/null &
  creator=$!
  trap 'kill $creator; die 1 "interrupted: $NAME may still be made in $zone; delete.sh $NAME"' INT TERM
  REASON="not ready and healthy after $WAIT_S s"
  while [ $SECONDS -lt $deadline ]; do
    sleep "$POLL_S"
    if [ -z "$status" ] && ! kill -0 $creator 2>/dev/null; then
      status=0
      wait $creator || status=$?
      if [ $status != 0 ]; then REASON=$(GCLOUD_ERR=$TMP/create why); break; fi
    fi
    ZONES=$zone lookup "$NAME"
    say "$NAME in $zone: $VM_STATE $VM_HEALTH$VM_ERROR"
    if [ "$VM_STATE $VM_HEALTH" = "READY HEALTHY" ]; then REASON=""; break; fi
    case $VM_STATE in PREEMPTED | TERMINATED) REASON="taken away at once"; break ;; esac
  done
  kill $creator 2>/dev/null || true  # gcloud's own waiting has long pauses
  wait $creator 2>/dev/null || true
  trap - INT TERM
  [ -n "$REASON" ] || return 0
  ZONES=$zone lookup "$NAME"
  # Another zone is tried only when this one holds nothing: two VMs would cost twice, and only one would be seen.
  [ "$VM_STATE" = absent ] || tpu "$zone" delete "$NAME" --async >/dev/null || [ "$(why)" = not_found ] ||
    die 1 "$NAME may be left in $zone, and cost: delete.sh $NAME; $(complaint)"
  return 1
}

zones=$(printf %s "$ZONES" | tr , ' ')
round=1
while :; do
  left=""
  for zone in $zones; do
    say "+ gcloud compute tpus tpu-vm create $NAME --zone=$zone $(quote "${flags[@]}")"
    [ -z "$DRY_RUN" ] || continue
    if try "$zone"; then
      say "$NAME is ready in $zone: $VM_IPS, ${USD:-unknown} USD an hour until it is deleted"
      exit 0
    fi
    case $REASON in
      quota) say "$zone: no quota: $(GCLOUD_ERR=$TMP/create complaint)"; continue ;;
      auth) die 4 "credentials refused (gcloud auth login): $(GCLOUD_ERR=$TMP/create complaint)" ;;
      stockout) say "$zone: no capacity" ;;
      other) say "$zone: $(GCLOUD_ERR=$TMP/create complaint)" ;;
      *) say "$zone: $REASON" ;;
    esac
    left="$left $zone"
  done
  [ -z "$DRY_RUN" ] || exit 0
  zones=$left
  [ -n "$zones" ] || die 5 "no quota in any of $ZONES for $TYPE: ask for it in the console, or give other --zones"
  [ $round -lt "$ROUNDS" ] || die 5 "no VM in$zones after $ROUNDS rounds"
  pause=$(backoff "$BACKOFF_S" $round)
  say "round $round of $ROUNDS without success; again in $pause s"
  sleep "$pause"
  round=$((round + 1))
done
