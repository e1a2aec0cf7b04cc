"""`--cache`: what was encoded for one output is not encoded for another, and nothing wrong comes out of it."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from embedctl.broker import Broker
from tests.support.changes import OTHER_VECTORS, RESEEDED, Write, assert_holds, counts, many, told, worker_later
from tests.support.jobs import reference
from tests.support.processes import RunEmbedctl
from tests.support.workers import StartWorker


def test_what_was_encoded_once_comes_out_of_the_cache(
    write: Write, embedctl: RunEmbedctl, broker: Broker, short_folder: Path, start_worker: StartWorker
) -> None:
    start_worker()
    documents = many(300)
    corpus = write(documents)
    cache = ("--cache", "c.db", "--json")
    assert counts(told(embedctl("submit", corpus, "-o", "a.parquet", *cache))) == (0, 0, 300)
    facts = told(embedctl("submit", corpus, "-o", "b.parquet", *cache))
    assert counts(facts) == (0, 300, 0)
    assert facts["id"] is None
    assert not list(broker.jobs.newest())
    assert (short_folder / "a.parquet").read_bytes() == (short_folder / "b.parquet").read_bytes()

    documents |= {f"other-{at}": f"other {at}" for at in range(10)}
    facts = told(embedctl("submit", write(documents), "-o", "a.parquet", "--sync", *cache))
    assert counts(facts) == (300, 0, 10)
    told(embedctl("submit", corpus, "-o", "c.npy", *cache))
    facts = told(embedctl("submit", write(documents), "-o", "d.parquet", "--cache", "sqlite:///c.db", "--json"))
    assert counts(facts) == (0, 310, 0)
    assert_holds(short_folder / "d.parquet", documents)
    np.testing.assert_array_equal(np.load(short_folder / "c.npy"), reference(list(documents.values())))


def test_other_vectors_are_no_hits(
    write: Write, embedctl: RunEmbedctl, short_folder: Path, start_worker: StartWorker
) -> None:
    with (short_folder / "embedctl.toml").open("a") as config:
        config.write(RESEEDED)
    for name in ("dummy", "half", "reseeded"):
        start_worker(name)
    corpus, cache = write(many(20)), ("--cache", "c.db", "--json")
    told(embedctl("submit", corpus, "-o", "a.parquet", *cache))
    for options in OTHER_VECTORS:
        assert counts(told(embedctl("submit", corpus, "-o", "b.parquet", *cache, *options))) == (0, 0, 20), options
        assert counts(told(embedctl("submit", corpus, "-o", "c.parquet", *cache, *options))) == (0, 20, 0), options
        assert (short_folder / "b.parquet").read_bytes() == (short_folder / "c.parquet").read_bytes(), options


def test_a_damaged_value_is_encoded_again(
    write: Write, embedctl: RunEmbedctl, short_folder: Path, start_worker: StartWorker
) -> None:
    start_worker()
    documents = many(20)
    corpus, cache = write(documents), ("--cache", "c.db", "--json")
    told(embedctl("submit", corpus, "-o", "a.parquet", *cache))
    with sqlite3.connect(short_folder / "c.db") as database:
        value = bytearray(database.execute("SELECT value FROM vectors WHERE at = 3").fetchone()[0])
        value[20] ^= 1
        database.execute("UPDATE vectors SET value = ? WHERE at = 3", (bytes(value),))
    database.close()
    assert counts(told(embedctl("submit", corpus, "-o", "b.parquet", *cache))) == (0, 19, 1)
    assert_holds(short_folder / "b.parquet", documents)
    assert counts(told(embedctl("submit", corpus, "-o", "c.parquet", *cache))) == (0, 20, 0)


def test_failed_texts_are_not_cached_and_what_was_cut_is_told_again(
    write: Write, embedctl: RunEmbedctl, short_folder: Path, start_worker: StartWorker
) -> None:
    start_worker()
    documents = {"a": "one", "b": "", "c": "word " * 600}
    corpus, cache = write(documents), ("--cache", "c.db", "--json")
    for name, expected in (("a.parquet", (0, 0, 3)), ("b.parquet", (0, 2, 1))):
        done = embedctl("submit", corpus, "-o", name, *cache)
        assert done.returncode == 3, done.stderr
        assert counts(json.loads(done.stdout)) == expected
    first, second = (pq.read_table(short_folder / name) for name in ("a.parquet", "b.parquet"))
    assert first == second
    assert first["tokens_lost"].to_pylist()[2] > 0


@pytest.mark.slow
def test_without_a_worker_the_cache_is_not_read(
    write: Write, embedctl: RunEmbedctl, short_folder: Path, start_worker: StartWorker
) -> None:
    """Nothing tells which files the model has, until a worker claims the job."""
    worker = start_worker()
    corpus, cache = write(many(20)), ("--cache", "c.db", "--json")
    told(embedctl("submit", corpus, "-o", "a.parquet", *cache))
    worker.stop()
    with worker_later(start_worker):
        done = embedctl("submit", corpus, "-o", "b.parquet", *cache)
    assert counts(told(done)) == (0, 0, 20)
    assert "no live worker tells" in done.stderr


@pytest.mark.slow
def test_a_small_cache_keeps_the_newest(
    write: Write, embedctl: RunEmbedctl, short_folder: Path, start_worker: StartWorker
) -> None:
    start_worker()
    documents = many(12_000)
    cache = ("--cache", "c.db", "--json")
    variables = {"EMBEDCTL_CACHE_MAX_BYTES": str(2**20)}
    told(embedctl("submit", write(documents), "-o", "a.parquet", *cache, **variables))
    assert (short_folder / "c.db").stat().st_size < 2**21
    facts = told(embedctl("submit", write(documents), "-o", "b.parquet", *cache, **variables))
    assert 0 < facts["cached"] < 12_000
    assert (short_folder / "a.parquet").read_bytes() == (short_folder / "b.parquet").read_bytes()


def test_a_cache_that_can_not_be_used_is_refused_before_anything_is_queued(
    write: Write, embedctl: RunEmbedctl, broker: Broker, short_folder: Path, start_worker: StartWorker
) -> None:
    start_worker()
    corpus = write(many(5))
    (short_folder / "junk").write_text("something else " * 100)
    for cache, why in (
        ("junk", "not a database"),
        ("no folder/c.db", "can't be used"),
        ("redis://u:secret@host/0", "takes a path"),
    ):
        done = embedctl("submit", corpus, "-o", "a.parquet", "--cache", cache)
        assert done.returncode in (1, 2)
        assert why in done.stderr
        assert "secret" not in done.stderr
    assert not list(broker.jobs.newest())


def test_a_cache_that_takes_nothing_costs_no_vector(
    write: Write, embedctl: RunEmbedctl, broker: Broker, short_folder: Path, start_worker: StartWorker
) -> None:
    """As on a full disk: the output is complete, and the command says what is missing."""
    start_worker()
    documents = many(20)
    cache = ("--cache", "c.db", "--json")
    told(embedctl("submit", write({"a": "first"}), "-o", "a.parquet", *cache))
    with sqlite3.connect(short_folder / "c.db") as database:
        database.execute("CREATE TRIGGER full BEFORE INSERT ON vectors BEGIN SELECT RAISE(ABORT, 'no room'); END")
    database.close()
    done = embedctl("submit", write(documents), "-o", "b.parquet", *cache)
    assert counts(told(done)) == (0, 0, 20)
    assert "not all of them are in the cache" in done.stderr
    assert_holds(short_folder / "b.parquet", documents)
    assert not list(broker.jobs.newest())
