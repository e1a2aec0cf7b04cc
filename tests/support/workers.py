"""Worker processes that tests start, and the settings that they read."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from embedctl.queueing.broker import Broker
from embedctl.store import WorkerRow
from tests.support.forked import Process
from tests.support.waiting import PATIENCE_S, eventually

#: The hardware classes and short times of redis_server.py, in the form that a worker process reads.
CONFIG = """
lease_s = 1.0
hardware = "dummy"
model = "dummy"

[classes.dummy]
backend = "dummy"
options = {dim = 16}

[classes.half]
backend = "dummy"
precision = "fp16"
options = {dim = 16}

[classes.slow]
backend = "dummy"
token_budget = 64
options = {dim = 16, seconds_per_batch = 0.1}

[classes.colbert]
backend = "dummy"
options = {dim = 16, outputs = "multi"}

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


@dataclass
class WorkerProcess:
    """A worker that a test started."""

    process: Process
    broker: Broker
    log_file: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def row(self) -> WorkerRow:
        return next(row for row in self.broker.workers.alive() if row.pid == self.pid)

    def wait_ready(self) -> WorkerProcess:
        def ready() -> bool:
            assert self.process.poll() is None, self.log()
            return any(row.pid == self.pid for row in self.broker.workers.alive())

        # Twice as long as others, for a real model whose references are computed first.
        eventually(ready, 2 * PATIENCE_S, what="the worker's start", show=self.log)
        return self

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def logged(self, words: str, **fields: object) -> bool:
        """Whether the worker logged a line with these words in its message and with these fields."""
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
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()


StartWorker = Callable[..., WorkerProcess]


@contextmanager
def kept_alive(start: StartWorker, count: int, hardware: str = "poison") -> Iterator[list[WorkerProcess]]:
    """Workers that are restarted when they die, as by a supervisor. Yields all workers that ever ran."""
    workers = [start(hardware) for _ in range(count)]
    over = threading.Event()

    def keep() -> None:
        current = list(workers)
        while not over.wait(0.1):
            for at, worker in enumerate(current):
                if worker.process.poll() is not None:
                    current[at] = start(hardware, wait=False)
                    workers.append(current[at])

    keeper = threading.Thread(target=keep)
    keeper.start()
    try:
        yield workers
    finally:
        over.set()
        keeper.join()


def deaths(workers: list[WorkerProcess]) -> list[int]:
    return [status for worker in workers if (status := worker.process.returncode) is not None]
