#!/usr/bin/env bash
# Starts a stopped on-demand VM, waits until it is ready and prints its IP, which is another than before.
#
#   deploy/start.sh NAME
#
#   --wait_s N                 how long to wait (default 600)
#   --dry_run                  say what would be done
. "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
parse "" "$@"
NAME=${ARGS[0]:-$NAME}
[ -n "$NAME" ] || die 2 "which VM? start.sh NAME"
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
