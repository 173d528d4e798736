# shellcheck shell=bash disable=SC2034
# Settings and flags of all scripts; it sources gcloud.sh, errors.sh and ssh.sh. It works in bash 3.2 (macOS).
# The first lines of every script follow the symbolic links that lead to it, and end it if this file is not found.
#
# Exit status of every script: 0 done; 1 failed; 2 wrong use, or an error that no waiting mends; 3 no such VM;
# 4 gcloud gave no answer (credentials, network); 5 no capacity in any zone; 6 refused, because it exists or runs
# already; 7 budget spent; 70 watch.sh itself failed; 143 told to stop; 255 no connection to the VM.
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

# Settings have these defaults, which config.env overrides, which flags override. A name with "=" takes a value.
SETTINGS="PROJECT= ZONES= NAME= TYPE= BUCKET= SSH_USER= SSH_KEY= WANDB_PROJECT= WANDB_KEY_FILE= ON_DEMAND USD_PER_HOUR="
SETTINGS="$SETTINGS WORKER= WAIT_S= POLL_S= DRY_RUN INTERNAL_IPS"
PROJECT="" ZONES="" NAME="" TYPE=v5litepod-8 BUCKET="" SSH_USER="" SSH_KEY=$HOME/.ssh/google_compute_engine
WANDB_PROJECT="" WANDB_KEY_FILE="" ON_DEMAND="" USD_PER_HOUR="" WORKER=all WAIT_S=600 POLL_S=10 SSH_TIMEOUT_S=20
DRY_RUN="" INTERNAL_IPS=""

awk() { LC_ALL=C command awk "$@"; }  # numbers have a decimal point in every locale
say() { printf '%s\n' "$*" >&2; }
die() { local code=$1; shift; say "error: $*"; exit "$code"; }
need_room() { [ -n "$TMP" ] || die 1 "no room for small files in \$TMPDIR, /dev/shm, /var/tmp or $HOME: free some"; }
quote() { local a; for a in "$@"; do printf "'%s' " "$(printf %s "$a" | sed "s/'/'\\\\''/g")"; done; }
# backoff SECONDS ROUND prints the pause after that round. It doubles every round and is varied by half at random, so
# that several waiting scripts do not ask at the same time.
backoff() { echo $(($1 * (1 << ($2 - 1)) * (50 + RANDOM % 100) / 100)); }

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

# given NAME returns 0 if a flag has set this variable.
given() { case $GIVEN in *" $1 "*) ;; *) return 1 ;; esac; }

# check_flags TYPE exits if base_train would refuse FLAGS on a TPU of this type ("": not known). For dry runs: otherwise
# the VM says so.
check_flags() {
  local status=0 python=$ROOT/.venv/bin/python
  (cd "$ROOT" && limited 120 "$python" -m deploy.lib.check_flags "$1" ${FLAGS[@]+"${FLAGS[@]}"}) || status=$?
  case $status in
    0) ;;
    2) exit 2 ;;
    *) say "the flags after -- are not checked: that needs the packages that make installs" ;;
  esac
}

# parse "MORE= SETTINGS" "$@" sets a variable for each flag (--a_b=1 or --a-b 1), ARGS to the other words, and FLAGS to
# all words after --.
parse() {
  local spec=" $SETTINGS $1 " name value config_type
  shift && ARGS=() FLAGS=() GIVEN=" "
  if [ -f "${NANOCHAT_DEPLOY_CONFIG:=$HERE/config.env}" ]; then
    eval "$(LC_ALL=C tr -d '\r' <"$NANOCHAT_DEPLOY_CONFIG")"  # an editor of Windows ends lines with CR LF
  fi
  config_type=$TYPE
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
          *) die 2 "unknown flag $1; $(basename "$0") --help lists the flags" ;;
        esac
        GIVEN="$GIVEN$name "
        printf -v "$name" %s "$value" ;;
      *) ARGS+=("$1") ;;
    esac
    shift
  done
  # The price in config.env is that of the type there, and not of another type.
  [ "$TYPE" = "$config_type" ] || given USD_PER_HOUR || USD_PER_HOUR=""
  for name in $spec; do  # a mistyped limit of time or money must not be read as 0 or as no limit
    name=${name%=}
    case $name in
      POLL_S | MAX_* | USD_*)
        case ${!name} in .* | *. | *.*.* | *[!0-9.]*) die 2 "$name is not a number of 0 or more: ${!name}" ;; esac
        [ -n "${!name}" ] || ! given "$name" || die 2 "$name is given without a number" ;;
      *_S | *_GB | ROUNDS | PATIENCE)
        case ${!name:-x} in *[!0-9]*) die 2 "$name is not a whole number: ${!name}" ;; esac ;;
    esac
  done
}

. "$LIB/gcloud.sh" && . "$LIB/errors.sh" && . "$LIB/ssh.sh" || exit 1
