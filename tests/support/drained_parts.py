"""Reads the parts of a drained job alone, as a user would who has nothing but the folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from embedctl import Job
from embedctl_config import keys


@contextmanager
def unlocked(folder: Path) -> Iterator[None]:
    """Let the folder's lock be away, as it is for another machine."""
    lock = next(folder.glob(".*.lock"))
    lock.rename(folder / "aside")
    yield
    (folder / "aside").rename(lock)


def results_in_redis(job: Job) -> set[int]:
    """The chunks whose results are there."""
    with job._broker.connection.client() as client:
        chunks = range(job.status().chunks)
        return {chunk for chunk in chunks if client.exists(keys.chunk_result(job.id, chunk))}


def write_corpus(folder: Path, count: int) -> list[str]:
    """The texts of `c.jsonl`, which is made."""
    texts = [f"text {i}" for i in range(count)]
    (folder / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def manifest_of(folder: Path) -> dict[str, Any]:
    """The manifest, after each part that it lists was checked against it."""
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    listed = {part["name"] for part in manifest["parts"]}
    assert listed == {each.name for each in folder.glob("part-*.parquet")}
    for part in manifest["parts"]:
        data = (folder / part["name"]).read_bytes()
        assert (hashlib.sha256(data).hexdigest(), len(data)) == (part["sha256"], part["bytes"])
    return manifest


def rows_of(folder: Path) -> dict[int, dict[str, Any]]:
    """Position → row. Every position must be once in the parts of the corpus' chunks; later retries replace it."""
    found: dict[int, dict[str, Any]] = {}
    for path in sorted(folder.glob("part-[0-9]*.parquet")):
        footer = json.loads(pq.read_metadata(path).metadata[b"embedctl"])
        rows = pq.read_table(path).to_pylist()
        positions = [row["position"] for row in rows]
        assert (footer["first"], footer["last"], footer["records"]) == (positions[0], positions[-1], len(rows))
        assert not found.keys() & set(positions), f"{path.name} repeats positions"
        found |= dict(zip(positions, rows, strict=True))
    for path in sorted(folder.glob("part-retry-*.parquet")):
        found |= {row["position"]: row for row in pq.read_table(path).to_pylist()}
    return found
