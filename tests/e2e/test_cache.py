"""`--cache`: what was encoded for one output is not encoded for another, and nothing wrong comes out of it.

That other vectors are no hits is tested in test_sync_files.py.
"""

from __future__ import annotations

import json
import sqlite3

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.support.changes import assert_holds, counts, many, submitted, told, worker_later
from tests.support.here import Here
from tests.support.jobs import reference

CACHE = ("--cache", "c.db")


def test_what_was_encoded_once_comes_out_of_the_cache(here: Here) -> None:
    here.start_worker()
    documents = many(300)
    assert counts(submitted(here, documents, "-o", "a.parquet", *CACHE)) == (0, 0, 300)
    facts = submitted(here, documents, "-o", "b.parquet", *CACHE)
    assert (counts(facts), facts["id"]) == ((0, 300, 0), None)
    assert not list(here.broker.jobs.newest())
    assert (here.folder / "a.parquet").read_bytes() == (here.folder / "b.parquet").read_bytes()

    documents |= {f"other-{at}": f"other {at}" for at in range(10)}
    assert counts(submitted(here, documents, "-o", "a.parquet", "--sync", *CACHE)) == (300, 0, 10)
    submitted(here, documents, "-o", "c.npy", *CACHE)
    facts = submitted(here, documents, "-o", "d.parquet", "--cache", "sqlite:///c.db")
    assert counts(facts) == (0, 310, 0)
    assert_holds(here.folder / "d.parquet", documents)
    np.testing.assert_array_equal(np.load(here.folder / "c.npy"), reference(list(documents.values())))


def test_a_damaged_value_is_encoded_again(here: Here) -> None:
    here.start_worker()
    documents = many(20)
    submitted(here, documents, "-o", "a.parquet", *CACHE)
    with sqlite3.connect(here.folder / "c.db") as database:
        value = bytearray(database.execute("SELECT value FROM vectors WHERE at = 3").fetchone()[0])
        value[20] ^= 1
        database.execute("UPDATE vectors SET value = ? WHERE at = 3", (bytes(value),))
    database.close()
    assert counts(submitted(here, documents, "-o", "b.parquet", *CACHE)) == (0, 19, 1)
    assert_holds(here.folder / "b.parquet", documents)
    assert counts(submitted(here, documents, "-o", "c.parquet", *CACHE)) == (0, 20, 0)


def test_failed_texts_are_not_cached_and_what_was_cut_is_told_again(here: Here) -> None:
    here.start_worker()
    corpus = here.write({"a": "one", "b": "", "c": "word " * 600})
    for name, expected in (("a.parquet", (0, 0, 3)), ("b.parquet", (0, 2, 1))):
        done = here.embedctl("submit", corpus, "-o", name, *CACHE, "--json", status=3)
        assert counts(json.loads(done.stdout)) == expected
    first, second = (pq.read_table(here.folder / name) for name in ("a.parquet", "b.parquet"))
    assert first == second
    assert first["tokens_lost"].to_pylist()[2] > 0


@pytest.mark.slow
def test_without_a_worker_the_cache_is_not_read(here: Here) -> None:
    """Nothing tells which files the model has, until a worker claims the job."""
    worker = here.start_worker()
    submitted(here, many(20), "-o", "a.parquet", *CACHE)
    worker.stop()
    with worker_later(here.start_worker):
        done = here.embedctl("submit", "corpus.jsonl", "-o", "b.parquet", *CACHE, "--json")
    assert counts(told(done)) == (0, 0, 20)
    assert "no live worker tells" in done.stderr


@pytest.mark.slow
def test_a_small_cache_keeps_the_newest(here: Here) -> None:
    here.start_worker()
    here.environment["EMBEDCTL_CACHE_MAX_BYTES"] = str(2**20)
    documents = many(12_000)
    submitted(here, documents, "-o", "a.parquet", *CACHE)
    assert (here.folder / "c.db").stat().st_size < 2**21
    assert 0 < submitted(here, documents, "-o", "b.parquet", *CACHE)["cached"] < 12_000


def test_a_cache_that_can_not_be_used_is_refused_before_anything_is_queued(here: Here) -> None:
    here.start_worker()
    corpus = here.write(many(5))
    (here.folder / "junk").write_text("something else " * 100)
    for cache, why in (
        ("junk", "not a database"),
        ("no folder/c.db", "can't be used"),
        ("redis://u:secret@host/0", "takes a path"),
    ):
        done = here.embedctl("submit", corpus, "-o", "a.parquet", "--cache", cache)
        assert done.returncode in (1, 2)
        assert why in done.stderr
        assert "secret" not in done.stderr
    assert not list(here.broker.jobs.newest())


def test_a_cache_that_takes_nothing_costs_no_vector(here: Here) -> None:
    """As on a full disk: the output is complete, and the command says what is missing."""
    here.start_worker()
    documents = many(20)
    submitted(here, {"a": "first"}, "-o", "a.parquet", *CACHE)
    with sqlite3.connect(here.folder / "c.db") as database:
        database.execute("CREATE TRIGGER full BEFORE INSERT ON vectors BEGIN SELECT RAISE(ABORT, 'no room'); END")
    database.close()
    done = here.embedctl("submit", here.write(documents), "-o", "b.parquet", *CACHE, "--json")
    assert counts(told(done)) == (0, 0, 20)
    assert "not all of them are in the cache" in done.stderr
    assert_holds(here.folder / "b.parquet", documents)
    assert not list(here.broker.jobs.newest())
