"""`--since` with `--to`: each night, a table gets what is new and changed, and loses what is gone, before the output is
replaced."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedctl.broker import Broker
from tests.support.changes import Documents, Kill, Write, assert_holds, killer, many, told, worker_later
from tests.support.forked import Forked
from tests.support.jobs import reference
from tests.support.processes import RunEmbedctl
from tests.support.sinks import KINDS, Database, Postgres, QdrantByHttp, database
from tests.support.workers import CONFIG, StartWorker

OUTPUT = "v.parquet"
#: Steps of a night: a module and a class, a function, and which of its calls. A sink's own steps are the same in all
#: databases, and tests/contract/sinks kills a process between them in each.
STEPS = [
    ("embedctl.cli.changes", "bring", 1),
    ("embedctl.sinks.postgresql:PostgresSink", "open", 1),
    ("embedctl.sinks.postgresql:PostgresSink", "write", 1),
    ("embedctl.sinks.postgresql:PostgresSink", "commit", 1),
    ("embedctl.sinks.postgresql:PostgresSink", "open", 2),
    ("embedctl.sinks.postgresql:PostgresSink", "delete", 1),
    ("embedctl.sinks.postgresql:PostgresSink", "finish", 2),
    ("embedctl.output.parquet:ParquetWriter", "write", 1),
    ("embedctl.output.parquet", "publish", 1),
    ("embedctl.job:Job", "discard", 1),
]


@pytest.fixture
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """The database whose commands cost the least, unless a test is for all of them."""
    return database(request, getattr(request, "param", "pgvector"), tmp_path)


def night(table: Database, *options: str) -> tuple[str, ...]:
    return "submit", "corpus.jsonl", "--since", OUTPUT, "-o", OUTPUT, "--to", table.url, "--json", *options


def did(facts: dict[str, Any]) -> tuple[int, int, int, int]:
    return facts["unchanged"], facts["encoded"], facts["delivered"], facts["deleted"]


def assert_table(table: Database, documents: Documents) -> None:
    """The table has exactly the vectors of these documents."""
    rows = table.rows()
    assert sorted(rows) == sorted(documents)
    found = np.array([rows[label][0] for label in documents])
    np.testing.assert_allclose(found, reference(list(documents.values())), rtol=0, atol=1e-6)


def next_day(documents: Documents) -> Documents:
    """One is changed, one is new and one is gone."""
    after = {label: text for label, text in documents.items() if label != "id-7"}
    return {**after, "id-3": "changed", "new": "a new text"}


def test_each_night_a_table_gets_what_is_new_and_loses_what_is_gone(
    table: Database, write: Write, embedctl: RunEmbedctl, broker: Broker, short_folder: Path, start_worker: StartWorker
) -> None:
    start_worker()
    documents = many(40)
    write(documents)
    assert did(told(embedctl(*night(table)))) == (0, 40, 40, 0)
    assert_table(table, documents)
    assert isinstance(table, Postgres)
    stamps = dict(table.stamps())

    after = next_day(documents)
    write(after)
    done = embedctl(*night(table))
    assert did(told(done)) == (38, 2, 2, 0)
    assert "1 record is gone and stays in the table: --delete-missing" in done.stderr
    assert_table(table, {**after, "id-7": documents["id-7"]})
    later = dict(table.stamps())
    assert {label for label in documents if later[label] != stamps[label]} == {"id-3"}

    # It is still on the list of what is gone.
    assert did(told(embedctl(*night(table, "--delete-missing")))) == (40, 0, 0, 1)
    assert_table(table, after)
    assert did(told(embedctl(*night(table, "--delete-missing")))) == (40, 0, 0, 0)
    del after["id-9"]
    after["id-7"] = "it is back"
    write(after)
    assert did(told(embedctl(*night(table, "--delete-missing")))) == (39, 1, 1, 1)
    assert_table(table, after)
    assert_holds(short_folder / OUTPUT, after)

    table.empty()
    assert did(told(embedctl(*night(table, "--force")))) == (0, 40, 40, 0)
    assert_table(table, after)
    assert not list(broker.jobs.newest())


@pytest.mark.parametrize("table", KINDS, indirect=True)
def test_a_corpus_that_only_shrinks(
    table: Database, write: Write, embedctl: RunEmbedctl, short_folder: Path, start_worker: StartWorker
) -> None:
    """There is no job then, and no worker is needed."""
    worker = start_worker()
    documents = many(10)
    write(documents)
    told(embedctl(*night(table)))
    worker.stop()
    del documents["id-1"]
    write(documents)
    done = embedctl(*night(table, "--delete-missing"))
    assert did(told(done)) == (9, 0, 0, 1)
    assert "Deleted 1 records from" in done.stderr
    assert_table(table, documents)
    assert_holds(short_folder / OUTPUT, documents)


def test_a_list_without_its_output_deletes_nothing(
    table: Database, write: Write, embedctl: RunEmbedctl, short_folder: Path, start_worker: StartWorker
) -> None:
    start_worker()
    documents = many(10)
    write(documents)
    told(embedctl(*night(table)))
    write({label: text for label, text in documents.items() if label != "id-1"})
    told(embedctl(*night(table)))
    write(documents)
    (short_folder / OUTPUT).unlink()
    assert did(told(embedctl(*night(table, "--delete-missing")))) == (0, 10, 10, 0)
    assert_table(table, documents)


def test_gone_records_without_an_id_are_counted(
    table: Database, write: Write, embedctl: RunEmbedctl, short_folder: Path, start_worker: StartWorker
) -> None:
    start_worker()
    (short_folder / "corpus.jsonl").write_text('{"text": "nameless"}\n{"id": "a", "text": "one"}\n')
    told(embedctl("submit", "corpus.jsonl", "--digests", "-o", OUTPUT, "--json"))
    write({"a": "changed"})
    done = embedctl(*night(table, "--delete-missing"))
    assert did(told(done)) == (0, 1, 1, 0)
    assert "Of what is gone, 1 had no id" in done.stderr


def test_kept_fields_of_unchanged_texts_are_said_to_stay(
    table: Database, write: Write, embedctl: RunEmbedctl, start_worker: StartWorker
) -> None:
    start_worker()
    write({"a": "one", "b": "two"}, title="old")
    told(embedctl(*night(table, "--keep", "title")))
    write({"a": "one", "b": "changed"}, title="new")
    done = embedctl(*night(table, "--keep", "title"))
    assert did(told(done)) == (1, 1, 1, 0)
    assert "Kept fields of unchanged texts stay as they are in the table: --force" in done.stderr
    assert [table.rows()[label][1]["title"] for label in "ab"] == ["old", "new"]


@pytest.mark.parametrize(
    ("before", "after", "statuses", "expected", "held"),
    [
        pytest.param(
            {"a": "one", "b": "two", "c": "three", "d": "four"},
            {"a": "two", "b": "one", "moved": "three", "d": "four", "twin": "four"},
            (0, 0),
            (1, 4, 4, 1),
            {"a": "two", "b": "one", "moved": "three", "d": "four", "twin": "four"},
            id="a text under another id is another row",  # without a table, its vector would only be copied
        ),
        pytest.param(
            {"a": "one", "b": ""},
            {"a": "one", "b": "two"},
            (3, 0),
            (1, 1, 1, 0),
            {"a": "one", "b": "two"},
            id="what failed is delivered once it is mended",
        ),
        pytest.param(
            {"a": "one", "b": "two"},
            {"a": ""},
            (0, 1),
            (0, 1, 0, 1),
            {"a": "one"},
            id="what fails keeps its vector, and what is gone is deleted",
        ),
    ],
)
def test_the_second_night(
    before: Documents,
    after: Documents,
    statuses: tuple[int, int],
    expected: tuple[int, int, int, int],
    held: Documents,
    table: Database,
    write: Write,
    embedctl: RunEmbedctl,
    start_worker: StartWorker,
) -> None:
    start_worker()
    write(before)
    first = embedctl(*night(table))
    write(after)
    second = embedctl(*night(table, "--delete-missing"))
    assert (first.returncode, second.returncode) == statuses, first.stderr + second.stderr
    assert did(json.loads(second.stdout)) == expected
    assert_table(table, held)


def test_the_table_of_another_model_leaves_the_output_as_it_is(
    table: Database, write: Write, embedctl: RunEmbedctl, short_folder: Path, start_worker: StartWorker
) -> None:
    start_worker()
    documents = many(10)
    write(documents)
    told(embedctl(*night(table)))
    before = (short_folder / OUTPUT).read_bytes()
    del documents["id-1"]
    write(documents)
    done = embedctl(*night(table, "--delete-missing", "--prompt", "query: "))
    assert done.returncode == 65, done.stderr
    assert len(table.rows()) == 10
    assert (short_folder / OUTPUT).read_bytes() == before


@pytest.mark.slow
def test_a_worker_with_other_weights_that_comes_later_writes_nothing_into_the_table(
    table: Database, write: Write, embedctl: RunEmbedctl, short_folder: Path, start_worker: StartWorker
) -> None:
    """Nothing tells the model's files before the job is claimed. Even where models may be mixed, the difference alone
    must not come from another model."""
    first = start_worker()
    documents = many(20)
    write(documents)
    told(embedctl(*night(table)))
    first.stop()
    before = (short_folder / OUTPUT).read_bytes()
    (short_folder / "embedctl.toml").write_text(
        CONFIG.replace("options = {dim = 16}", "options = {dim = 16, seed = 1}", 1)
    )
    after = next_day(documents)
    write(after)
    with worker_later(start_worker):
        done = embedctl(*night(table, "--delete-missing"))
    assert done.returncode == 65, done.stderr
    assert "other model files" in done.stderr
    assert_table(table, documents)
    assert (short_folder / OUTPUT).read_bytes() == before
    assert did(told(embedctl(*night(table, "--delete-missing", "--allow-mixed")))) == (0, 20, 20, 1)
    assert_holds(short_folder / OUTPUT, after, seed=1)
    assert sorted(table.rows()) == sorted(after)


@pytest.mark.slow
@pytest.mark.parametrize("table", ["qdrant-http"], indirect=True)
def test_a_database_that_is_away_leaves_the_earlier_output_and_the_same_command_heals_it(
    table: Database,
    write: Write,
    embedctl: RunEmbedctl,
    broker: Broker,
    short_folder: Path,
    start_worker: StartWorker,
) -> None:
    assert isinstance(table, QdrantByHttp)
    start_worker()
    documents = many(10)
    write(documents)
    told(embedctl(*night(table)))
    before = (short_folder / OUTPUT).read_bytes()
    after = next_day(documents)
    write(after)
    table.server.faults.extend([503] * 5)
    done = embedctl(*night(table, "--delete-missing"))
    assert done.returncode == 69, done.stderr
    assert (short_folder / OUTPUT).read_bytes() == before
    assert_table(table, documents)
    assert len(list(broker.jobs.newest())) == 1
    assert did(told(embedctl(*night(table, "--delete-missing")))) == (8, 2, 2, 1)
    assert_table(table, after)
    assert_holds(short_folder / OUTPUT, after)
    assert not list(broker.jobs.newest())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_night_that_is_killed_at_any_step_is_repeated(
    table: Database,
    write: Write,
    embedctl: RunEmbedctl,
    environment: dict[str, str],
    broker: Broker,
    short_folder: Path,
    start_worker: StartWorker,
) -> None:
    kill: Kill = killer(environment, short_folder)
    start_worker()
    documents = many(30)
    write(documents)
    told(embedctl(*night(table)))
    for number, (step, when) in enumerate(itertools.product(STEPS, ("before", "after"))):
        # The next night brings the table and the output from the last one on, so nothing has to be reset.
        before = (short_folder / OUTPUT).read_bytes()
        del documents[next(iter(documents))]
        documents = {**documents, next(iter(documents)): f"changed {number}", f"new-{number}": "a new text"}
        write(documents)
        kill(step, when, *night(table, "--delete-missing"))
        published = (step[1], when) in {("publish", "after"), ("discard", "before"), ("discard", "after")}
        found = (short_folder / OUTPUT).read_bytes()
        assert (found != before) is published, (step, when)
        done = embedctl(*night(table, "--delete-missing"))
        assert done.returncode == 0, (step, when, done.stderr)
        assert_table(table, documents)
        assert_holds(short_folder / OUTPUT, documents)
        if published:
            assert (short_folder / OUTPUT).read_bytes() == found, (step, when)
        left = list(broker.jobs.newest())
        assert not left or published, (step, when)
        for job in left:
            embedctl("discard", job.id)


@pytest.mark.slow
def test_two_at_once_make_one_table_and_one_output(
    table: Database,
    write: Write,
    embedctl: RunEmbedctl,
    environment: dict[str, str],
    short_folder: Path,
    start_worker: StartWorker,
) -> None:
    start_worker()
    documents = many(300)
    write(documents)
    told(embedctl(*night(table)))
    for number in range(3):
        documents = {**next_day(documents), f"more-{number}": f"more {number}", "id-3": f"changed {number}"}
        del documents[f"id-{number + 20}"]
        write(documents)
        both = [Forked(night(table, "--delete-missing"), environment, short_folder) for _ in range(2)]
        said = [process.communicate(timeout=120)[1] for process in both]
        assert 0 in [process.returncode for process in both], said
        assert "Traceback" not in "".join(said), said
        assert_table(table, documents)
        assert_holds(short_folder / OUTPUT, documents)
        assert did(told(embedctl(*night(table, "--delete-missing"))))[1:] == (0, 0, 0)


@pytest.mark.slow
def test_run_brings_a_difference_too_also_if_it_was_killed_after_that(
    table: Database, write: Write, embedctl: RunEmbedctl, environment: dict[str, str], short_folder: Path
) -> None:
    documents = many(10)
    write(documents)
    command = ("run", *night(table, "--class", "dummy", "--delete-missing")[1:])
    assert did(told(embedctl(*command, EMBEDCTL_REDIS_URL=""))) == (0, 10, 10, 0)
    after = next_day(documents)
    write(after)
    before = (short_folder / OUTPUT).read_bytes()
    kill = killer({**environment, "EMBEDCTL_REDIS_URL": ""}, short_folder)
    kill(("embedctl.cli.changes", "bring", 1), "after", *command)
    assert_table(table, after)
    assert (short_folder / OUTPUT).read_bytes() == before
    assert did(told(embedctl(*command, EMBEDCTL_REDIS_URL=""))) == (8, 2, 0, 0)
    assert_table(table, after)
    assert_holds(short_folder / OUTPUT, after)


def test_ids_are_needed_and_no_fix_is_named_that_is_refused(
    table: Database, embedctl: RunEmbedctl, short_folder: Path
) -> None:
    for line, message in (({"text": "b"}, "has no id"), ({"id": "a", "text": "b"}, "is not unique")):
        lines = [{"id": "a", "text": "a"}, line]
        (short_folder / "corpus.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
        done = embedctl(*night(table))
        assert done.returncode == 2
        assert message in done.stderr
        assert "give each record its own" in done.stderr
        assert "--id position" not in done.stderr
