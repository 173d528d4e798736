#!/usr/bin/env bash
# Copies the code of this checkout to a VM, as ~/nanochat.
#
#   deploy/push.sh HOST        HOST: an IP, an ssh host, a list of them (a,b), or the VM's name
#
# Only nanochat/, scripts/, tokenizer/ and the build files are copied. The VM compares the tarball's checksum, unpacks
# it beside the present code and switches to it in one rename: an interrupted push changes nothing, and a running run
# keeps the code with which it was started.
#
#   --ssh_user NAME            who logs in (default: as ssh itself chooses)
#   --ssh_key FILE             with this key (default ~/.ssh/google_compute_engine, if it exists)
#   --worker N|all             which VM of a pod (default all)
#   --dry_run                  only print what would be done
. "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
MAX_BYTES=50000000
parse "" "$@"
resolve ${ARGS[@]+"${ARGS[@]}"}

pack() { # writes code.tgz, from a list of names: no data, log, cache or secret can get in by accident
  local found
  cd "$ROOT"
  found=$(ls -d nanochat scripts tokenizer pyproject.toml Makefile README.md .tpu_env.example 2>/dev/null || true)
  # shellcheck disable=SC2086  # a list of plain words
  find $found -type f ! -path '*/__pycache__/*' ! -path '*/.*/*' ! -path '*/wandb/*' ! -name '*.py[co]' \
    ! -name '*.log' ! -name 'nohup.out' ! -name '*.parquet' ! -name '*.jsonl' ! -name '*.safetensors' ! -name '*.html' \
    ! -name '*.part' ! -name '.DS_Store' ! -name '.tpu_env' ! -name '*.env' | LC_ALL=C sort >"$TMP/files"
  tar -cf - -T "$TMP/files" | gzip -n >"$TMP/code.tgz"
}

pack
bytes=$(($(wc -c <"$TMP/code.tgz")))
sum=$( (sha256sum "$TMP/code.tgz" 2>/dev/null || shasum -a 256 "$TMP/code.tgz") | cut -d' ' -f1)
commit=$(git -C "$ROOT" describe --always --dirty --exclude '*' 2>/dev/null || echo unversioned)
say "code $commit: $(($(wc -l <"$TMP/files"))) files, $((bytes / 1000)) kB packed, sha256 ${sum%"${sum#????????????}"}"
if [ $bytes -gt $MAX_BYTES ]; then
  tr '\n' '\0' <"$TMP/files" | xargs -0 du -k | sort -rn | head -n 3 >&2 || true
  die 2 "$bytes bytes of code, more than $MAX_BYTES: move the largest, listed above, out of these folders"
fi

script <<'END'
name=$1 sum=$2 new=$D/releases/$1 part=$D/releases/part.$$
trap 'rm -rf "$part" "$part.tgz"' EXIT
mkdir -p "$D/releases"
cat >"$part.tgz" || { echo "cannot store the code: is the disk full? The old code is untouched" >&2; exit 1; }
[ "$(sha256sum <"$part.tgz")" = "$sum  -" ] || { echo "wrong checksum: the transfer was interrupted" >&2; exit 1; }
mkdir "$part"
tar -xzf "$part.tgz" -C "$part" || { echo "cannot unpack: is the disk full? The old code is untouched" >&2; exit 1; }
echo "$name" >"$part/COMMIT"
ln -s "$D/venv" "$part/.venv"; ln -s ~/.tpu_env "$part/.tpu_env"
[ -d "$new" ] || mv "$part" "$new"
touch "$new"
[ -L ~/nanochat ] || [ ! -e ~/nanochat ] || mv ~/nanochat ~/nanochat.before_push
ln -sfn "$new" ~/nanochat.next; mv -T ~/nanochat.next ~/nanochat
inuse=$(readlink "/proc/$(cat "$D/runs/pid" 2>/dev/null || echo self)/cwd" || true)
ls -1td "$D"/releases/*/ | tail -n +4 | while read -r old; do [ "${old%/}" = "$inuse" ] || rm -rf "$old"; done
echo "$(hostname): ~/nanochat is now $name"
! running || echo "the running run keeps its old code until it is started again"
END

send() { vm "$1" "$SCRIPT" "$commit-${sum%"${sum#????????}"}" "$sum" <"$TMP/code.tgz"; }
send_again() { retry send "$1"; }
each send_again
