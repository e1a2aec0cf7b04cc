"""Show the passages whose vectors are nearest to those of given questions, from a table of LanceDB.

python nearest.py FOLDER TABLE queries.npy queries.txt
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import lancedb
import numpy as np

NEAREST = 3
WIDTH = 88


def main() -> None:
    """Run the command line."""
    folder, name, query_vectors_file, queries_file = sys.argv[1:]
    table = lancedb.connect(folder).open_table(name)
    queries = Path(queries_file).read_text(encoding="utf-8").splitlines()
    for query, vector in zip(queries, np.load(query_vectors_file), strict=True):
        print(f"\n{query}")
        for found in table.search(vector).distance_type("cosine").limit(NEAREST).to_list():
            print(f"  {1 - found['_distance']:.2f}  {found['id']}")
            passage = json.loads(found["metadata"])["text"]
            text = textwrap.wrap(passage, WIDTH - 8, max_lines=2, placeholder=" …")
            print(textwrap.indent("\n".join(text), " " * 8))


if __name__ == "__main__":
    main()
