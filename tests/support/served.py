"""A command of `embedctl` that answers HTTP, which a test starts and sends requests to."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.forked import Forked
from tests.support.redis_server import as_user
from tests.support.waiting import PATIENCE_S, eventually


@dataclass
class Served:
    """A running command, the beginning of the URLs that it answers at, and what it logs."""

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

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(PATIENCE_S)


@contextmanager
def listening(
    user: str, listens: re.Pattern[str], command: list[str], environment: Mapping[str, str], folder: Path
) -> Iterator[tuple[Forked, str, Path]]:
    """Run a command on a free port, as this user if Redis has an access list, until the end of the block.

    Yields:
        The process, the URL that stands in the first group of what `listens` finds in its log, and that log.
    """
    number, name = tempfile.mkstemp(dir=folder, prefix=f"{command[0]}-", suffix=".log")
    os.close(number)
    log_file = Path(name)
    process = Forked(
        [command[0], "--address", "0", *command[1:]], as_user(environment, user), folder, log_file, log_file
    )
    try:
        eventually(lambda: process.poll() is not None or listens.search(log_file.read_text()))
        found = listens.search(log_file.read_text())
        assert found, log_file.read_text()
        yield process, found[1], log_file
    finally:
        process.kill()
        process.wait()
