#!/usr/bin/env bash
# Stops an on-demand VM: its chips are given back, its disk stays (and costs). A spot VM cannot be stopped: delete it.
#
#   deploy/stop.sh NAME        stop_run.sh first, so that the run saves a checkpoint
#
#   --dry_run                  say what would be done
. "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
parse "" "$@"
NAME=${ARGS[0]:-$NAME}
[ -n "$NAME" ] || die 2 "which VM? stop.sh NAME"
need "$NAME"
[ "$VM_STATE" != STOPPED ] || { say "$NAME is stopped already"; exit 0; }
[ "$VM_SPOT" != True ] || die 2 "$NAME is a spot VM, which cannot be started again: delete.sh $NAME"
change stop || die 1 "$NAME is NOT stopped: $(complaint)"
[ -n "$DRY_RUN" ] || say "$NAME is stopped"
