"""A destination in memory, and a plug-in that brings it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from embedctl.destinations.interface import Batch, Contract, Destination, Row
from embedctl_config.errors import DestinationRefused, DestinationUnavailable
from embedctl_config.record_ids import RecordId

CONTRACT = Contract("aa" * 32, "m", "fp32", {}, 4)


class Memory(Destination):
    """A dictionary as a database. It refuses ids that begin with `bad`, and is away `away` times.

    Attributes:
        steps: what was called.
    """

    batch_records = 4
    name = "memory:"

    def __init__(self, away: int = 0) -> None:
        self.rows: dict[RecordId, tuple[np.ndarray, bytes | None]] = {}
        self.away = away
        self.steps: list[str] = []

    def open(self, contract: Contract | None) -> bool:
        return bool(self.rows)

    def sources(self, ids: Sequence[RecordId]) -> Mapping[RecordId, bytes | None]:
        return {label: self.rows[label][1] for label in ids if label in self.rows}

    def ids(self) -> Iterator[Row]:
        for label, (_, source) in list(self.rows.items()):
            yield label, source

    def write(self, batch: Batch) -> None:
        self.steps.append(f"write {len(batch)}")
        if self.away:
            self.away -= 1
            raise DestinationUnavailable("memory: is away")
        if bad := [label for label in batch.ids if str(label).startswith("bad")]:
            raise DestinationRefused(f"memory: refuses {bad[0]!s}")
        for (label, source), vector in zip(batch.rows, batch.vectors, strict=True):
            self.rows[label] = vector, source

    def delete(self, rows: Sequence[Row]) -> int:
        self.steps.append(f"delete {len(rows)}")
        same = [label for label, source in rows if label in self.rows and self.rows[label][1] == source]
        for label in same:
            del self.rows[label]
        return len(same)

    def close(self) -> None: ...


@contextmanager
def memo_plugin(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed distribution with a destination for `memo:` URLs, and one that wants to be that of PostgreSQL."""
    info = folder / "memo_destination-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: memo-destination\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(
        "[embedctl.destinations]\nmemo = memo_destination:make\npostgresql = memo_destination:make\n"
    )
    (folder / "memo_destination.py").write_text(
        "from tests.support.memory_destination import Memory\ndef make(url, settings):\n"
        "    table = Memory()\n    table.url = url\n    return table\n"
    )
    monkeypatch.syspath_prepend(folder)
    try:
        yield
    finally:
        sys.modules.pop("memo_destination", None)
