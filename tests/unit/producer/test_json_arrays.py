"""JSON arrays, read element by element: whatever is cut where, the elements are those of the standard library."""

from __future__ import annotations

import gzip
import io
import json
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedctl.corpus import arrays
from embedctl.corpus.arrays import elements
from embedctl.corpus.reading import open_corpus
from embedctl.corpus.records import Record
from embedctl.corpus.rows import Rows
from embedctl_config.errors import InputError
from embedctl_config.wire import RecordKind

TEXT, NOT_TEXT, _, OVERSIZE = RecordKind


def read(folder: Path, content: bytes, name: str = "c.json", **options: Any) -> list[Record]:
    path = folder / name
    path.write_bytes(content)
    return list(open_corpus(str(path), rows=Rows(10_000), **options).records())


def parsed(content: bytes, block: int) -> list[Any]:
    return list(elements(io.BytesIO(content), "c.json", block))


def texts(*values: str) -> list[Record]:
    return [Record(TEXT, value.encode()) for value in values]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(VALUES, max_size=5), st.integers(1, 40), st.booleans(), st.sampled_from([None, 1, "\t\r\n "]))
def test_arrays_may_be_cut_anywhere(values: list[Any], block: int, ascii_only: bool, indent: int | str | None) -> None:
    content = json.dumps(values, ensure_ascii=ascii_only, indent=indent).encode()
    assert parsed(content, block) == values


TOUGH = (
    '\ufeff \r\n[ -12.5e+3 ,1234567890, "a\\"\\\\b\\ud83d\\ude00\\u00fc", "ü😀", true ,false,null,\r\n'
    '{"a" : {"b":[1,[2,[3]]]} , "":-0},-Infinity, [ ] ,{ }, 0.1, 10 ]\r\n '
).encode()


@pytest.mark.parametrize("block", [1, 7, 1000])
def test_a_file_that_ends_too_early_is_never_taken_for_whole(block: int) -> None:
    for end in range(TOUGH.index(b"[") + 1, len(TOUGH.rstrip())):
        with pytest.raises(InputError, match=r"c\.json, element"):
            parsed(TOUGH[:end], block)


@given(st.binary(max_size=30), st.integers(1, 8))
def test_any_bytes_give_elements_or_an_error(content: bytes, block: int) -> None:
    def outcome(block: int) -> Any:
        try:
            return repr(parsed(b"[" + content, block))
        except InputError:
            return InputError

    expected: Any = outcome(1000)
    assert outcome(block) == expected
    with suppress(ValueError):
        assert repr(json.loads(b"[" + content)) == expected


@pytest.mark.parametrize("content", [b"", b" \n", b"\xef\xbb\xbf", b"[]", b"\xef\xbb\xbf[ ]\r\n"])
def test_an_empty_array_or_file_has_no_records(tmp_path: Path, content: bytes) -> None:
    assert read(tmp_path, content) == []


def test_objects_and_texts_are_records_of_a_compressed_array_too(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    content = b'[\n{"id": 1, "text": "one"},\r\n"two", {"text": null}, {"text": "3"}\n]'
    expected = [Record(TEXT, b"one", 1), Record(TEXT, b"two"), Record(NOT_TEXT, b"NoneType"), Record(TEXT, b"3")]
    assert read(tmp_path, content) == expected
    assert read(tmp_path, gzip.compress(content), "c.json.gz") == expected
    assert read(tmp_path, pyarrow.compress(content, "zstd", asbytes=True), "c.JSON.zst") == expected


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'["a",]', "element 2: not JSON: Expecting value, found ']'"),
        (b'["a" "b"]', "element 1: expected a comma or the array's end after it, found '\"b\"]'"),
        (b'["a"', "element 1: expected a comma or the array's end after it, found the end of the file"),
        (b'["a", {"text": "b"', "element 2: not JSON: Expecting ',' delimiter, found the end of the file"),
        (b'["a", "b', "element 2: not JSON: Unterminated string starting at, found '\"b'"),
        (b'["a"] x', "expected nothing after the array's end, found 'x'"),
        (
            b"nonsense",
            "expected a JSON array such as .*, found 'nonsense'. For an object on each line, give --format jso",
        ),
        (b'[{"text": "a"}, ' + b'{"x": ' * 100_000, "element 2: not JSON: nested too deeply"),
    ],
)
def test_what_is_no_array_names_the_element_and_what_stands_there(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(InputError, match=rf"c\.json(, |: ){words}"):
        read(tmp_path, content)


@pytest.mark.parametrize(
    ("element", "words"),
    [
        (b"[1]", "expected an object such as .* or a text, found a list"),
        (b'{"body": 1}', "no field 'text'; fields seen: body"),
        (b'{"text": "a", "id": 1.5}', "an id must be text, .* or a date, not 1.5"),
    ],
)
def test_a_bad_element_is_named_and_can_be_skipped(tmp_path: Path, element: bytes, words: str) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(b'["a", ' + element + b', "b"]')
    corpus = open_corpus(str(path), rows=Rows(100))
    with pytest.raises(InputError, match=rf"c\.json, element 2: {words}.*--skip-bad-lines"):
        corpus.check()
    skipped: list[tuple[str, int]] = []
    assert list(corpus.records(lambda error, position: skipped.append((str(error), position)))) == texts("a", "b")
    assert [position for _, position in skipped] == [1]


def test_a_huge_number_costs_nothing_but_its_own_record(tmp_path: Path) -> None:
    digits = b"9" * 10_000
    found = read(tmp_path, b'[{"text": ' + digits + b'}, {"text": "ok", "n": -' + digits + b"}]")
    assert [record.kind for record in found] == [NOT_TEXT, TEXT]
    assert parsed(b"[" + digits + b"]", 100) == [Decimal(digits.decode())]


def test_an_element_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "MAX_LINE_BYTES", 2000)
    assert parsed(b'["' + b"x" * 1900 + b'"]', 100) == ["x" * 1900]
    with pytest.raises(InputError, match="element 2: longer than"):
        parsed(b'["a", "' + b"x" * 10_000 + b'"]', 100)


def test_objects_line_by_line_in_a_json_file_are_read_as_such(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf\n {"text": "a", "id": 1}\n{"text": "b"}\n'
    assert read(tmp_path, content) == [Record(TEXT, b"a", 1), Record(TEXT, b"b")]
    with pytest.raises(
        InputError, match=r"line 1: not JSON: .*; the format json is one array, or an object on each line"
    ):
        read(tmp_path, json.dumps({"data": ["a"]}, indent=1).encode())


def test_an_array_in_a_jsonl_file_names_the_format(tmp_path: Path) -> None:
    content = b'[\n{"text": "a"}\n]'
    with pytest.raises(InputError, match=r"line 1: .*; if it is a JSON array, give --format json"):
        read(tmp_path, content, "c.jsonl")
    assert read(tmp_path, content, "c.jsonl", file_format="json") == texts("a")
