# shellcheck shell=bash disable=SC2034
# Settings and flags of all scripts; it sources gcloud.sh, errors.sh and ssh.sh. It works in bash 3.2 (macOS).
# The first lines of every script follow the symbolic links that lead to it, and end it if this file is not found.
# docs/deploy.md has the exit statuses of every script.
set -euo pipefail

# Physical paths: seen through a symbolic link, the parent of deploy/ is another folder than the checkout.
LIB=$(CDPATH="" cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd -P) && HERE=${LIB%/*} && ROOT=${HERE%/*} || exit 1

# TMP is a new folder in the first of these places that has room for small files. If none has, TMP is empty: deleting a
# VM needs no file, and everything else says that there is no room.
for TMPDIR in "${TMPDIR:-/tmp}" /dev/shm /var/tmp "$HOME"; do
  TMP=$(mktemp -d "$TMPDIR/nanochat.XXXXXX" 2>/dev/null) || continue
  if head -c 300000 /dev/zero 2>/dev/null >"$TMP/room"; then rm "$TMP/room"; break; fi 2>/dev/null
  rm -rf "$TMP"
  TMP=""
done
export TMPDIR  # bash writes here-documents there
trap '[ -z "$TMP" ] || rm -rf "$TMP"' EXIT
export -n WANDB_API_KEY 2>/dev/null || true  # a secret: no child process needs it in its environment
export COPYFILE_DISABLE=1  # so that tar on macOS adds no ._ files

# Settings have these defaults, which config.env overrides, which flags override. settings.py has their forms.
PROJECT="" ACCOUNT="" ZONES="" NAME="" TYPE=v5litepod-8 BUCKET="" SSH_USER="" SSH_KEY=$HOME/.ssh/google_compute_engine
WANDB_PROJECT="" WANDB_KEY_FILE="" ON_DEMAND="" USD_PER_HOUR="" WORKER=all WAIT_S=600 POLL_S=10 SSH_TIMEOUT_S=20
DRY_RUN="" INTERNAL_IPS="" GIVEN=" "

awk() { LC_ALL=C command awk "$@"; }  # numbers have a decimal point in every locale
say() { printf '%s\n' "$*" >&2; }
die() { local code=$1; shift; say "error: $*"; exit "$code"; }
need_room() { [ -n "$TMP" ] || die 1 "no room for small files in \$TMPDIR, /dev/shm, /var/tmp or $HOME: free some"; }
quote() { local a; for a in "$@"; do printf "'%s' " "$(printf %s "$a" | sed "s/'/'\\\\''/g")"; done; }
# limited SECONDS COMMAND runs it, and ends it and its children after SECONDS, with status 124.
limited() (
  deadline=$((SECONDS + $1))
  set -m  # the command becomes a process group of its own, all of which can be ended
  "${@:2}" </dev/null &
  set +m
  trap 'kill -- -$! 2>/dev/null || true' EXIT
  trap 'exit 143' INT TERM
  while kill -0 $! 2>/dev/null; do
    if [ $SECONDS -ge $deadline ]; then echo "ERROR: $2 gave no answer for $1 s, and was ended" >&2; exit 124; fi
    sleep 0.1
  done
  wait $!
)

# limit_after HOURS NODE sets limit to the arguments of set_limit on the VM.
limit_after() {
  local max_s reserve_s=$MARGIN_S
  max_s=$(awk "BEGIN { printf \"%d\", 3600 * $1 }")
  [ "$reserve_s" -le $((max_s / 2)) ] || reserve_s=$((max_s / 2))
  limit=("$max_s" "$reserve_s" "$2" "$POLL_S")
}

# given NAME returns 0 if a flag has set this variable.
given() { case $GIVEN in *" $1 "*) ;; *) return 1 ;; esac; }

# take_name sets NAME to the name of a VM on the command line, or leaves that of config.env.
take_name() {
  [ ${#ARGS[@]} -lt 2 ] || die 2 "one VM at a time, and not ${ARGS[*]}"
  NAME=${ARGS[0]:-$NAME}
  [ -n "$NAME" ] || die 2 "the VM has no name: $(basename "$0") NAME, or set NAME in deploy/config.env"
  check_name "$NAME"
}
check_name() { # check_name NAME exits unless Google allows this name for a VM
  local LC_ALL=C
  case $1 in [!a-z]* | *[!a-z0-9-]* | *-) ;; *) [ ${#1} -gt 63 ] || return 0 ;; esac
  die 2 "$1 is no name of a VM: small letters, digits and -, at most 63, a letter first"
}

# check_flags TYPE exits if base_train would refuse FLAGS on a TPU of this type ("": not known). For dry runs: otherwise
# the VM says so.
check_flags() {
  local said status=0
  said=$(cd "$ROOT" && limited 120 "$ROOT/.venv/bin/python" -m deploy.lib.check_flags "$1" \
    ${FLAGS[@]+"${FLAGS[@]}"} 2>&1) || status=$?
  case $status in
    0) ;;
    2) say "$said"; exit 2 ;;
    *) say "the flags after -- are not checked: that needs the packages that make installs" ;;
  esac
}

# PYTHON is the Python that reads settings, and whatever a VM says.
for PYTHON in python3 python3.14 python3.13 python3.12 python3.11 python3.10 "$ROOT/.venv/bin/python" ""; do
  [ -n "$PYTHON" ] || die 2 "deploy/ needs Python 3.10 or newer: python3 is $(python3 --version 2>&1 || true)"
  if "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then break; fi
done

# parse "MORE SETTINGS" "$@" sets a variable for each flag (--a_b=1 or --a-b 1), ARGS to the other words, and FLAGS to
# all words after --.
parse() {
  local word config_type settings
  for word in "${@:2}"; do
    case $word in
      --) break ;;
      -h | --help) sed -n -e 1d -e '/^#/!q' -e 's/^# \{0,1\}//p' "$0"; exit 0 ;;
    esac
  done
  settings=$("$PYTHON" "$LIB/settings.py" "$@") || exit 2
  eval "$settings"  # what settings.py printed, each value in quotation marks
  # The price in config.env is that of the type there, and not of another type.
  [ "$TYPE" = "$config_type" ] || given USD_PER_HOUR || USD_PER_HOUR=""
}

. "$LIB/gcloud.sh" && . "$LIB/errors.sh" && . "$LIB/ssh.sh" || exit 1
