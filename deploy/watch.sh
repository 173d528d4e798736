#!/usr/bin/env bash
# Keeps one run alive on one VM until it is finished, and creates the VM again when it is preempted or unhealthy.
#
#   nohup deploy/watch.sh NAME --zones=us-west4-a,us-west4-b --bucket=gs://my-bucket/nanochat --max_usd=50 -- \
#     --run=d16 --depth=16 --checkpoint_mirror=gs://my-bucket/nanochat/checkpoints >watch.log 2>&1 &
#
# The flags after -- are the run's. A new VM gets packages, code and data, and the run resumes from the mirror. When the
# run has ended with status 0, it is fetched and the VM is deleted. When it has ended three times without getting
# further, or a setting is wrong, watch.sh gives up: it prints the end of the log, fetches the run and deletes the VM.
# A VM whose disk alone holds the newest checkpoint is not deleted, except with the last of the budget.
#
#   --max_usd N, --max_hours N   the budget; one of them is required. Before it is spent, the run is stopped and fetched
#                                and the VM deleted
#   --margin_s N               the seconds of the budget that are reserved for that (default 600), besides those that
#                              copying the newest checkpoint to this machine takes
#   --poll_s N                 seconds between two checks of the VM (default 60)
#   --patience N               after how many failed checks in a row the VM is created again (default 5)
#   --stall_s N                a run without a new log line for this long is started again (default 1800)
#   --to DIR                   where fetch.sh puts the run (default: checkpoints/ beside deploy/)
#   --dry_run                  only check the flags after --, and say what would be done and what it costs
#   WEBHOOK=URL in config.env  an address that gets every line of the journal as {"text": …}
#
# Exit status 0: finished; 1: given up; 2: wrong use; 6: watched already; 7: budget spent; 70: watch.sh itself failed;
# 143: told to stop. A VM may remain, and cost money, after 2, 6, 70 and 143.
me=$0; while [ -L "$me" ]; do l=$(readlink "$me"); case $l in /*) me=$l ;; *) me=$(dirname "$me")/$l ;; esac; done
. "$(dirname "$me")/lib/common.sh" || exit 2
# shellcheck disable=SC2034  # exported by name, below
MAX_USD="" MAX_HOURS="" MARGIN_S=600 POLL_S=60 PATIENCE=5 STALL_S=1800
# shellcheck disable=SC2034
WEBHOOK="" TO=$ROOT/checkpoints
parse "MAX_USD MAX_HOURS MARGIN_S PATIENCE STALL_S TO DRY_RUN" "$@"
take_name
[ ${#FLAGS[@]} -gt 0 ] || die 2 "the run has no flags: watch.sh NAME … -- --run=NAME …"
[ -n "$ZONES" ] || die 2 "--zones is not set: give the flag or write deploy/config.env"
[ -n "$MAX_USD$MAX_HOURS" ] || die 2 "the run has no budget: --max_usd or --max_hours"
[ -z "$DRY_RUN" ] || check_flags "$TYPE"
# One project and account for the whole watch. A VM of this name that may exist elsewhere would be forgotten.
[ -n "$DRY_RUN" ] || settle "$NAME"
for file in "$MEMORY"/*/*/"$NAME"; do
  if [ ! -f "$file" ] || [ -n "$DRY_RUN" ]; then continue; fi
  zone=${file%/*} project=${file%/*/*}
  case ",$ZONES,:$project" in *",${zone##*/},"*":$MEMORY/$PROJECT") ;; *)
    die 2 "$NAME may exist in ${zone##*/} of project ${project##*/}, and cost money: give this --zones and --project," \
      "or delete.sh $NAME --project=${project##*/}" ;;
  esac
done
[ -n "$PROJECT$DRY_RUN" ] || die 4 "gcloud does not say what its project is: give --project"
# shellcheck disable=SC2153  # parse sets it
for setting in $NAMES; do
  export "WATCH_$setting=${!setting}"  # in the environment, where other users do not see the webhook
done
[ -z "$TMP" ] || rm -rf "$TMP"
export "WATCH_WANDB_API_KEY=${WANDB_API_KEY:-}"
exec "$PYTHON" "$HERE/watch.py" "$NAME" -- "${FLAGS[@]}"
