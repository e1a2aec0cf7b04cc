"""A destination in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest

from embedctl.destinations import registry
from embedctl.destinations.interface import Batch, Contract, Destination, Row
from embedctl.destinations.registry import DatabaseKind
from embedctl.destinations.urls import DestinationUrl
from embedctl_config.errors import DestinationRefused, DestinationUnavailable
from embedctl_config.record_ids import RecordId
from embedctl_config.settings import Settings

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


def take_memo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `memo:` be the scheme of such a database."""
    memo = DatabaseKind("memo", "memo:…", ("memo",), "", (), f"{__name__}:make", "omit it")
    monkeypatch.setattr(registry, "KINDS", (*registry.KINDS, memo))


def make(url: DestinationUrl, settings: Settings) -> Memory:
    return Memory()
