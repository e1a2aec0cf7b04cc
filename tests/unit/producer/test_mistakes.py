"""What a newcomer passes for texts and ids: taken right, or refused with the line that mends it."""

from __future__ import annotations

import io
import sqlite3
import tempfile
from collections import namedtuple
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


def given(line: str, name: str, values: Any) -> Any:
    """What a refusal's line gives: the part behind `texts=`, evaluated as the user would."""
    expression = line[line.index("texts=") + len("texts=") :]
    for end in range(len(expression), 0, -1):
        try:
            return eval(expression[:end], {name: values, "texts": values})
        except SyntaxError:
            continue
    raise AssertionError(f"no line of Python in {line}")


class Frame:
    """As a table: its columns' names come when it is iterated over."""

    columns = ("text", "id")

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


async def coroutine() -> list[str]:
    return ["text"]


async def asynchronous() -> AsyncIterator[str]:
    yield "text"


def generator() -> Iterator[str]:
    yield "text"


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (None, "texts is None, not several: give an iterable, such as texts=[text]"),
        ("one text", "texts is a string, not several: give a list, such as texts=[text]"),
        (bytearray(b"x"), "texts is bytes, not several"),
        ({"text": "x"}, "texts is one mapping, not several: give texts=[mapping] or, if it maps ids to texts, texts="),
        ({"text": ["a", "b"], "id": [1, 2]}, 'texts is a mapping of columns: give one of them, texts=columns["text"]'),
        (Frame(), 'texts is a table, and iterating over it gives no rows: give its column, texts=df["text"]'),
        (np.zeros((2, 3)), "texts is an array of 2 dimensions: give one column, texts=array[:, 0]"),
        (np.zeros(2, [("text", "U3")]), 'texts is a table: give its column, texts=array["text"]'),
        (7, "texts is of type int: give an iterable, such as texts=[text]"),
        (Path("a.txt"), "texts is a path, not what the file holds: give texts=path.read_text().splitlines() if each"),
        (
            io.StringIO("a"),
            'texts is an open file: give texts=(line.rstrip("\\r\\n") for line in file) if each line is',
        ),
        (generator, "texts is a function: give what it returns, texts=rows()"),
        (asynchronous(), "texts is an async iterable: give texts to aenqueue_embeddings, or a list"),
    ],
)
def test_what_would_be_iterated_over_wrongly_is_refused_at_once(texts: Any, message: str) -> None:
    assert refusal(texts).startswith(message)
    if texts is not None:
        assert refusal([], ids=texts).startswith(message.replace("texts is", "ids is").split(":")[0])


def test_a_coroutine_and_a_temporary_file_are_refused_at_once() -> None:
    forgotten = coroutine()
    assert refusal(forgotten) == "texts is a coroutine: give what it returns, texts=await rows()"
    forgotten.close()
    with tempfile.NamedTemporaryFile() as file:
        assert "texts is an open file" in refusal(file)


def _table(package: str, make: Callable[[Any], Any]) -> Any:
    return lambda: make(need(package))


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("df", _table("pandas", lambda pandas: pandas.DataFrame(COLUMNS))),
        ("df", _table("polars", lambda polars: polars.DataFrame(COLUMNS))),
        ("frame", _table("polars", lambda polars: polars.LazyFrame(COLUMNS))),
        ("df", _table("pyarrow", lambda pyarrow: pyarrow.table(COLUMNS))),
        ("df", _table("pyarrow", lambda pyarrow: pyarrow.table(COLUMNS).to_batches()[0])),
        ("array", _table("pandas", lambda pandas: pandas.DataFrame(COLUMNS).to_records())),
        ("relation", _table("duckdb", lambda duckdb: duckdb.sql("SELECT unnest(['one', NULL, 'three']) AS text"))),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_table_is_refused_at_once_and_the_line_gives_its_texts(name: str, make: Callable[[], Any]) -> None:
    table = make()
    found = of(given(refusal(table), name, table))
    assert [record.text for record in found if record.kind is RecordKind.TEXT] == [b"one", b"three"]
    assert len(found) == 3


def test_a_dataset_is_read_row_by_row_and_its_splits_are_refused() -> None:
    datasets = need("datasets")
    dataset = datasets.Dataset.from_dict(COLUMNS)
    assert of(dataset) == of(dataset.to_iterable_dataset()) == of(dataset["text"], ids=dataset["id"]) == ROWS
    splits = datasets.DatasetDict(train=dataset)
    assert of(given(refusal(splits), "splits", splits)) == ROWS


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


Row = namedtuple("Row", "id text")


def database_rows() -> list[Any]:
    database = sqlite3.connect(":memory:")
    database.row_factory = sqlite3.Row
    return database.execute("SELECT 'one' AS text").fetchall()


@pytest.mark.parametrize(
    ("items", "kind"),
    [
        ([(7, "one")], "tuple"),
        ([("one",)], "tuple"),
        ([(3, "one", 7)], "tuple"),
        ([Row(7, "one")], "Row"),
        ([["one", "two"]], "list"),
        ([{"one"}], "set"),
        ([Document()], "Document"),
        (database_rows(), "Row"),
        ([np.array(["one"])], "ndarray"),
        ([bytearray(b"one")], "bytearray"),
    ],
)
@pytest.mark.parametrize("before", [[], ["a text"]])
def test_a_wrong_item_is_refused_and_the_line_gives_its_text(items: list[Any], kind: str, before: list[Any]) -> None:
    with pytest.raises(InputError) as raised:
        of([*before, *items])
    message = str(raised.value)
    assert message.startswith(f"record {len(before)} is of type {kind}, not a text: give texts=")
    assert of(given(message, "texts", items))[0].text == b"one"


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
