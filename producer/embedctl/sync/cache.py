"""A cache of vectors in a file of SQLite, for any number of processes of one machine."""

from __future__ import annotations

import hashlib
import sqlite3
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from embedctl.corpus.digests import NO_DIGEST, Digests
from embedctl.destinations.unfinished import lock_of, part_of, publish
from embedctl.sync.known import Known, Rows, row_type
from embedctl.waiting.results import ChunkVectors
from embedctl_config import durable
from embedctl_config.errors import OutputError, SettingsError

#: What SQLite notes of the file's program ("EMBC") and of its format.
_APPLICATION, _FORMAT = 0x454D4243, 1
#: Before the vector: crc32 of the key and of all that follows, and the numbers of tokens used and lost.
_HEAD = struct.Struct("<III")
#: Keys that are asked for together, and vectors that are written together.
_ASKED, _WRITTEN = 500, 1000
#: How long a process waits for another one that writes (seconds).
_PATIENCE_S = 60.0
_SCHEME = "sqlite"

#: A vector of the cache: the numbers of tokens of its text that were used and lost, zeros unless it was cut; float32.
Vector = tuple[tuple[int, int], npt.NDArray[np.float32]]


def key_of(fingerprint: str, precision: str, digest: bytes) -> bytes:
    """The key of a vector, 32 bytes: of a job's fingerprint in hexadecimal, and of the SHA-256 of a text."""
    return hashlib.sha256(bytes.fromhex(fingerprint) + precision.encode() + digest).digest()


class Cache:
    """Vectors by key, in a file of at most `max_bytes`: a path, or `sqlite:///PATH`, where a fourth slash makes the
    path absolute, as in SQLAlchemy. The oldest ones make room for new ones. A context manager. Every method raises
    OutputError if the file can't be used, or is none of a cache."""

    def __init__(self, where: str, max_bytes: int) -> None:
        self.path = path_of(where)
        self._max = max_bytes
        with self._explained():
            if not self._is_there():
                self._make()
            self._database = sqlite3.connect(self.path, timeout=_PATIENCE_S, isolation_level=None)
            try:
                self._check()
            except BaseException:
                self._database.close()
                raise

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._database.close()

    def find(self, keys: Iterable[bytes]) -> Iterator[tuple[bytes, Vector]]:
        """Those keys that have a vector, in any order. A value that fails its checksum counts as absent."""
        source = iter(keys)
        while asked := list(islice(source, _ASKED)):
            marks = ",".join("?" * len(asked))
            with self._explained():
                found = self._database.execute(
                    f"SELECT key, value FROM vectors WHERE key IN ({marks})",  # noqa: S608  (only question marks)
                    asked,
                ).fetchall()
            for key, value in found:
                if (cached := _parsed(key, value)) is not None:
                    yield key, cached

    def stand_still(self) -> None:
        """Find what is there now, whatever other processes write, until :meth:`put`."""
        with self._explained():
            self._database.execute("BEGIN")
            self._database.execute("SELECT at FROM vectors LIMIT 1").fetchone()

    def put(self, vectors: Iterable[tuple[bytes, Vector]]) -> None:
        """Add vectors, each under its key. Call it when the vectors are durable elsewhere."""
        with self._explained():
            self._database.commit()
        source = iter(vectors)
        while some := list(islice(source, _WRITTEN)):
            rows = [(key, _written(key, *cached)) for key, cached in some]
            with self._explained(), self._database:
                self._database.execute("BEGIN IMMEDIATE")
                self._database.executemany("INSERT OR REPLACE INTO vectors (key, value) VALUES (?, ?)", rows)
                self._make_room()

    def add(self, chunks: Iterable[ChunkVectors], fingerprint: str) -> None:
        """Add the vectors of a job with digests."""
        # A class with bounds of its own promises something else than its precision.
        self.put(vector for chunk in chunks if not chunk.bounds for vector in _vectors(chunk, fingerprint))

    def size(self) -> int:
        """The bytes that are in use."""
        pages, free, size = (
            int(self._database.execute(f"PRAGMA {name}").fetchone()[0])
            for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size

    def _make_room(self) -> None:
        while (excess := self.size() - self._max) > 0:
            row = self._database.execute("SELECT max(at) - min(at) + 1, min(at) FROM vectors").fetchone()
            if row[0] is None:
                return
            span, first = row
            # The oldest have the lowest numbers. A gap between numbers only makes this take another turn.
            least = first + max(1, span * excess // max(1, self.size())) - 1
            self._database.execute("DELETE FROM vectors WHERE at <= ?", (least,))

    def _make(self) -> None:
        """Make the file under another name: SQLite does not wait for a process that changes the journal's mode."""
        with durable.locked(lock_of(self.path), holder=f"makes the cache {self.path}", vanishes=True):
            if self._is_there():
                return
            part_of(self.path).unlink(missing_ok=True)
            with closing(sqlite3.connect(part_of(self.path), isolation_level=None)) as database:
                for statement in (
                    "PRAGMA journal_mode = OFF",
                    "CREATE TABLE vectors (at INTEGER PRIMARY KEY, key BLOB UNIQUE NOT NULL, value BLOB NOT NULL)",
                    f"PRAGMA application_id = {_APPLICATION}",
                    f"PRAGMA user_version = {_FORMAT}",
                    "PRAGMA journal_mode = WAL",
                ):
                    database.execute(statement)
            publish(self.path)

    def _is_there(self) -> bool:
        return self.path.exists() and self.path.stat().st_size > 0

    def _check(self) -> None:
        application, version = (
            self._database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
        if (application, version) != (_APPLICATION, _FORMAT):
            raise OutputError(f"{self.path} is no cache that this version of embedctl knows: name another file")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise OutputError(
                f"the cache {self.path} can't be used: {error}. Make room there, or choose or remove the file"
            ) from error


class Cached(Known):
    """What a cache has for one kind of job, by its fingerprint in hexadecimal and its precision: no other precision
    answers it, not even a better one. It is what was there when it was first asked, because another process may make
    room meanwhile."""

    def __init__(self, cache: Cache, fingerprint: str, precision: str) -> None:
        self.name = str(cache.path)
        self._cache, self._fingerprint, self._precision = cache, fingerprint, precision
        self.dim: int | None = None
        cache.stand_still()

    def has(self, digests: Digests) -> npt.NDArray[np.bool_]:
        found = self._find(digests)
        return np.array([row.tobytes() in found for row in digests], bool)

    def take(self, digests: Digests) -> Rows:
        found = self._find(digests)
        rows = np.zeros(len(digests), row_type(self.dim or 0))
        for at, row in enumerate(digests):
            if (vector := found.get(row.tobytes())) is None:
                raise OutputError(f"the cache {self.name} was damaged meanwhile: start again, or omit --cache")
            rows[at] = row, *vector
        return rows

    def _find(self, digests: Digests) -> dict[bytes, Vector]:
        """What there is, by digest, of the same dimensions as what was found first."""
        found: dict[bytes, Vector] = {}
        wanted = {row.tobytes() for row in digests} - {NO_DIGEST}
        by_key = {key_of(self._fingerprint, self._precision, digest): digest for digest in wanted}
        for key, (cut, vector) in self._cache.find(by_key):
            self.dim = self.dim or len(vector)
            if len(vector) == self.dim:
                found[by_key[key]] = cut, vector
        return found


def path_of(where: str) -> Path:
    """The file of a cache. The SettingsError for another kind of URL does not quote it: it may hold a password."""
    if "://" not in where and not where.startswith(f"{_SCHEME}:"):
        return Path(where)
    parts = urlsplit(where)
    if parts.scheme != _SCHEME or parts.netloc or parts.query or parts.fragment or len(parts.path) < 2:
        raise SettingsError(
            f"--cache takes a path or sqlite:///PATH, and no {parts.scheme or 'such'} URL with a host, a user or "
            "parameters"
        )
    return Path(parts.path[1:])


def _vectors(chunk: ChunkVectors, fingerprint: str) -> Iterator[tuple[bytes, Vector]]:
    failed = {error.position for error in chunk.errors}
    cuts = {cut.position: (cut.used, cut.lost) for cut in chunk.truncations}
    for at, position in enumerate(chunk.positions.tolist()):
        if chunk.digests is not None and position not in failed and np.isfinite(chunk.vectors[at]).all():
            key = key_of(fingerprint, chunk.precision, chunk.digests[at].tobytes())
            yield key, (cuts.get(position, (0, 0)), chunk.vectors[at])


def _written(key: bytes, cut: tuple[int, int], vector: npt.NDArray[np.float32]) -> bytes:
    rest = struct.pack("<II", *cut) + np.ascontiguousarray(vector, "<f4").tobytes()
    return struct.pack("<I", zlib.crc32(rest, zlib.crc32(key))) + rest


def _parsed(key: bytes, value: object) -> Vector | None:
    if not isinstance(value, bytes) or len(value) <= _HEAD.size or len(value) % 4:
        return None
    crc, used, lost = _HEAD.unpack_from(value)
    if crc != zlib.crc32(memoryview(value)[4:], zlib.crc32(key)):
        return None
    vector = np.frombuffer(value, "<f4", offset=_HEAD.size)
    return ((used, lost), vector) if np.isfinite(vector).all() else None
