"""The cache of vectors: whole keys, checksums, a bound, and two processes at once."""

from __future__ import annotations

import dataclasses
import hashlib
import multiprocessing
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from embedctl.corpus.digests import NO_DIGEST, as_rows
from embedctl.destinations.interface import Contract
from embedctl.sync.cache import Cache, Cached, Value, key_of, kinds_of, path_of
from embedctl.sync.known import Rows
from embedctl.waiting.results import ChunkVectors, TruncatedRecord
from embedctl.waiting.shapes import MultiVectors, SparseVectors
from embedctl_config.errors import OutputError, SettingsError
from embedctl_config.outputs import Output
from tests.support.jobs import assert_same_rows
from tests.support.store import some
from tests.support.waiting import PATIENCE_S

LARGE = 1 << 40
FINGERPRINT = "ab" * 32


def contract(precision: str = "fp32", **options: object) -> Contract:
    return Contract("", "model", precision, options, model_fingerprint=FINGERPRINT)


def cached(value: float, dim: int = 4, cut: tuple[int, int] = (0, 0)) -> Value:
    return cut, np.full(dim, value, np.float32).tobytes()


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def found_in(cache: Cache, *keys: bytes) -> dict[bytes, tuple[tuple[int, int], list[float]]]:
    return {key: (cut, np.frombuffer(vector, np.float32).tolist()) for key, (cut, vector) in cache.find(keys)}


def test_a_vector_comes_back_as_it_was(tmp_path: Path) -> None:
    one, other = bytes(32), b"\1" * 32
    with Cache(str(tmp_path / "c.db"), LARGE) as cache:
        cache.put([(one, cached(0.1, cut=(510, 7)))])
    with Cache(f"sqlite:///{tmp_path}/c.db".replace("///", "////").replace("/////", "////"), LARGE) as cache:
        found = found_in(cache, one, other)
    assert found == {one: ((510, 7), [float(np.float32(0.1))] * 4)}


@pytest.mark.parametrize(
    "damage",
    [
        lambda value: value[:-4] + b"\0\0\0\1",
        lambda value: value[:4] + b"\1" + value[5:],
        lambda value: value[:-4],
        lambda value: b"",
        lambda value: "text",
    ],
)
def test_a_damaged_value_counts_as_absent_and_is_replaced(damage: object, tmp_path: Path) -> None:
    key = digest("key")
    with Cache(str(tmp_path / "c.db"), LARGE) as cache:
        cache.put([(key, cached(1.0))])
        database = sqlite3.connect(tmp_path / "c.db")
        (value,) = database.execute("SELECT value FROM vectors").fetchone()
        assert callable(damage)
        database.execute("UPDATE vectors SET value = ?", (damage(value),))
        database.commit()
        database.close()
        assert found_in(cache, key) == {}
        cache.put([(key, cached(2.0))])
        assert found_in(cache, key) == {key: ((0, 0), [2.0] * 4)}


def test_a_value_under_another_key_counts_as_absent(tmp_path: Path) -> None:
    with Cache(str(tmp_path / "c.db"), LARGE) as cache:
        cache.put([(digest("a"), cached(1.0)), (digest("b"), cached(2.0))])
        database = sqlite3.connect(tmp_path / "c.db")
        (value,) = database.execute("SELECT value FROM vectors WHERE key = ?", (digest("a"),)).fetchone()
        database.execute("UPDATE vectors SET value = ? WHERE key = ?", (value, digest("b")))
        database.commit()
        database.close()
        assert list(found_in(cache, digest("a"), digest("b"))) == [digest("a")]


def test_the_oldest_make_room(tmp_path: Path) -> None:
    keys = [digest(str(at)) for at in range(3000)]
    with Cache(str(tmp_path / "c.db"), 1_000_000) as cache:
        for first in range(0, len(keys), 100):
            cache.put((key, cached(at, dim=128)) for at, key in enumerate(keys[first : first + 100], first))
            assert cache.size() <= 1_000_000
        left = [at for at, key in enumerate(keys) if key in found_in(cache, key)]
    assert left == list(range(left[0], 3000))
    assert len(left) > 1000
    assert (tmp_path / "c.db").stat().st_size < 1_500_000


def test_a_cache_smaller_than_one_vector_stays_usable(tmp_path: Path) -> None:
    with Cache(str(tmp_path / "c.db"), 1) as cache:
        cache.put([(digest("a"), cached(1.0))])
        assert found_in(cache, digest("a")) == {}


def test_it_is_asked_by_texts_and_answers_the_same_whatever_others_write(tmp_path: Path) -> None:
    digests = as_rows(digest("a") + digest("b") + NO_DIGEST + digest("a") + digest("c"))
    fp32, fp16 = (kinds_of(contract(precision))[Output.DENSE] for precision in ("fp32", "fp16"))
    there = [
        (key_of(fp32, digest("a")), cached(1.0)),
        (key_of(fp16, digest("b")), cached(2.0)),
        (key_of(fp32, digest("b")), cached(3.0, cut=(3, 4))),
        (key_of(fp32, digest("c")), cached(4.0, dim=5)),
        (key_of(fp32, NO_DIGEST), cached(5.0)),
    ]
    with Cache(str(tmp_path / "c.db"), LARGE) as cache, Cache(str(tmp_path / "c.db"), 1) as other:
        cache.put(there)
        known = Cached(cache, contract())
        assert known.has(digests[:2]).tolist() == [True, True]
        other.put([(key_of(fp32, digest("d")), cached(6.0))])  # which makes room
        # A record without a text has no vector, and c's has other dimensions than the others.
        assert known.has(digests).tolist() == [True, True, False, True, False]
        rows = known.take(digests[[0, 1, 3]])
        cache.put(there[:1])
        assert known.has(digests).tolist() == [True, False, False, True, False]
    assert [row.tobytes() for row in rows.digests] == [digest("a"), digest("b"), digest("a")]
    assert rows.vectors[:, 0].tolist() == [1.0, 3.0, 1.0]
    assert rows.cuts.tolist() == [[0, 0], [3, 4], [0, 0]]


def test_a_text_is_there_if_all_outputs_are_and_each_comes_back_exactly(tmp_path: Path) -> None:
    """Whichever others a job asked for beside it. A vector of a token that float16 holds takes half of the room."""
    texts = ["a", "b", "c"]
    digests = as_rows(b"".join(map(digest, texts)))
    sparse = SparseVectors(9, np.array([2, 0, 1]), np.array([3, 8, 0], np.uint32), np.array([0.1, 2, 3], np.float32))
    multi = MultiVectors(2, np.array([1, 2, 0]), np.array([[0.5, -2], [0.1, 1e9], [1, 2]], np.float32))
    chunk = ChunkVectors(
        np.array([5, 6, 7]),
        [None] * 3,
        np.eye(3, 4, dtype=np.float32),
        [],
        [TruncatedRecord(6, None, 510, 7)],
        digests=digests,
        sparse=sparse,
        multi=multi,
    )
    sparse_alone, both, every = (
        contract(vectors=each.split()) for each in ("sparse", "dense multi", "dense sparse multi")
    )

    def add(chunk: ChunkVectors, job: Contract) -> None:
        with Cache(str(tmp_path / "c.db"), LARGE) as cache:
            cache.add([chunk], job)

    def found(job: Contract) -> Rows | None:
        with Cache(str(tmp_path / "c.db"), LARGE) as cache:
            known = Cached(cache, job)
            return known.take(digests) if known.has(digests).all() else None

    add(dataclasses.replace(chunk, vectors=chunk.vectors[:, :0], multi=None), sparse_alone)
    assert [found(job) is None for job in (contract(), both, every, sparse_alone)] == [True, True, True, False]
    add(chunk, both)
    for job in (contract(), both, every, sparse_alone):
        rows = some(found(job))
        assert list(rows.widths) == list(job.outputs)
        assert rows.cuts.tolist() == [[0, 0], [510, 7], [0, 0]]
    rows = some(found(every))
    np.testing.assert_array_equal(rows.vectors, chunk.vectors)
    assert_same_rows(rows.sparse, sparse)
    assert_same_rows(rows.multi, multi)


@pytest.mark.parametrize(
    "where", ["redis://:secret@host/0", "sqlite://host/x", "sqlite://", "sqlite:///", "sqlite:///x?key=secret"]
)
def test_another_url_is_refused_and_not_quoted(where: str) -> None:
    with pytest.raises(SettingsError) as refused:
        path_of(where)
    assert "secret" not in str(refused.value)


def test_another_file_is_left_alone(tmp_path: Path) -> None:
    junk = tmp_path / "junk"
    junk.write_bytes(b"something else " * 500)
    with pytest.raises(OutputError, match="not a database"):
        Cache(str(junk), LARGE)
    assert junk.read_bytes() == b"something else " * 500
    database = sqlite3.connect(tmp_path / "other.db")
    database.execute("CREATE TABLE other (a)")
    database.close()
    with pytest.raises(OutputError, match="is no cache"):
        Cache(str(tmp_path / "other.db"), LARGE)
    with pytest.raises(OutputError, match="can't be used"):
        Cache(str(tmp_path / "no folder" / "c.db"), LARGE)


def _fill(path: str, number: int) -> None:
    for first in range(0, 1000, 50):
        with Cache(path, LARGE) as cache:
            cache.put((digest(f"{number} {at}"), cached(at)) for at in range(first, first + 50))


def test_processes_share_a_cache(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_fill, args=(str(tmp_path / "c.db"), number)) for number in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(PATIENCE_S)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    with Cache(str(tmp_path / "c.db"), LARGE) as cache:
        keys = [digest(f"{number} {at}") for number in range(3) for at in range(1000)]
        assert len(found_in(cache, *keys)) == 3000
