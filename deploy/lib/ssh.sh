# shellcheck shell=bash disable=SC2034
# Runs commands on HOST, which may be several VMs; sourced by common.sh.
ON_VM=$(cat "$LIB/on_vm.sh")

# is_vm HOST returns 0 if HOST is the name of a VM, and not an IP or a host that ssh's configuration defines.
is_vm() { case $1 in *[.:@,]*) return 1 ;; esac; [ "$(ssh -T -G -- "$1" | sed -n 's/^hostname //p')" = "$1" ]; }

# resolve sets TARGETS and ALIASES for the HOST in ARGS: a list of IPs or ssh hosts (a,b,c), or the name of a VM.
resolve() {
  [ ${#ARGS[@]} = 1 ] || die 2 "exactly one HOST is needed: an IP, an ssh host or the VM's name; $(basename "$0") --help"
  VM_ID="" VM_TYPE="" VM_IPS=${ARGS[0]}
  ! is_vm "${ARGS[0]}" || need "${ARGS[0]}"
  aim
}
# aim sets TARGETS (ssh destinations) and ALIASES (names in known_hosts) from VM_IPS and WORKER.
aim() {
  local ip n=0
  case $VM_IPS in *[[:space:]]*) die 2 "'$VM_IPS' is no HOST: write several with commas and no blanks between them" ;; esac
  TARGETS=() ALIASES=()
  for ip in $(printf %s "$VM_IPS" | tr , ' '); do
    case $ip in -* | *[!A-Za-z0-9@.:_%-]*) die 2 "$ip is no HOST: give an IP, an ssh host or the VM's name" ;; esac
    if [ "$WORKER" = all ] || [ "$WORKER" = $n ]; then
      case $ip in *@*) TARGETS+=("$ip") ;; *) TARGETS+=("${SSH_USER:+$SSH_USER@}$ip") ;; esac
      ALIASES+=("${VM_ID:+tpu-$VM_ID-$n}")  # the VM's id, not its IP: a VM that is created again has another host key
    fi
    n=$((n + 1))
  done
  [ $n -gt 0 ] || die 2 "the VM has no external IP: --internal_ips takes its internal one, inside its network"
  [ ${#TARGETS[@]} -gt 0 ] || die 2 "--worker $WORKER does not exist: there are $n"
}

# from_vm.py reads all that a VM says after this line, in the form of READ. Before it, .bashrc may print a greeting.
BEGIN="-- nanochat begins --" READ=(lines)
# script NAME <<'END' puts the text up to END into NAME. vm I SCRIPT ARGS runs a bash script on host I, with our stdin.
script() { IFS= read -r -d '' "$1" || true; }
vm() {
  local i=$1 script=$2 host=${TARGETS[$1]} alias=${ALIASES[$1]} options socket status=0
  shift 2
  options=(-o BatchMode=yes -o "ConnectTimeout=$SSH_TIMEOUT_S" -o "ServerAliveInterval=$((SSH_TIMEOUT_S / 2))"
    -o ServerAliveCountMax=3 -o LogLevel=ERROR -E "$TMP/ssh$i" -a -x -o RemoteCommand=none -o RequestTTY=no)
  # A new host's key is accepted, unless the user's configuration says how to check it.
  [ "$(ssh -T -G "$host" | sed -n 's/^stricthostkeychecking //p')" != ask ] ||
    options+=(-o StrictHostKeyChecking=accept-new)
  # One connection serves all calls of a minute. The path of a socket has 104 bytes at most, of which ssh needs 17.
  socket=$HOME/.ssh/nc-$(echo "$alias$host" | cksum | cut -d' ' -f1)
  [ ${#socket} -gt 86 ] || options+=(-o ControlMaster=auto -o ControlPersist=60 -o "ControlPath=\"$socket\"")
  [ -z "$alias" ] || options+=(-o "HostKeyAlias=$alias")
  # Only this key: a server refuses who offers too many, and an agent may have many.
  [ ! -f "$SSH_KEY" ] && [ ! -f "$SSH_KEY.pub" ] || options+=(-o IdentitiesOnly=yes -i "$SSH_KEY")
  [ -d "$HOME/.ssh" ] || (umask 077 && mkdir -p "$HOME/.ssh")
  need_room && rm -f "$TMP/ssh$i"
  "$PYTHON" "$LIB/from_vm.py" "$BEGIN" "$TMP/ssh$i" "${READ[@]}" -- \
    ssh "${options[@]}" "$host" "bash -c $(quote "echo '$BEGIN'
$ON_VM
$script" bash "$@")" || status=$?
  if [ $status = 255 ]; then
    case $(cat "$TMP/ssh$i") in
      *"IDENTIFICATION HAS CHANGED"*) status=1; say "$host has another host key than before." \
        "If the VM was created again or its IP now belongs to another VM: ssh-keygen -R ${host#*@}" ;;
      *"Permission denied"*) status=1; say "$host does not accept the key: set --ssh_user, --ssh_key" ;;
      *) say "$host: $(tail -n 1 "$TMP/ssh$i" | grep . || echo the connection was lost)" ;;
    esac
  fi
  return $status
}

# retry COMMAND runs COMMAND up to four times while it returns 255 (connection lost). It must be safe to run twice.
retry() {
  local n status
  for n in 1 2 3 4; do
    status=0
    "$@" || status=$?
    [ $status = 255 ] && [ $n -lt 4 ] || return $status
    say "no connection (attempt $n of 4); again in $((n * 2)) s"
    sleep $((n * 2))
  done
}

# each COMMAND runs COMMAND I for every host I, all concurrently, and says which workers failed.
each() {
  local i pids status=0
  pids=()
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

# first_of COMMAND runs COMMAND I for every host I, all concurrently, until that of host 0 ends, and returns its status.
# The others then have $LAST_LINES_S to end, too. If another fails first, host 0 has $LAST_WORDS_S to end by itself, as
# a run does; the other's status is returned.
: "${LAST_WORDS_S:=30}" "${LAST_LINES_S:=0}"
first_of() (
  local first i status
  trap 'kill -- $(jobs -p | sed "s/^/-/") 2>/dev/null || true' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  set -m  # each of them becomes a process group, which can be ended
  "$@" 0 </dev/null &
  first=$!
  for i in "${!TARGETS[@]}"; do
    [ "$i" = 0 ] || end_if_it_fails "$first" "$i" "$@" </dev/null &
  done
  set +m
  status=0
  wait "$first" || status=$?
  for ((i = 0; i < 10 * LAST_LINES_S; i++)); do
    [ -n "$(jobs -rp)" ] || break
    sleep 0.1
  done
  [ "$status" = 0 ] || exit "$(cat "$TMP/failed" 2>/dev/null || echo "$status")"
)
end_if_it_fails() { # end_if_it_fails FIRST I COMMAND: for first_of; FIRST is the process group of host 0
  local status=0
  "${@:3}" "$2" 2>&1 | sed "s/^/[worker $2] /" || status=$?
  [ $status != 0 ] && [ $status != 255 ] || return 0
  [ -s "$TMP/failed" ] || echo $status >"$TMP/failed"  # the first that failed is the cause
  sleep "$LAST_WORDS_S"
  kill -- "-$1" 2>/dev/null || true
}

# ask_limit ARGS sets the VM's own limit on every host, as set_limit ARGS. It prints "yes" if the VM may delete itself,
# or else why not: only its own service account knows. It fails where a host could not be asked.
ask_limit() {
  local i script said answer=yes status=0
  # shellcheck disable=SC2016  # it is evaluated on the VM
  script="$(cat "$LIB/limit.sh")"$'\n''set_limit "$@" >&2; may_delete "$3"'
  aim
  for i in "${!TARGETS[@]}"; do
    said=$(limited 180 retry vm "$i" "$script" "$@" 2>&1 | LC_ALL=C tr -cd ' -~\n' | tail -n 1 |
      cut -c 1-300) || status=$?
    [ "$said" = yes ] || answer=${said:-no answer}
  done
  echo "$answer"
  return $status
}
