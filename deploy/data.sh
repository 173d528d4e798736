#!/usr/bin/env bash
# Brings parquet shards and the tokenizer from a bucket to a VM: only what is missing there or has another size.
#
#   deploy/data.sh HOST --bucket=gs://my-bucket/nanochat
#
# However the bucket is nested, val/*.parquet goes to parquet/val, other *.parquet to parquet/base_data_v3, and what is
# in a folder called tokenizer or tokenizer_65k to tokenizer/, all under NANOCHAT_BASE_DIR of the VM. The VM must be
# allowed to read the bucket (its service account).
#
#   --worker N|all             which VM of a pod (default all)
#   --dry_run                  say what would be done
. "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"
parse "" "$@"
resolve ${ARGS[@]+"${ARGS[@]}"}
case $BUCKET in gs://?*) ;; *) die 2 "--bucket=gs://… is needed, is: '$BUCKET'" ;; esac

script <<'END'
load_env
incoming=$BASE/incoming
exec 9>"$D/data.lock"; flock -w 5 9 || { echo "data.sh is at work on this VM already" >&2; exit 6; }
mkdir -p "$incoming"
gcloud storage ls --long "${1%/}/**" >"$incoming/listing" ||
  { echo "cannot list $1: does it exist, and may this VM's service account read it?" >&2; exit 1; }
# size, place, address of every object that we want
awk '$1 ~ /^[0-9]+$/ && $3 ~ /^gs:/ {
  address = $0; sub(/^.*gs:/, "gs:", address); n = split(address, part, "/"); name = part[n]; folder = part[n - 1]
  if (name ~ /\.parquet$/) print $1 "\t" (folder == "val" ? "parquet/val/" : "parquet/base_data_v3/") name "\t" address
  else if (folder ~ /^tokenizer(_65k)?$/ && name != "") print $1 "\t" "tokenizer/" name "\t" address
}' "$incoming/listing" >"$incoming/wanted"
[ -s "$incoming/wanted" ] || { echo "nothing of ours in $1: no *.parquet, no tokenizer/" >&2; exit 1; }
twice=$(cut -f 2 "$incoming/wanted" | sort | uniq -d | head -n 1)
[ -z "$twice" ] || { echo "$1 has two files for $twice: give a --bucket further down" >&2; exit 1; }
size() { stat -c %s "$1" 2>/dev/null || echo none; }
count=0 bytes=0 missing=0
while IFS=$'\t' read -r bytes place address; do
  [ "$(size "$BASE/$place")" = "$bytes" ] || { printf '%s\t%s\t%s\n' "$bytes" "$place" "$address"; }
done <"$incoming/wanted" >"$incoming/missing"
missing=$(($(awk '{ n += $1 } END { print n + 0 }' "$incoming/missing") / 1000000))
free=$(($(df -Pk "$BASE" | awk 'NR == 2 { print $4 }') / 1000))
echo "$(wc -l <"$incoming/wanted") files, $(wc -l <"$incoming/missing") missing, $missing MB; $free MB free"
[ "$missing" -lt "$free" ] || { echo "$missing MB do not fit: $free MB free on $BASE" >&2; exit 1; }
while IFS=$'\t' read -r bytes place address <&3; do
  count=$((count + 1))
  echo "$count  $address -> $place"
  mkdir -p "$BASE/${place%/*}"
  gcloud storage cp --no-user-output-enabled "$address" "$incoming/part" || { echo "cannot copy $address" >&2; exit 1; }
  [ "$(size "$incoming/part")" = "$bytes" ] ||
    { echo "$address: $(size "$incoming/part") bytes came, not $bytes" >&2; exit 1; }
  mv "$incoming/part" "$BASE/$place"
done 3<"$incoming/missing"
rm -r "$incoming"
echo "$(hostname): data and tokenizer are complete under $BASE"
END

get() { retry vm "$1" "$SCRIPT" "$BUCKET"; }
each get
