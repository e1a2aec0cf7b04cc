"""Every format in and out, and files that are written while something goes wrong."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from subprocess import DEVNULL

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedctl import OutputError, enqueue_embeddings
from embedctl.destinations.files import fetch
from embedctl_config.settings import Settings
from tests.support.forked import Forked
from tests.support.jobs import reference
from tests.support.processes import RunEmbedctl
from tests.support.waiting import eventually
from tests.support.workers import StartWorker

TEXTS = [f'text {i}, with "quotes" and ünïcode' for i in range(50)]
SLOW = [f"text {i} " + "word " * 60 for i in range(40)]


def write_corpus(path: Path, ids: str) -> str:
    rows = [{"id": f"{ids}-{i}", "text": text} for i, text in enumerate(TEXTS)]
    name = path.name
    if ".jsonl" in name:
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    elif ".parquet" in name:
        plain = path.with_suffix(".plain")
        pq.write_table(pa.Table.from_pylist(rows), plain)
        data = plain.read_bytes()
    elif ".txt" in name:
        data = "".join(text + "\n" for text in TEXTS).encode()
    else:
        plain = path.with_suffix(".plain")
        with plain.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, ["id", "text"], dialect="excel-tab" if ".tsv" in name else "excel")
            writer.writeheader()
            writer.writerows(rows)
        data = plain.read_bytes()
    if name.endswith(".gz"):
        data = gzip.compress(data)
    if name.endswith(".zst"):
        data = pa.compress(data, "zstd", asbytes=True)
    path.write_bytes(data)
    return str(path)


def test_every_format_in_gives_the_same_vectors(
    embedctl: RunEmbedctl, start_worker: StartWorker, short_folder: Path
) -> None:
    start_worker()
    suffixes = ["jsonl", "csv", "tsv", "txt", "parquet", "jsonl.gz", "csv.gz", "tsv.zst", "jsonl.zst", "parquet.gz"]
    corpora = [write_corpus(short_folder / f"{at}.{suffix}", suffix) for at, suffix in enumerate(suffixes)]
    done = embedctl("submit", *corpora, "-o", "out.npy", "--chunk-size", "13")
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(short_folder / "out.npy"), reference(TEXTS * len(suffixes)))
    ids = [json.loads(line) for line in (short_folder / "out.ids.jsonl").read_text().splitlines()]
    assert ids == [None if suffix == "txt" else f"{suffix}-{i}" for suffix in suffixes for i in range(50)]


def test_every_format_out_holds_the_same_vectors(
    settings: Settings, start_worker: StartWorker, short_folder: Path
) -> None:
    start_worker()
    texts = [*TEXTS[:20], "", *TEXTS[20:], "word " * 300]
    job = enqueue_embeddings(texts, ids=[f"id-{i}" for i in range(52)], chunk_size=7, settings=settings)
    job.wait(timeout=60)
    vectors = job.vectors()

    fetch(job, short_folder / "out.jsonl")
    rows = [json.loads(line) for line in (short_folder / "out.jsonl").read_text().splitlines()]
    assert [row["position"] for row in rows] == list(range(52))
    assert rows[20] == {"position": 20, "id": "id-20", "error": {"code": "empty", "message": "the text is empty"}}
    assert rows[51]["truncated"] == {"used": 256, "lost": 44}
    good = [row for row in rows if "embedding" in row]
    np.testing.assert_array_equal(np.array([row["embedding"] for row in good], np.float32), np.delete(vectors, 20, 0))

    fetch(job, short_folder / "out.parquet")
    table = pq.read_table(short_folder / "out.parquet")
    assert table["id"].to_pylist() == [f"id-{i}" for i in range(52)]
    assert table["embedding"].null_count == 1
    assert table["error_code"].to_pylist()[20] == "empty"
    assert (table["tokens_used"].to_pylist()[51], table["tokens_lost"].to_pylist()[51]) == (256, 44)
    column = [row for row in table["embedding"].to_pylist() if row is not None]
    np.testing.assert_array_equal(np.array(column, np.float32), np.delete(vectors, 20, 0))

    assert len(fetch(job, short_folder / "out.npy").files) == 4
    np.testing.assert_array_equal(np.load(short_folder / "out.npy"), vectors)
    assert not list(short_folder.glob(".out*"))


@pytest.mark.parametrize(
    "name", ["out.npy", *(pytest.param(name, marks=pytest.mark.slow) for name in ("out.jsonl", "out.parquet"))]
)
def test_a_reader_that_was_killed_is_resumed(
    name: str,
    settings: Settings,
    environment: dict[str, str],
    embedctl: RunEmbedctl,
    start_worker: StartWorker,
    short_folder: Path,
) -> None:
    texts = [*SLOW, *(f"more {text}" for text in SLOW)]
    start_worker("slow")
    job = enqueue_embeddings(texts, hardware="slow", chunk_size=5, settings=settings)
    log = short_folder / "reader.log"
    reader = Forked(["fetch", job.id, "-o", name], environment, short_folder, log, log)
    eventually(lambda: (short_folder / f".{name}.part").exists())
    reader.kill()
    reader.wait()
    assert not (short_folder / name).exists()
    done = embedctl("fetch", job.id, "-o", name)
    assert done.returncode == 0, done.stderr
    expected = reference(texts)
    if name == "out.npy":
        found = np.load(short_folder / name)
    elif name == "out.jsonl":
        lines = (short_folder / name).read_text().splitlines()
        found = np.array([json.loads(line)["embedding"] for line in lines], np.float32)
    else:
        found = np.array(pq.read_table(short_folder / name)["embedding"].to_pylist(), np.float32)
    np.testing.assert_array_equal(found, expected)
    assert not list(short_folder.glob(".out*"))


@pytest.mark.slow
def test_two_fetches_to_one_file_do_not_mix(
    settings: Settings, environment: dict[str, str], start_worker: StartWorker, short_folder: Path
) -> None:
    job = enqueue_embeddings(SLOW, hardware="slow", settings=settings)
    first = Forked(["fetch", job.id, "-o", "out.npy"], environment, short_folder, DEVNULL, DEVNULL)
    eventually(lambda: (short_folder / ".out.npy.lock").exists())
    with pytest.raises(OutputError, match="another fetch"):
        fetch(job, short_folder / "out.npy")
    start_worker("slow")
    assert first.wait(60) == 0
    np.testing.assert_array_equal(np.load(short_folder / "out.npy"), reference(SLOW))
