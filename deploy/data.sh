#!/usr/bin/env bash
# Copies parquet shards and the tokenizer from a bucket to a VM: the files that the VM lacks or has in another size.
#
#   deploy/data.sh HOST --bucket=gs://my-bucket/nanochat
#
# All files go below NANOCHAT_BASE_DIR of the VM, however the folders of the bucket are nested: val/*.parquet to
# parquet/val/, other *.parquet to parquet/base_data_v3/, and the files of a folder named tokenizer or tokenizer_65k to
# tokenizer/. The VM's service account must be allowed to read the bucket.
#
#   --bucket gs://…            the bucket, or a folder of it
#   --worker N|all             which VM of a pod (default all)
#   --dry_run                  only print what would be done
#
# Exit status 6: another data.sh is running on the VM.
. "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
parse "" "$@"
resolve ${ARGS[@]+"${ARGS[@]}"}
case $BUCKET in gs://?*) ;; *) die 2 "--bucket must be gs://…, but is '$BUCKET'" ;; esac

script <<'END'
load_env
incoming=$BASE/incoming
exec 9>"$D/data.lock"; flock -w 5 9 || { echo "another data.sh is running on this VM" >&2; exit 6; }
mkdir -p "$incoming"
gcloud storage ls --long "${1%/}/**" >"$incoming/listing" ||
  { echo "cannot list $1: does it exist, and may this VM's service account read it?" >&2; exit 1; }
# One line per wanted object: size, path below $BASE, address.
awk '$1 ~ /^[0-9]+$/ && $3 ~ /^gs:/ {
  address = $0; sub(/^.*gs:/, "gs:", address); n = split(address, part, "/"); name = part[n]; folder = part[n - 1]
  if (name ~ /\.parquet$/) print $1 "\t" (folder == "val" ? "parquet/val/" : "parquet/base_data_v3/") name "\t" address
  else if (folder ~ /^tokenizer(_65k)?$/ && name != "") print $1 "\t" "tokenizer/" name "\t" address
}' "$incoming/listing" >"$incoming/wanted"
[ -s "$incoming/wanted" ] || { echo "$1 has neither *.parquet files nor a tokenizer folder" >&2; exit 1; }
twice=$(cut -f 2 "$incoming/wanted" | sort | uniq -d | head -n 1)
[ -z "$twice" ] || { echo "$1 has two files for $twice: let --bucket name the folder with the right one" >&2; exit 1; }
size() { stat -c %s "$1" 2>/dev/null || echo none; }
count=0
while IFS=$'\t' read -r bytes path address; do
  [ "$(size "$BASE/$path")" = "$bytes" ] || printf '%s\t%s\t%s\n' "$bytes" "$path" "$address"
done <"$incoming/wanted" >"$incoming/missing"
missing=$(($(awk '{ n += $1 } END { print n + 0 }' "$incoming/missing") / 1000000))
free=$(($(df -Pk "$BASE" | awk 'NR == 2 { print $4 }') / 1000))
echo "$(wc -l <"$incoming/wanted") files, $(wc -l <"$incoming/missing") missing, $missing MB; $free MB free"
[ "$missing" -lt "$free" ] || { echo "$missing MB are missing, but only $free MB are free in $BASE" >&2; exit 1; }
while IFS=$'\t' read -r bytes path address <&3; do
  count=$((count + 1))
  echo "$count  $address -> $path"
  mkdir -p "$BASE/${path%/*}"
  gcloud storage cp --no-user-output-enabled "$address" "$incoming/part" || { echo "cannot copy $address" >&2; exit 1; }
  [ "$(size "$incoming/part")" = "$bytes" ] ||
    { echo "$address: $(size "$incoming/part") of $bytes bytes arrived" >&2; exit 1; }
  mv "$incoming/part" "$BASE/$path"
done 3<"$incoming/missing"
rm -r "$incoming"
echo "$(hostname): data and tokenizer are complete under $BASE"
END

get() { retry vm "$1" "$SCRIPT" "$BUCKET"; }
each get
