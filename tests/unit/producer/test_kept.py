"""Kept fields: what becomes of values, what is refused, and where they come from."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedctl.corpus.kept import MAX_KEPT_BYTES, OWN_NAMES, check_keep, kept_fields, parse_keep
from embedctl.corpus.reading import open_corpus
from embedctl.corpus.records import Record
from embedctl.corpus.rows import Rows, records_of
from embedctl_config.errors import InputError, SettingsError

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


def kept(**fields: Any) -> Any:
    return json.loads(kept_fields(fields, list(fields), "record 0") or b"")


def nested(depth: int) -> list[Any]:
    inner: list[Any] = []
    for _ in range(depth - 1):
        inner = [inner]
    return inner


def read(folder: Path, name: str, content: bytes, keep: tuple[str, ...], max_bytes: int = 1000) -> list[Record]:
    (folder / name).write_bytes(content)
    return list(open_corpus(str(folder / name), rows=Rows(max_bytes, keep=keep)).records())


def fields_of(records: list[Record]) -> list[Any]:
    return [json.loads(record.kept or b"null") for record in records]


@given(JSON)
def test_a_json_value_comes_back_as_it_was(value: Any) -> None:
    assert kept(value=value) == {"value": value}


@pytest.mark.parametrize(
    ("value", "comes_back"),
    [
        (float("nan"), None),
        (float("-inf"), None),
        ([1, {"x": float("inf"), "y": np.float32("nan")}], [1, {"x": None, "y": None}]),
        (np.float32(0.5), 0.5),
        (np.int64(2**60), 2**60),
        (np.bool_(True), True),
        (np.str_("s"), "s"),
        (np.array([[1, 2]]), [[1, 2]]),
        (Decimal("1.10"), "1.10"),
        (Decimal("NaN"), None),
        (np.datetime64("NaT"), None),
        (date(2026, 1, 2), "2026-01-02"),
        (datetime(2026, 1, 2, 3, 4, 5, 600, UTC), "2026-01-02T03:04:05.000600+00:00"),
        (time(3, 4), "03:04:00"),
        (timedelta(minutes=1, milliseconds=500), 60.5),
        (np.datetime64("2026-01-02T03:04", "s"), "2026-01-02T03:04:00"),
        (UUID(int=5), "00000000-0000-0000-0000-000000000005"),
        (b"bytes", "Ynl0ZXM="),
        ("caf\udce9", "caf\ufffd"),
        ("\ud800", "\ufffd"),
        ((1, "a"), [1, "a"]),
        (2**70, 2**70),
        ({7: "seven"}, {"7": "seven"}),
        (nested(63), nested(63)),
    ],
    ids=repr,
)
def test_a_value_without_a_type_in_json_has_a_form(value: object, comes_back: object) -> None:
    assert kept(value=value) == {"value": comes_back}


@pytest.mark.parametrize(
    "value",
    [{1, 2}, object(), {(1, 2): 3}, nested(64), CIRCLE, 10**5000, np.timedelta64(1, "s")],
    ids=["set", "object", "key", "deep", "a circle", "digits", "timedelta64"],
)
def test_a_value_without_any_form_is_refused(value: object) -> None:
    with pytest.raises(InputError, match=r"^line 3: the field 'b' can't be kept: .* Leave it out of --keep"):
        kept_fields({"a": 1, "b": value}, ["a", "b"], "line 3")


def test_the_largest_fields_are_kept_and_larger_ones_name_the_culprit() -> None:
    room = MAX_KEPT_BYTES - len('{"a":"","b":1}')
    assert len(kept_fields({"a": "x" * room, "b": 1}, ["a", "b"], "") or b"") == MAX_KEPT_BYTES
    with pytest.raises(InputError, match=r"^line 9: the kept fields have 65,537 bytes, .* 65,536; the largest is 'a'"):
        kept_fields({"a": "x" * (room + 1), "b": 1}, ["a", "b"], "line 9")


def test_names_are_separated_by_commas_and_each_counts_once() -> None:
    assert parse_keep(None) == ()
    assert parse_keep("title, url,title") == ("title", "url")


@pytest.mark.parametrize("words", ["", ",", "title,", "a" * 300, ",".join(map(str, range(33))), *sorted(OWN_NAMES)])
def test_names_that_nothing_can_have_are_refused(words: str) -> None:
    with pytest.raises(SettingsError, match=r"^keep"):
        parse_keep(words)


@pytest.mark.parametrize("names", ["title", "", 5, [["title"]], [5], [None]])
def test_what_is_not_several_names_is_refused(names: Any) -> None:
    with pytest.raises(SettingsError, match=r"^keep"):
        check_keep(names)


def test_every_format_gives_the_fields_of_its_records(tmp_path: Path) -> None:
    lines = b'{"text": "one", "title": "A", "n": 1}\n{"text": "two", "n": [2]}\n'
    assert fields_of(read(tmp_path, "c.jsonl", lines, ("title", "n"))) == [
        {"title": "A", "n": 1},
        {"title": None, "n": [2]},
    ]
    rows = b"title,text,n\nA,one,1\nB,two\n"
    assert fields_of(read(tmp_path, "c.csv", rows, ("n", "text"))) == [
        {"n": "1", "text": "one"},
        {"n": None, "text": "two"},
    ]
    assert fields_of(read(tmp_path, "c.txt", b"one\n\n", ("text",))) == [{"text": "one"}, {"text": ""}]
    pq.write_table(
        pa.table({"text": ["one", "two"], "day": [date(2026, 1, 2), None], "price": [Decimal("1.50"), None]}),
        tmp_path / "c.parquet",
    )
    corpus = open_corpus(str(tmp_path / "c.parquet"), rows=Rows(99, keep=("day", "text", "price")))
    assert fields_of(list(corpus.records())) == [
        {"day": "2026-01-02", "text": "one", "price": "1.50"},
        {"day": None, "text": "two", "price": None},
    ]


@pytest.mark.parametrize(("name", "content"), [("c.csv", b"text,titel\nx,y\n"), ("c.txt", b"x\n"), ("c.parquet", b"")])
def test_a_field_that_the_corpus_can_not_have_is_refused(name: str, content: bytes, tmp_path: Path) -> None:
    if not content:
        pq.write_table(pa.table({"text": ["x"], "titel": ["y"]}), tmp_path / name)
        content = (tmp_path / name).read_bytes()
    with pytest.raises(InputError, match=rf"{name}.*: no field 'title'; fields seen: text.*--keep"):
        read(tmp_path, name, content, ("title",))


def test_a_field_that_no_record_has_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "c.jsonl").write_text('{"text": "x", "title": null}\n{"text": "x", "title": "a", "url": null}\n')
    path = str(tmp_path / "c.jsonl")
    open_corpus(path, rows=Rows(99, keep=("title",))).check()
    assert not caplog.messages
    open_corpus(path, rows=Rows(99, keep=("url", "title", "titel"))).check()
    assert caplog.messages == [f"{path}: no record has a value in titel, url: kept as null"]


def test_items_without_fields_can_keep_none() -> None:
    with pytest.raises(InputError, match=r'record 1 is a string, .* mappings such as \{"text": …, "title": …\}'):
        list(records_of([{"text": "a"}, "b"], Rows(99, keep=("title",))))
