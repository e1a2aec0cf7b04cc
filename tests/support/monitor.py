"""An `embedctl metrics` that a test starts and scrapes."""

from __future__ import annotations

import re
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.support.forked import Forked
from tests.support.redis_server import as_user
from tests.support.waiting import PATIENCE_S, eventually

LISTENS = re.compile(r"^metrics and health: (http://\S+)/metrics", re.MULTILINE)
LABELS = ("hardware_class", "model", "lane", "tenant")


@dataclass
class Monitor:
    """A running `embedctl metrics`."""

    process: Forked
    log: Path

    @property
    def url(self) -> str:
        eventually(lambda: LISTENS.search(self.log.read_text()) or self.process.poll() is not None)
        found = LISTENS.search(self.log.read_text())
        assert found, self.log.read_text()
        return found[1]

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(PATIENCE_S)

    def get(self, path: str) -> tuple[int, str]:
        """Status and body."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=PATIENCE_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    @property
    def ready(self) -> bool:
        return self.get("/readyz")[0] == 200

    def metrics(self) -> dict[tuple[str, ...], float]:
        """Every value of ours, by its name and the values of :data:`LABELS`."""
        return {
            (
                sample.name.removeprefix("embedctl_"),
                *(sample.labels[name] for name in LABELS if name in sample.labels),
            ): sample.value
            for family in text_string_to_metric_families(self.get("/metrics")[1])
            for sample in family.samples
            if sample.name.startswith("embedctl_")
        }


@contextmanager
def running_monitor(environment: Mapping[str, str], folder: Path) -> Iterator[Monitor]:
    """Run `embedctl metrics` on a free port, as the user monitor if Redis has an access list."""
    log = folder / "monitor.log"
    log.touch()
    process = Forked(["metrics", "--address", "0"], as_user(environment, "monitor"), folder, log, log)
    try:
        yield Monitor(process, log)
    finally:
        process.kill()
        process.wait()
