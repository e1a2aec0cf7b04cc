"""What one worker could not do with a chunk, kept with the chunk until another one has tried."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

#: Where a worker does not know at which row it fell sick.
_UNKNOWN = -1
#: Workers that fell sick over a chunk, of which at most the last so many are remembered.
_MOST_SICK = 16


@dataclass(frozen=True, slots=True)
class Doubts:
    """The words of workers about a chunk that they gave back.

    Attributes:
        rows: by worker instance, the rows that it could not encode.
        unreadable: the instances that could not read the chunk's input.
        rounds: how often the chunk was given back so that another worker may try.
        sick: by worker instance that fell sick while it held the chunk, the row after which it did; -1 where unknown.
    """

    rows: Mapping[str, frozenset[int]] = field(default_factory=dict)
    unreadable: frozenset[str] = frozenset()
    rounds: int = 0
    sick: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_suspect(self) -> bool:
        """Whether workers fell sick over the chunk so often that one of its rows may be the cause."""
        return len(self.sick) > 1

    @property
    def named(self) -> frozenset[int]:
        """The rows after which a worker fell sick that was well before them."""
        return frozenset(self.sick.values()) - {_UNKNOWN}

    @property
    def poisonous(self) -> frozenset[int]:
        """The rows after which two workers fell sick that were well before them."""
        times = Counter(self.sick.values())
        return frozenset(row for row in self.named if times[row] > 1)

    def with_rows(self, instance: str, rows: Collection[int]) -> Self:
        """The same when an instance could not encode these rows, and gives the chunk back."""
        mine = self.rows.get(instance, frozenset()) | frozenset(rows)
        return replace(self, rows={**self.rows, instance: mine}, rounds=self.rounds + 1)

    def with_unreadable(self, instance: str) -> Self:
        """The same when an instance could not read the input, and gives the chunk back."""
        return replace(self, unreadable=self.unreadable | {instance}, rounds=self.rounds + 1)

    def with_sick(self, instance: str, row: int | None) -> Self:
        """The same when an instance fell sick over the chunk: after this row, which it had come to with care."""
        sick = {**self.sick, instance: _UNKNOWN if row is None else row}
        named = self.poisonous  # these are known for good
        forgotten = [each for each in sick if sick[each] not in named][: max(0, len(sick) - _MOST_SICK)]
        return replace(self, sick={each: at for each, at in sick.items() if each not in forgotten})

    def as_json(self) -> str:
        """As the store keeps it."""
        rows = {instance: sorted(rows) for instance, rows in self.rows.items()}
        facts: dict[str, object] = {"rows": rows, "unreadable": sorted(self.unreadable), "rounds": self.rounds}
        if self.sick:
            facts["sick"] = dict(self.sick)
        return json.dumps(facts, separators=(",", ":"))

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """What :meth:`as_json` made, of this version, an earlier or a later one."""
        facts = json.loads(data)
        rows = {instance: frozenset(rows) for instance, rows in facts.get("rows", {}).items()}
        return cls(
            rows, frozenset(facts.get("unreadable", ())), int(facts.get("rounds", 0)), dict(facts.get("sick", {}))
        )
