"""Every format in and out, dry runs, and files that are written while something goes wrong."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embedctl.cli.run import _run_key
from embedctl.corpus.reading import open_corpus
from embedctl.corpus.rows import Rows
from tests.support.here import Here
from tests.support.jobs import reference
from tests.support.processes import RunEmbedctl

TEXTS = [f'text {i}, with "quotes" and ünïcode' for i in range(50)]


def write_corpus(path: Path, ids: str) -> None:
    rows = [{"id": f"{ids}-{i}", "text": text} for i, text in enumerate(TEXTS)]
    name, data = path.name, b"".join(f"{text}\n".encode() for text in TEXTS)
    if ".jsonl" in name:
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    elif ".parquet" in name:
        file = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), file)
        data = file.getvalue()
    elif ".txt" not in name:
        stream = io.StringIO(newline="")
        writer = csv.DictWriter(stream, ["id", "text"], dialect="excel-tab" if ".tsv" in name else "excel")
        writer.writeheader()
        writer.writerows(rows)
        data = stream.getvalue().encode()
    if name.endswith(".gz"):
        data = gzip.compress(data)
    if name.endswith(".zst"):
        data = pa.compress(data, "zstd", asbytes=True)
    path.write_bytes(data)


def test_every_format_in_gives_the_same_vectors(here: Here) -> None:
    here.start_worker()
    folder = here.folder / "d"
    folder.mkdir()
    suffixes = ["jsonl", "csv", "tsv", "txt", "parquet", "jsonl.gz", "csv.gz", "tsv.zst", "jsonl.zst", "parquet.gz"]
    for at, suffix in enumerate(suffixes):
        write_corpus(folder / f"{at}.{suffix}", suffix)
    for _ in range(2):  # the second time, the folder has the files that the first wrote
        here.embedctl("submit", "d", "-o", "d/out.npy", "--chunk-size", "13", status=0)
        np.testing.assert_array_equal(np.load(folder / "out.npy"), reference(TEXTS * len(suffixes)))
        ids = [json.loads(line) for line in (folder / "out.ids.jsonl").read_text().splitlines()]
        assert ids == [None if suffix == "txt" else f"{suffix}-{i}" for suffix in suffixes for i in range(50)]
    here.embedctl("submit", "d/3.txt", "d/0.*", "--limit", "51", "-o", "cut.npy", status=0)
    np.testing.assert_array_equal(np.load(here.folder / "cut.npy"), reference([*TEXTS, TEXTS[0]]))


def test_a_dry_run_on_one_machine_needs_no_redis_and_writes_nothing(embedctl: RunEmbedctl, short_folder: Path) -> None:
    texts = ["A cat sits on the mat.", "A cat sits on the mat.", "", "word " * 600]
    (short_folder / "c.json").write_text(json.dumps(texts))
    before = sorted(short_folder.rglob("*"))

    def dry_run(*more: str) -> subprocess.CompletedProcess[str]:
        command = ["run", "c.json", "--dry-run", "--class", "cpu", *more]
        return embedctl(*command, EMBEDCTL_REDIS_URL="", PATH="")

    done = dry_run("--model", "all-MiniLM-L6-v2", "-o", "out.npy")
    assert done.returncode == 0, done.stderr
    facts = dict(line.split(None, 1) for line in done.stdout.splitlines())
    assert facts["class"] == "cpu"
    assert (facts["records"], facts["unusable"], facts["duplicates"]) == ("4", "1", "1")
    assert (facts["tokens"], facts["truncated"]) == (str(9 + 9 + 256), "1")
    assert facts["vectors"] == f"{4 * 384 * 4:,} bytes"
    assert facts["workers"] == "no Redis was asked"
    wrong = dry_run("--precision", "int8")
    assert wrong.returncode == 2
    assert "offers precision fp32, not int8" in wrong.stderr
    assert sorted(short_folder.rglob("*")) == before


def test_the_key_of_a_run_covers_all_files_and_the_limit(tmp_path: Path) -> None:
    def key(command: str = "command") -> str | None:
        return _run_key(open_corpus(str(tmp_path), rows=Rows(10)), command)

    (tmp_path / "a.txt").write_text("a")
    seen = {key(), key("with another limit")}
    assert None not in seen
    assert key() in seen
    (tmp_path / "b.txt").write_text("b")
    seen.add(key())
    (tmp_path / "b.txt").write_text("bc")
    seen.add(key())
    os.utime(tmp_path / "a.txt", (1, 1))
    seen.add(key())
    (tmp_path / "b.txt").rename(tmp_path / "c.txt")
    seen.add(key())
    assert len(seen) == 6
    assert _run_key(open_corpus(str(tmp_path), "-", rows=Rows(10)), "command") is None
