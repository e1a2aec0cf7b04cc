"""What holds for every database: records once, whatever is repeated; one contract; deletions of what was read alone."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from datetime import date
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from embedctl.destinations import writing
from embedctl.destinations.interface import Contract
from embedctl.destinations.numbers import Dtype
from embedctl.sync.comparison import Limit
from embedctl_config.errors import OtherContract, OutputError, SettingsError
from embedctl_config.outputs import Output
from embedctl_config.record_ids import IdType, RecordId
from tests.support.database_rows import OTHER, compared, deleted, holds_rows, missing_deleted, rows_of, written
from tests.support.databases import CONTRACT, DIM, MULTI, SPARSE, Database, assert_holds, batch, with_outputs

#: Spellings that a database, or a language for queries, may take for something else.
AWKWARD = [
    *(
        "",
        " ",
        "it's",
        'a "b"',
        "a;b--",
        "%s",
        "\\",
        "\n",
        "ü",
        "ﬁ",
        "日本",
        "🙂",
        "e\u0301",
        "\u00e9",
        "NULL",
        "x" * 2000,
    ),
    *("0", "7", "007", "-1", "18446744073709551615", "18446744073709551616", "٣", "1.0"),
    *("936da01f-9abd-4d9d-80c7-02af85c822a8", "936DA01F-9ABD-4D9D-80C7-02AF85C822A8"),
    *("{936da01f-9abd-4d9d-80c7-02af85c822a8}", "936da01f9abd4d9d80c702af85c822a8"),
]
TYPES: list[list[RecordId]] = [
    [1, -5, 2**63 - 1],
    [UUID(int=5), UUID(int=6), UUID(int=2**127)],
    [Decimal("1.10"), Decimal("-2.25"), Decimal("12345678901234567890.00")],
    [b"\0\xff'", b"", b"a"],
    [date(2026, 1, 2), date(1, 1, 1), date(9999, 12, 31)],
]
WITH_MULTI = ["dense sparse multi", "multi"]
NOT_SEARCHED = [("pgvector", ["int8"]), ("lancedb", ["int8"]), ("qdrant", ["int8", "binary"])]
HALF = dataclasses.replace(CONTRACT, dtype="float16")


def test_what_is_written_is_there_and_tells_from_what_it_was_made(table: Database) -> None:
    first, second = batch(["a", "b"]), batch(["c"], seed=1)
    assert not holds_rows(table)
    written(table, first, second)
    assert_holds(table, first, second)
    assert holds_rows(table)
    assert rows_of(table) == dict([*first.rows, *second.rows])
    with table.delivery() as destination:
        assert destination.sources(["a", "c", "nobody"]) == dict([first.rows[0], second.rows[0]])
        assert writing.sources_of(destination, ["a", "nul\0"]) == dict(first.rows[:1])
        destination.close()  # more than once


def test_nothing_is_made_to_see_whether_a_database_is_there(table: Database) -> None:
    with closing(table.destination()) as destination:
        assert not destination.open(None)
        assert not destination.open(dataclasses.replace(CONTRACT, dim=0))
    assert not table.exists()
    rows = batch(["a"])
    written(table, rows)
    with table.delivery(dataclasses.replace(CONTRACT, dim=0)) as destination:
        assert dict(destination.sources(["a"])) == dict(rows.rows)
        assert list(destination.ids()) == rows.rows
    with pytest.raises(OtherContract):
        holds_rows(table, dataclasses.replace(OTHER, dim=0))


def test_a_batch_that_is_written_again_doubles_nothing(table: Database) -> None:
    """Its acknowledgement may have been lost."""
    rows = batch([f"r{i}" for i in range(50)])
    written(table, rows, rows)
    written(table, rows.part(slice(20)), rows.part(slice(10, None)))
    assert_holds(table, rows)


def test_a_later_vector_replaces_an_earlier_one(table: Database) -> None:
    written(table, batch(["a", "b"]))
    changed = batch(["b", "c"], seed=5)
    written(table, changed)
    assert_holds(table, batch(["a", "b"]).part(slice(1)), changed)
    assert rows_of(table)["b"] == dict(changed.rows)["b"]


def test_rows_may_lack_a_source(table: Database) -> None:
    rows = dataclasses.replace(batch(["a", "b"]), sources=None)
    written(table, rows)
    assert rows_of(table) == {"a": None, "b": None}
    assert deleted(table, [("a", None), ("b", bytes(16))]) == 1
    assert rows_of(table) == {"b": None}


def test_ids_come_back_as_they_were(table: Database) -> None:
    rows = batch(AWKWARD)
    written(table, rows)
    assert_holds(table, rows)
    written(table, rows)
    assert_holds(table, rows)
    assert rows_of(table) == dict(rows.rows)
    with table.delivery() as destination:
        assert destination.sources(rows.ids) == dict(rows.rows)


def test_kept_fields_come_back(table: Database) -> None:
    kept: list[dict[str, Any]] = [
        {"title": 'it\'s "ü"', "n": 3, "tags": ["x", {"y": None}]},
        {"title": None, "n": 0.5, "tags": []},
    ]
    written(table, batch(["a", "b"], kept=kept))
    found = table.rows()
    assert [found["a"][1], found["b"][1]] == kept


def test_another_models_vectors_are_refused(table: Database) -> None:
    rows = batch(["a"])
    written(table, rows)
    with pytest.raises(OtherContract, match=r"fingerprint aaaaaaaaaaaa.* are of .*fingerprint bbbbbbbbbbbb"):
        holds_rows(table, OTHER)
    assert_holds(table, rows)


def test_an_empty_table_is_bound_too(table: Database) -> None:
    """Rows come minutes after the table was made, and another job may open it in between."""
    written(table)
    with pytest.raises(OtherContract):
        holds_rows(table, OTHER)
    assert not holds_rows(table)


def test_records_of_unknown_origin_are_refused(table: Database) -> None:
    table.make_foreign()
    with pytest.raises(OtherContract, match="nothing"):
        holds_rows(table)
    assert table.exists()


@pytest.mark.parametrize("other", [HALF, dataclasses.replace(CONTRACT, dim=DIM + 1)])
def test_another_type_and_other_dimensions_are_refused(table: Database, other: Contract) -> None:
    written(table, batch(["a"]))
    with pytest.raises(OtherContract):
        holds_rows(table, other)


def test_a_table_that_was_removed_is_made_again_for_any_contract(table: Database) -> None:
    written(table, batch(["a"]))
    table.remove()
    assert not holds_rows(table, OTHER)


@pytest.mark.parametrize("table", ["pgvector", "qdrant-http", "lancedb"], indirect=True)
def test_of_two_creators_with_two_models_one_is_refused(table: Database) -> None:
    """Both open the table at the same time, and write only if they may: no table has rows of both."""
    for _ in range(20):
        ready, refused = threading.Barrier(2), list[str]()

        def create(name: str, contract: Contract, ready: threading.Barrier, refused: list[str]) -> None:
            ready.wait()
            try:
                written(table, batch([name]), batch([name * 2]), contract=contract)
            except OutputError:
                refused.append(name)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(create, "ab", (CONTRACT, OTHER), (ready, ready), (refused, refused)))
        there = "".join(map(str, table.rows()))
        assert set(there) in ({"a"}, {"b"}), there
        assert refused
        table.remove()


def test_float16(table: Database) -> None:
    whole = batch(["a", "b"])
    half = dataclasses.replace(whole, vectors=whole.vectors.astype(np.float16))
    written(table, half, contract=HALF)
    assert_holds(table, half, tolerance=2e-3)
    vectors = np.stack([table.rows()[label][0] for label in whole.ids])
    assert not np.array_equal(vectors, whole.vectors)


@pytest.mark.parametrize(
    ("table", "outputs"),
    [
        *((kind, each) for kind in ["qdrant", "pgvector"] for each in ["dense sparse", "sparse", *WITH_MULTI]),
        *(("lancedb", each) for each in ["dense multi", "multi"]),
    ],
    indirect=["table"],
)
def test_rows_hold_the_outputs_of_the_contract(table: Database, outputs: str) -> None:
    rows, contract = with_outputs(batch(["a", "b"]), outputs.split())
    swapped = dataclasses.replace(rows, ids=["b", "a"])
    for batches in ([rows], [rows, rows], [swapped]):
        written(table, *batches, contract=contract)
        found = table.other_vectors()
        assert len(found) == 2
        for row, label in enumerate(batches[0].ids):
            assert found[label].keys() == set(outputs.split())
            assert found[label].get("dense", []) == pytest.approx(rows.vectors[row])
            assert found[label].get("sparse", SPARSE[row]) == SPARSE[row]
            assert found[label].get("multi", MULTI[row]) == MULTI[row]
    assert holds_rows(table, dataclasses.replace(contract, dim=0, sparse_dim=0, multi_dim=0))
    with pytest.raises(OtherContract):
        holds_rows(table, dataclasses.replace(contract, sparse_dim=98, multi_dim=5))
    with table.delivery(contract) as destination:
        assert destination.delete([rows.rows[0], swapped.rows[0]]) == 1
    assert table.other_vectors().keys() == {"a"}


@pytest.mark.parametrize("table", ["pgvector", "lancedb"], indirect=True)
@pytest.mark.parametrize("dim", [16, 11])
def test_bits_are_found_by_their_hamming_distance(table: Database, dim: int) -> None:
    whole = batch(["a", "b", "c"])
    signs = whole.vectors[:, :dim] > 0
    rows = dataclasses.replace(whole, vectors=np.packbits(signs, axis=-1))
    binary = dataclasses.replace(CONTRACT, dtype="binary", dim=dim)
    written(table, rows, contract=binary)
    written(table, rows, rows.part(slice(1)), contract=binary)
    distances = np.logical_xor(signs, signs[1]).sum(axis=1)
    assert table.by_hamming(signs[1]) == dict(zip(rows.ids, distances.tolist(), strict=True))
    for other in (CONTRACT, HALF, dataclasses.replace(binary, dim=dim + 1)):
        with pytest.raises(OtherContract):
            holds_rows(table, other)


@pytest.mark.parametrize(("table", "dtypes"), NOT_SEARCHED, indirect=["table"])
def test_numbers_that_a_database_does_not_search_are_refused(table: Database, dtypes: Sequence[Dtype]) -> None:
    for dtype in Dtype:
        with pytest.raises(SettingsError, match=f"of the dtype {dtype}") if dtype in dtypes else nullcontext():
            table.destination().refuse_dtype(dtype)


@pytest.mark.parametrize("table", ["pgvector", "qdrant", "lancedb"], indirect=True)
def test_multi_vectors_of_float16(table: Database) -> None:
    rows, contract = with_outputs(batch(["a", "b"]), ["multi"])
    assert rows.multi is not None
    half = dataclasses.replace(rows, multi=rows.multi.astype(np.dtype(np.float16)))
    written(table, half, contract=dataclasses.replace(contract, dtype="float16"))
    assert [table.other_vectors()[label]["multi"] for label in rows.ids] == MULTI


@pytest.mark.parametrize("table", ["lancedb"], indirect=True)
def test_outputs_that_a_table_can_t_hold_are_refused(table: Database) -> None:
    with pytest.raises(SettingsError, match="can't hold sparse vectors"):
        table.destination().refuse_outputs([Output.DENSE, Output.SPARSE])


def test_rows_are_deleted_if_they_are_still_as_they_were_read(table: Database) -> None:
    rows = batch(["a", "b", "c", "d"])
    written(table, rows)
    written(table, batch(["d"], seed=7))
    assert deleted(table, [rows.rows[1], ("nobody", bytes(16)), rows.rows[3]]) == 1
    assert sorted(table.rows()) == ["a", "c", "d"]
    assert deleted(table, [rows.rows[1]]) == 0


@pytest.mark.parametrize("ids", TYPES, ids=lambda ids: type(ids[0]).__name__)
def test_ids_keep_their_type(table: Database, ids: list[RecordId], caplog: pytest.LogCaptureFixture) -> None:
    contract = dataclasses.replace(CONTRACT, ids=str(IdType.of(ids[0])))
    rows = batch(ids)
    written(table, rows.part(slice(0, 2)), contract=contract)
    written(table, rows, contract=contract)
    with closing(table.destination()) as destination:
        assert destination.open(contract)
        assert dict(destination.ids()) == destination.sources(ids) == dict(rows.rows)
        assert {type(label) for label, _ in destination.ids()} == {type(ids[0])}
        assert destination.delete([rows.rows[0], (ids[1], bytes(16))]) == 1
        assert dict(destination.ids()) == dict(rows.rows[1:])
    with closing(table.destination()) as destination, pytest.raises(OutputError, match="its ids are of the type"):
        destination.open(dataclasses.replace(CONTRACT, ids="text"))
    assert not caplog.messages


def test_text_holds_ids_of_other_types_and_that_is_said(table: Database, caplog: pytest.LogCaptureFixture) -> None:
    written(table, batch(["1", "b"]))
    with closing(table.destination()) as destination:
        destination.open(dataclasses.replace(CONTRACT, ids="int64"))
        assert "they are written as text" in caplog.text.lower()
        assert destination.sources(destination.held([1, 2])).keys() == {"1"}


@pytest.mark.parametrize("source", ["by hand", "AB" * 16, ""])
def test_a_source_that_was_edited_by_hand_is_that_of_no_text(table: Database, source: str) -> None:
    """Its row is written again, or deleted, as any other one."""
    written(table, batch(["a", "b", "c"]))
    table.edit_source("b", source)
    there = rows_of(table)
    assert there["b"] not in (None, dict(batch(["b"]).rows)["b"])
    assert deleted(table, [("b", there["b"])]) == 1
    table.edit_source("c", source)
    written(table, batch(["c"]))
    assert rows_of(table) == dict(batch(["a", "c"]).rows)


def test_awkward_ids_are_deleted_and_no_others(table: Database) -> None:
    rows = batch(AWKWARD)
    written(table, rows)
    assert deleted(table, rows.rows[::2]) == len(AWKWARD[::2])
    assert_holds(table, rows.part(slice(1, None, 2)))
    for row in rows.rows[1::2]:
        assert deleted(table, [row]) == 1
    assert table.rows() == {}


def test_many_rows_are_listed_and_deleted(table: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("qdrant", "lancedb"):
        monkeypatch.setattr(f"embedctl.destinations.{module}._LISTED", 7)
    rows = batch([f"r{i}" for i in range(50)])
    written(table, rows)
    assert rows_of(table) == dict(rows.rows)
    assert deleted(table, rows.rows[:45]) == 45
    assert_holds(table, rows.part(slice(45, None)))


def test_what_another_run_has_written_since_the_corpus_was_read_stays(table: Database) -> None:
    """Its corpus may be a newer one. It wrote a row that was gone, and one that was not there yet."""
    written(table, batch(["gone", "back", "kept"]))
    with compared(table, {"kept": "kept"}) as difference:
        later = batch(["back", "new"], seed=1)
        written(table, later)
        assert missing_deleted(table, difference, Limit(share=1.0)) == 1
    assert sorted(table.rows()) == ["back", "kept", "new"]


def test_rows_that_a_run_has_written_do_not_raise_its_limit(table: Database) -> None:
    """Another corpus altogether must not replace all rows because it is large."""
    written(table, batch(["a", "b"]))
    with compared(table, {f"r{i}": "text" for i in range(50)}) as difference:
        written(table, batch([f"r{i}" for i in range(50)]))
        with pytest.raises(OutputError, match=r"lacks 2 of the 2 rows of .*, and at most 0 may be deleted"):
            missing_deleted(table, difference, Limit(share=0.1))
    assert len(table.rows()) == 52
