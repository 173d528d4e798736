#!/usr/bin/env bash
# Stops an on-demand VM: its chips are released; its disk is kept and still costs money.
#
#   deploy/stop.sh NAME        run stop_run.sh first, so that the run saves a checkpoint
#
# A spot VM cannot be started again after a stop; delete it instead.
#
#   --dry_run                  only print what would be done
#
# Exit status 3: there is no such VM; 4: gcloud could not say whether it exists.
me=$0; while [ -L "$me" ]; do l=$(readlink "$me"); case $l in /*) me=$l ;; *) me=$(dirname "$me")/$l ;; esac; done
. "$(dirname "$me")/lib/common.sh" || exit 2
parse "" "$@"
NAME=${ARGS[0]:-$NAME}
[ -n "$NAME" ] || die 2 "the VM has no name: stop.sh NAME"
need "$NAME"
[ "$VM_STATE" != STOPPED ] || { say "$NAME is stopped already"; exit 0; }
[ "$VM_SPOT" != True ] || die 2 "$NAME is a spot VM, which cannot be started again: delete.sh $NAME"
change stop || die 1 "$NAME is NOT stopped: $(complaint)"
[ -n "$DRY_RUN" ] || say "$NAME is stopped"
