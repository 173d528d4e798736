#!/usr/bin/env bash
# Copies parquet shards and the tokenizer from a bucket to a VM: the files that the VM lacks or has in another size.
#
#   deploy/data.sh HOST --bucket=gs://my-bucket/nanochat
#
# All files go below NANOCHAT_BASE_DIR of the VM, however the folders of the bucket are nested: val/*.parquet to
# parquet/val/, other *.parquet to parquet/base_data_v3/, and the files of a folder named tokenizer or tokenizer_65k to
# tokenizer/. Many files are copied at the same time, and an interrupted copy is resumed by the next data.sh. The VM's
# service account must be allowed to read the bucket.
#
#   --bucket gs://…            the bucket, or a folder of it
#   --no_tokenizer             leave the bucket's tokenizer out; training uses the one that push.sh brings
#   --worker N|all             which VM of a pod (default all)
#   --dry_run                  only print what would be done
#
# Exit status 6: another data.sh is running on the VM.
me=$0; while [ -L "$me" ]; do l=$(readlink "$me"); case $l in /*) me=$l ;; *) me=$(dirname "$me")/$l ;; esac; done
. "$(dirname "$me")/lib/common.sh" || exit 2
NO_TOKENIZER=""
parse "NO_TOKENIZER" "$@"
resolve ${ARGS[@]+"${ARGS[@]}"}
case $BUCKET in gs://?*) ;; *) die 2 "--bucket must be gs://…, but is '$BUCKET'" ;; esac

script <<'END'
load_env
bucket=${1%/} no_tokenizer=$2 incoming=$BASE/incoming
fail() { echo "$1" >&2; exit "${2:-1}"; }
exec 9>"$D/data.lock"; flock -w 5 9 || fail "another data.sh is running on this VM" 6
mkdir -p "$incoming"
gcloud storage ls --long "$bucket/**" >"$incoming/listing" ||
  fail "cannot list $bucket: does it exist, and may this VM's service account read it?"
# One line per wanted object: size, path below $BASE, address.
awk -v no_tokenizer="$no_tokenizer" '$1 ~ /^[0-9]+$/ && $3 ~ /^gs:/ {
  address = $0; sub(/^.*gs:/, "gs:", address); n = split(address, part, "/"); name = part[n]; folder = part[n - 1]
  if (name ~ /\.parquet$/) print $1 "\t" (folder == "val" ? "parquet/val/" : "parquet/base_data_v3/") name "\t" address
  else if (folder ~ /^tokenizer(_65k)?$/ && name != "" && !no_tokenizer) print $1 "\t" "tokenizer/" name "\t" address
}' "$incoming/listing" >"$incoming/wanted"
[ -s "$incoming/wanted" ] || fail "$bucket has neither *.parquet files nor a tokenizer folder"
twice=$(cut -f 2 "$incoming/wanted" | sort | uniq -d | head -n 1)
[ -z "$twice" ] || fail "$bucket has two files for $twice: let --bucket name the folder with the right one"

size() { stat -c %s "$1" 2>/dev/null || echo none; }
new_tokenizer=""
while IFS=$'\t' read -r bytes path address; do
  [ "$(size "$BASE/$path")" != "$bytes" ] || continue
  case $path in
    tokenizer/*) new_tokenizer=1 ;;
    *) [ "$(size "$incoming/$path")" = "$bytes" ] || printf '%s\t%s\t%s\n' "$bytes" "$path" "$address" ;;
  esac
done <"$incoming/wanted" >"$incoming/missing"
[ -z "$new_tokenizer" ] || grep $'\ttokenizer/' "$incoming/wanted" >>"$incoming/missing"  # all of it, never a mixture
missing=$(($(awk '{ n += $1 } END { print n + 0 }' "$incoming/missing") / 1000000))
free=$(($(df -Pk "$BASE" | awk 'NR == 2 { print $4 }') / 1000))
echo "$(wc -l <"$incoming/wanted") files, $(wc -l <"$incoming/missing") missing, $missing MB; $free MB free"
[ "$missing" -lt "$free" ] || fail "$missing MB are missing, but only $free MB are free in $BASE"

# copy FOLDER brings the missing files of the folder into incoming/, all in one call: gcloud copies several at a time.
copy() {
  grep $'\t'"$1/[^/]*"$'\t' "$incoming/missing" >"$incoming/part" || return 0
  mkdir -p "$incoming/$1"
  echo "copying $(wc -l <"$incoming/part") files to $BASE/$1"
  cut -f 3 "$incoming/part" | gcloud storage cp --read-paths-from-stdin "$incoming/$1/" 2>"$incoming/messages" ||
    fail "cannot copy: $(grep -A 5 '^ERROR' "$incoming/messages" | tail -n 6); data.sh again resumes"
  while IFS=$'\t' read -r bytes path address; do
    [ "$(size "$incoming/$path")" = "$bytes" ] || fail "$address: $(size "$incoming/$path") of $bytes bytes arrived"
  done <"$incoming/part"
}
[ -z "$new_tokenizer" ] || rm -rf "$incoming/tokenizer" "$BASE/tokenizer.before"
for folder in tokenizer parquet/base_data_v3 parquet/val; do copy $folder; done
[ -z "$new_tokenizer" ] || [ ! -d "$BASE/tokenizer" ] || mv "$BASE/tokenizer" "$BASE/tokenizer.before"
cut -f 2 "$incoming/wanted" | while read -r path; do
  [ ! -f "$incoming/$path" ] || { mkdir -p "$BASE/${path%/*}"; mv "$incoming/$path" "$BASE/$path"; }
done
rm -r "$incoming"
echo "$(hostname): data and tokenizer are complete under $BASE"
END

get() { retry vm "$1" "$SCRIPT" "$BUCKET" "$NO_TOKENIZER"; }
each get
