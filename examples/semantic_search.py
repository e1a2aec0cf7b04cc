"""Search the text and Markdown files below a folder by meaning.

    python semantic_search.py FOLDER "How do I …?"

Needs a Redis and a worker. `embedctl up` runs both on this machine, and prints the `export` line to set first.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from embedctl import enqueue_embeddings, load_settings

NEAREST = 3


def passages(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each paragraph with its place: one vector for a whole document would say little about its parts."""
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".txt", ".md")):
        for number, text in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n\n"), start=1):
            if text.strip():
                yield f"{path.relative_to(folder)}, paragraph {number}", text.strip()


def main() -> None:
    """Run the command line."""
    folder, question = Path(sys.argv[1]), sys.argv[2]
    found = list(passages(folder)) or sys.exit(f"{folder} holds no .txt or .md file with text")
    texts = [text for _, text in found]
    # The key is a hash of the model and the texts. The next search over the same files finds the same job, and encodes
    # only its question. One changed file makes another key, and so another job.
    key = hashlib.sha256("\0".join([load_settings().model, *texts]).encode()).hexdigest()
    corpus = enqueue_embeddings(texts, idempotency_key=f"search-{key}")
    asked = enqueue_embeddings([question], ttl=600)  # nobody reads this job again
    for job in (corpus, asked):
        job.wait()
    scores = corpus.vectors() @ asked.vectors()[0]  # vectors of unit length, so these are cosines
    for at in np.argsort(-scores)[:NEAREST]:  # the score of a failed paragraph is NaN, which sorts last
        print(f"{scores[at]:.2f}  {found[at][0]}\n      {' '.join(found[at][1].split())[:100]}")


if __name__ == "__main__":
    main()
