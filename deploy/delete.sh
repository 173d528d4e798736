#!/usr/bin/env bash
# Deletes a VM and its disk; what is not in a bucket or fetched is lost. Asks first.
#
#   deploy/delete.sh NAME
#
#   --yes                      do not ask
#   --dry_run                  say what would be done
. "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
YES=""
parse "YES" "$@"
NAME=${ARGS[0]:-$NAME}
[ -n "$NAME" ] || die 2 "which VM? delete.sh NAME"
need "$NAME"
if [ -z "$YES$DRY_RUN" ]; then
  printf 'Delete %s (%s, %s in %s) and its disk? Type its name: ' "$NAME" "$VM_TYPE" "$VM_STATE" "$VM_ZONE" >&2
  read -r answer || answer=""
  [ "$answer" = "$NAME" ] || die 1 "not deleted"
fi
change delete || case $(why) in
  not_found) ;;  # gone between the two questions
  auth) die 4 "credentials refused, $NAME is NOT deleted: gcloud auth login" ;;
  *) die 1 "$NAME is NOT deleted: $(complaint)" ;;
esac
[ -n "$DRY_RUN" ] || say "$NAME is deleted"
