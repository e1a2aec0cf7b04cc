"""Records from files, streams and iterables; and what is said about those that are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedctl.corpus.reading import open_corpus
from embedctl.corpus.records import Record, kind_of, make_record
from embedctl.corpus.rows import Rows, records_of
from embedctl_config.errors import InputError
from embedctl_config.wire import RecordKind

MAX = 1000
TEXT, NOT_TEXT, INVALID, OVERSIZE = RecordKind


def read(
    folder: Path, content: bytes, suffix: str = ".jsonl", file_format: str | None = None, **rows: Any
) -> list[Record]:
    path = folder / f"corpus{suffix}"
    path.write_bytes(content)
    return list(open_corpus(str(path), rows=Rows(MAX, **rows), file_format=file_format).records())


def of(texts: Any, ids: Any = None) -> list[Record]:
    return list(records_of(texts, Rows(MAX), ids))


def texts(*values: str) -> list[Record]:
    return [Record(TEXT, value.encode()) for value in values]


def test_blank_lines_in_jsonl_count_for_nothing_but_line_numbers(tmp_path: Path) -> None:
    assert read(tmp_path, b'\n{"text": "a"}\n  \t\r\n{"text": "b"}\r\n\n') == texts("a", "b")
    with pytest.raises(InputError, match="line 4"):
        read(tmp_path, b'\n{"text": "a"}\n\nnope\n')


@pytest.mark.parametrize(
    ("value", "kind"),
    [("7", b"int"), ("1.5", b"float"), ("null", b"NoneType"), ("true", b"bool"), ("[1]", b"list"), ("{}", b"dict")],
)
def test_what_is_no_text_stays_a_record(tmp_path: Path, value: str, kind: bytes) -> None:
    found = read(tmp_path, f'{{"text": {value}, "id": "x"}}\n{{"text": "fine"}}\n'.encode())
    assert found == [Record(NOT_TEXT, kind, "x"), Record(TEXT, b"fine")]


@pytest.mark.parametrize(
    ("value", "record"),
    [
        ("é" * 5, Record(TEXT, b"\xc3\xa9" * 5)),
        ("é" * 5 + "a", Record(OVERSIZE, b"11")),
        (b"\xff" * 50, Record(INVALID, b"\xff" * 10)),
        ("\udc00" * 50, Record(INVALID, (b"\xed\xb0\x80" * 50)[:10])),
    ],
)
def test_a_text_over_the_bound_says_its_size_and_invalid_bytes_are_cut(value: str | bytes, record: Record) -> None:
    assert make_record(value, None, 10) == record


def test_a_missing_field_names_the_line_the_fields_seen_and_the_fix(tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised:
        read(tmp_path, b'{"text": "a"}\n{"title": "b", "body": "c"}\n')
    message = str(raised.value)
    assert f"{tmp_path / 'corpus.jsonl'}, line 2" in message
    assert "'text'" in message
    assert "body, title" in message
    assert "--text-field" in message
    with pytest.raises(InputError, match="fields seen: none"):
        read(tmp_path, b"{}\n")


@pytest.mark.parametrize(
    "line", [b"nope", b'{"text": "a"', b'{"text": "a"} x', b"[" * 100_000, b"\x00", b"{'text': 1}"]
)
def test_what_is_not_json_names_the_line(tmp_path: Path, line: bytes) -> None:
    with pytest.raises(InputError, match=r"corpus\.jsonl, line 2: not JSON"):
        read(tmp_path, b'{"text": "a"}\n' + line + b"\n")


@pytest.mark.parametrize(("value", "label"), [('"a"', "a"), ("0", 0), ("-3", -3), ('""', ""), ("null", None)])
def test_ids_are_text_or_whole_numbers(tmp_path: Path, value: str, label: str | int | None) -> None:
    assert read(tmp_path, f'{{"text": "t", "id": {value}}}'.encode()) == [Record(TEXT, b"t", label)]


@pytest.mark.parametrize("value", ["true", "1.0", "[1]", "{}"])
def test_other_ids_are_refused_with_the_line(tmp_path: Path, value: str) -> None:
    with pytest.raises(InputError, match="line 1: an id must be text, a whole number"):
        read(tmp_path, f'{{"text": "t", "id": {value}}}'.encode())


def test_an_id_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"line 1: the id .* is not valid UTF-8") as raised:
        read(tmp_path, b'{"text": "t", "id": "\xff"}')
    str(raised.value).encode()


def test_an_unknown_format_lists_the_known_and_a_format_wins_over_the_suffix(tmp_path: Path) -> None:
    for suffix in (".xlsx", "", ".xml.gz"):
        with pytest.raises(InputError, match="--format"):
            read(tmp_path, b"", suffix)
    with pytest.raises(InputError, match="'xml' is none of jsonl, json, csv, tsv, txt, parquet"):
        read(tmp_path, b"", file_format="xml")
    assert read(tmp_path, b"{not json\n", ".jsonl", file_format="txt") == texts("{not json")


@pytest.mark.parametrize("value", [None, True, 7, 1.5, [1], {}, b"x", "x", np.int64(3), np.float32(2), np.zeros(2)])
def test_no_message_speaks_of_pythons_types(value: object) -> None:
    assert kind_of(value) in ("null", "true or false", "a number", "a list", "an object", "bytes", "a string")


def test_records_of_strings_and_mappings() -> None:
    found = of(["a", {"text": "b", "id": 2}, {"text": None}, 3, b"bytes", b"\xff"])
    assert found == [
        Record(TEXT, b"a"),
        Record(TEXT, b"b", 2),
        Record(NOT_TEXT, b"NoneType"),
        Record(NOT_TEXT, b"int"),
        Record(TEXT, b"bytes"),
        Record(INVALID, b"\xff"),
    ]


@pytest.mark.parametrize(
    ("texts", "ids", "message"),
    [
        ("ab", ["x"], "ids has 1 entries, and texts has more"),
        ("ab", ["x", "y", None], "texts has 2 entries, and ids has more"),
    ],
)
def test_ids_that_are_fewer_or_more_than_texts_are_refused(texts: str, ids: list[str | None], message: str) -> None:
    with pytest.raises(InputError, match=message):
        of(list(texts), ids=ids)


def test_a_mapping_without_a_text_names_the_record() -> None:
    with pytest.raises(InputError, match="record 1: no field 'text'; fields seen: body"):
        of([{"text": "a"}, {"body": "b"}])
