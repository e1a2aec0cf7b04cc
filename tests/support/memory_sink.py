"""A sink in memory, and a plug-in that brings it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from embedctl.sinks.base import Batch, Provenance, Sink, Target, Verified, compared
from embedctl_config.errors import SinkRefused, SinkUnavailable

TARGET = Target("J", "v", Provenance("aa" * 32, "fp32", "m", 4))


class Memory(Sink):
    """A dictionary as a database. It refuses ids that begin with `bad`, and is away `away` times.

    Attributes:
        steps: what was called.
    """

    rows_per_commit = 4
    name = "memory:"

    def __init__(self, away: int = 0) -> None:
        self.rows: dict[str, np.ndarray] = {}
        self.away, self.resume = away, 0
        self.steps: list[str] = []

    def check(self) -> None: ...

    def open(self, target: Target) -> int:
        return self.resume

    def write(self, batch: Batch) -> None:
        self.steps.append(f"write {len(batch)}")
        if self.away:
            self.away -= 1
            raise SinkUnavailable("memory: is away")
        if bad := [label for label in batch.ids if label.startswith("bad")]:
            raise SinkRefused(f"memory: refuses {bad[0]}")
        self.rows.update(zip(batch.ids, batch.vectors, strict=True))

    def commit(self, chunks: int) -> None:
        self.steps.append(f"commit {chunks}")
        self.resume = chunks

    def recover(self) -> None:
        self.steps.append("recover")

    def verify(self, sample: Batch) -> Verified:
        return compared(sample, self.rows, half=False)

    def close(self) -> None: ...


@contextmanager
def memo_plugin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed distribution with a sink for `memo:` URLs, and one that wants to be that of PostgreSQL."""
    info = folder / "memo_sink-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: memo-sink\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[embedctl.sinks]\nmemo = memo_sink:make\npostgresql = memo_sink:make\n")
    (folder / "memo_sink.py").write_text(
        "from tests.support.memory_sink import Memory\ndef make(url, settings):\n"
        "    sink = Memory()\n    sink.url = url\n    return sink\n"
    )
    monkeypatch.syspath_prepend(folder)
    try:
        yield
    finally:
        sys.modules.pop("memo_sink", None)
