# shellcheck shell=bash disable=SC2034
# What gcloud's error messages mean, which tpu keeps in TPU_ERR; sourced by common.sh.

# failure prints gcloud's last error message in one line. Before it, gcloud may have written about its progress, and
# after it the details of the API. Without such a message it prints the last line that is not about progress.
failure() {
  printf '%s\n' "$TPU_ERR" | awk '/^ERROR: / { text = ""; inside = 1; sub(/^ERROR: (\(gcloud[^)]*\) )?/, "") }
       /^- .@type|^To search the help text/ { inside = 0 }
       inside && NF { sub(/^ +/, ""); text = text (text == "" ? "" : " ") $0 }
       NF && !/^(Create request issued|Waiting for operation|\.)/ { line = $0 }
       END { print text == "" ? line : text }'
}
# complaint prints gcloud's reason in its own words.
complaint() {
  if [[ $TPU_ERR = *"Failed to find attribute [project]"* ]]; then
    echo "no project is set: --project, PROJECT in config.env, or gcloud config set project"
    return
  fi
  failure | sed -e 's/^{.*"code": *\([0-9]*\),.*"message": *"\(.*\)".*/\2 (code \1)/' -e 's/\\"/"/g' \
    -e 's/^HttpError.*"message": *"\([^"]*\)".*/\1/' | cut -c 1-500 | grep . || echo "gcloud failed and did not say why"
}

# why prints the reason of gcloud's failure: not_found, auth, quota, stockout, permanent (an error that no waiting
# mends: a misspelt zone, an API that is not enabled, a missing permission) or other. Only the message tells them apart,
# because every failure exits with status 1: it begins with the name of a google.rpc code, or is JSON with its number.
why() {
  local text code
  text=$(failure)
  code=$(printf '%s\n' "$text" | sed -n -e 's/^\([A-Z][A-Z_]*\): .*/\1/p' -e 's/^{[^{}]*"code": *\([0-9]*\).*/\1/p' \
    -e 's/^HttpError.*"status": *"\([A-Z_]*\)".*/\1/p')
  case $code in
    NOT_FOUND | 5)
      case $text in
        */nodes/*) echo not_found ;;
        *location* | *Location* | *roject*) echo permanent ;;  # it is the zone or the project that does not exist
        *) echo not_found ;;
      esac ;;
    UNAUTHENTICATED | 16) echo auth ;;
    RESOURCE_EXHAUSTED | 8)
      case $text in
        *"per minute"*) echo other ;;  # too many requests
        *[Qq]uota*) echo quota ;;
        *) echo stockout ;;
      esac ;;
    INVALID_ARGUMENT | 3 | PERMISSION_DENIED | 7 | OUT_OF_RANGE | 11 | UNIMPLEMENTED | 12) echo permanent ;;
    *)
      case $text in
        *eauthenticat* | *invalid_grant* | *"auth login"*) echo auth ;;
        *"unrecognized arguments"* | *"argument --"* | *"Failed to find attribute"* | *"required property"* | \
          *"command not found"*) echo permanent ;;
        *"no more capacity"*) echo stockout ;;
        *) echo other ;;
      esac ;;
  esac
}
