#!/usr/bin/env bash
# Installs on a VM everything that training needs, and checks that torch_xla sees all chips. It is safe to run again.
#
#   deploy/setup.sh HOST       HOST: an IP, an ssh host, a list of them (a,b), or the VM's name
#
# It installs Python 3.11 with venv unless there is a 3.11 or 3.12 with venv, and the packages that pyproject.toml pins
# into ~/nanochat.d/venv, and creates ~/.tpu_env from .tpu_env.example (mode 600). The WandB key is read from
# $WANDB_API_KEY or a file and sent over stdin: it never appears on a command line.
#
#   --type TYPE                the VM's type, such as v6e-4, which says how many chips to expect (default: if HOST is a
#                              VM's name, gcloud is asked; if not, any number is accepted)
#   --wandb_key_file FILE      a file with the WandB key, if it is not in $WANDB_API_KEY
#   --wandb_project NAME       the WandB project to write into ~/.tpu_env
#   --worker N|all             which VM of a pod (default all)
{ set +x; } 2>/dev/null  # bash -x would print the key
me=$0; while [ -L "$me" ]; do l=$(readlink "$me"); case $l in /*) me=$l ;; *) me=$(dirname "$me")/$l ;; esac; done
. "$(dirname "$me")/lib/common.sh" || exit 2
parse "" "$@"
given TYPE || TYPE=""  # the type in config.env may be that of another VM
resolve

key=${WANDB_API_KEY:-}
[ -z "$WANDB_KEY_FILE" ] || key=$(head -n 1 "$WANDB_KEY_FILE") || die 2 "cannot read --wandb_key_file $WANDB_KEY_FILE"
key=${key//[[:space:]]/}  # a file from Windows ends its lines with CR LF
chips=0 TYPE=${VM_TYPE:-$TYPE}
if [ -n "$TYPE" ]; then facts "$TYPE"; chips=$((CHIPS / HOSTS)); fi

script SET_UP <<'END'
project=$1 expected=$2 files=$D/setup venv=$D/venv
IFS= read -r key
mkdir -p "$files"; tar -xf - -C "$files"
sudo=$([ "$(id -u)" = 0 ] || echo "sudo -n")
usable() { # prints the first of these programs that runs and has venv
  for python in "$@"; do
    if "$python" -c 'import venv, ensurepip'; then echo "$python"; return; fi
  done 2>/dev/null
  return 1
}
# The pins have wheels for Python 3.10 to 3.12. On 3.10, which has no jax 0.7, the kernels in Pallas are missing.
if ! python=$(usable python3.11 python3.12); then
  echo "installing Python 3.11"
  export DEBIAN_FRONTEND=noninteractive
  $sudo apt-get -q -o DPkg::Lock::Timeout=300 update >"$files/apt.log" 2>&1 &&
    $sudo apt-get -q -y -o DPkg::Lock::Timeout=300 install python3.11 python3.11-venv >>"$files/apt.log" 2>&1 || true
  python=$(usable python3.11 python3.10) ||
    { tail -n 3 "$files/apt.log" >&2; fail "cannot install Python 3.11, and there is no 3.10 to 3.12"; }
fi
"$python" -c 'import sys
try: import tomllib
except ImportError: from pip._vendor import tomli as tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
print(*project["dependencies"],
      *project["optional-dependencies"]["tpu"], sep="\n")' "$files/pyproject.toml" >"$files/pins"
if cmp -s "$files/pins" "$venv/pins"; then
  echo "packages are as pinned"
else
  echo "installing $(wc -l <"$files/pins") pinned packages"
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check --progress-bar off -r "$files/pins"
  cp "$files/pins" "$venv/pins"  # written last, so that an interrupted installation is repeated
fi
umask 077
[ -f ~/.tpu_env ] || cp "$files/.tpu_env.example" ~/.tpu_env
chmod 600 ~/.tpu_env
keep() { # keep NAME VALUE writes it into ~/.tpu_env, unless it is empty. printf is a builtin: no process has the key
  [ -n "$2" ] || return 0
  sed -e "/^export $1=/d" -e '$a\' ~/.tpu_env >~/.tpu_env.next  # $a: its last line may lack an end
  printf 'export %s=%q\n' "$1" "$2" >>~/.tpu_env.next
  mv ~/.tpu_env.next ~/.tpu_env
  echo "$1 is in ~/.tpu_env"
}
keep WANDB_PROJECT "$project"
keep WANDB_API_KEY "$key"

running && { echo "the chips are not counted, because a run is using them"; exit 0; }
load_env
[ "${PJRT_DEVICE:-}" = TPU ] || fail "PJRT_DEVICE is not TPU in ~/.tpu_env"
count='import torch_xla.runtime as xr; print(xr.addressable_runtime_device_count())'
seen=$(timeout 300 "$D/venv/bin/python" -c "$count" 2>"$D/setup/devices.log" | tail -n 1) || seen=0
if [ "$seen" = 0 ] || { [ "$expected" != 0 ] && [ "$seen" != "$expected" ]; }; then
  tail -n 3 "$D/setup/devices.log" >&2
  fail "torch_xla sees $seen chips, $expected expected: docs/troubleshooting.md lists the causes"
fi
echo "$seen" >"$D/chips"
echo "$(hostname): torch_xla sees $seen chips; ready"
END
# The key comes first, on stdin, and then the files.
send() { { printf '%s\n' "$key"; tar -cf - -C "$ROOT" pyproject.toml .tpu_env.example; } | vm "$@"; }
setup() { retry send "$1" "$SET_UP" "$WANDB_PROJECT" "$chips"; }
each setup
