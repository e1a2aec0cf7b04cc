"""Several files, folders, patterns and streams as one corpus, and what is said about those that can't be read."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedctl.cli.corpora import refuse_addresses
from embedctl.corpus.reading import Corpus, open_corpus
from embedctl.corpus.rows import Rows
from embedctl_config.errors import InputError


def opened(*paths: str | Path, text_field: str = "text", id_field: str = "id", **options: Any) -> Corpus:
    return open_corpus(*map(str, paths), rows=Rows(1000, text_field, id_field), **options)


def texts(*paths: str | Path, **options: Any) -> list[str]:
    return [record.text.decode() for record in opened(*paths, **options).records()]


def pipe(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(content))))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a file of most formats, a folder and files that are no corpus."""
    monkeypatch.chdir(tmp_path)
    Path("d").mkdir()
    Path("d/e").mkdir()
    Path("d/b.txt").write_text("b1\nb2\n")
    Path("d/a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    Path("d/c.csv").write_text("id,text\n1,c\n")
    Path("d/README.md").write_text("no corpus")
    Path("d/.hidden.txt").write_text("no corpus")
    Path("d/e/deep.txt").write_text("deep\n")
    Path("z.json").write_text('["z"]')
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_files_folders_and_patterns_come_in_the_order_given() -> None:
    assert texts("z.json", "d") == ["z", "a", "b1", "b2", "c"]
    assert texts("d/", "z.json") == ["a", "b1", "b2", "c", "z"]
    assert texts("d/*.[tc]*", "*.json") == ["b1", "b2", "c", "z"]
    assert texts("**/*.txt") == ["b1", "b2", "deep"]
    assert texts("z.json", "d/e", file_format="txt") == ['["z"]', "deep"]


@pytest.mark.usefixtures("folder")
def test_standard_input_may_stand_among_files_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, b'{"text": "piped"}\n')
    assert texts("z.json", "-", "d/e") == ["z", "piped", "deep"]
    assert not opened("z.json", "-").rereadable
    with pytest.raises(InputError, match=r"standard input \(-\) is given twice"):
        opened("-", "-")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (["nothing"], "nothing can't be read: no such file"),
        (["z.json/x"], "z.json/x can't be read: no such file"),
        ([""], "an empty name is given"),
        (["x" * 300], "can't be read: File name too long"),
        (["*.parquet"], r"\*\.parquet can't be read: no file matches"),
        (["d/README.md"], r"d/README\.md: can't tell the format from '\.md'; give --format"),
        (["empty"], r"empty is a folder: no file in it ends in \.jsonl, .* such as 'empty/\*\*/\*\.jsonl'"),
        (["d", "d/b.txt"], r"d/b\.txt is given twice: as d and as d/b\.txt"),
        (["link.json", "z.json"], r"z\.json is given twice"),
    ],
)
def test_what_names_no_file_or_one_twice_is_refused(paths: list[str], words: str) -> None:
    Path("empty").mkdir()
    Path("empty/x.xlsx").touch()
    Path("link.json").symlink_to("z.json")
    with pytest.raises(InputError, match=words):
        opened(*paths)


@pytest.mark.usefixtures("folder")
def test_links_in_a_circle_do_no_harm_and_those_that_lead_nowhere_are_named() -> None:
    for name in ("x", "y"):
        Path("d/e", name).symlink_to("..")
        Path("d", name).symlink_to("e")
    assert texts("d/**/*.txt") == ["b1", "b2", "deep"]
    assert texts(f"{Path.cwd()}/**/e/**/deep.txt") == ["deep"]
    Path("d/gone.csv").symlink_to("nowhere")
    for argument in ("d", "d/*.csv", "**/g*.csv"):
        with pytest.raises(InputError, match=r"d/gone\.csv can't be read: No such file"):
            opened(argument)
    Path("d/gone.csv").unlink()
    Path("d/round.csv").symlink_to("round.csv")
    for argument in ("d", "d/round.csv"):
        with pytest.raises(InputError, match=r"d/round\.csv can't be read: Too many levels"):
            opened(argument)


@pytest.mark.parametrize("change", ["grows", "is cut", "is replaced"])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, change: str) -> None:
    path = tmp_path / "c.txt"
    path.write_text(f"{'a text' * 25}\n" * 1000)

    def changed() -> None:
        if change == "is replaced":
            (tmp_path / "new").write_text(f"{'a text' * 25}\n" * 1000)
            (tmp_path / "new").rename(path)
        else:
            with path.open("a" if change == "grows" else "r+") as stream:
                stream.write("one more\n") if change == "grows" else stream.truncate(7)

    corpus = opened(path)
    corpus.check()
    assert len(list(corpus.records())) == 1000
    reading = corpus.records()
    next(reading)
    changed()
    for records in (reading, corpus.records()):
        with pytest.raises(InputError, match=r"c\.txt has changed while it was read"):
            list(records)


@pytest.mark.usefixtures("folder")
def test_files_that_will_be_written_are_no_part_of_a_folder_and_never_overwritten() -> None:
    written = [Path("d/b.txt").resolve()]
    assert texts("d", written=written) == ["a", "c"]
    assert texts("d/*.[tc]*", written=written) == ["c"]
    with pytest.raises(InputError, match="the vectors would overwrite it"):
        opened("d/b.txt", written=written)


@pytest.mark.usefixtures("folder")
def test_an_unreadable_file_later_in_the_list_is_found_by_a_check() -> None:
    Path("d/d.jsonl.gz").write_bytes(b"no gzip")
    corpus = opened("d", "z.json")
    for check in (corpus.check, corpus.check_beginnings):
        with pytest.raises(InputError, match=r"d/d\.jsonl\.gz can't be read: Not a gzipped file"):
            check()
    Path("d/d.jsonl.gz").unlink()
    Path("d/d.csv").write_text("body\nx\n")
    with pytest.raises(InputError, match=r"d/d\.csv, line 1: no field 'text'; fields seen: body"):
        opened("d").check_beginnings()


def bad(folder: Path, content: str, name: str = "c.jsonl") -> Corpus:
    (folder / name).write_text(content)
    return opened(folder / name)


def test_a_check_names_the_first_bad_lines_of_all_files_and_counts_all(tmp_path: Path) -> None:
    bad(tmp_path, '{"text": "a"}\n' + "nope\n" * 8, "a.jsonl")
    bad(tmp_path, '{"text": "a"}\n{"body": 1}\n' + "nope\n" * 20, "b.jsonl")
    with pytest.raises(InputError) as raised:
        opened(tmp_path).check()
    summary, *lines = str(raised.value).split("\n")
    assert summary == "29 lines are bad, and nothing is queued. To leave such lines out, give --skip-bad-lines."
    assert len(lines) == 11
    assert "a.jsonl, line 2: not JSON" in lines[0]
    assert "b.jsonl, line 2: no field 'text'; fields seen: body" in lines[8]
    assert lines[-1] == "…"


def test_skipped_lines_come_with_the_position_of_the_next_record(tmp_path: Path) -> None:
    skipped: list[tuple[str, int]] = []
    corpus = bad(tmp_path, 'nope\n{"text": "a"}\n\n{"text": "b"}\n[]\nnope\n')
    list(corpus.records(lambda error, position: skipped.append((str(error), position))))
    where = [(error.rpartition("c.jsonl, ")[2].partition(":")[0], position) for error, position in skipped]
    assert where == [("line 1", 0), ("line 5", 2), ("line 6", 2)]


@contextmanager
def lines_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """The lines that are read inside the block."""
    read: list[bytes] = []

    def counted(stream: io.BufferedReader, name: str) -> Iterator[bytes]:
        for line in stream:
            read.append(line)
            yield line

    with monkeypatch.context() as patch:
        patch.setattr("embedctl.corpus.file.bounded_lines", counted)
        yield read


@pytest.mark.usefixtures("folder")
def test_a_limit_takes_the_first_records_and_reads_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    assert texts("d", "z.json", limit=3) == ["a", "b1", "b2"]
    assert texts("d", limit=100) == ["a", "b1", "b2", "c"]
    Path("c.jsonl").write_text('{"text": "1"}\n{"text": "2"}\nnope\n')
    with lines_read(monkeypatch) as read:
        opened("c.jsonl", "d", limit=2).check()
        assert len(read) == 2
        assert texts("c.jsonl", "d", limit=2) == ["1", "2"]
        assert len(read) == 4


def test_a_limit_leaves_the_rest_of_a_pipe_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.write(writing, b'{"text": "a"}\n{"text": "b"}\n')  # and it stays open: a third line never comes
    with os.fdopen(reading, "rb") as stream:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=stream))
        assert texts("-", limit=2) == ["a", "b"]
    os.close(writing)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a text\n", "; standard input is read as jsonl: give --format txt for plain text, or .* csv"),
        (b"3\n", "expected an object .* found a number; standard input is read as jsonl"),
        (b'[{"text": "a"}]', "give --format json$"),
        (b"PAR1\x15", "not jsonl, but parquet: give --format parquet"),
        (gzip.compress(b"{}", mtime=0), "but compressed: .* pipe it through gunzip"),
    ],
)
def test_standard_input_of_another_format_names_it(content: bytes, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, content)
    with pytest.raises(InputError, match=rf"standard input.*{words}"):
        texts("-")


def test_a_check_of_standard_input_finds_another_format_and_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe(monkeypatch, b"a text\nand another\n")
    with pytest.raises(InputError, match="give --format txt"):
        opened("-").check()
    opened("-", file_format="txt").check()
    assert texts("-", file_format="txt") == ["a text", "and another"]
    for content in (b"", b'\xef\xbb\xbf\n{"text": "a"}\n', b'{"text": "a"}', b'{"text": "' + b"x" * 100_000):
        pipe(monkeypatch, content)
        opened("-").check()


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("HTTP://x.org/c.csv?a=1&b=2", "curl -sSL 'HTTP://x.org/c.csv?a=1&b=2' | embedctl run - --format …"),
        ("s3://b/c.parquet", "aws s3 cp s3://b/c.parquet - | embedctl run - --format …"),
        ("file:///c.jsonl", "Give the path of a file"),
    ],
)
def test_an_address_is_refused_with_the_line_that_pipes(address: str, words: str) -> None:
    with pytest.raises(InputError) as raised:
        refuse_addresses(["a.jsonl", address], "run")
    assert str(raised.value) == f"{address} is not a file, and embedctl downloads nothing. " + (
        words if words.startswith("Give") else f"Pipe it: {words}"
    )
    refuse_addresses(["a.jsonl", "-", "dir/https:", "C:x"], "run")


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_nested_fields_are_read_and_a_missing_one_lists_its_neighbours(tmp_path: Path, suffix: str) -> None:
    rows: list[dict[str, Any]] = [
        {"custom_id": "a", "body": {"input": "one", "model": "m"}, "meta": {"id": 7}},
        {"custom_id": "b", "body": {"input": "two", "model": "m"}, "meta": None},
    ]
    path = write_rows(tmp_path / f"c{suffix}", rows)
    found = list(opened(path, text_field="body.input", id_field="meta.id").records())
    assert [(record.text, record.id) for record in found] == [(b"one", 7), (b"two", None)]
    with pytest.raises(InputError, match=r"no field 'body\.text'; fields seen in 'body': input, model"):
        opened(path, text_field="body.text").check()
    with pytest.raises(InputError, match=r"no field 'message\.text'; fields seen: body, custom_id, meta"):
        opened(path, text_field="message.text").check()


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_named_column_of_ids_must_be_there(tmp_path: Path, suffix: str) -> None:
    path = write_rows(tmp_path / f"c{suffix}", [{"text": "a", "key": "k"}])
    assert [record.id for record in opened(path).records()] == [None]
    assert [record.id for record in opened(path, id_field="key").records()] == ["k"]
    with pytest.raises(
        InputError, match=r"no field 'kye'; fields seen: key, text\. Name the right one with --id-field"
    ):
        opened(path, id_field="kye").check()


def test_a_csv_row_with_more_fields_than_columns_is_bad_and_loses_no_text(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text('id,text\n1,"quoted, well"\n2,not quoted, and cut\n3,c,,\n')
    with pytest.raises(InputError, match=r"c\.csv, line 3: more fields than the 2 columns; .* must be quoted"):
        opened(path).check()
    assert [record.id for record in opened(path).records(lambda *_: None)] == ["1", "3"]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        lines = "\n".join(map(json.dumps, rows))
        path.write_text(lines if path.suffix == ".jsonl" else f"[{lines}]".replace("\n", ","))
    return path
