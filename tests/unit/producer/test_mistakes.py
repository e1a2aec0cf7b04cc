"""What a newcomer passes for texts and ids: taken right, or refused."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from embedctl.corpus.records import Record
from embedctl.corpus.rows import Rows, records_of
from embedctl_config.errors import InputError
from embedctl_config.record_ids import RecordId
from embedctl_config.wire import RecordKind
from tests.support.packages import need

MAX = 1000
COLUMNS = {"text": ["one", None, "three"], "id": [7, 8, 9]}
ROWS = [Record(RecordKind.TEXT, b"one", 7), Record(RecordKind.NOT_TEXT, b"NoneType", 8),
        Record(RecordKind.TEXT, b"three", 9)]  # fmt: skip


def of(texts: Any, ids: Any = None, **fields: Any) -> list[Record]:
    return list(records_of(texts, Rows(MAX, **fields), ids))


def refusal(texts: Any, ids: Any = None, **fields: Any) -> str:
    """What is said of texts; records_of must refuse them before it reads any."""
    with pytest.raises(InputError) as raised:
        records_of(texts, Rows(MAX, **fields), ids)
    return str(raised.value)


class Frame:
    """As a table: its columns' names come when it is iterated over."""

    columns = ("text", "id")

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


async def asynchronous() -> AsyncIterator[str]:
    yield "text"


def generator() -> Iterator[str]:
    yield "text"


def _table(package: str, make: Callable[[Any], Any]) -> Any:
    return lambda: make(need(package))


@pytest.mark.parametrize(
    "make",
    [
        lambda: None,
        lambda: "one text",
        lambda: bytearray(b"x"),
        lambda: {"text": "x"},
        Frame,
        lambda: np.zeros((2, 3)),
        lambda: np.zeros(2, [("text", "U3")]),
        lambda: 7,
        lambda: Path("a.txt"),
        lambda: sys.stdin,
        lambda: generator,
        asynchronous,
        _table("pandas", lambda pandas: pandas.DataFrame(COLUMNS)),
        _table("polars", lambda polars: polars.DataFrame(COLUMNS)),
        _table("polars", lambda polars: polars.LazyFrame(COLUMNS)),
        _table("pyarrow", lambda pyarrow: pyarrow.table(COLUMNS)),
        _table("pyarrow", lambda pyarrow: pyarrow.table(COLUMNS).to_batches()[0]),
        _table("pandas", lambda pandas: pandas.DataFrame(COLUMNS).to_records()),
        _table("duckdb", lambda duckdb: duckdb.sql("SELECT unnest(['one', NULL, 'three']) AS text")),
        _table("datasets", lambda datasets: datasets.DatasetDict(train=datasets.Dataset.from_dict(COLUMNS))),
    ],
)
@pytest.mark.filterwarnings("error")
def test_what_would_be_iterated_over_wrongly_is_refused_at_once(make: Callable[[], Any]) -> None:
    texts = make()
    said = f"texts is of type {type(texts).__name__}, which does not give one of the texts after the other: give a list"
    assert refusal(texts, text_field="body").startswith(said)
    assert refusal(texts, text_field="body").endswith("texts=df['body']")
    if texts is not None:
        assert refusal([], ids=texts).endswith("ids=df['id']")


def test_a_dataset_is_read_row_by_row() -> None:
    dataset = need("datasets").Dataset.from_dict(COLUMNS)
    assert of(dataset) == of(dataset.to_iterable_dataset()) == of(dataset["text"], ids=dataset["id"]) == ROWS


@pytest.mark.parametrize(
    "make",
    [
        _table("polars", lambda polars: polars.DataFrame(COLUMNS)),
        _table("pyarrow", lambda pyarrow: pyarrow.table(COLUMNS)),
        _table("pandas", lambda pandas: pandas.DataFrame(COLUMNS, dtype=object)),
    ],
)
def test_columns_are_texts_and_ids(make: Callable[[], Any]) -> None:
    table = make()
    assert of(table["text"], ids=table["id"]) == ROWS


def test_missing_values_of_pandas_are_record_errors_and_no_ids() -> None:
    pandas = need("pandas")
    found = of(pandas.Series(["a", pandas.NA, None, float("nan")], dtype=object), ids=["x", pandas.NA, np.nan, None])
    assert [record.kind for record in found] == [RecordKind.TEXT] + [RecordKind.NOT_TEXT] * 3
    assert [record.id for record in found] == ["x", None, None, None]
    assert {record.kind for record in of(pandas.Series([None, None], dtype=float))} == {RecordKind.NOT_TEXT}
    assert [record.text for record in found[1:]] == [b"NAType", b"NoneType", b"float"]


@dataclass
class Document:
    text: str = "one"


def database_rows() -> list[Any]:
    database = sqlite3.connect(":memory:")
    database.row_factory = sqlite3.Row
    return database.execute("SELECT 'one' AS text").fetchall()


@pytest.mark.parametrize(
    ("items", "kind"),
    [
        ([(7, "one")], "tuple"),
        ([["one", "two"]], "list"),
        ([{"one"}], "set"),
        ([Document()], "Document"),
        (database_rows(), "Row"),
        ([np.array(["one"])], "ndarray"),
        ([bytearray(b"one")], "bytearray"),
    ],
)
@pytest.mark.parametrize("before", [[], ["a text"]])
def test_a_wrong_item_is_refused(items: list[Any], kind: str, before: list[Any]) -> None:
    with pytest.raises(InputError) as raised:
        of([*before, *items])
    said = "not a text: give strings, or mappings such as {'text': …}"
    assert str(raised.value) == f"record {len(before)} is of type {kind}, {said}"


@pytest.mark.parametrize("item", [7, 1.5, True, np.int64(7), np.float32(1.5), Decimal(7)])
def test_numbers_are_refused_unless_a_text_came_before(item: object) -> None:
    missing: tuple[list[Any], ...] = ([], [None], [float("nan"), None])
    for before in missing:
        with pytest.raises(InputError, match=r"is of type \w+, not a text: give texts=map\(str, texts\)"):
            of([*before, item])
    texts: tuple[list[Any], ...] = (["a text"], [b"a text"], [{"text": None}], [None, "a text"])
    for before in texts:
        *_, stray, last = of([*before, item, "more"])
        assert stray == Record(RecordKind.NOT_TEXT, type(item).__name__.encode())
        assert last.kind is RecordKind.TEXT


@pytest.mark.parametrize("label", [-7, UUID(int=7), Decimal("1.10"), b"\xff\0", date(2026, 1, 2), "7"])
def test_ids_keep_their_type(label: RecordId) -> None:
    (record,) = of(["a"], ids=[label])
    assert (type(record.id), record.id) == (type(label), label)


def test_ids_of_two_types_are_refused() -> None:
    words = "record 2: the id is text, and that of record 0 is a whole number: ids of one job have one type"
    with pytest.raises(InputError, match=words):
        of(["a", "b", "c"], ids=[1, None, "1"])
    with pytest.raises(InputError, match=r"record 1: .* a decimal with 1 digits .* 0 is a decimal with 2 digits"):
        of(["a", "b"], ids=[Decimal("1.10"), Decimal("1.1")])


def test_other_ids_are_refused_with_the_fix() -> None:
    with pytest.raises(InputError, match=r'of type float: give ids=df\["id"\].astype\("Int64"\)'):
        of(["a"], ids=[1.5])
    for label, words in (
        (True, "not true or false"),
        (datetime(2026, 1, 2), "not a date and a time"),
        (Decimal("NaN"), "is a decimal that is no number"),
        (Decimal(10) ** 40, "has more than 38 digits"),
        (np.array([1]), "not a list"),
    ):
        with pytest.raises(InputError, match=words):
            of(["a"], ids=[label])
