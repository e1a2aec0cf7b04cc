"""An `embedctl metrics` that a test starts and scrapes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.support.served import Served, listening

LISTENS = re.compile(r"^metrics and health: (http://\S+)/metrics", re.MULTILINE)
LABELS = ("hardware_class", "model", "lane", "tenant")


class Monitor(Served):
    """A running `embedctl metrics`."""

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
    """Run `embedctl metrics` on a free port."""
    with listening("monitor", LISTENS, ["metrics"], environment, folder) as found:
        yield Monitor(*found)
