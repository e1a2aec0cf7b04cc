"""An `embedctl metrics` that a test starts and scrapes."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.support.served import Served, listening
from tests.support.waiting import PATIENCE_S

LISTENS = re.compile(r"^metrics and health: (http://\S+)/metrics", re.MULTILINE)
LABELS = ("hardware_class", "model", "lane", "tenant")


def get(url: str) -> tuple[int, str]:
    """Status and body; the status is 0 while nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def samples(page: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Every value of ours on a page of metrics: its name, its labels and itself."""
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name.startswith("embedctl_") and not sample.name.endswith("_created"):
                yield sample.name.removeprefix("embedctl_"), dict(sample.labels), sample.value


class Monitor(Served):
    """A running `embedctl metrics`."""

    @property
    def ready(self) -> bool:
        return self.get("/readyz")[0] == 200

    def metrics(self) -> dict[tuple[str, ...], float]:
        """Every value of ours, by its name and the values of :data:`LABELS`."""
        return {
            (name, *(labels[each] for each in LABELS if each in labels)): value
            for name, labels, value in samples(self.get("/metrics")[1])
        }


@contextmanager
def running_monitor(environment: Mapping[str, str], folder: Path) -> Iterator[Monitor]:
    """Run `embedctl metrics` on a free port."""
    with listening("monitor", LISTENS, ["metrics"], environment, folder) as found:
        yield Monitor(*found)
