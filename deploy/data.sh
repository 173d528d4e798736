#!/usr/bin/env bash
# Copies the folders parquet/ and tokenizer/ of a bucket to a VM: the files that it lacks or that differ.
#
#   deploy/data.sh HOST --bucket=gs://my-bucket/nanochat
#
# They go below NANOCHAT_BASE_DIR of the VM, where base_train looks. Another tokenizer that was there is kept as
# tokenizer.before.TIME. After an interrupted copy the next data.sh goes on. The VM's service account must be allowed to
# read the bucket.
#
#   --bucket gs://…            the bucket, or a folder of it
#   --no_tokenizer             leave the bucket's tokenizer out; training uses the one that push.sh brings
#   --worker N|all             which VM of a pod (default all)
#
# Exit status 6: another data.sh is running on the VM.
me=$0; while [ -L "$me" ]; do l=$(readlink "$me"); case $l in /*) me=$l ;; *) me=$(dirname "$me")/$l ;; esac; done
. "$(dirname "$me")/lib/common.sh" || exit 2
NO_TOKENIZER=""
parse "NO_TOKENIZER" "$@"
resolve
case $BUCKET in gs://?*) ;; *) die 2 "--bucket must be gs://…, but is '$BUCKET'" ;; esac

script COPY <<'END'
load_env
bucket=${1%/} no_tokenizer=$2
exec 9>"$D/data.lock"; flock -w 5 9 || fail "another data.sh is running on this VM" 6
copy() { # copy FOLDER TO
  local folder=$1
  mkdir -p "$BASE/$2"
  echo "copying what is missing of $bucket/$folder"
  gcloud storage rsync --recursive "$bucket/$folder" "$BASE/$2" >"$D/data.log" 2>&1 ||
    fail "cannot copy: $(grep -A 5 '^ERROR' "$D/data.log" | tail -n 6 | grep . || tail -n 1 "$D/data.log"). Is there a \
folder $folder in $bucket, and may this VM's service account read it? data.sh again goes on"
}
copy parquet parquet
if [ -z "$no_tokenizer" ] && gcloud storage ls "$bucket/tokenizer/" >/dev/null 2>&1; then
  rm -rf "$BASE/tokenizer.new"
  copy tokenizer tokenizer.new  # never a mixture of two
  if ! diff -rq "$BASE/tokenizer" "$BASE/tokenizer.new" >"$D/data.log" 2>&1; then
    [ ! -d "$BASE/tokenizer" ] || mv "$BASE/tokenizer" "$BASE/tokenizer.before.$(date +%s)"
    mv "$BASE/tokenizer.new" "$BASE/tokenizer"
  fi
  rm -rf "$BASE/tokenizer.new"
fi
echo "$(hostname): data and tokenizer are complete under $BASE"
END

get() { retry vm "$1" "$COPY" "$BUCKET" "$NO_TOKENIZER"; }
each get
