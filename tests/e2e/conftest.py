"""Real worker processes on a real Redis."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from embedctl.broker import Broker
from embedctl.store import WorkerRow
from embedctl_config.settings import Settings, load_settings
from tests.conftest import as_user

#: The hardware classes and the short times of tests/conftest.py, as a worker process reads them.
CONFIG = """
lease_s = 1.0
reissue_s = 1.0
hardware = "dummy"
model = "dummy"

[classes.dummy]
backend = "dummy"
options = {dim = 16}

[classes.slow]
backend = "dummy"
token_budget = 64
options = {dim = 16, seconds_per_batch = 0.1}

[classes.poison]
backend = "dummy"
options = {dim = 16, poison = true}

[classes.small]
backend = "dummy"
options = {dim = 16, memory_tokens = 100}

[classes.hung]
backend = "dummy"
options = {dim = 16, poison = true}
"""

#: The first worker with a model also computes its references and builds what it runs.
START_S = 120.0


@dataclass
class WorkerProcess:
    """A worker that a test started."""

    process: subprocess.Popen[bytes]
    broker: Broker
    log_file: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def row(self) -> WorkerRow:
        return next(row for row in self.broker.workers.alive() if row.pid == self.pid)

    def wait_ready(self) -> WorkerProcess:
        deadline = time.monotonic() + START_S
        while not any(row.pid == self.pid for row in self.broker.workers.alive()):
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)
        return self

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def logged(self, words: str, **fields: object) -> bool:
        """Whether it has logged a line with these words in its message, and with these fields."""
        lines = [json.loads(line) for line in self.log().splitlines() if line.startswith("{") and line.endswith("}")]
        return any(words in line["message"] and fields.items() <= line.items() for line in lines)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode


@pytest.fixture
def environment(redis_server, short_folder: Path, cache_folder: Path) -> dict[str, str]:
    """What a process needs to find this test's Redis and classes."""
    config = short_folder / "embedctl.toml"
    config.write_text(CONFIG)
    own = {name: value for name, value in os.environ.items() if not name.startswith("EMBEDCTL_")}
    return {
        **own,
        "EMBEDCTL_REDIS_URL": redis_server.url_of("producer"),
        "EMBEDCTL_CONFIG": str(config),
        "EMBEDCTL_STATE_DIR": str(short_folder / "state"),
        "EMBEDCTL_CACHE_DIR": str(cache_folder),
    }


@pytest.fixture
def settings(environment: dict[str, str]) -> Settings:
    return load_settings(environment)


@pytest.fixture
def worker_broker(environment: dict[str, str]) -> Iterator[Broker]:
    """For a test that does what a worker does."""
    broker = Broker.connect(load_settings(as_user(environment, "worker")))
    yield broker
    broker.close()


StartWorker = Callable[..., WorkerProcess]


@pytest.fixture
def start_worker(environment: dict[str, str], broker: Broker, short_folder: Path) -> Iterator[StartWorker]:
    """Starts workers; whatever still runs at the test's end is stopped."""
    started: list[WorkerProcess] = []

    def start(hardware: str = "dummy", *, model: str = "dummy", cpus: str | None = None, wait: bool = True):
        command = [sys.executable, "-m", "embedctl_workers", "--class", hardware, "--model", model]
        command += ["--cpus", cpus] if cpus is not None else []
        log_file = short_folder / f"worker-{len(started)}.log"
        with log_file.open("wb") as log:
            own = as_user(environment, "worker")
            process = subprocess.Popen(command, env=own, stdout=log, stderr=log, start_new_session=True)
        worker = WorkerProcess(process, broker, log_file)
        started.append(worker)
        return worker.wait_ready() if wait else worker

    yield start
    for worker in started:
        worker.stop()


@pytest.fixture
def embedctl(environment: dict[str, str], short_folder: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command line."""

    def run(*arguments: str, stdin: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        user = {"worker": "worker", "up": "worker", "flower": "flower"}.get(arguments[0], "producer")
        return subprocess.run(
            [sys.executable, "-m", "embedctl", *arguments],
            env={**as_user(environment, user), **variables},
            cwd=short_folder,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def eventually(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Poll until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.02)
