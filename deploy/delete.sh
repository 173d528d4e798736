#!/usr/bin/env bash
# Deletes a VM and its disk, after asking. Files that are neither in a bucket nor fetched are lost.
#
#   deploy/delete.sh NAME
#
#   --yes                      do not ask
#   --dry_run                  only print what would be done
#
# Exit status 3: there is no such VM; 4: gcloud could not say, or refused the credentials.
me=$0; while [ -L "$me" ]; do l=$(readlink "$me"); case $l in /*) me=$l ;; *) me=$(dirname "$me")/$l ;; esac; done
. "$(dirname "$me")/lib/common.sh" || exit 2
YES=""
parse "YES" "$@"
NAME=${ARGS[0]:-$NAME}
[ -n "$NAME" ] || die 2 "the VM has no name: delete.sh NAME"
need "$NAME"
if [ -z "$YES$DRY_RUN" ]; then
  printf 'Delete %s (%s, %s in %s) and its disk? Type its name: ' "$NAME" "$VM_TYPE" "$VM_STATE" "$VM_ZONE" >&2
  read -r answer || answer=""
  [ "$answer" = "$NAME" ] || die 1 "not deleted"
fi
change delete || case $(why) in
  not_found) ;;  # deleted by somebody else since it was looked up
  auth) die 4 "credentials refused, $NAME is NOT deleted: gcloud auth login" ;;
  *) die 1 "$NAME is NOT deleted: $(complaint)" ;;
esac
[ -n "$DRY_RUN" ] || say "$NAME is deleted"
