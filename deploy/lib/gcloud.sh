# shellcheck shell=bash disable=SC2034
# Everything about gcloud and TPU types; sourced by common.sh. Another way to create VMs would be another such file.

# calc EXPRESSION prints its value with two decimals.
calc() { awk "BEGIN { printf \"%.2f\", $1 }"; }

# facts TYPE [ZONES] sets CHIPS, HOSTS, VERSION (of the runtime), USD (per hour) and USD_NOTE. USD is --usd_per_hour, or
# that of the dearest of these zones (default: $ZONES) in nanochat/device/prices.csv; it is empty if no price of the
# type is known. A zone that the table lacks counts at the dearest price of the type, and USD_NOTE says so. It returns
# 2, after a line that says why, if there is no such type.
facts() {
  local printed
  CHIPS="" HOSTS="" VERSION="" USD=$USD_PER_HOUR USD_NOTE=""
  printed=$(cd "$ROOT" && "$PYTHON" -m deploy.lib.catalogue "$1" "${2:-$ZONES}" "$ON_DEMAND" "$USD_PER_HOUR") ||
    return 2
  eval "$printed"  # each value in quotation marks
}

# gcloud_tpu ZONE VERB ARGS runs gcloud. gcloud asks five times when there is no answer, so a dead network costs two
# minutes. A gcloud that hangs for another reason is ended after $GCLOUD_S or, if it changes a VM and waits for that, a
# minute after --wait_s.
: "${GCLOUD_S:=180}"
gcloud_tpu() {
  local zone=$1 verb=$2 limit_s=$GCLOUD_S
  shift 2
  case $verb in create | delete) limit_s=$((WAIT_S + 60)) ;; esac
  CLOUDSDK_CORE_HTTP_TIMEOUT=20 limited "$limit_s" gcloud compute tpus tpu-vm "$verb" "$@" --zone="$zone" --quiet \
    ${PROJECT:+--project="$PROJECT"} ${ACCOUNT:+--account="$ACCOUNT"}
}

# A VM that may exist is remembered as the file MEMORY/PROJECT/ZONE/NAME, which has its account, type, spot or not, id
# (- until it is ready) and ssh key, until gcloud has confirmed that it is gone.
MEMORY=$HOME/.local/state/nanochat/vms REMEMBERED="" SETTLED=""
# settle NAME sets, once, PROJECT and ACCOUNT, which every call is given: gcloud's present ones may change meanwhile.
# They are those with which NAME was created, or else gcloud's present ones. REMEMBERED is the zones in which NAME may
# exist.
settle() {
  local file project zone account key found
  [ -z "$SETTLED" ] || return 0
  SETTLED=1 found=""
  for file in "$MEMORY"/*/*/"$1"; do
    [ -f "$file" ] || continue
    zone=${file%/*} project=${file%/*/*}
    zone=${zone##*/} project=${project##*/}
    [ "${PROJECT:-$project}" = "$project" ] || continue
    [ -z "$1" ] || [ "${found:-$project}" = "$project" ] || die 2 "$1 exists in $found and in $project: give --project"
    read -r account _ _ _ key <"$file" || true
    [ -n "$ACCOUNT" ] || [ "$account" = - ] || ACCOUNT=$account
    given SSH_KEY || [ -z "$key" ] || SSH_KEY=$key
    found=$project REMEMBERED="$REMEMBERED${REMEMBERED:+,}$zone"
  done
  PROJECT=${PROJECT:-$found}
  [ -z "$PROJECT" ] || return 0
  found=$(limited $((GCLOUD_S < 60 ? GCLOUD_S : 60)) \
    gcloud config list --format='value[separator="|"](core.project,core.account)' 2>/dev/null) || return 0
  [[ $found =~ ^(([a-z0-9.-]+:)?[a-z][a-z0-9-]*)?[|][A-Za-z0-9@._+-]*$ ]] || return 0
  PROJECT=${found%%|*}
  [ -n "$PROJECT" ] || die 2 "no project is set: --project, PROJECT in config.env, or gcloud config set project"
  [ -n "$ACCOUNT" ] || ACCOUNT=${found#*|}
}
remember() { # remember NAME ZONE [ID], before it is created there, and when it is
  local folder=$MEMORY/$PROJECT/$2 spot
  spot=$([ -z "$ON_DEMAND" ] && echo True || echo False)
  (umask 077 && mkdir -p "$folder" && echo "${ACCOUNT:--} $TYPE $spot ${3:--} $SSH_KEY" >"$folder/$1") ||
    say "$1 is not remembered: cannot write to $folder"
}
forget() { rm -f "$MEMORY/$PROJECT/$2/$1"; }  # forget NAME ZONE: gcloud has said that it is not there
# all_zones prints ZONES and those in which the VM may exist.
all_zones() { printf '%s\n' "$REMEMBERED,$ZONES" | tr , '\n' | awk 'NF && !seen[$0]++' | paste -s -d , -; }

# tpu ZONE VERB ARGS runs gcloud_tpu. It sets TPU_OUT to what gcloud prints and TPU_ERR to its messages, for why and
# complaint. Both come through one pipe, with a mark before each message: on a full disk there are no files.
TPU_OUT="" TPU_ERR=""
tpu() {
  local both status=0
  both=$({ gcloud_tpu "$@" 2>&1 >&3 | sed 's/^/! /' >&3; } 3>&1) || status=$?
  TPU_OUT=$(printf '%s\n' "$both" | sed '/^! /d')
  TPU_ERR=$(printf '%s\n' "$both" | sed -n 's/^! //p')
  return $status
}
# What gcloud prints of a VM has this form. Anything else, such as the page of a proxy, says nothing about the VM.
STATES="CREATING|READY|RESTARTING|REIMAGING|DELETING|REPAIRING|STOPPED|STOPPING|STARTING|PREEMPTED|TERMINATED"
STATES="$STATES|HIDING|HIDDEN|UNHIDING"
IPS_FORM="[0-9a-fA-FNone:.,]*"
VM_FORM="^($STATES)[|][A-Z_]*[|][0-9]+[|][0-9TZ:.-]*[|][a-z0-9]+-[0-9]+[|]${IPS_FORM}[|]${IPS_FORM}[|](True|False)?$"
# unreadable says in one line what gcloud printed instead.
unreadable() { echo "gcloud's answer is none${TPU_OUT:+: $(printf '%s' "$TPU_OUT" | LC_ALL=C tr -c ' -~' ' ' |
  cut -c 1-80)}"; }
# lookup NAME sets VM_STATE to the state that the API reports, to absent (NOT_FOUND in every zone), or to unknown
# (VM_ERROR says why; VM_PERMANENT is 1 if no waiting mends that), and the other VM_ variables if the VM exists.
lookup() {
  local zone reason external internal format='value[separator="|"](state,health,id,createTime,acceleratorType,'
  format+='networkEndpoints[].accessConfig.externalIp.list(),networkEndpoints[].ipAddress.list(),schedulingConfig.spot)'
  check_name "$1"
  settle "$1"
  [ -n "$ZONES" ] || die 2 "--zones is not set: give the flag or write deploy/config.env"
  VM_STATE=absent VM_HEALTH="" VM_ZONE="" VM_ID="" VM_CREATED="" VM_TYPE="" VM_IPS="" VM_SPOT="" VM_ERROR=""
  VM_PERMANENT=""
  for zone in $(printf %s "$ZONES" | tr , ' '); do
    if tpu "$zone" describe "$1" --format="$format"; then
      [[ $TPU_OUT =~ $VM_FORM ]] || { VM_STATE=unknown VM_ERROR="$zone: $(unreadable)"; continue; }
      IFS='|' read -r VM_STATE VM_HEALTH VM_ID VM_CREATED VM_TYPE external internal VM_SPOT \
        < <(printf '%s\n' "$TPU_OUT")
      VM_ZONE=$zone VM_IPS=$external VM_ERROR="" VM_PERMANENT=""
      case $external in *None*) VM_IPS="" ;; esac
      [ -z "$INTERNAL_IPS" ] || VM_IPS=$internal
      return
    fi
    reason=$(why)
    [ "$reason" != not_found ] || continue
    VM_STATE=unknown
    [ -z "$VM_PERMANENT" ] || continue
    case $reason in
      auth) VM_ERROR="credentials refused (gcloud auth login): $(complaint)" ;;
      permanent) VM_PERMANENT=1 VM_ERROR="$zone: $(complaint)" ;;
      *) VM_ERROR="$zone: $(complaint)" ;;
    esac
  done
}

# newest_in FOLDER prints the newest whole checkpoint there: its SHA256SUMS is copied last.
newest_in() {
  limited "$GCLOUD_S" gcloud storage ls "$1/step_*/SHA256SUMS" ${ACCOUNT:+--account="$ACCOUNT"} 2>/dev/null |
    sed -n 's|.*/\(step_[0-9]\{1,12\}\)/SHA256SUMS$|\1|p' | sort -t _ -k 2 -n | tail -n 1 || true
}

# facts_of_vm TYPE SPOT ZONE sets what facts sets, for a VM that exists. If facts does not know its type, the price is
# empty. The price in config.env is only that of TYPE.
facts_of_vm() {
  local ON_DEMAND="" USD_PER_HOUR=$USD_PER_HOUR
  [ "$2" = True ] || ON_DEMAND=1
  given USD_PER_HOUR || [ "$1" = "$TYPE" ] || USD_PER_HOUR=""
  facts "$1" "$3" 2>/dev/null || true
}

# cannot_tell NAME exits because lookup has found out nothing.
cannot_tell() { die "$([ -n "$VM_PERMANENT" ] && echo 2 || echo 4)" "cannot tell whether $1 exists: $VM_ERROR"; }

# find_vm NAME is lookup, also in the zones in which the VM may exist, unless --zones was given.
find_vm() {
  settle "$1"
  given ZONES || ZONES=$(all_zones)
  lookup "$1"
}

# need NAME finds the VM and exits unless it is READY.
need() {
  find_vm "$1"
  [ "$VM_STATE" != absent ] || die 3 "no VM $1 in $ZONES of project ${PROJECT:-?}; list.sh looks in all zones"
  [ "$VM_STATE" != unknown ] || cannot_tell "$1"
  [ "$VM_STATE" = READY ] || die 1 "$1 is $VM_STATE, not READY"
}
