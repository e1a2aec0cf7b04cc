"""Real worker processes on a real Redis."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import redis as redis_py

from embedctl import Job
from embedctl.queueing.broker import Broker
from embedctl_config.loading import load_settings
from embedctl_config.settings import Settings
from embedctl_workers.backends import BACKENDS
from embedctl_workers.backends.dummy import DummyBackend
from tests.support.batches import client_of
from tests.support.changes import Nights, Write, writer
from tests.support.databases import Database, database
from tests.support.forked import Forked, Process, can_be_forked, run_forked
from tests.support.gateway import Running, running_gateway
from tests.support.here import Here
from tests.support.limits import settings_of
from tests.support.processes import RunEmbedctl
from tests.support.redis_server import RedisServer, as_user
from tests.support.rig import TEXTS_OF_13_CHUNKS, Encode, Rig, encoded_job
from tests.support.workers import CONFIG, StartWorker, WorkerProcess

#: Commands that import what reads variables while it loads, or that must be pinned before they import anything.
NOT_FORKED = ("bench", "worker")


@pytest.fixture
def environment(
    redis_server: RedisServer, short_folder: Path, cache_folder: Path, chunk_files_environment: dict[str, str]
) -> dict[str, str]:
    """What a process needs to find this test's Redis and classes."""
    config = short_folder / "embedctl.toml"
    config.write_text(CONFIG)
    # Where tests run side by side, COLUMNS is set, and programs would believe it rather than their terminal.
    left_out = ("COLUMNS", "LINES")
    own = {
        name: value for name, value in os.environ.items() if not name.startswith("EMBEDCTL_") and name not in left_out
    }
    return {
        **own,
        **chunk_files_environment,
        "EMBEDCTL_REDIS_URL": redis_server.url_of("producer"),
        "EMBEDCTL_CONFIG": str(config),
        "EMBEDCTL_STATE_DIR": str(short_folder / "state"),
        "EMBEDCTL_CACHE_DIR": str(cache_folder),
    }


@pytest.fixture
def settings(environment: dict[str, str]) -> Settings:
    return settings_of(environment)


@pytest.fixture
def worker_broker(environment: dict[str, str]) -> Iterator[Broker]:
    """For a test that does what a worker does."""
    broker = Broker.connect(settings_of(as_user(environment, "worker")))
    yield broker
    broker.close()


@pytest.fixture
def start_worker(environment: dict[str, str], broker: Broker, short_folder: Path) -> Iterator[StartWorker]:
    """Starts workers; those that still run at the test's end are killed, which is quicker than to stop them."""
    started: list[WorkerProcess] = []

    def start(
        hardware: str = "dummy",
        *more: str,
        model: str = "dummy",
        cpus: str | None = None,
        wait: bool = True,
        forked: bool = True,
        prepare: Callable[[], None] | None = None,
    ) -> WorkerProcess:
        arguments = ["--class", hardware, "--model", model, *more]
        arguments += ["--cpus", cpus] if cpus is not None else []
        own = as_user(environment, "worker")
        log_file = short_folder / f"worker-{len(started)}.log"
        log_file.touch()
        process: Process
        backend = load_settings(own).hardware_class(hardware).backend
        model_runs = backend != "dummy" and backend in BACKENDS
        if forked and can_be_forked(own, model=model_runs):
            process = Forked(
                ["worker", *arguments], own, short_folder, log_file, log_file, prepare=prepare, model=model_runs
            )
        else:
            assert prepare is None, "a new process can't be prepared"
            command = [sys.executable, "-m", "embedctl_workers", *arguments]
            with log_file.open("wb") as log:
                process = subprocess.Popen(command, env=own, stdout=log, stderr=log, start_new_session=True)
        worker = WorkerProcess(process, broker, log_file)
        started.append(worker)
        return worker.wait_ready() if wait else worker

    yield start
    for worker in started:
        worker.kill()


@pytest.fixture
def write(short_folder: Path) -> Write:
    """Writes a corpus of ids and texts, and returns its name."""
    return writer(short_folder)


@pytest.fixture
def rig(worker_broker: Broker, settings: Settings) -> Rig:
    """Encodes in this process, into vectors of 16 dimensions."""
    return Rig(worker_broker, settings, DummyBackend(dim=16))


@pytest.fixture
def encode(worker_broker: Broker, settings: Settings) -> Encode:
    """Makes an ended job of 13 chunks, unless it gets other texts."""

    def make(texts: Sequence[Any] = TEXTS_OF_13_CHUNKS, **options: Any) -> Job:
        return encoded_job(worker_broker, settings, texts, **options)

    return make


@pytest.fixture
def gateway(settings: Settings) -> Iterator[Running]:
    with running_gateway(settings) as running:
        yield running


@pytest.fixture
def http(gateway: Running) -> Iterator[httpx2.Client]:
    """A client of the gateway that does not retry."""
    with gateway.client() as client:
        yield client


@pytest.fixture
def client(gateway: Running) -> Iterator[openai.OpenAI]:
    """OpenAI's client, which does not retry."""
    with client_of(gateway) as client:
        yield client


@pytest.fixture
def embedctl(environment: dict[str, str], short_folder: Path) -> RunEmbedctl:
    """Runs the command line to a `status`, if given; with `model`, as a fork that has the libraries of models."""

    def run(
        *arguments: str,
        stdin: str | None = None,
        prepare: Callable[[], None] | None = None,
        model: bool = False,
        status: int | None = None,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        user = {"worker": "worker", "up": "worker", "flower": "flower"}.get(arguments[0], "producer")
        own = {**as_user(environment, user), **variables}
        forkable = arguments[0] not in NOT_FORKED or arguments[:2] == ("worker", "--ready")
        if forkable and can_be_forked(own, model=model):
            done = run_forked(arguments, own, short_folder, stdin=stdin, prepare=prepare, model=model)
        else:
            assert prepare is None, "a new process can't be prepared"
            done = subprocess.run(
                [sys.executable, "-m", "embedctl", *arguments],
                env=own,
                cwd=short_folder,
                input=stdin,
                capture_output=True,
                text=True,
                timeout=120,
            )
        assert status in (None, done.returncode), done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def here(
    environment: dict[str, str],
    short_folder: Path,
    settings: Settings,
    broker: Broker,
    raw: redis_py.Redis,
    embedctl: RunEmbedctl,
    start_worker: StartWorker,
    write: Write,
) -> Here:
    return Here(environment, short_folder, settings, broker, raw, embedctl, start_worker, write)


@pytest.fixture
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """The database whose commands cost the least, unless a test is for others."""
    return database(request, getattr(request, "param", "pgvector"), tmp_path)


@pytest.fixture
def nights(here: Here, table: Database) -> Nights:
    return Nights(here, table)
