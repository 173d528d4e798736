# shellcheck shell=bash disable=SC2154
# The VM's own limit, on the VM: create.sh sends on_vm.sh and this as the startup script, and train.sh as a part of the
# run's start. The limit is a program, ~root/nanochat.d/limit, which a systemd timer starts every minute, after every
# boot as well. It needs nobody: no gcloud, no ssh, and not the machine from which the VM was created.

metadata() { # metadata NAME prints what Google says of this VM
  curl -sS -f -m 10 -H "Metadata-Flavor: Google" \
    "http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1/instance/$1"
}
# api METHOD URL [BODY] asks Google's API as the VM's service account. It prints the answer and then its status, 000
# where there was none.
api() {
  local token
  token=$(metadata service-accounts/default/token |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["access_token"])') ||
    { echo "the VM has no service account"; echo 000; return; }
  printf 'header = "Authorization: Bearer %s"\n' "$token" |  # over stdin: no other user sees it
    curl -sS -m 60 -K - -X "$1" -H "Content-Type: application/json" ${3:+-d "$3"} -w '\n%{http_code}\n' "$2" 2>&1 ||
    true
}
may_delete() { # may_delete NODE prints "yes" if the VM's service account may delete this node, or else why not
  local project=${1#projects/} answer
  local url=${CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDRESOURCEMANAGER:-https://cloudresourcemanager.googleapis.com/}
  answer=$(api POST "${url}v1/projects/${project%%/*}:testIamPermissions" '{"permissions": ["tpu.nodes.delete"]}')
  case $answer in
    *'"tpu.nodes.delete"'*$'\n'200) echo yes ;;
    *$'\n'200) echo "its service account lacks the permission tpu.nodes.delete" ;;
    *) echo "cannot tell: $(printf %s "$answer" | tr -s '[:space:]' ' ' | cut -c 1-300)" ;;
  esac
}

# set_limit SECONDS RESERVE_S NODE PAUSE_S: the VM's time ends in so many seconds, by its own clock. RESERVE_S before,
# its runs are ended. NODE, its full name in the API, is deleted when the mirror has their checkpoints and half of the
# reserve is over, and at the end whatever its disk alone has. The newest limit counts. Without NODE the VM stays.
# Without root the limit does not outlive a reboot.
set_limit() {
  local sudo="" path=~root/nanochat.d/limit end
  end=$(($(date +%s) + $1))
  if [ "$(id -u)" != 0 ]; then
    if sudo -n true 2>/dev/null; then sudo="sudo -n"; else path=$D/limit; fi
  fi
  $sudo mkdir -p "$(dirname "$path")"
  # shellcheck disable=SC2016  # they are evaluated there
  { printf '#!/bin/bash\nset -euo pipefail\nEND=%d RESERVE_S=%d NODE=%q PAUSE_S=%q\n' "$end" "${@:2}"
    declare -f running ended current note signal_run stop_run load_env mirror_lines checkpoints not_mirrored \
      metadata api end_runs check_limit start_limit
    echo '"$@"'; } | $sudo bash -c 'cat >"$0.new" && mv "$0.new" "$0"' "$path"
  $sudo bash "$path" start_limit
}
start_limit() {
  if [ "$(id -u)" = 0 ] && [ -d /run/systemd/system ]; then
    printf '[Service]\nType=oneshot\nTimeoutStartSec=infinity\nExecStart=/bin/bash %s check_limit\n' "$0" \
      >/etc/systemd/system/nanochat-limit.service
    printf '[Timer]\nOnBootSec=60\nOnActiveSec=1\nOnUnitInactiveSec=60\n[Install]\nWantedBy=timers.target\n' \
      >/etc/systemd/system/nanochat-limit.timer
    systemctl daemon-reload
    systemctl enable --now nanochat-limit.timer
  else
    # shellcheck disable=SC2016  # it is evaluated there
    setsid -f flock -n "$0.lock" bash -c 'while :; do bash "$0" check_limit; sleep "$1"; done' "$0" "$PAUSE_S" \
      </dev/null >>"$0.log" 2>&1
  fi
}
# check_limit ends and deletes what is over its time. Whatever fails is tried again with the next check.
check_limit() {
  local now last unsaved answer wait_s
  now=$(date +%s) last=$((END - (RESERVE_S < 240 ? RESERVE_S / 4 : 60)))
  [ "$now" -ge $((END - RESERVE_S)) ] || return 0
  echo "$(date -u +%FT%TZ) the time of this VM is over"
  wait_s=$((last - now > 5 ? last - now : 5))
  # Limited in time: it reads what users wrote, such as ~/.tpu_env, which may wait for ever or exit.
  unsaved=$(timeout -k 1 $wait_s bash "$0" end_runs $wait_s "the VM's limit is reached: the run ends") ||
    unsaved+=" what other users have is not known"
  now=$(date +%s)
  if [ -z "$NODE" ]; then echo "the VM stays: its name is not known"; return; fi
  if [ "$now" -lt "$last" ]; then
    # The last half is left to the machine that may be fetching the run. Only a pod's first host knows the mirror.
    if [ -n "$unsaved" ] || [ "$now" -lt $((END - RESERVE_S / 2)) ]; then
      echo "not yet deleted: ${unsaved:-waiting}"
      return
    fi
    case $(metadata attributes/agent-worker-number 2>/dev/null || true) in [1-9]*) return ;; esac
  fi
  answer=$(api DELETE "${CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU:-https://tpu.googleapis.com/}v2/$NODE")
  echo "the deletion of $NODE is answered: $answer"
  case $answer in
    *$'\n'2??) ;;
    *) timeout -k 1 60 bash "$0" end_runs 5 \
      "error: this VM could not delete itself at its limit, and costs money: delete.sh ${NODE##*/}" || true ;;
  esac
}
# end_runs SECONDS TEXT ends the runs of all users, after writing TEXT, once, into their logs. It prints the checkpoints
# that are on this disk alone.
end_runs() {
  local home
  for home in $({ getent passwd | cut -d : -f 6; ls -d /home/*; } 2>/dev/null | sort -u); do
    [ -d "$home/nanochat.d/runs" ] || continue
    ( HOME=$home D=$home/nanochat.d
      log=$D/runs/$(current).log
      [ ! -f "$log" ] || tail -n 50 "$log" | grep -qF "$2" || echo "$2" >>"$log"
      if running; then stop_run "$1" || true; fi
      load_env </dev/null >/dev/null 2>&1
      not_mirrored ) || echo "what $home has is not known"
  done
}
