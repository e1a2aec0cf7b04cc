"""A cache of vectors in a file of SQLite, for any number of processes of one machine."""

from __future__ import annotations

import hashlib
import sqlite3
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from embedctl.corpus.digests import NO_DIGEST, Digests
from embedctl.destinations.interface import Contract
from embedctl.destinations.numbers import FLOAT32, not_finite
from embedctl.destinations.unfinished import lock_of, part_of, publish
from embedctl.sync.known import Known, Rows
from embedctl.waiting.results import ChunkVectors
from embedctl.waiting.shapes import MultiVectors, SparseVectors
from embedctl_config import durable
from embedctl_config.errors import OutputError, SettingsError
from embedctl_config.fingerprint import job_fingerprint
from embedctl_config.outputs import PLAIN, Multi, Output, Sparse

#: What SQLite notes of the file's program ("EMBC") and of its format.
_APPLICATION, _FORMAT = 0x454D4243, 1
#: Before the vector: crc32 of the key and of all that follows, and the numbers of tokens used and lost.
_HEAD = struct.Struct("<III")
#: Keys that are asked for together, and bytes of values that are written together.
_ASKED, _WRITTEN = 500, 4 * 1024 * 1024
#: How long a process waits for another one that writes (seconds).
_PATIENCE_S = 60.0
_SCHEME = "sqlite"

#: What the cache has under a key: the numbers of tokens of the text that were used and lost, zeros unless it was cut;
#: and the vector of one output: a dense one as float32, any other as the section of a result of one row.
Value = tuple[tuple[int, int], bytes]


def kinds_of(contract: Contract) -> dict[Output, bytes]:
    """For each output of a contract, what tells its vectors from those of others. It is the same whichever outputs a
    job asks for beside it."""

    def of(output: Output) -> bytes:
        options = {**contract.options, "vectors": None if (output,) == PLAIN else [output]}
        return bytes.fromhex(job_fingerprint(contract.model_fingerprint, options)) + contract.precision.encode()

    return {output: of(output) for output in contract.outputs}


def key_of(kind: bytes, digest: bytes) -> bytes:
    """The key of a vector, 32 bytes: of its kind, and of the SHA-256 of a text."""
    return hashlib.sha256(kind + digest).digest()


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

    def find(self, keys: Iterable[bytes]) -> Iterator[tuple[bytes, Value]]:
        """Those keys that have a value, in any order. A value that fails its checksum counts as absent."""
        source = iter(keys)
        while asked := list(islice(source, _ASKED)):
            marks = ",".join("?" * len(asked))
            with self._explained():
                stored = self._database.execute(
                    f"SELECT key, value FROM vectors WHERE key IN ({marks})",  # noqa: S608  (only question marks)
                    asked,
                )
                yield from ((key, value) for key, found in stored if (value := _parsed(key, found)) is not None)

    def stand_still(self) -> None:
        """Find what is there now, whatever other processes write, until :meth:`put`."""
        with self._explained():
            self._database.execute("BEGIN")
            self._database.execute("SELECT at FROM vectors LIMIT 1").fetchone()

    def put(self, values: Iterable[tuple[bytes, Value]]) -> None:
        """Add values, each under its key. Call it when the vectors are durable elsewhere."""
        with self._explained():
            self._database.commit()
        rows, size = list[tuple[bytes, bytes]](), 0
        for key, value in values:
            rows.append((key, _written(key, *value)))
            size += len(rows[-1][1])
            if size >= _WRITTEN:
                self._write(rows)
                rows, size = [], 0
        if rows:
            self._write(rows)

    def add(self, chunks: Iterable[ChunkVectors], contract: Contract) -> None:
        """Add the vectors of a job with digests, and of this contract."""
        # A class with bounds of its own promises something else than its precision.
        self.put(value for chunk in chunks if not chunk.bounds for value in _values(chunk, kinds_of(contract)))

    def _write(self, rows: list[tuple[bytes, bytes]]) -> None:
        with self._explained(), self._database:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.executemany("INSERT OR REPLACE INTO vectors (key, value) VALUES (?, ?)", rows)
            self._make_room()

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
    """What a cache has of the texts of a contract: those with a vector of each output, and of no other precision, not
    even a better one. It is what was there when it was first asked, because another process may make room meanwhile."""

    def __init__(self, cache: Cache, contract: Contract) -> None:
        self.name = str(cache.path)
        self._cache, self._kinds = cache, kinds_of(contract)
        self.widths: dict[Output, int] = {}
        cache.stand_still()

    def has(self, digests: Digests) -> npt.NDArray[np.bool_]:
        found = {row.tobytes() for row in digests} - {NO_DIGEST}
        for output in self._kinds:
            found = {digest for digest, _, _ in self._find(output, found)}
        return np.array([row.tobytes() in found for row in digests], bool)

    def take(self, digests: Digests) -> Rows:
        asked = [row.tobytes() for row in digests]
        cuts: list[tuple[int, int]] = []
        vectors: dict[Output, list[Any]] = {}
        for output in self._kinds:
            found = {digest: value for digest, *value in self._find(output, set(asked))}
            if len(found) < len(set(asked)):
                raise OutputError(f"the cache {self.name} was damaged meanwhile: start again, or omit --cache")
            cuts, vectors[output] = ([found[digest][of] for digest in asked] for of in (0, 1))
        return Rows(
            digests,
            np.array(cuts, np.uint32),
            np.array(vectors.get(Output.DENSE, [()] * len(asked)), np.float32),
            SparseVectors.joined(vectors[Output.SPARSE]) if Output.SPARSE in vectors else None,
            MultiVectors.joined(vectors[Output.MULTI]) if Output.MULTI in vectors else None,
        )

    def _find(self, output: Output, digests: set[bytes]) -> Iterator[tuple[bytes, tuple[int, int], Any]]:
        """What there is of an output: each digest, the numbers of tokens, and the vector, which is of the same size as
        the one that was found first."""
        by_key = {key_of(self._kinds[output], digest): digest for digest in digests}
        for key, (cut, stored) in self._cache.find(by_key):
            size, cell = _cell(output, stored)
            if self.widths.setdefault(output, size) == size:
                yield by_key[key], cut, cell


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


def _values(chunk: ChunkVectors, kinds: dict[Output, bytes]) -> Iterator[tuple[bytes, Value]]:
    if chunk.digests is None:  # it has no records
        return
    failed = np.isin(chunk.positions, [error.position for error in chunk.errors]) | not_finite(chunk, FLOAT32.dtype)
    cuts = {cut.position: (cut.used, cut.lost) for cut in chunk.truncations}
    digests = [digest.tobytes() for digest in chunk.digests]
    for output, kind in kinds.items():
        for at, stored in enumerate(_stored(chunk, output)):
            if not failed[at]:
                yield key_of(kind, digests[at]), (cuts.get(int(chunk.positions[at]), (0, 0)), stored)


def _stored(chunk: ChunkVectors, output: Output) -> Iterator[bytes]:
    """How a cache stores the vector of each record of a chunk."""
    if output is Output.DENSE:
        yield from (vector.astype("<f4", copy=False).tobytes() for vector in chunk.vectors)
    elif output is Output.SPARSE and (sparse := chunk.sparse) is not None:
        for indices, weights in sparse:
            yield Sparse(sparse.width, [len(indices)], indices.tobytes(), weights.tobytes()).section()
    elif output is Output.MULTI and (multi := chunk.multi) is not None:
        for vectors in multi:
            with np.errstate(over="ignore"):
                halves = vectors.astype("<f2")
            exact = halves if np.array_equal(halves, vectors) else vectors
            yield Multi(multi.width, [len(vectors)], exact.tobytes(), exact.dtype.str).section()


def _cell(output: Output, stored: bytes) -> tuple[int, Any]:
    """A vector of a cache, and its size: an array, or rows of one record."""
    if output is Output.DENSE:
        return len(stored) // 4, np.frombuffer(stored, "<f4")
    take = BytesIO(stored).read
    rows = SparseVectors.of(Sparse.read(take, 1)) if output is Output.SPARSE else MultiVectors.of(Multi.read(take, 1))
    return rows.width, rows


def _written(key: bytes, cut: tuple[int, int], stored: bytes) -> bytes:
    rest = struct.pack("<II", *cut) + stored
    return struct.pack("<I", zlib.crc32(rest, zlib.crc32(key))) + rest


def _parsed(key: bytes, value: object) -> Value | None:
    if not isinstance(value, bytes) or len(value) <= _HEAD.size:
        return None
    crc, used, lost = _HEAD.unpack_from(value)
    if crc != zlib.crc32(memoryview(value)[4:], zlib.crc32(key)):
        return None
    return (used, lost), value[_HEAD.size :]
