"""Failures of workers with a chunk, kept with the chunk until another worker has tried it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

#: The row of a worker that fell sick without knowing its row.
_UNKNOWN = -1
#: At most this many workers that fell sick over a chunk are remembered, the last ones.
_MOST_SICK = 16


@dataclass(frozen=True, slots=True)
class Doubts:
    """The failures that workers reported when they gave a chunk back.

    Attributes:
        rows: worker instance → the rows that it could not encode.
        unreadable: the instances that could not read the chunk's input.
        rounds: how often the chunk was given back so that another worker may try.
        sick: worker instance that fell sick while it held the chunk → the row that it fell sick after; -1 if unknown.
    """

    rows: Mapping[str, frozenset[int]] = field(default_factory=dict)
    unreadable: frozenset[str] = frozenset()
    rounds: int = 0
    sick: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_suspect(self) -> bool:
        """Whether more than one worker fell sick over the chunk, so that one of its rows may be the cause."""
        return len(self.sick) > 1

    @property
    def named(self) -> frozenset[int]:
        """The rows that a worker fell sick after, having been well before."""
        return frozenset(self.sick.values()) - {_UNKNOWN}

    @property
    def poisonous(self) -> frozenset[int]:
        """The rows that at least two workers fell sick after, having been well before."""
        times = Counter(self.sick.values())
        return frozenset(row for row in self.named if times[row] > 1)

    def with_rows(self, instance: str, rows: Collection[int]) -> Self:
        """A copy which records that an instance could not encode these rows, and gave the chunk back."""
        mine = self.rows.get(instance, frozenset()) | frozenset(rows)
        return replace(self, rows={**self.rows, instance: mine}, rounds=self.rounds + 1)

    def with_unreadable(self, instance: str) -> Self:
        """A copy which records that an instance could not read the input, and gave the chunk back."""
        return replace(self, unreadable=self.unreadable | {instance}, rounds=self.rounds + 1)

    def with_sick(self, instance: str, row: int | None) -> Self:
        """A copy which records that an instance fell sick over the chunk, in careful mode after this row if known."""
        sick = {**self.sick, instance: _UNKNOWN if row is None else row}
        named = self.poisonous  # poisonous rows are never forgotten
        forgotten = [each for each in sick if sick[each] not in named][: max(0, len(sick) - _MOST_SICK)]
        return replace(self, sick={each: at for each, at in sick.items() if each not in forgotten})

    def as_json(self) -> str:
        """The JSON that the store keeps."""
        rows = {instance: sorted(rows) for instance, rows in self.rows.items()}
        facts = {"rows": rows, "unreadable": sorted(self.unreadable), "rounds": self.rounds, "sick": dict(self.sick)}
        return json.dumps(facts, separators=(",", ":"))

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """The inverse of :meth:`as_json`."""
        facts = json.loads(data)
        rows = {instance: frozenset(rows) for instance, rows in facts["rows"].items()}
        return cls(rows, frozenset(facts["unreadable"]), facts["rounds"], facts["sick"])
