"""What of a corpus a destination lacks, and which of its rows are gone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedctl.corpus.digests import Digests, digest_of
from embedctl.corpus.records import Record, make_record
from embedctl.destinations.interface import Batch, Row
from embedctl.sync import comparison
from embedctl.sync.comparison import Difference, Limit, compare, compare_texts, delete_missing
from embedctl.sync.known import Known, Rows
from embedctl_config.errors import InputError, OutputError
from tests.support.memory_destination import CONTRACT, Memory

ALL = Limit(share=1.0)
CORPORA = st.dictionaries(st.text(max_size=3), st.sampled_from("abc"), max_size=30)


def records(texts: dict[str, str]) -> list[Record]:
    return [make_record(text, label, 1000) for label, text in texts.items()]


def holding(texts: dict[str, str]) -> Memory:
    """A destination with rows of these texts."""
    table = Memory()
    made = records(texts)
    for record, source in zip(made, CONTRACT.sources(map(digest_of, made)), strict=True):
        table.rows[str(record.id)] = np.zeros(4), source
    return table


@given(CORPORA, CORPORA)
def test_a_destination_becomes_what_the_corpus_says(before: dict[str, str], after: dict[str, str]) -> None:
    table, corpus = holding(before), records(after)
    with compare(table, CONTRACT, iter(corpus)) as difference:
        lacking = list(difference.taken_from(corpus))
        assert {record.id for record in lacking} == {
            label for label, text in after.items() if before.get(label) != text
        }
        assert difference.unchanged + difference.to_encode == len(after)
        assert delete_missing(table, difference, ALL) == len(before.keys() - after.keys())
    assert sorted(table.rows) == sorted(before.keys() & after.keys())


@pytest.mark.parametrize("held", [4, 10_000])
def test_many_ids_are_compared_on_the_disk_as_in_memory(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "_HELD", held)
    monkeypatch.setattr(comparison, "_BLOCK", 7)
    monkeypatch.setattr(comparison, "_DELETED", 3)
    table = holding({f"r{at}": "text" for at in range(300)})
    corpus = records({f"r{at}": "text" for at in range(50, 350)})
    with compare(table, CONTRACT, iter(corpus)) as difference:
        assert difference.names.on_disk is (held == 4)
        assert difference.to_encode == 50
        assert delete_missing(table, difference, ALL) == 50
    assert sorted(table.rows) == sorted(f"r{at}" for at in range(50, 300))


@pytest.mark.parametrize("same", [slice(0, 8), slice(8, 16)], ids=["first", "last"])
def test_ids_whose_digests_are_the_same_in_half_are_told_apart(same: slice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the 128 bits is what others can make equal on purpose."""

    def alike(word: bytes, digest_size: int) -> Any:
        digest = bytearray(hashlib.blake2b(word, digest_size=digest_size).digest())
        digest[same] = bytes(8)
        return SimpleNamespace(digest=lambda: bytes(digest))

    monkeypatch.setattr(comparison, "hashlib", SimpleNamespace(blake2b=alike, sha256=hashlib.sha256))
    table = holding({f"r{at}": "text" for at in range(10)})
    with compare(table, CONTRACT, iter(records({f"r{at}": "text" for at in range(3, 10)}))) as difference:
        table.rows["r1"] = np.zeros(4), bytes(16)  # another run has written it
        assert delete_missing(table, difference, ALL) == 2
    assert sorted(table.rows) == ["r1", *(f"r{at}" for at in range(3, 10))]


@pytest.mark.parametrize(("limit", "allowed"), [(Limit(3), True), (Limit(2), False), (Limit(share=0.3), True)])
def test_a_limit_is_a_number_or_a_share_of_the_rows(limit: Limit, allowed: bool) -> None:
    table = holding({f"r{at}": "text" for at in range(10)})
    with compare(table, CONTRACT, iter(records({f"r{at}": "text" for at in range(7)}))) as difference:
        if allowed:
            assert delete_missing(table, difference, limit) == 3
            return
        with pytest.raises(OutputError, match=r"lacks 3 of the 10 rows of memory:, and at most 2 may be deleted"):
            delete_missing(table, difference, limit)
    assert len(table.rows) == 10
    assert not [step for step in table.steps if step.startswith("delete")]


def test_a_row_that_changes_between_two_readings_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run writes it just then."""
    table = holding({"a": "text", "gone": "text"})
    real = table.delete

    def delete(rows: list[Row]) -> int:
        (fresh,) = records({"gone": "it is back"})
        table.write(Batch(["gone"], np.zeros((1, 4), np.float32), list(CONTRACT.sources([digest_of(fresh)]))))
        return real(rows)

    monkeypatch.setattr(table, "delete", delete)
    with compare(table, CONTRACT, iter(records({"a": "text"}))) as difference:
        assert delete_missing(table, difference, ALL) == 0
    assert sorted(table.rows) == ["a", "gone"]


@pytest.mark.parametrize("now", [{"a": "one"}, {"a": "one", "b": "other"}, {"a": "one", "b": "two", "c": "three"}])
def test_a_corpus_that_changes_between_two_readings_is_noticed(now: dict[str, str]) -> None:
    with (
        compare(Memory(), CONTRACT, iter(records({"a": "one", "b": "two"}))) as difference,
        pytest.raises(InputError, match="the corpus changed"),
    ):
        list(difference.taken_from(records(now)))


def test_nothing_is_asked_of_a_destination_that_holds_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Memory()

    def sources(ids: object) -> Iterator[None]:
        raise AssertionError

    monkeypatch.setattr(table, "sources", sources)
    with compare(table, replace(CONTRACT, dim=0), iter(records({"a": "one"}))) as difference:
        assert difference.to_encode == 1


class Texts(Known):
    """What has vectors of some texts."""

    def __init__(self, *texts: str) -> None:
        self._digests = {digest_of(record) for record in records({text: text for text in texts})}

    def has(self, digests: Digests) -> npt.NDArray[np.bool_]:
        return np.array([row.tobytes() in self._digests for row in digests], bool)

    def take(self, digests: Digests) -> Rows:
        raise AssertionError("comparing copies no vector")


def by_texts(*texts: str, kept: bytes | None = None) -> Difference:
    corpus = (record._replace(kept=kept) for record in records({f"{at}": text for at, text in enumerate(texts)}))
    return compare_texts([Texts("a", "b"), Texts("b", "c")], corpus)


def test_a_text_is_taken_from_the_first_that_has_it() -> None:
    corpus = records({"1": "c", "2": "d", "3": "b", "4": "a", "5": "d"})
    difference = compare_texts([Texts("a", "b"), Texts("b", "c")], iter(corpus))
    assert difference.found.tolist() == [1, -1, 0, 0, -1]
    assert (difference.unchanged, difference.to_encode) == (3, 2)
    assert [record.id for record in difference.taken_from(corpus)] == ["2", "5"]


def test_the_key_is_that_of_what_is_lacking_alone() -> None:
    key = by_texts("a", "d", "b").key
    assert by_texts("b", "d", "b", "c").key == key
    assert by_texts("a", "e", "b").key != key
    assert by_texts("a", "d", "b", kept=b'{"n":2}').key != key
    assert by_texts("a", "d", "d").key != key
