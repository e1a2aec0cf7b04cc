"""Texts that are made of several fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from embedctl.corpus.reading import open_corpus
from embedctl.corpus.records import Record
from embedctl.corpus.rows import Rows, records_of
from embedctl.corpus.template import parse_template
from embedctl_config.errors import InputError, SettingsError
from embedctl_config.wire import RecordKind
from tests.support.packages import need

TITLED = "title: {title} | text: {text}"
ROW = {"title": "Cats", "text": "A cat sät.", "id": 1, "year": 2026, "body": {"input": "deep"}}


def rows(template: str, **more: Any) -> Rows:
    return Rows(1000, template=parse_template(template), **more)


def parquet(path: Path) -> None:
    need("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"title": ["Cats"], "text": ["A cat sät."], "other": [1]}), path)


FILES: dict[str, bytes | Callable[[Path], None]] = {
    "c.jsonl": b'{"text": "A cat s\xc3\xa4t.", "title": "Cats"}\n',
    "c.json": b'[{"text": "A cat s\xc3\xa4t.", "title": "Cats"}]',
    "c.csv": b"other;title;text\n1;Cats;A cat s\xc3\xa4t.\n",
    "c.parquet": parquet,
}


@pytest.mark.parametrize("name", FILES)
def test_a_text_is_made_of_fields_in_each_format(name: str, tmp_path: Path) -> None:
    path, content = tmp_path / name, FILES[name]
    if callable(content):
        content(path)
    else:
        path.write_bytes(content)
    corpus = open_corpus(str(path), rows=rows(TITLED))
    corpus.check()
    (record,) = corpus.records()
    assert (record.kind, record.text.decode()) == (RecordKind.TEXT, "title: Cats | text: A cat sät.")
    assert record.own is not None
    assert record.text.decode()[slice(*record.own)] == "A cat sät."
    with pytest.raises(InputError, match=r"no field 'subject'.*title.*--template"):
        open_corpus(str(path), rows=rows("{subject}: {text}")).check()


def test_a_file_of_lines_has_one_field(tmp_path: Path) -> None:
    path = tmp_path / "c.txt"
    path.write_bytes(b"one\n\nt\xe4t\n")
    found = list(open_corpus(str(path), rows=rows("<{text}>")).records())
    assert [(each.kind, each.text) for each in found] == [
        (RecordKind.TEXT, b"<one>"),
        (RecordKind.TEXT, b""),  # a blank text fails as it does without a template
        (RecordKind.INVALID_UTF8, b"<t\xe4t>"),
    ]
    with pytest.raises(InputError, match="no field 'title'"):
        open_corpus(str(path), rows=rows(TITLED)).check()


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{year}{{}}{body.input}", "2026{}deep"),  # no text field, so the whole text is the record's
        ("{text} {title} {text}", "A cat sät. Cats A cat sät."),
        ("{text}", "A cat sät."),
    ],
)
def test_what_a_template_may_hold(template: str, text: str) -> None:
    def taken(items: list[Any]) -> Iterator[Record]:
        return records_of(items, rows(template))

    assert [record.text.decode() for record in taken([ROW])] == [text]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"title": None}, "record 0: the field 'title' holds null"),
        ({"title": float("nan")}, "record 0: the field 'title' holds null"),
        ({"title": ["a"]}, "record 0: the field 'title' holds a list"),
        ({"title": True}, "record 0: the field 'title' holds true or false"),
    ],
)
def test_a_field_that_can_t_stand_in_a_text_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        list(records_of([{**ROW, **change}], rows(TITLED)))


def test_a_record_whose_own_text_is_none_fails_as_without_a_template() -> None:
    for text in (None, 7, "  "):
        item = {**ROW, "text": text}
        assert list(records_of([item], rows(TITLED))) == list(records_of([item], Rows(1000)))


@pytest.mark.parametrize("words", ["text", "", "{", "{text!r}", "{text:>3}", "{}", "a } b"])
def test_what_is_no_template_is_refused(words: str) -> None:
    with pytest.raises(SettingsError, match="--template"):
        parse_template(words)
