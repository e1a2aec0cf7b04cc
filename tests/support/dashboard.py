"""An `embedctl flower` that a test starts and sends requests to."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.support.forked import Forked
from tests.support.redis_server import as_user
from tests.support.waiting import PATIENCE_S, eventually

LISTENS = re.compile(r"^Flower is at (http://\S+) for ", re.MULTILINE)
#: Pages that a browser can request without knowing a job or a worker.
PAGES = ("/", "/workers", "/tasks", "/broker", "/metrics", "/api/workers", "/api/tasks", "/api/queues/length")


@dataclass
class Dashboard:
    """A running `embedctl flower`."""

    process: Forked
    url: str
    log_file: Path

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        """Send a GET request. Return the answer's status and body."""
        return self.send("GET", path, headers)

    def send(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str]:
        to = HTTPConnection(urlsplit(self.url).netloc, timeout=120)
        to.request(method, path, headers=dict(headers))
        answer = to.getresponse()
        body = answer.read().decode()
        to.close()
        return answer.status, body

    def ask(self, path: str) -> dict[str, Any]:
        status, body = self.get(path)
        assert status == 200, body
        answer: dict[str, Any] = json.loads(body)
        return answer

    def tasks(self, job_id: str) -> list[dict[str, Any]]:
        return [task for task in self.ask("/api/tasks").values() if f"job {job_id}," in (task["args"] or "")]

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(PATIENCE_S)


@contextmanager
def dashboard(environment: Mapping[str, str], folder: Path, *arguments: str) -> Iterator[Dashboard]:
    """Run `embedctl flower` on a free port."""
    number, name = tempfile.mkstemp(dir=folder, prefix="flower-", suffix=".log")
    os.close(number)
    log_file = Path(name)
    command = ["flower", "--address", "0", *arguments]
    process = Forked(command, as_user(environment, "flower"), folder, log_file, log_file)
    try:
        eventually(lambda: process.poll() is not None or LISTENS.search(log_file.read_text()))
        listens = LISTENS.search(log_file.read_text())
        assert listens, log_file.read_text()
        yield Dashboard(process, listens[1], log_file)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
