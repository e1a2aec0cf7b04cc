#!/usr/bin/env bash
# What `make demo` runs: embed a corpus and three questions on this machine, then look up the nearest passages.
set -euo pipefail
cd "$(dirname "$0")"

export PATH="$PWD/../.venv/bin:$PATH"
unset "${!EMBEDCTL_@}" # your own settings and your own Redis stay out of it
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

$records passages embedded in $seconds s, $((records / seconds)) a second, start and stop included. In demo/out:
  corpus.jsonl      the passages: one {"id": …, "text": …} a line
  corpus.npy        their vectors: one row a passage, in the same order
  corpus.ids.jsonl  their ids, likewise
END
