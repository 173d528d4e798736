#!/usr/bin/env bash
# Lists the VMs in all zones, with the price of each per hour.
#
#   deploy/list.sh --zones=us-west4-a,us-west4-b
#
# Exit status 4: at least one zone gave no answer.
. "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
parse "" "$@"
[ -n "$ZONES" ] || die 2 "--zones is not set: give the flag or write deploy/config.env"
format='value[separator="|"](name.basename(),state,health,acceleratorType,schedulingConfig.spot,'
format+='networkEndpoints[].accessConfig.externalIp.list())'
status=0 total=0
for zone in $(printf %s "$ZONES" | tr , ' '); do
  tpu "$zone" list --format="$format" >"$TMP/list" || { say "$zone: $(why): $(complaint)"; status=4; continue; }
  while IFS='|' read -r name state health type spot ips; do
    ON_DEMAND=$([ "$spot" = True ] || echo 1)
    facts "$type"
    case $state in STOPPED | PREEMPTED | TERMINATED) USD=0 ;; esac
    total=$(calc "$total + ${USD:-0}")
    printf '%-20s %-16s %-10s %-10s %-14s %-9s %-16s %s USD/h\n' "$name" "$zone" "$state" "$health" "$type" \
      "${ON_DEMAND:-spot}" "$ips" "${USD:-?}" | sed 's/ 1  */ on demand /'
  done <"$TMP/list"
done
echo "together: $total USD an hour"
exit $status
