"""One table of kills: the steps of a delivery to each destination. Whatever dies there, the same call goes on."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
from redis import Redis

from embedctl import Job
from embedctl.destinations import parquet
from embedctl.destinations.writer import Writer
from embedctl.queueing.broker import Broker
from embedctl_config.settings import Settings
from tests.support.databases import Database, database
from tests.support.drained_parts import manifest_of, results_in_redis, rows_of
from tests.support.failpoints import Killed, kill_at
from tests.support.jobs import assert_same_vectors, other_vectors, reference
from tests.support.limits import limited
from tests.support.prepared import found
from tests.support.rig import encoded_job

#: A kept field becomes wider in the middle of a file, and of a part.
ITEMS = [{"id": f"r{i}", "text": f"text {i}" if i != 7 else "", "n": i if i < 50 else i + 0.5} for i in range(100)]
GOOD = [i for i in range(100) if i != 7]
VECTORS = reference([str(ITEMS[i]["text"]) for i in GOOD])
DATABASES = {
    "pgvector": "embedctl.destinations.postgresql:PostgresTable",
    "qdrant-http": "embedctl.destinations.qdrant:QdrantCollection",
    "lancedb": "embedctl.destinations.lancedb:LanceTable",
}


#: The outputs of what does not hold all.
OUTPUTS = {"npy": "dense", "npz": "dense,sparse", "lancedb": "dense,multi"}
#: By position, sparse vectors and multi-vectors.
Others = Mapping[int, Mapping[str, Any]]


class Way(ABC):
    """Where a job's results go.

    Attributes:
        to: what :meth:`Job.deliver` is given.
        frees: whether the results leave Redis; otherwise one job goes to many places.
    """

    to: str
    frees = False

    @abstractmethod
    def assert_safe(self, job: Job) -> None:
        """What a delivery that died has left does no harm."""

    @abstractmethod
    def assert_whole(self, job: Job, others: Others) -> None:
        """Each record is there once, and nothing else is."""


class File(Way):
    def __init__(self, folder: Path, kind: str, whole: Mapping[str, bytes]) -> None:
        folder.mkdir()
        self._folder, self._name, self._whole = folder, f"v.{kind}", whole
        self.to = str(folder / self._name)

    def assert_safe(self, job: Job) -> None:
        there = files_of(self._folder)
        assert there.get(self._name) in (None, self._whole[self._name])

    def assert_whole(self, job: Job, others: Others) -> None:
        assert files_of(self._folder) == self._whole


class Parts(Way):
    frees = True

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder, self.to = folder, f"{folder}/"

    def local(self) -> Path:
        """A folder with the parts."""
        return self._folder

    def assert_safe(self, job: Job) -> None:
        """Nothing is unlinked that is not durable."""
        in_parts = set(rows_of(self.local()))
        for chunk in set(range(13)) - results_in_redis(job):
            assert set(range(8 * chunk, min(8 * chunk + 8, 100))) <= in_parts

    def assert_whole(self, job: Job, others: Others) -> None:
        folder = self.local()
        rows = rows_of(folder)
        assert [rows[i]["n"] for i in range(100)] == [item["n"] for item in ITEMS]
        np.testing.assert_array_equal([rows[i]["embedding"] for i in GOOD], VECTORS)
        for i in GOOD:
            sparse = {pair["index"]: pair["value"] for pair in rows[i]["sparse"]}
            assert_same_vectors({"sparse": sparse, "multi": rows[i]["multi"]}, others[i])
        assert manifest_of(folder)["records"] == 100
        assert results_in_redis(job) == set()
        assert not list(folder.glob(".*")), "nothing unfinished is left"


class Bucket(Parts):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.to = f"s3://vectors/{folder.name}/"

    def local(self) -> Path:
        client = boto3.client("s3")
        for each in client.list_objects_v2(Bucket="vectors", Prefix=f"{self._folder.name}/").get("Contents", []):
            client.download_file("vectors", each["Key"], str(self._folder / each["Key"].rpartition("/")[2]))
        return self._folder


class Table(Way):
    def __init__(self, table: Database) -> None:
        self._table, self.to = table, table.url

    def assert_safe(self, job: Job) -> None:
        if self._table.exists():
            assert self._table.rows().keys() <= {f"r{i}" for i in GOOD}

    def assert_whole(self, job: Job, others: Others) -> None:
        rows = self._table.rows()
        assert rows.keys() == {f"r{i}" for i in GOOD}
        assert [rows[f"r{i}"][1] for i in GOOD] == [{"n": ITEMS[i]["n"]} for i in GOOD]
        np.testing.assert_allclose([rows[f"r{i}"][0] for i in GOOD], VECTORS, rtol=0, atol=1e-6)
        found = self._table.other_vectors()
        for i in GOOD:
            assert_same_vectors(found[f"r{i}"], others[i])


def steps(owner: str, *names: str) -> list[tuple[str, str]]:
    return [(owner, name) for name in names]


ON_DISK = steps("embedctl_config.durable", "publish", "sync_folder")
PARTS = [
    *steps("embedctl.destinations.part:OpenPart", "add", "finish"),
    *steps("embedctl.store:Drains", "note", "unlink"),
]
#: By destination, the functions that are its steps, each with its module or class.
STEPS = {
    "npy": [
        *steps("embedctl.destinations.npy:NpyWriter", "write", "finish"),
        *steps("embedctl_config.durable", "remove"),
        *ON_DISK,
    ],
    "npz": [*steps("embedctl.destinations.npz:NpzWriter", "_put", "_complete"), *ON_DISK],
    "jsonl": [*steps("embedctl.destinations.jsonl:JsonlWriter", "write", "finish"), *ON_DISK],
    "parquet": [*steps("embedctl.destinations.parquet:ParquetWriter", "write", "finish"), *ON_DISK],
    "folder": [*PARTS, *steps("embedctl_config.durable", "_move_exclusively"), *ON_DISK],
    "bucket": [*PARTS, *steps("embedctl.destinations.place:PartsBucket", "publish")],
    **{kind: steps(owner, "open", "write", "close") for kind, owner in DATABASES.items()},
}


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return limited(settings.replace(lease_s=30.0), part_records=20)


@pytest.fixture
def make_job(to: str, broker: Broker, settings: Settings, raw: Redis) -> Callable[[], Job]:
    """Gives one job as it was before it was delivered, whatever has left Redis since."""
    vectors = OUTPUTS.get(to, "dense,sparse,multi")
    job = encoded_job(broker, settings, ITEMS, keep=("n",), count_tokens=True, digests=True, vectors=vectors)
    there = {key: raw.dump(key) or b"" for key in raw.scan_iter(f"*{job.id}*")}

    def make() -> Job:
        raw.delete(*raw.scan_iter(f"*{job.id}*"))
        for key, data in there.items():
            raw.restore(key, 10**7, data)
        return Job(job.id, broker)

    return make


@pytest.fixture
def ways(
    request: pytest.FixtureRequest, make_job: Callable[[], Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Iterator[Way]]:
    """Places of one kind, all of them empty."""
    folders = (tmp_path / f"{number}" for number in itertools.count())
    monkeypatch.setattr(parquet, "ROWS", 20)
    for owner in DATABASES.values():  # each chunk is a batch
        monkeypatch.setattr(found(owner), "batch_records", 8)

    def make(to: str) -> Iterator[Way]:
        if to in DATABASES:
            return (Table(database(request, to, folder)) for folder in folders)
        if to == "folder":
            return map(Parts, folders)
        if to == "bucket":
            request.getfixturevalue("s3")
            return (Bucket(folder.with_name(f"{tmp_path.name}-{folder.name}")) for folder in folders)
        undisturbed = File(next(folders), to, {})
        make_job().deliver(undisturbed.to)
        whole = files_of(Path(undisturbed.to).parent)
        return (File(folder, to, whole) for folder in folders)

    return make


@pytest.mark.parametrize(
    ("to", "step"),
    [
        pytest.param(to, step, id=f"{to}-{step[1]}", marks=pytest.mark.slow if to == "bucket" else ())
        for to, found in STEPS.items()
        for step in found
    ],
)
def test_what_dies_at_a_step_is_gone_on_with(
    ways: Callable[[str], Iterator[Way]],
    make_job: Callable[[], Job],
    to: str,
    step: tuple[str, str],
) -> None:
    """At its call of the number 1, 2, 4 …, as long as there are so many, and before it as well as after it."""
    places, (where, name), job = ways(to), step, make_job()
    others = other_vectors(job)
    # A bucket takes a second for what a folder does at once, and has most of its code. Its sixth file is the manifest.
    calls = (1, 2, 4, 8) if to != "bucket" else (1, 4, 6) if name == "publish" else (1, 4)
    for after in (False, True):
        for call in calls:
            way = next(places)
            job = make_job() if way.frees else job
            if not dies(job, way, found(where), name, call, after=after):
                assert call > 1, "it did not come to this step"
                break
            way.assert_safe(job)
            job.deliver(way.to)
            way.assert_whole(job, others)


def dies(job: Job, way: Way, owner: Any, name: str, call: int, *, after: bool) -> bool:
    """Deliver, and die at this call; whether there were so many."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Writer, "discard", lambda self: None)  # nobody tidies after a kill
        kill_at(patched, owner, name, call, after=after)
        try:
            job.deliver(way.to)
        except Killed:
            return True
    return False
