# shellcheck shell=bash disable=SC2034
# What the scripts share: settings and ssh (gcloud is in gcloud.sh). Sourced, never run; works in bash 3.2 (macOS).
#
# Exit status of every script: 0 done; 1 failed; 2 wrong use; 3 no such VM; 4 could not find out (credentials, network);
# 5 no capacity in any zone; 6 refused, because it exists or runs already; 7 budget reached.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) && ROOT=${HERE%/*}
TMP=$(mktemp -d) && trap 'rm -rf "$TMP"' EXIT
ON_VM=$(cat "$HERE/on_vm.sh")
export -n WANDB_API_KEY 2>/dev/null || true  # a secret: no child process needs it in its environment

# Settings: these defaults, then config.env, then flags; a name with "=" takes a value.
SETTINGS="PROJECT= ZONES= NAME= TYPE= BUCKET= SSH_USER= SSH_KEY= WANDB_PROJECT= WANDB_KEY_FILE= ON_DEMAND USD_PER_HOUR="
SETTINGS="$SETTINGS WORKER= WAIT_S= POLL_S= DRY_RUN"
PROJECT="" ZONES="" NAME="" TYPE=v5litepod-8 BUCKET="" SSH_USER="" SSH_KEY=$HOME/.ssh/google_compute_engine
WANDB_PROJECT="" WANDB_KEY_FILE="" ON_DEMAND="" USD_PER_HOUR="" WORKER=all WAIT_S=600 POLL_S=10 DRY_RUN=""

say() { printf '%s\n' "$*" >&2; }
die() { local code=$1; shift; say "error: $*"; exit "$code"; }
quote() { local a; for a in "$@"; do printf "'%s' " "$(printf %s "$a" | sed "s/'/'\\\\''/g")"; done; }
run() { say "+ $*"; [ -n "$DRY_RUN" ] || "$@"; }

# parse "MORE= SETTINGS" "$@": flags (--a_b=1, --a-b 1) into variables, words into ARGS, what follows -- into FLAGS.
parse() {
  local spec=" $SETTINGS $1 " name value
  shift && ARGS=() FLAGS=()
  # shellcheck source=/dev/null
  if [ -f "${NANOCHAT_DEPLOY_CONFIG:=$HERE/config.env}" ]; then . "$NANOCHAT_DEPLOY_CONFIG"; fi
  while [ $# -gt 0 ]; do
    case $1 in
      -h | --help) sed -n -e 1d -e '/^#/!q' -e 's/^# \{0,1\}//p' "$0"; exit 0 ;;
      --) shift; FLAGS=("$@"); break ;;
      --*)
        name=$(printf '%s\n' "${1#--}" | sed 's/=.*//' | tr 'a-z-' 'A-Z_')
        [ "$name" != ZONE ] || name=ZONES
        case $spec in
          *" $name= "*)
            case $1 in *=*) value=${1#*=} ;; *) [ $# -gt 1 ] || die 2 "$1 needs a value"; shift; value=$1 ;; esac ;;
          *" $name "*) value=1 ;;
          *) die 2 "unknown flag $1; $(basename "$0") --help lists them" ;;
        esac
        printf -v "$name" %s "$value" ;;
      *) ARGS+=("$1") ;;
    esac
    shift
  done
}

# is_vm HOST: whether it is the name of a VM, and not an IP or something that ssh knows.
is_vm() { case $1 in *[.:@,]*) return 1 ;; esac; [ "$(ssh -G "$1" | sed -n 's/^hostname //p')" = "$1" ]; }

# resolve HOST: TARGETS (ssh destinations) and ALIASES (names in known_hosts) of IPs or ssh hosts (a,b,c) or of a VM.
resolve() {
  local ip n=0
  TARGETS=() ALIASES=() VM_ID="" VM_IPS=${1:-}
  [ $# = 1 ] || die 2 "one HOST is needed: an IP, an ssh host or the VM's name; $(basename "$0") --help"
  ! is_vm "$1" || need "$1" READY
  for ip in $(printf %s "$VM_IPS" | tr , ' '); do
    if [ "$WORKER" = all ] || [ "$WORKER" = $n ]; then
      case $ip in *@*) TARGETS+=("$ip") ;; *) TARGETS+=("${SSH_USER:+$SSH_USER@}$ip") ;; esac
      ALIASES+=("${VM_ID:+tpu-$VM_ID-$n}")  # the VM's id, not its IP: a VM made again has another host key
    fi
    n=$((n + 1))
  done
  [ ${#TARGETS[@]} -gt 0 ] || die 2 "--worker $WORKER: $1 has $n"
}

# script <<'END' puts that text into SCRIPT; vm I SCRIPT ARGS runs a bash script on host I, whose stdin is ours.
script() { IFS= read -r -d '' SCRIPT || true; }
vm() {
  local i=$1 script=$2 host=${TARGETS[$1]} alias=${ALIASES[$1]} options status=0
  shift 2
  options=(-o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=10 -o ServerAliveCountMax=3 -o LogLevel=ERROR
    -o StrictHostKeyChecking=accept-new -o ControlMaster=auto -o ControlPersist=60 -E "$TMP/ssh$i"
    -o "ControlPath=$HOME/.ssh/nc-$(echo "$alias$host" | cksum | cut -d' ' -f1)")
  [ -z "$alias" ] || options+=(-o "HostKeyAlias=$alias")
  [ ! -f "$SSH_KEY" ] || options+=(-i "$SSH_KEY")
  if [ -n "$DRY_RUN" ]; then say "+ ssh $host bash -c SCRIPT bash $(quote "$@") where SCRIPT is" "$script"; return; fi
  [ -d "$HOME/.ssh" ] || (umask 077 && mkdir -p "$HOME/.ssh")
  rm -f "$TMP/ssh$i"
  ssh "${options[@]}" "$host" "bash -c $(quote "$ON_VM
$script" bash "$@")" || status=$?
  if [ $status = 255 ]; then
    case $(cat "$TMP/ssh$i") in
      *"IDENTIFICATION HAS CHANGED"*) status=1; say "$host has another host key than before." \
        "If the VM was made again or its IP given to another: ssh-keygen -R ${host#*@}" ;;
      *"Permission denied"*) status=1; say "$host does not accept the key: set --ssh_user, --ssh_key" ;;
      *) say "$host: $(tail -n 1 "$TMP/ssh$i")" ;;
    esac
  fi
  return $status
}

# retry COMMAND: again, up to four times, on 255 (connection lost). Only for what may run twice.
retry() {
  local n=1 status=0
  while status=0; "$@" || status=$?; [ $status = 255 ] && [ $n -lt 4 ]; do
    say "no connection (attempt $n of 4); again in $((n * 2)) s"
    sleep $((n * 2))
    n=$((n + 1))
  done
  return $status
}

# each COMMAND: COMMAND I for every host I, all at once; says which worker failed.
each() {
  local i pids=() status=0
  if [ ${#TARGETS[@]} = 1 ]; then "$@" 0; return; fi
  for i in "${!TARGETS[@]}"; do
    "$@" "$i" > >(sed "s/^/[worker $i] /") 2>&1 </dev/null &
    pids+=($!)
  done
  for i in "${!TARGETS[@]}"; do
    wait "${pids[i]}" || { status=$?; say "worker $i (${TARGETS[i]}) failed with status $status"; }
  done
  return $status
}

. "$HERE/gcloud.sh"
