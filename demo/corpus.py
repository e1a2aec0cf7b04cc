"""Write a corpus of real English: the paragraphs of Python's own docstrings.

    python corpus.py corpus.jsonl [--limit 6000]

An id says where a passage stands: `asyncio.queues.Queue.get#2` is the second paragraph of that method's docstring.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from embedctl_bench.texts.passages import spread_passages


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--limit", type=int, default=6000, help="maximum number of passages (default: 6000)")
    arguments = parser.parse_args()
    found = spread_passages(arguments.limit)
    with arguments.output.open("w", encoding="utf-8") as stream:
        for label, text in found:
            stream.write(json.dumps({"id": label, "text": text}, ensure_ascii=False) + "\n")
    print(f"{len(found):,} passages written to {arguments.output}")


if __name__ == "__main__":
    main()
