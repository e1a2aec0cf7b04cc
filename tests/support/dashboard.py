"""An `embedctl flower` that a test starts and sends requests to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.served import Served, listening

LISTENS = re.compile(r"^Flower is at (http://\S+) for ", re.MULTILINE)
#: Pages that a browser can request without knowing a job or a worker.
PAGES = ("/", "/workers", "/tasks", "/broker", "/metrics", "/api/workers", "/api/tasks", "/api/queues/length")


class Dashboard(Served):
    """A running `embedctl flower`."""

    def ask(self, path: str) -> dict[str, Any]:
        status, body = self.get(path)
        assert status == 200, body
        answer: dict[str, Any] = json.loads(body)
        return answer

    def tasks(self, job_id: str) -> list[dict[str, Any]]:
        return [task for task in self.ask("/api/tasks").values() if f"job {job_id}," in (task["args"] or "")]


@contextmanager
def dashboard(environment: Mapping[str, str], folder: Path, *arguments: str) -> Iterator[Dashboard]:
    """Run `embedctl flower` on a free port."""
    with listening("flower", LISTENS, ["flower", *arguments], environment, folder) as found:
        yield Dashboard(*found)
