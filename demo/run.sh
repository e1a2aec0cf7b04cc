#!/usr/bin/env bash
# `make demo` runs this: embed a corpus into a vector database, and three questions, on this machine. Then ask it for the
# nearest passages.
set -euo pipefail
cd "$(dirname "$0")"

export PATH="$PWD/../.venv/bin:$PATH"
unset "${!EMBEDCTL_@}" # the demo does not touch your own settings and your own Redis
export EMBEDCTL_STATE_DIR="$PWD/out/state"
export EMBEDCTL_CACHE_DIR="$PWD/out/cache"
mkdir -p out
cd out
rm -rf lance

step() {
	printf '\n$ %s\n' "$*"
	"$@"
}

step python ../corpus.py corpus.jsonl
began=$SECONDS
step embedctl run corpus.jsonl --keep text -o 'lancedb:lance?table=passages'
seconds=$((SECONDS - began))
step embedctl run ../queries.txt -o queries.npy
step python ../nearest.py lance passages queries.npy ../queries.txt

records=$(wc -l <corpus.jsonl)
cat <<END

$records passages embedded in $seconds s, $((records / seconds)) per second, start and stop included. In demo/out:
  corpus.jsonl      the passages: one {"id": …, "text": …} per line
  lance             a LanceDB database; its table passages has their ids, vectors and texts
END
