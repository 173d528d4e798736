#!/usr/bin/env bash
# Lists the VMs of the project in all zones, with the price of each per hour.
#
#   deploy/list.sh
#
#   --usd_per_hour N           the price of a VM, if the built-in table is wrong; in config.env: of one of type TYPE
#   --project ID               the Google Cloud project (default: gcloud's own)
#
# Exit status 4: gcloud gave no answer; 2: gcloud refused for a reason that no waiting mends.
me=$0; while [ -L "$me" ]; do l=$(readlink "$me"); case $l in /*) me=$l ;; *) me=$(dirname "$me")/$l ;; esac; done
. "$(dirname "$me")/lib/common.sh" || exit 2
parse "" "$@"
settle ""
format='value[separator="|"](name.basename(),name.segment(-3),state,health,acceleratorType,schedulingConfig.spot,'
format+='networkEndpoints[].accessConfig.externalIp.list(),networkEndpoints[].ipAddress.list())'
line_form="^[a-z0-9-]+[|][a-z0-9-]+[|](UNKNOWN|$STATES)[|][A-Z_]*[|][a-z0-9]+-[0-9]+[|](True|False)?[|]"
line_form+="${IPS_FORM}[|]$IPS_FORM$"
tpu - list --format="$format" || { status=4; [ "$(why)" != permanent ] || status=2; die $status "$(complaint)"; }
while IFS= read -r line; do
  [ -z "$line" ] || [[ $line =~ $line_form ]] || die 4 "$(unreadable)"
done <<<"$TPU_OUT"
total=0 unknown="" found=$TPU_OUT
while IFS='|' read -r name zone state health type spot external internal; do
  facts_of_vm "$type" "$spot" "$zone"
  case $external in "" | *None*) external=$internal ;; esac
  case $state in STOPPED | PREEMPTED | TERMINATED) USD=0 ;; esac
  [ -n "$USD" ] || unknown=", and the VMs whose price is not known"
  total=$(calc "$total + ${USD:-0}")
  printf '%-20s %-16s %-10s %-10s %-14s %-9s %-16s %s USD/h\n' "$name" "$zone" "$state" "$health" "$type" \
    "$([ "$spot" = True ] && echo spot || echo on demand)" "$external" "${USD:-?}"
done < <(printf '%s\n' "$found" | sed '/^$/d')
for file in "$MEMORY"/*/*/*; do  # what gcloud does not show: a VM of another project, one that is just being made
  [ -f "$file" ] || continue
  name=${file##*/} zone=${file%/*} project=${file%/*/*}
  zone=${zone##*/} project=${project##*/}
  case "$project"$'\n\n'"$found" in "$PROJECT"$'\n'*$'\n'"$name|$zone|"*) continue ;; esac
  read -r _ type spot _ <"$file" || true
  printf '%-20s %-16s may exist in project %s, which gcloud did not show: delete.sh %s --project=%s, %s %s\n' \
    "$name" "$zone" "$project" "$name" "$project" "$type" "$([ "$spot" = True ] && echo spot || echo on demand)"
  unknown=", and the VMs whose price is not known"
done
echo "together: $total USD an hour$unknown"
