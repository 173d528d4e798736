#!/usr/bin/env bash
# Prints what is known about a VM or its run as NAME=value lines, for watch.py.
#
#   deploy/lib/look.sh NAME --what=vm      the VM, as gcloud describes it
#
#   --what vm|run              the VM; or its newest run
#   --what limit               sets the VM's own limit to --max_hours: "yes" if it may delete itself, or why not
#   --what mirror              the newest whole checkpoint in the folder --bucket of a run's mirror
#   --vm_ips A,B --vm_id ID    for run and limit: the addresses and the id that --what=vm printed
. "$(dirname "${BASH_SOURCE[0]}")/common.sh" || exit
WHAT="" VM_ID="" VM_IPS="" MAX_HOURS="" MARGIN_S=600
parse "WHAT VM_ID VM_IPS MAX_HOURS MARGIN_S" "$@"
NAME=${ARGS[0]:-$NAME}
case $WHAT in
  vm)
    lookup "$NAME"
    id="" remembered=""
    # Another VM may have its name since it has deleted itself.
    read -r _ _ _ id _ 2>/dev/null <"$MEMORY/$PROJECT/$VM_ZONE/$NAME" || true
    case $id in - | "$VM_ID") remembered=1 ;; esac
    printf '%s\n' "state=$VM_STATE" "health=$VM_HEALTH" "zone=$VM_ZONE" "id=$VM_ID" "type=$VM_TYPE" "ips=$VM_IPS" \
      "spot=$VM_SPOT" "error=$VM_ERROR" "permanent=$VM_PERMANENT" "remembered=$remembered" ;;
  limit)
    settle "$NAME"
    limit_after "$MAX_HOURS" "projects/$PROJECT/locations/$ZONES/nodes/$NAME"
    ask_limit "${limit[@]}" ;;
  mirror) settle "$NAME"; echo "mirrored=$(newest_in "$BUCKET")" ;;
  run) WORKER=0 READ=(fields); aim; vm 0 probe ;;
  *) die 2 "--what=$WHAT is not vm, run, limit or mirror" ;;
esac
