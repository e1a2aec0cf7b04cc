"""`--sync`: each night, a database becomes what the corpus says. Nothing else is asked what it holds."""

from __future__ import annotations

import itertools
import json

import pytest

from embedctl import Job
from tests.support.changes import DELETE, OTHER_WEIGHTS, Nights, did, killer, many, next_day, told
from tests.support.databases import KINDS, Database, Postgres, QdrantByHttp
from tests.support.forked import Forked
from tests.support.here import Here
from tests.support.waiting import eventually
from tests.support.workers import CONFIG

#: Steps of a night: a module and a class, a function, and which of its calls. A destination's own steps are walked
#: through in tests/e2e/test_databases.py.
STEPS = [
    ("embedctl.cli.sync", "compare", 1),
    ("embedctl.cli.job_command", "submit", 1),
    ("embedctl.destinations.postgresql:PostgresTable", "write", 1),
    ("embedctl.destinations.postgresql:PostgresTable", "close", 3),
    ("embedctl.jobs.job:Job", "discard", 1),
    ("embedctl.cli.sync", "delete_missing", 1),
    ("embedctl.destinations.postgresql:PostgresTable", "delete", 1),
]
WRITING = ("embedctl.destinations.rows:Rows", "_write", 1)


@pytest.mark.parametrize("table", KINDS, indirect=True)
def test_each_night_a_table_becomes_what_the_corpus_says(here: Here, nights: Nights, table: Database) -> None:
    here.start_worker()
    documents, vectors = many(40), ("--vectors", "dense,multi")
    assert nights.synced(documents, *vectors) == (0, 40, None)
    nights.assert_holds(documents)
    stamps = dict(table.stamps()) if isinstance(table, Postgres) else {}

    after = next_day(documents)
    assert told(nights.run(after, *vectors, "--dry-run"))["records"] == 2
    assert nights.synced(after, *vectors) == (38, 2, None)
    nights.assert_holds({**after, "id-7": documents["id-7"]})
    if isinstance(table, Postgres):
        later = dict(table.stamps())
        assert {label for label in documents if later[label] != stamps[label]} == {"id-3"}

    assert nights.synced(after, *vectors, "--delete") == (40, 0, 1)
    nights.assert_holds(after)
    of_words = {label: len(row["multi"]) for label, row in table.other_vectors().items()}
    assert of_words == {label: len(text.split()) for label, text in after.items()}
    assert nights.synced(after, *vectors, "--delete") == (40, 0, 0)
    assert not list(here.broker.jobs.newest())


def test_what_happened_to_the_table_is_seen(here: Here, nights: Nights, table: Database) -> None:
    """It was dropped, restored from an older state, or lost, got or changed rows by hand; and a night was skipped."""
    assert isinstance(table, Postgres)
    here.start_worker()
    documents = many(40)
    nights.synced(documents)
    table.remove()
    assert nights.synced(documents, "--delete") == (0, 40, 0)
    nights.assert_holds(documents)
    table.connection.execute(f"DELETE FROM {table.table} WHERE id IN ('id-1', 'id-2')")
    table.connection.execute(f"UPDATE {table.table} SET source = NULL WHERE id = 'id-4'")
    table.connection.execute(
        f"INSERT INTO {table.table} SELECT 'by hand', embedding, metadata, source FROM {table.table} WHERE id = 'id-5'"
    )
    documents = {**next_day(next_day(documents)), "later": "another night"}
    assert nights.synced(documents, "--delete") == (35, 6, 2)
    nights.assert_holds(documents)


def test_more_than_allowed_are_not_deleted(here: Here, nights: Nights) -> None:
    here.start_worker()
    documents = many(20)
    nights.synced(documents)
    few = {**dict(itertools.islice(documents.items(), 17)), "new": "a new text"}
    done = nights.run(few, "--delete")
    assert done.returncode == 1
    assert "lacks 3 of the 20 rows" in done.stderr
    assert "at most 2 may be deleted: nothing is deleted" in done.stderr
    nights.assert_holds({**documents, "new": "a new text"})
    assert nights.synced(few, "--delete", "--delete-at-most", "3") == (18, 0, 3)
    nights.assert_holds(few)
    (here.folder / "corpus.jsonl").write_text('{"id": "id-0", "text": "text 0"}\nnonsense\n')
    done = here.embedctl(*nights.command("--skip-bad-lines", "--delete", "--delete-at-most", "100%"), status=1)
    assert "nothing is deleted" in done.stderr
    assert "1 bad line left out of the corpus" in done.stderr
    nights.assert_holds(few)


def test_another_model_is_refused_before_anything_is_encoded(here: Here, nights: Nights, table: Database) -> None:
    worker = here.start_worker()
    documents = many(10)
    nights.synced(documents)
    del documents["id-1"]
    for other in (("--prompt", "query: "), ("--dtype", "float16")):
        assert nights.run(documents, *DELETE, *other).returncode == 65
    worker.stop()
    done = nights.run(documents, *DELETE)
    assert done.returncode == 1
    assert "start a worker, or set [models.dummy] fingerprint" in done.stderr
    (here.folder / "embedctl.toml").write_text(OTHER_WEIGHTS)
    here.start_worker()
    assert nights.run(documents, *DELETE).returncode == 65
    assert len(table.rows()) == 10
    assert not list(here.broker.jobs.newest())


def test_what_fails_keeps_its_row_and_is_tried_each_night(here: Here, nights: Nights) -> None:
    here.start_worker()
    nights.synced({"a": "one", "b": "two"})
    done = nights.run({"a": ""}, *DELETE)
    assert done.returncode == 1, "not one record of its job has a vector"
    assert "record 0 (a): empty:" in done.stderr
    assert did(json.loads(done.stdout)) == (0, 0, 1)
    assert json.loads(done.stdout)["delivered"]["failed"] == 1
    nights.assert_holds({"a": "one"})


@pytest.mark.parametrize("changes", [False, True])
def test_a_job_that_an_earlier_run_left_is_found(here: Here, nights: Nights, table: Database, changes: bool) -> None:
    """It is delivered first, also if the destination lacks less by now; and if it had not all of its records yet, it is
    begun again."""
    here.start_worker()
    documents = many(40)
    nights.kill(documents, WRITING, "before")
    (left,) = here.broker.jobs.newest()
    if changes:
        part = here.write(dict(itertools.islice(documents.items(), 10)), "part.jsonl")
        told(here.embedctl("submit", part, "-o", table.url, "--json"))
    done = nights.run(documents)
    assert did(told(done))[1] == (30 if changes else 40)
    assert (f"Resuming job {left.id}" in done.stderr) is changes
    nights.assert_holds(documents)
    assert left.id not in {job.id for job in here.broker.jobs.newest()}


def test_a_table_that_was_dropped_after_its_job_had_left_redis_is_filled(
    here: Here, nights: Nights, table: Database
) -> None:
    here.start_worker()
    documents = many(40)
    nights.kill(documents, ("embedctl.store.drains:Drains", "unlink", 1), "after")
    assert len(table.rows()) == 40
    table.remove()
    assert nights.synced(documents) == (0, 40, None)
    nights.assert_holds(documents)
    assert not list(here.broker.jobs.newest())


def test_a_job_that_was_left_with_other_options_stops_no_later_night(here: Here, nights: Nights) -> None:
    """Nobody knows its key, and it stays until it expires."""
    here.start_worker()
    nights.kill(many(10), WRITING, "before", "--chunk-size", "5")
    assert nights.synced(many(10)) == (0, 10, None)
    nights.assert_holds(many(10))


def test_a_job_that_another_model_took_is_not_found_again(here: Here, nights: Nights) -> None:
    """The worker that told its model was replaced before it took the job, and is back the next night."""
    first = here.start_worker()
    documents = many(10)
    nights.synced(documents)
    documents["new"] = "a new text"
    here.write(documents)
    first.kill()  # it counts as alive for some seconds
    run = Forked(nights.command(), here.environment, here.folder)
    eventually(lambda: list(here.broker.jobs.newest()))
    (here.folder / "embedctl.toml").write_text(OTHER_WEIGHTS)
    second = here.start_worker()
    _, said = run.communicate(timeout=120)
    assert run.returncode == 65, said
    assert not list(here.broker.jobs.newest())
    second.stop()
    (here.folder / "embedctl.toml").write_text(CONFIG)
    here.start_worker()
    assert nights.synced(documents) == (10, 1, None)
    nights.assert_holds(documents)


@pytest.mark.slow
@pytest.mark.parametrize("table", ["qdrant-http"], indirect=True)
def test_a_database_that_is_away_is_healed_by_the_same_command(here: Here, nights: Nights, table: Database) -> None:
    assert isinstance(table, QdrantByHttp)
    here.start_worker()
    documents = many(10)
    nights.synced(documents)
    after = next_day(documents)
    table.server.faults.extend([503] * 5)
    done = nights.run(after, *DELETE)
    assert done.returncode == 69, done.stderr
    nights.assert_holds(documents)
    assert nights.synced(after, *DELETE) == (8, 2, 1)
    nights.assert_holds(after)
    assert not list(here.broker.jobs.newest())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_night_that_is_killed_at_any_step_is_repeated(here: Here, nights: Nights) -> None:
    here.start_worker()
    documents = many(30)
    nights.synced(documents)
    for number, (step, when) in enumerate(itertools.product(STEPS, ("before", "after"))):
        del documents[next(iter(documents))]
        changed = {f"changed {number}": f"changed {number}", next(iter(documents)): f"changed {number}"}
        documents = {**documents, **changed, f"new-{number}": "a new text"}
        nights.kill(documents, step, when, *DELETE)
        done = nights.run(documents, *DELETE)
        assert done.returncode == 0, (step, when, done.stderr)
        nights.assert_holds(documents)
        left = list(here.broker.jobs.newest())
        assert not left or step[1] in ("write", "close", "discard"), (step, when)
        for job in left:  # all that it had was written already, so nobody looks for it
            Job(job.id, here.broker).discard()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_at_once_do_no_harm(here: Here, nights: Nights) -> None:
    here.start_worker()
    documents = many(300)
    nights.synced(documents)
    for number in range(6):
        documents = {**next_day(documents), f"more-{number}": f"more {number}", "id-3": f"changed {number}"}
        del documents[f"id-{number + 20}"]
        here.write(documents)
        both = [Forked(nights.command(*DELETE), here.environment, here.folder) for _ in range(2)]
        said = [process.communicate(timeout=120)[1] for process in both]
        assert [process.returncode for process in both] == [0, 0], said
        nights.assert_holds(documents)
        assert nights.synced(documents, *DELETE) == (len(documents), 0, 0)


@pytest.mark.slow
def test_what_an_error_budget_ends_is_written_and_deletes_nothing(here: Here, nights: Nights, table: Database) -> None:
    here.start_worker("poison")
    documents = many(40)
    options = ("--class", "poison", "--chunk-size", "2", *DELETE)
    nights.synced(documents, *options)
    after = {**documents, **{f"id-{at}": f"changed {at}" for at in range(10, 30)}}
    del after["id-7"]
    failed = nights.run({**after, "id-10": "fail-encoder", "id-11": "fail-encoder"}, *options, "--max-errors", "1")
    assert (failed.returncode, "error budget" in failed.stderr) == (1, True)
    assert sorted(table.rows()) == sorted(documents), "nothing is deleted"
    unchanged, written, deleted = nights.synced(after, *options)
    assert (unchanged + written, deleted) == (39, 1)
    assert 2 <= written <= 20
    nights.assert_holds(after)


@pytest.mark.slow
def test_run_syncs_too_also_if_it_was_killed(here: Here, nights: Nights) -> None:
    here.environment["EMBEDCTL_REDIS_URL"] = ""
    documents = many(10)
    here.write(documents)
    command = ("run", *nights.command("--class", "dummy", *DELETE)[1:])
    assert did(told(here.embedctl(*command))) == (0, 10, 0)
    after = next_day(documents)
    here.write(after)
    kill = killer(here.environment, here.folder)
    kill(("embedctl.cli.sync", "delete_missing", 1), "before", *command)
    nights.assert_holds({**after, "id-7": documents["id-7"]})
    assert did(told(here.embedctl(*command))) == (10, 0, 1)
    nights.assert_holds(after)
