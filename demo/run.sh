#!/usr/bin/env bash
# `make demo` runs this: embed a corpus and three questions on this machine, then find the nearest passages.
set -euo pipefail
cd "$(dirname "$0")"

export PATH="$PWD/../.venv/bin:$PATH"
unset "${!EMBEDCTL_@}" # the demo does not touch your own settings and your own Redis
export EMBEDCTL_STATE_DIR="$PWD/out/state"
export EMBEDCTL_CACHE_DIR="$PWD/out/cache"
mkdir -p out
cd out

step() {
	printf '\n$ %s\n' "$*"
	"$@"
}

step python ../corpus.py corpus.jsonl
began=$SECONDS
step embedctl run corpus.jsonl -o corpus.npy
seconds=$((SECONDS - began))
step embedctl run ../queries.txt -o queries.npy
step python ../nearest.py corpus.npy corpus.jsonl queries.npy ../queries.txt

records=$(wc -l <corpus.jsonl)
cat <<END

$records passages embedded in $seconds s, $((records / seconds)) per second, start and stop included. In demo/out:
  corpus.jsonl      the passages: one {"id": …, "text": …} per line
  corpus.npy        their vectors: one row per passage, in the same order
  corpus.ids.jsonl  their ids: one per line, in the same order
END
