#!/usr/bin/env bash
# Starts a stopped on-demand VM, waits until it is healthy and prints its new IP.
#
#   deploy/start.sh NAME
#
# A spot VM that was stopped or preempted cannot be started again: delete it and create another.
#
#   --wait_s N                 how long to wait (default 600)
#   --dry_run                  only print what would be done
#
# Exit status 3: there is no such VM; 4: gcloud could not say whether it exists.
me=$0; while [ -L "$me" ]; do l=$(readlink "$me"); case $l in /*) me=$l ;; *) me=$(dirname "$me")/$l ;; esac; done
. "$(dirname "$me")/lib/common.sh" || exit 2
parse "" "$@"
NAME=${ARGS[0]:-$NAME}
[ -n "$NAME" ] || die 2 "the VM has no name: start.sh NAME"
need "$NAME"
case $VM_STATE in
  READY | STARTING) ;;
  STOPPED)
    [ "$VM_SPOT" != True ] || die 2 "$NAME is a spot VM, which cannot be started: delete.sh $NAME, then create.sh $NAME"
    change start || die 1 "$NAME is NOT started: $(complaint)" ;;
  *) die 1 "$NAME is $VM_STATE and cannot be started: delete.sh $NAME, then create.sh $NAME" ;;
esac
[ -z "$DRY_RUN" ] || exit 0
deadline=$((SECONDS + WAIT_S))
while lookup "$NAME"; [ "$VM_STATE $VM_HEALTH" != "READY HEALTHY" ]; do
  [ $SECONDS -lt $deadline ] || die 1 "$NAME is $VM_STATE $VM_HEALTH after $WAIT_S s"
  sleep "$POLL_S"
done
facts_of_vm "$VM_TYPE" "$VM_SPOT" "$VM_ZONE"
end=$([ "$VM_SPOT" = True ] && echo deleted || echo stopped)
say "$NAME is ready in $VM_ZONE: $VM_IPS, ${USD:-unknown} USD an hour until it is $end"
