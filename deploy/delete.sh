#!/usr/bin/env bash
# Deletes a VM and its disk, after asking. Files that are neither in a bucket nor fetched are lost.
#
#   deploy/delete.sh NAME
#
#   --yes                      do not ask
#   --vm_id ID                 only the VM with this id, and no other of this name
#
# Exit status 3: there is no such VM; 4: gcloud could not say, or refused the credentials.
me=$0; while [ -L "$me" ]; do l=$(readlink "$me"); case $l in /*) me=$l ;; *) me=$(dirname "$me")/$l ;; esac; done
. "$(dirname "$me")/lib/common.sh" || exit 2
YES="" VM_ID=""
parse "YES VM_ID" "$@"
take_name
wanted=$VM_ID
find_vm "$NAME"
zones=$VM_ZONE  # gcloud need not say where the VM is: it is deleted in every zone in which it may be
[ -n "$zones" ] || zones=$(printf %s "$ZONES" | tr , ' ')
[ "$VM_STATE:$REMEMBERED" != unknown: ] || cannot_tell "$NAME"
[ "$VM_STATE" != unknown ] || say "gcloud does not say whether $NAME exists: $VM_ERROR"
case $VM_STATE:$VM_ERROR in unknown:"credentials refused"*) cannot_tell "$NAME" ;; esac
[ -z "$wanted" ] || [ "${VM_ID:-$wanted}" = "$wanted" ] ||
  die 3 "the VM $NAME in $VM_ZONE is not the one with the id $wanted, and is not deleted"
if [ "$VM_STATE" = absent ]; then
  for zone in $zones; do
    # A creation that has just begun, and was interrupted, may still make one.
    if [ -z "$(find "$MEMORY/$PROJECT/$zone/$NAME" -mmin -10 2>/dev/null)" ]; then forget "$NAME" "$zone"; else
      say "a creation of $NAME in $zone began less than 10 minutes ago: look again with list.sh, or delete.sh again"
    fi
  done
  die 3 "no VM $NAME in $ZONES of project $PROJECT; list.sh looks in all zones"
fi
if [ -z "$YES" ]; then
  printf 'Delete %s (%s %s in %s of %s) and its disk? Type its name: ' \
    "$NAME" "$VM_TYPE" "$VM_STATE" "$zones" "$PROJECT" >&2
  read -r answer || answer=""
  [ "$answer" = "$NAME" ] || die 1 "not deleted"
fi
deleted=""
for zone in $zones; do
  say "+ gcloud compute tpus tpu-vm delete $NAME --zone=$zone"
  if tpu "$zone" delete "$NAME"; then deleted=1; else
    case $(why) in
      not_found) [ "$VM_STATE" = unknown ] || deleted=1 ;;  # deleted by somebody else since it was looked up
      auth) die 4 "credentials refused, $NAME is NOT deleted: gcloud auth login" ;;
      *) [ "$VM_STATE" = unknown ] || die 1 "$NAME is NOT deleted: $(complaint)" ;;
    esac
  fi
done
was=$VM_STATE
lookup "$NAME"  # gcloud confirms it
case $VM_STATE in
  absent) for zone in $zones; do forget "$NAME" "$zone"; done ;;
  unknown) [ -n "$deleted" ] || cannot_tell "$NAME"
    die 4 "$NAME is deleted as far as gcloud's operation says, and not yet confirmed: $VM_ERROR" ;;
  *) die 1 "$NAME is NOT deleted: it is $VM_STATE in $VM_ZONE" ;;
esac
[ -n "$deleted" ] || [ "$was" != unknown ] || die 3 "no VM $NAME in $ZONES of project $PROJECT"
say "$NAME is deleted"
