#!/usr/bin/env bash
# Copies the code of this checkout to a VM, as ~/nanochat.
#
#   deploy/push.sh HOST        HOST: an IP, an ssh host, a list of them (a,b), or the VM's name
#
# Of nanochat/, scripts/, configs/, tokenizer/ and the build files, those are copied that git tracks, and new ones that
# git does not ignore if they are *.py, data of the package or a tokenizer's. Without git, only these and the build
# files are. No symbolic link, no hidden file and no file with the name of a key or password file is copied; those left
# out are named.
#
# The VM compares the tarball's checksum, unpacks it beside the present code and switches to it in one rename: an
# interrupted push changes nothing, and a running run keeps the code with which it was started.
#
#   --ssh_user NAME            who logs in (default: as ssh itself chooses)
#   --ssh_key FILE             with this key (default ~/.ssh/google_compute_engine, if it exists)
#   --worker N|all             which VM of a pod (default all)
me=$0; while [ -L "$me" ]; do l=$(readlink "$me"); case $l in /*) me=$l ;; *) me=$(dirname "$me")/$l ;; esac; done
. "$(dirname "$me")/lib/common.sh" || exit 2
MAX_BYTES=50000000
parse "" "$@"
resolve
need_room

cd "$ROOT"
names=(nanochat scripts configs tokenizer pyproject.toml Makefile README.md .tpu_env.example)
source='^(nanochat|scripts)/.*\.py$|^configs/[^/]*\.toml$|^[^/]*$'
source="$source|^nanochat/(device/prices\\.csv|serve/page\\.html|judge/problem_set/[^/]*\\.cpp)$"  # package-data
source="$source|^tokenizer/(tokenizer_65k/)?(vocabulary\\.tiktoken|tokenizer\\.json|token_bytes\\.pt|tokenizer\\.pkl)$"
noise='(^|/)__pycache__/|\.py[co]$|(^|/)\.DS_Store$'
secret='/\.|/wandb/|\.env$|\.(pem|key|p12|pfx|jks|ppk|kdbx)$|/id_(rsa|dsa|ecdsa|ed25519)[^/.]*(\.pub)?$'
secret="$secret|[[:cntrl:]]|/[^/]*(credential|secret|passw(or)?d|service[_-]?account)[^/]*$"
secret="$secret|/([^/]*[._-])?(api|access|private|ssh|hf)?[._-]?(keys?|tokens?)(\\.(json|ya?ml|txt|ini|cfg|csv))?$"

# Lists of files have one name a line, sorted; a line break in a name becomes the control character 1.
list() { LC_ALL=C tr '\0\n' '\n\1' | LC_ALL=C sort; }
# find goes through no symbolic link, and fails because some of the names may be missing.
found() { { find "${names[@]}" "$@" -print0 2>/dev/null || true; } | list; }
matching() { LC_ALL=C grep -E "$@" || true; }
# No GIT_DIR or the like of the environment: they would name another repository.
# shellcheck disable=SC2046  # a list of plain words
repository() { (unset $(git rev-parse --local-env-vars); git -c core.fsmonitor=false "$@") 2>/dev/null; }
tracked() { repository ls-files -z "$@" -- "${names[@]}" | list; }

pack() { # writes files, left_out and code.tgz
  found -type f >"$TMP/real"
  found ! -type d >"$TMP/present"
  tracked >"$TMP/wanted" || true
  if grep -q '^nanochat/' "$TMP/wanted"; then
    tracked --others --exclude-standard >"$TMP/new"
    LC_ALL=C sort "$TMP/wanted" "$TMP/new" | LC_ALL=C comm -12 - "$TMP/present" >"$TMP/known"
    matching "$source" <"$TMP/new" >>"$TMP/wanted"
    commit=$(repository describe --always --dirty --exclude '*' || echo unversioned)
  else
    cp "$TMP/present" "$TMP/known"
    matching "$source" <"$TMP/present" >"$TMP/wanted"
    commit=unversioned
  fi
  LC_ALL=C sort "$TMP/wanted" | LC_ALL=C comm -12 - "$TMP/real" | matching -vi "$noise|$secret" >"$TMP/files"
  LC_ALL=C comm -23 "$TMP/known" "$TMP/files" | matching -v "$noise" | LC_ALL=C sed 's/[[:cntrl:]]/?/g' >"$TMP/left_out"
  grep -q '^nanochat/' "$TMP/files" || die 2 "no code to push: there is no nanochat/ with source files in $ROOT"
  submodules=$(repository ls-files -s -- "${names[@]}" | grep '^160000 ' | cut -f 2 | tr '\n' ' ') || true
  [ -z "$submodules" ] || say "left out (submodules): $submodules"
  tr '\n' '\0' <"$TMP/files" | tar -cf - --null -T - | gzip -n >"$TMP/code.tgz"
}

pack
bytes=$(($(wc -c <"$TMP/code.tgz")))
sum=$( (sha256sum "$TMP/code.tgz" 2>/dev/null || shasum -a 256 "$TMP/code.tgz") | cut -d' ' -f1)
say "code $commit: $(($(wc -l <"$TMP/files"))) files, $((bytes / 1000)) kB packed, sha256 ${sum%"${sum#????????????}"}"
if [ -s "$TMP/left_out" ]; then
  say "left out (no source files, links, or named like secrets): $(head -n 20 "$TMP/left_out" | tr '\n' ' ')" \
    "$(tail -n +21 "$TMP/left_out" | wc -l | sed -n 's/ *\([1-9].*\)/and \1 more/p')"
fi
if [ $bytes -gt $MAX_BYTES ]; then
  tr '\n' '\0' <"$TMP/files" | xargs -0 du -k | sort -rn | head -n 3 >&2 || true
  die 2 "$bytes bytes of code, more than $MAX_BYTES: move the largest, listed above, out of these folders"
fi

script UNPACK <<'END'
name=$1 sum=$2 new=$D/releases/$1 part=$D/releases/part.$$
trap 'rm -rf "$part" "$part.tgz"' EXIT
mkdir -p "$D/releases"
cat >"$part.tgz" || fail "cannot store the code: is the disk full? The old code is untouched"
[ "$(sha256sum <"$part.tgz")" = "$sum  -" ] || fail "wrong checksum: the transfer was interrupted"
mkdir "$part"
tar -xzf "$part.tgz" -C "$part" || fail "cannot unpack: is the disk full? The old code is untouched"
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

send() { vm "$1" "$UNPACK" "$commit-${sum%"${sum#????????}"}" "$sum" <"$TMP/code.tgz"; }
send_again() { retry send "$1"; }
each send_again
