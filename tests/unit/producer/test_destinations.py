"""Destinations without a database: their URLs, the ids of records, the loop, and what is done when one refuses."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from embedctl.cli import main
from embedctl.corpus import runs, unique
from embedctl.corpus.digests import as_rows
from embedctl.destinations import keyed
from embedctl.destinations.formats import check_output
from embedctl.destinations.ids import Duplicates, decided
from embedctl.destinations.interface import Batch, Contract
from embedctl.destinations.loop import Delivered, RefusedRecord, ignore, run
from embedctl.destinations.numbers import Dtype
from embedctl.destinations.place import place_of
from embedctl.destinations.registry import KINDS, destination_of
from embedctl.destinations.rows import Options, Rows
from embedctl.destinations.writing import write
from embedctl.waiting.results import ChunkVectors
from embedctl.waiting.shapes import MultiVectors, SparseVectors
from embedctl_config.errors import (
    DestinationRefused,
    DestinationUnavailable,
    InputError,
    OtherContract,
    OutputError,
    SettingsError,
    UnusableOutput,
)
from embedctl_config.loading import load_settings
from embedctl_config.settings import Settings
from tests.support.memory_destination import CONTRACT, Memory
from tests.support.packages import need
from tests.support.result_chunks import result_chunk, unit_vectors


def batch(ids: Sequence[str]) -> Batch:
    return Batch(list(ids), unit_vectors(len(ids), 4))


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    pauses: list[float] = []
    monkeypatch.setattr("embedctl_config.retry.time.sleep", pauses.append)
    return pauses


# URLs


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hunter2@db/x?table=t",
        "postgresql://me:@db/x?table=t",
        "postgresql://db/x?table=t&password=hunter2",
        "postgres://db/x?table=t&sslpassword=hunter2",
        "qdrant+https://hunter2@db/c",
        "qdrant+http://db/c?api_key=hunter2",
        "qdrant+http://db/c?API-KEY=hunter2",
        "lancedb://me:hunter2@x/y?table=t",
    ],
)
def test_secrets_in_a_url_are_refused_with_what_the_database_reads_and_not_repeated(url: str) -> None:
    reads = {"postgres": "PGPASSWORD.*pgpass.*service file", "qdrant": "QDRANT_API_KEY", "lancedb": ""}
    fix = next(names for kind, names in reads.items() if url.startswith(kind))
    with pytest.raises(SettingsError, match=f"leave it out, and.*{fix}") as refused:
        destination_of(url, Settings())
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("docs.parquet", "no database has a URL that begins with 'that'"),
        ("mysql://secret@db/x", "begins with 'mysql'. Known: lancedb, postgres, postgresql, qdrant"),
        ("postgresql://db/x", "add the table"),
        ("postgresql://db/x?table=", "add the table"),
        ("postgresql://db/x?table=a.b.c", r"schema\.name"),
        ("postgresql://db/x?table=a&table=b", "twice"),
        ("postgresql://db/x?table=a#b", "%23"),
        ("postgresql://[::1/x?table=t", "can't be read as a URL"),
        ("lancedb:///x", "add the table"),
        ("lancedb://x/y?table=t", "lancedb:///FOLDER"),
        ("lancedb:///?table=t", "name the database's folder"),
        ("lancedb:///x?table=t&mode=w", "no option 'mode'. Known: table"),
        ("qdrant+http://db", r"HOST\[:PORT\]/COLLECTION"),
        ("qdrant+http://db/a/b", r"HOST\[:PORT\]/COLLECTION"),
        ("qdrant+http:///c", r"HOST\[:PORT\]/COLLECTION"),
        ("qdrant+http://db/c?distance=l2", "distance is one of cosine, dot"),
        ("qdrant://db/c?collection=x", "qdrant:///FOLDER"),
    ],
)
def test_urls_that_are_wrong_say_what_is_right(url: str, message: str) -> None:
    for module in ("psycopg", "qdrant_client", "lancedb"):
        need(module)
    with pytest.raises(SettingsError, match=message) as refused:
        destination_of(url, Settings())
    assert "secret" not in str(refused.value)


def test_every_extra_of_a_database_exists() -> None:
    import tomllib

    project = tomllib.loads(Path(__file__).parents[3].joinpath("pyproject.toml").read_text())["project"]
    assert {kind.extra for kind in KINDS} <= set(project["optional-dependencies"])


def test_the_api_key_of_qdrant_comes_from_the_environment_and_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings({"QDRANT_API_KEY": "hunter2"}).qdrant_api_key == "hunter2"
    both = {"QDRANT_API_KEY": "weak", "EMBEDCTL_QDRANT_API_KEY": "strong"}
    assert load_settings(both).qdrant_api_key == "strong"
    assert "hunter2" not in repr(load_settings({"QDRANT_API_KEY": "hunter2"}))
    monkeypatch.setenv("QDRANT_API_KEY", "hunter2")
    for flags in ([], ["--json"]):
        shown = CliRunner().invoke(main, ["config", "show", *flags]).output
        assert "hunter2" not in shown
        assert "QDRANT_API_KEY" in shown


def test_the_command_lists_databases() -> None:
    shown = CliRunner().invoke(main, ["destinations"])
    assert shown.exit_code == 0
    assert "postgresql://[USER@]HOST[:PORT]/DATABASE?table=TABLE" in shown.output
    listed = json.loads(CliRunner().invoke(main, ["destinations", "--json"]).output)
    assert [each["extra"] for each in listed] == ["pgvector", "qdrant", "qdrant", "lancedb"]


def test_a_database_whose_client_is_missing_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedctl.destinations.registry.find_spec", lambda name: None)
    assert "no: pip install 'embedctl[qdrant]'" in CliRunner().invoke(main, ["destinations"]).output


# Ids


def chunks(*labels: Sequence[str | None], failed: Sequence[int] = ()) -> list[ChunkVectors]:
    """Chunks of records with these ids, of which the failed positions have no vector."""
    made, first = [], 0
    for ids in labels:
        rows = [position - first for position in failed if first <= position < first + len(ids)]
        made.append(result_chunk(unit_vectors(len(ids), 2), first=first, ids=ids, failed=rows))
        first += len(ids)
    return made


def test_equal_ids_are_refused_by_name_of_their_positions() -> None:
    with pytest.raises(InputError, match=r"2 ids are not unique(.|\n)*record 2: its id is that of record 0"):
        decided(chunks(["a", "b"], ["a", "b"]), 4, Duplicates.ERROR)


@pytest.mark.parametrize("held", [3, 1000])
@pytest.mark.parametrize("which", [Duplicates.FIRST, Duplicates.LAST])
@given(st.lists(st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=7), max_size=9))
def test_all_but_one_of_equal_ids_are_left_out(which: Duplicates, held: int, parts: list[list[str]]) -> None:
    """Also if the ids do not fit into memory."""
    labels = list(enumerate(label for part in parts for label in part))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unique, "_HELD", held)
        patch.setattr(runs, "_FILES", 8)  # each time all are opened
        left_out = decided(chunks(*parts), len(labels), which)
    kept = {label: at for at, label in (labels if which is Duplicates.LAST else reversed(labels))}
    expected = [at for at, label in labels if kept[label] != at]
    assert np.flatnonzero(left_out.among(np.arange(len(labels)))).tolist() == expected
    assert left_out.count == len(expected)


def test_a_failed_record_needs_no_id_and_takes_none_away() -> None:
    assert decided(chunks(["a", None], ["a"], failed=[0, 1]), 3, Duplicates.ERROR).count == 0


def test_a_record_without_an_id_is_named() -> None:
    with pytest.raises(InputError, match=r"2 records have no id.*--duplicates position.*Positions: 1, 2"):
        decided(chunks(["a", None], [None]), 3, Duplicates.FIRST)


def test_points_of_qdrant() -> None:
    need("qdrant_client")
    from embedctl.destinations.qdrant import point_id

    assert point_id("c", "0") == 0
    assert point_id("c", str(2**64 - 1)) == 2**64 - 1
    own = "936da01f-9abd-4d9d-80c7-02af85c822a8"
    assert point_id("c", own) == own
    space = uuid.uuid5(uuid.NAMESPACE_URL, "embedctl:c")
    for label in ("", "007", "-1", "٣", str(2**64), "1" * 5000, own.upper(), own.replace("-", ""), f"{{{own}}}", "a b"):
        assert point_id("c", label) == str(uuid.uuid5(space, label))
    assert point_id("c", "x") != point_id("d", "x")


# Whose vectors a destination holds


def test_a_contract_survives_and_other_text_is_none() -> None:
    assert Contract.from_json(CONTRACT.text) == CONTRACT
    for text in ("", "null", "[]", "{", '{"model": "m"}'):
        assert Contract.from_json(text) is None


@pytest.mark.parametrize(
    ("change", "is_another"),
    [
        ({"fingerprint": "bb" * 32}, True),
        ({"dtype": "float16"}, True),
        ({"dim": 5}, True),
        ({"dim": 0}, False),
        ({"model": "another name"}, False),
        ({"precision": "fp16"}, False),
    ],
)
def test_what_makes_another_contract(change: dict[str, Any], is_another: bool) -> None:
    other = dataclasses.replace(CONTRACT, **change)
    with pytest.raises(OtherContract) if is_another else nullcontext():
        other.refuse_other(CONTRACT, "t")
    with pytest.raises(OtherContract, match="nothing there tells"):
        other.refuse_other(None, "t")


# Refusals, and a database that is away


def test_a_database_that_comes_back_gets_the_batch_again(no_pauses: list[float]) -> None:
    table = Memory(away=4)
    assert not list(write(table, batch("abc")))
    assert sorted(table.rows) == ["a", "b", "c"]
    assert no_pauses == [1, 2, 4, 8]


def test_a_database_that_stays_away_ends_the_delivery(no_pauses: list[float]) -> None:
    table = Memory(away=10**6)
    with pytest.raises(DestinationUnavailable, match=r"is away\. Tried 5 times; the same command resumes"):
        list(write(table, batch("abc")))
    assert table.steps == ["write 3"] * 5


@pytest.mark.parametrize("at", [[0], [1, 57], [99], [*range(16)], [*range(0, 100, 2)]])
def test_records_that_are_refused_are_found_and_the_others_written(no_pauses: list[float], at: list[int]) -> None:
    table = Memory()
    ids = [f"bad {number}" if number in at else f"r{number}" for number in range(100)]
    rows = dataclasses.replace(batch(ids), positions=np.arange(1000, 1100))
    refused = list(write(table, rows))
    assert [each.position for each in refused] == [1000 + number for number in at]
    assert {each.id: each.reason for each in refused} == {ids[row]: f"memory: refuses {ids[row]}" for row in at}
    assert sorted(table.rows) == sorted({*ids} - {ids[row] for row in at})
    assert not no_pauses, "what will never pass is not tried again"


def test_a_refusal_of_all_records_is_an_error_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Memory()

    def refuse(rows: Batch) -> None:
        table.steps.append(f"write {len(rows)}")
        raise DestinationRefused("memory: no column")

    monkeypatch.setattr(table, "write", refuse)
    with pytest.raises(OutputError, match=r"no column.*refused alike"):
        list(write(table, batch([f"r{number}" for number in range(5_000)])))
    assert len(table.steps) < 32, "by halves to one record, and then some from all over"
    assert len(list(write(table, batch("abc")))) == 3, "of so few, each may be at fault"


# The loop


class Results:
    """Stands for a job with these chunks, and for its waiter and its reader."""

    def __init__(self, *found: ChunkVectors, records: int | None = None) -> None:
        self.found = found
        self.records = sum(len(each.positions) for each in found) if records is None else records
        self.id, self.options, self.model_fingerprint = "J", dict[str, Any](), "ff"
        self.model, self.precision, self.stopped_by = "m", "fp32", None

    def status(self) -> Results:
        return self

    def chunks(self, progress: object = None) -> Iterator[ChunkVectors]:
        return iter(self.found)


def delivered(table: Memory, results: Results, options: Options = Options()) -> tuple[Delivered, list[RefusedRecord]]:  # noqa: B008  (it is frozen)
    refused: list[RefusedRecord] = []
    rows = Rows(cast("Any", results), table, options, None, refused.append)
    delivery = keyed.Delivery(rows, None, ignore)
    run(results.chunks, delivery, cast("Any", results.status))
    return delivery.done, refused


def digested(chunk: ChunkVectors, seed: int = 0) -> ChunkVectors:
    digests = [hashlib.sha256(f"{label} {seed}".encode()).digest() for label in chunk.ids]
    return dataclasses.replace(chunk, digests=as_rows(b"".join(digests)))


def test_every_record_counts_once() -> None:
    table = Memory()
    done, refused = delivered(table, Results(*chunks(["a", "b", "bad", "c"], ["d", "e"], ["f"], failed=[1, 6])))
    assert done == Delivered(written=4, refused=1, failed=2)
    assert sorted(table.rows) == ["a", "c", "d", "e"]
    assert [(each.position, each.id) for each in refused] == [(2, "bad")]
    with pytest.raises(OutputError, match="has 8 records, and 4 written"):
        delivered(table, Results(*chunks(["a", "b", "c", "d"]), records=8))


def test_what_is_there_from_the_same_text_is_not_written_again() -> None:
    table = Memory()
    first, second = chunks(["a", "b", "c", "d"], ["e", "f", "g", "h"])
    delivered(table, Results(digested(first), digested(second)))
    del table.rows["b"]
    table.steps.clear()
    done, _ = delivered(table, Results(digested(first), digested(second, seed=1)))
    assert done == Delivered(written=5, unchanged=3)
    assert table.steps == ["write 1", "write 4"]


def test_without_digests_and_with_kept_fields_all_is_written() -> None:
    """A source tells neither."""
    table = Memory()
    (plain,) = chunks(["a", "b", "c", "d"])
    for _ in range(2):
        assert delivered(table, Results(plain))[0].written == 4
    kept = dataclasses.replace(digested(plain), kept=[{"n": 1}] * 4)
    results = Results(kept)
    results.options = {"keep": ("n",)}
    for _ in range(2):
        assert delivered(table, results)[0].written == 4


def test_a_vector_that_overflows_its_type_is_refused_by_name() -> None:
    (chunk,) = chunks(["a", "b", "c", "d", "e"])
    chunk.vectors[1] = 70_000.0
    chunk.vectors[2] = np.nan
    counts, weights = np.array([1, 0, 0, 0, 2]), np.array([70_000, 1, np.inf], np.float32)
    tokens = np.array([[1, 1], [1, 70_000], [1, 2]], np.float32)
    chunk = dataclasses.replace(
        chunk,
        sparse=SparseVectors(9, counts, np.arange(3, dtype=np.uint32), weights),
        multi=MultiVectors(2, np.array([1, 0, 0, 1, 1]), tokens),
    )
    done, refused = delivered(Memory(), Results(chunk), Options(dtype=Dtype.FLOAT16))
    assert done == Delivered(written=1, refused=4)
    assert [(each.id, each.reason) for each in refused] == [
        ("b", "the vector overflows float16"),
        ("c", "the vector is not finite"),
        ("d", "the vector overflows float16"),
        ("e", "the vector is not finite"),
    ]


def test_an_id_that_occurs_twice_in_a_batch_is_refused_before_it_is_written() -> None:
    """Ids were unique when they were looked at; a corpus may change until it is read."""
    table = Memory()
    with pytest.raises(InputError, match="ids occur twice in the job: 'a'"):
        delivered(table, Results(*chunks(["a", "b", "a"])))
    assert table.steps == []


def test_batches_have_about_the_bytes_that_a_destination_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Memory()
    monkeypatch.setattr(table, "batch_records", 1000)
    monkeypatch.setattr(table, "batch_bytes", 10 * 9)
    ids = [f"{number}" for number in range(100)]
    assert delivered(table, Results(*chunks(ids)))[0].written == 100
    assert {int(step.split()[1]) for step in table.steps} <= {9, 10, 11, 1}


def test_a_database_that_lost_what_it_acknowledged_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Memory()
    monkeypatch.setattr(table, "write", lambda rows: None)
    with pytest.raises(OutputError, match=r"does not hold what it has acknowledged.*'a'"):
        delivered(table, Results(*chunks(["a"])))


@pytest.mark.parametrize("where", ["v.npy", "parts/", "lancedb:{}/db?table=t"])
def test_a_full_disk_and_a_folder_that_may_not_be_written_are_seen_beforehand(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> None:
        if where.startswith("lancedb"):
            need("lancedb")
            destination_of(where.format(tmp_path), Settings()).open(None)
        elif where.endswith("/"):
            place_of(str(tmp_path / where)).check()
        else:
            check_output(tmp_path / where)

    check()
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda *_: False)
        with pytest.raises(UnusableOutput, match="permission denied"):
            check()
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=9, f_bavail=0))
    with pytest.raises(OutputError, match="is full") as full:
        check()
    assert full.value.exit_code == 1
