"""Show the passages whose vectors are nearest to those of given questions.

    python nearest.py corpus.npy corpus.jsonl queries.npy queries.txt

The vectors have unit length, so the dot product of two is their cosine.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import numpy as np

NEAREST = 3
WIDTH = 88


def main() -> None:
    """Run the command line."""
    vectors_file, corpus_file, query_vectors_file, queries_file = map(Path, sys.argv[1:])
    vectors, query_vectors = np.load(vectors_file, mmap_mode="r"), np.load(query_vectors_file)
    passages = [json.loads(line) for line in corpus_file.read_text(encoding="utf-8").splitlines()]
    queries = queries_file.read_text(encoding="utf-8").splitlines()
    for query, scores in zip(queries, query_vectors @ vectors.T, strict=True):
        print(f"\n{query}")
        for at in np.argsort(-scores)[:NEAREST]:
            print(f"  {scores[at]:.2f}  {passages[at]['id']}")
            text = textwrap.wrap(passages[at]["text"], WIDTH - 8, max_lines=2, placeholder=" …")
            print(textwrap.indent("\n".join(text), " " * 8))


if __name__ == "__main__":
    main()
