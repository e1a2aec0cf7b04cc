"""Embed the documents of a corpus that are new or changed since the last run, and keep all vectors in a folder.

    python nightly.py corpus.jsonl store     # from cron, say

Each line of the corpus is {"id": …, "text": …}. Whenever something has changed, a run adds a *part* to the store:

    000007.npy      float32, one row for each document that was embedded that night
    000007.jsonl    {"id": …, "sha256": …} for each row, with "error" if the document failed and its row is NaN;
                    then {"id": …} for each document that is gone from the corpus

Newer parts override older ones; `newest` reads them. You may kill the program at any moment and run it again:

- A part counts once its .jsonl exists. That file is written last, under a temporary name, and then renamed.
- The same changes make the same idempotency key, and so the same job: no text is queued twice, and everything that
  workers have encoded meanwhile is there. The key contains no date: a run that crashed before midnight continues after.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from embedctl import Job, enqueue_embeddings

Vector = np.ndarray[Any, np.dtype[np.float32]]


def documents(corpus: Path) -> Iterator[tuple[str, str]]:
    """Yield ids and texts one at a time: a corpus may be larger than memory."""
    with corpus.open(encoding="utf-8") as lines:
        for line in lines:
            document = json.loads(line)
            yield str(document["id"]), document["text"]


def digest(value: object) -> str:
    """A hash that shows whether a text has changed."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def rows(store: Path) -> Iterator[tuple[Path, int, dict[str, str]]]:
    """Yield each row of each part: the .npy file, the row's number and its entry; the oldest part first."""
    for part in sorted(store.glob("[0-9]*.jsonl")):
        for row, line in enumerate(part.read_text(encoding="utf-8").splitlines()):
            yield part.with_suffix(".npy"), row, json.loads(line)


def newest(store: Path) -> dict[str, Vector]:
    """The vector of each document that has one, for a search to read."""
    last = {entry["id"]: (file, row, entry) for file, row, entry in rows(store)}
    there = {name: (file, row) for name, (file, row, entry) in last.items() if {"id", "sha256"} == set(entry)}
    opened = {file: np.load(file, mmap_mode="r") for file, _ in there.values()}
    return {name: opened[file][row] for name, (file, row) in there.items()}


def embed(corpus: Path, changed: Mapping[str, str], part: str) -> Job:
    """The ended job of these changes: a new job, or the job of a run that was killed."""
    key = digest([str(corpus.resolve()), part, list(changed.items())])
    # Read the corpus again, because only the digests were kept. Texts that have changed since wait for the next night.
    texts = ({"id": name, "text": text} for name, text in documents(corpus) if changed.get(name) == digest(text))
    job = enqueue_embeddings(texts, idempotency_key=f"nightly-{key}")
    if job.wait().failed and job.retry_failed():  # perhaps a worker was at fault
        job.wait()
    return job


def check_model(store: Path, job: Job) -> None:
    """Refuse to mix the vectors of two models: searches in such a store would give wrong answers without an error."""
    file, fingerprint = store / "model", str(job.status().model_fingerprint)
    if not file.exists():
        file.write_text(fingerprint)
    if file.read_text() != fingerprint:
        sys.exit(f"{store} holds vectors of another model: embed everything into a new folder")


def write_vectors(file: Path, job: Job, changed: Mapping[str, str]) -> list[dict[str, str]]:
    """Write a job's vectors, one chunk at a time; return one entry per row."""
    status = job.status()
    vectors = np.lib.format.open_memmap(file, mode="w+", dtype=np.float32, shape=(status.records, status.dim or 0))
    entries: list[dict[str, str]] = []
    for chunk in job.iter_results():
        vectors[chunk.positions] = chunk.vectors
        failed = {error.position: {"error": error.code} for error in chunk.errors}
        for position, name in zip(chunk.positions.tolist(), chunk.ids, strict=True):
            entries.append({"id": str(name), "sha256": changed[str(name)], **failed.get(position, {})})
    vectors.flush()
    return entries


def publish(file: Path, target: Path) -> None:
    """Rename a complete file to its final name, once it is on the disk."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
    file.replace(target)


def night(corpus: Path, store: Path) -> str:
    """Bring the store up to date; return a one-line summary."""
    known = {entry["id"]: entry.get("sha256") for _, _, entry in rows(store)}
    today = {name: digest(text) for name, text in documents(corpus)}
    changed = {name: sha256 for name, sha256 in today.items() if known.get(name) != sha256}
    gone = [name for name, sha256 in known.items() if sha256 is not None and name not in today]
    if not changed and not gone:
        return "nothing has changed"
    part = f"{1 + len(list(store.glob('[0-9]*.jsonl'))):06}"
    entries: list[dict[str, str]] = []
    job = embed(corpus, changed, part) if changed else None
    if job is not None:
        check_model(store, job)
        entries = write_vectors(store / ".part.npy", job, changed)
        publish(store / ".part.npy", store / f"{part}.npy")
    entries += ({"id": name} for name in gone)
    (store / ".part.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    publish(store / ".part.jsonl", store / f"{part}.jsonl")  # from here on the part counts
    if job is not None:
        job.discard()  # the store has everything; free the memory of Redis
    failed = sum("error" in entry for entry in entries)
    return f"part {part}: {len(changed)} documents embedded, of which {failed} failed; {len(gone)} gone"


def main() -> None:
    """Run the command line."""
    corpus, store = Path(sys.argv[1]), Path(sys.argv[2])
    store.mkdir(parents=True, exist_ok=True)
    with (store / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"another run is writing {store}")
        print(night(corpus, store))


if __name__ == "__main__":
    main()
