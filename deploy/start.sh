#!/usr/bin/env bash
# Starts a stopped on-demand VM, waits until it is healthy and prints its new IP.
#
#   deploy/start.sh NAME
#
#   --wait_s N                 how long to wait (default 600)
#   --dry_run                  only print what would be done
#
# Exit status 3: there is no such VM; 4: gcloud could not say whether it exists.
. "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
parse "" "$@"
NAME=${ARGS[0]:-$NAME}
[ -n "$NAME" ] || die 2 "the VM has no name: start.sh NAME"
need "$NAME"
case $VM_STATE in
  READY | STARTING) ;;
  STOPPED) change start || die 1 "$NAME is NOT started: $(complaint)" ;;
  *) die 1 "$NAME is $VM_STATE and cannot be started: delete.sh $NAME, then create.sh $NAME" ;;
esac
[ -z "$DRY_RUN" ] || exit 0
deadline=$((SECONDS + WAIT_S))
while lookup "$NAME"; [ "$VM_STATE $VM_HEALTH" != "READY HEALTHY" ]; do
  [ $SECONDS -lt $deadline ] || die 1 "$NAME is $VM_STATE $VM_HEALTH after $WAIT_S s"
  sleep "$POLL_S"
done
facts "$VM_TYPE"
say "$NAME is ready in $VM_ZONE: $VM_IPS, ${USD:-unknown} USD an hour until it is stopped"
