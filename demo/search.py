"""Search a corpus by hybrid. Of each question, one list has the passages that are nearest in a table of LanceDB, by
dense vectors, and another one the best by sparse vectors. Reciprocal rank fusion makes one list of both.

python search.py FOLDER TABLE sparse.parquet queries.npy queries-sparse.parquet queries.txt
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import lancedb
import numpy as np
import pyarrow.parquet as pq

SHOWN = 3
#: So many passages of each list count; a passage has 1 / (RANK + its rank) of each list that it is in. Cormack et al.,
#: "Reciprocal Rank Fusion outperforms Condorcet and individual Rank Learning Methods", SIGIR 2009.
LISTED, RANK = 50, 60
WIDTH = 88


class Sparse:
    """Sparse vectors of a file: indices in a vocabulary and their weights."""

    def __init__(self, path: str) -> None:
        table = pq.read_table(path, columns=["id", "sparse"]).combine_chunks()
        self.ids = table["id"].to_pylist()
        rows = table["sparse"].chunk(0)
        self._starts = rows.offsets.to_numpy()
        self._indices, self._weights = (column.to_numpy() for column in rows.values.flatten())

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for first, end in zip(self._starts[:-1], self._starts[1:], strict=True):
            yield self._indices[first:end], self._weights[first:end]

    def best(self, indices: np.ndarray, weights: np.ndarray) -> list[str]:
        """The ids of the vectors with the largest inner products with another one, which is given."""
        query = np.zeros(1 + max(self._indices.max(), indices.max()), np.float32)
        query[indices] = weights
        sums = np.cumsum(np.concatenate([[0], query[self._indices] * self._weights]))
        scores = sums[self._starts[1:]] - sums[self._starts[:-1]]
        return [self.ids[row] for row in np.argsort(-scores)[:LISTED]]


def main() -> None:
    """Run the command line."""
    folder, name, sparse_file, dense_queries, sparse_queries, queries_file = sys.argv[1:]
    table, sparse = lancedb.connect(folder).open_table(name), Sparse(sparse_file)
    rows = table.to_arrow()
    texts = dict(zip(rows["id"].to_pylist(), rows["metadata"].to_pylist(), strict=True))
    queries = Path(queries_file).read_text(encoding="utf-8").splitlines()
    for query, vector, words in zip(queries, np.load(dense_queries), Sparse(sparse_queries), strict=True):
        near = table.search(vector).distance_type("cosine").limit(LISTED).to_list()
        lists = {"dense": [found["id"] for found in near], "sparse": sparse.best(*words)}
        fused = Counter[str]()
        for found in lists.values():
            fused.update({label: 1 / (RANK + rank) for rank, label in enumerate(found, 1)})
        print(f"\n{query}")
        for label, score in fused.most_common(SHOWN):
            ranks = [f"{kind} {found.index(label) + 1}" for kind, found in lists.items() if label in found]
            print(f"  {score:.4f}  {label}  ({', '.join(ranks)})")
            text = textwrap.wrap(json.loads(texts[label])["text"], WIDTH - 10, max_lines=2, placeholder=" …")
            print(textwrap.indent("\n".join(text), " " * 10))


if __name__ == "__main__":
    main()
