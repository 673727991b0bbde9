# For every script: `source help.sh` first. Where the script is called with --help, it prints the comment at its top and
# ends, before it installs or builds anything.
for argument in "$@"; do
  if [[ "$argument" == --help ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[1]}"
    exit 0
  fi
done
