"""Files that other tools write, through the command: each gives its vectors, or one line that says what is wrong."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.here import Here

CORPORA = Path(__file__).parent / "corpora"
#: File, options, exit status, what is told.
ROWS: list[tuple[str, Sequence[str], int, str]] = [
    ("quote-pair.tsv", (), 0, "5 read = 5 vectors + 0 failed"),
    ("quoted-title.tsv", (), 0, "3 read = 3 vectors + 0 failed"),
    ("open-quote.tsv", (), 0, "4 read = 4 vectors + 0 failed"),
    ("open-quote.csv", (), 2, "open-quote.csv, line 3: not csv: a quote is opened and never closed."),
    ("open-quote.csv", ("--skip-bad-lines",), 0, "4 read = 3 vectors + 0 failed + 1 bad line"),
    ("ctrl-z.csv", (), 0, "1 read = 1 vectors + 0 failed"),
    ("semicolon.csv", (), 0, "2 read = 2 vectors + 0 failed"),
    ("excel-sep.csv", (), 0, "1 read = 1 vectors + 0 failed"),
    ("old-mac.csv", (), 0, "2 read = 2 vectors + 0 failed"),
    ("old-mac.txt", (), 0, "3 read = 3 vectors + 0 failed"),
    ("utf16le.txt", (), 2, "utf16le.txt is not txt: it is no text in UTF-8."),
    ("utf16le.txt", ("--dialect", "encoding=utf-16-le"), 0, "2 read = 2 vectors + 0 failed"),
    ("utf16.txt", (), 0, "2 read = 2 vectors + 0 failed"),
    ("utf16.csv", (), 0, "2 read = 2 vectors + 0 failed"),
    ("utf16le.jsonl", (), 2, "utf16le.jsonl is not jsonl: it is no text in UTF-8."),
    ("utf16le.jsonl", ("--dialect", "encoding=utf-16-le"), 0, "2 read = 2 vectors + 0 failed"),
    ("latin1-text.parquet", (), 3, "2 read = 1 vectors + 1 failed"),
    ("latin1-id.parquet", (), 2, "latin1-id.parquet, row 1: the id 'ab\\udcff' is not valid UTF-8."),
    ("two-text.csv", (), 2, "two-text.csv, line 1: the column 'text' stands twice: rename one of the two"),
    ("two-text.jsonl", (), 2, "two-text.jsonl, line 1: the field 'text' stands twice: leave one of the two out"),
    ("two-id.csv", (), 2, "two-id.csv, line 1: the column 'id' stands twice: rename one of the two"),
    ("two-input-batch.jsonl", (), 2, "the field 'body.input' stands twice: leave one of the two out"),
    ("mixed-id.jsonl", (), 2, "mixed-id.jsonl, line 2: the id is text, and that of mixed-id.jsonl, line 1 is a whole"),
    ("long-number.jsonl", (), 0, "1 read = 1 vectors + 0 failed"),
    ("packed.jsonl.bz2", (), 0, "1 read = 1 vectors + 0 failed"),
]
#: Files, and the option that keeps a column.
COLUMNS = [
    *((f"{kind}-id.parquet", (), "id") for kind in ("int", "uuid", "decimal", "date")),
    ("kept-binary.parquet", ("--keep", "b"), "b"),
    ("kept-date.parquet", ("--keep", "d"), "d"),
]


@pytest.mark.slow
def test_each_text_has_a_vector_or_the_reason_is_told(here: Here) -> None:
    here.start_worker()
    for number, (name, options, status, told) in enumerate(ROWS):
        shutil.copy(CORPORA / name, here.folder)
        done = here.embedctl("submit", name, "-o", f"{number}.jsonl", *options)
        assert (done.returncode, told in done.stderr) == (status, True), f"{name} {options}: {done.stderr}"


@pytest.mark.slow
def test_a_column_has_the_type_that_it_had(here: Here) -> None:
    here.start_worker()
    for name, options, column in COLUMNS:
        shutil.copy(CORPORA / name, here.folder)
        here.embedctl("submit", name, "-o", "out.parquet", *options, status=0)
        read, written = (pq.read_table(here.folder / each)[column] for each in (name, "out.parquet"))
        assert (written.type, written.to_pylist()) == (read.type, read.to_pylist()), name
