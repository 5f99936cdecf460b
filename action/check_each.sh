#!/usr/bin/env bash
# The pre-commit hook: `autofit check` on each file, with the options that stand before `--`. Needs autofit on the PATH.
set -uo pipefail
options=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do options+=("$1") && shift; done
if [ $# -eq 0 ]; then
    echo "autofit-check: end the hook's args with --, for example args: [--gpu, a100-40gb, --]" >&2
    exit 2
fi
shift
worst=0
for recipe in "$@"; do
    echo "$recipe"
    code=0
    autofit check "${options[@]}" -- "$recipe" || code=$?
    [ "$code" -le "$worst" ] || worst=$code
done
exit "$worst"
