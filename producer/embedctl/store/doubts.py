"""What one worker could not do with a chunk, kept with the chunk until another one has tried."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Self


@dataclass(frozen=True, slots=True)
class Doubts:
    """The words of workers about a chunk that they gave back.

    Attributes:
        rows: by worker instance, the rows that it could not encode.
        unreadable: the instances that could not read the chunk's input.
        rounds: how often the chunk was given back so that another worker may try.
    """

    rows: Mapping[str, frozenset[int]] = field(default_factory=dict)
    unreadable: frozenset[str] = frozenset()
    rounds: int = 0

    @property
    def instances(self) -> frozenset[str]:
        """Who could not do something with the chunk."""
        return frozenset(self.rows) | self.unreadable

    def with_rows(self, instance: str, rows: Collection[int]) -> Self:
        """The same when an instance could not encode these rows, and gives the chunk back."""
        mine = self.rows.get(instance, frozenset()) | frozenset(rows)
        return replace(self, rows={**self.rows, instance: mine}, rounds=self.rounds + 1)

    def with_unreadable(self, instance: str) -> Self:
        """The same when an instance could not read the input, and gives the chunk back."""
        return replace(self, unreadable=self.unreadable | {instance}, rounds=self.rounds + 1)

    def passed_on(self) -> Self:
        """The same when the chunk is given back untried."""
        return replace(self, rounds=self.rounds + 1)

    def as_json(self) -> str:
        """As the store keeps it."""
        rows = {instance: sorted(rows) for instance, rows in self.rows.items()}
        facts = {"rows": rows, "unreadable": sorted(self.unreadable), "rounds": self.rounds}
        return json.dumps(facts, separators=(",", ":"))

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """What :meth:`as_json` made, of this version or a later one."""
        facts = json.loads(data)
        rows = {instance: frozenset(rows) for instance, rows in facts.get("rows", {}).items()}
        return cls(rows, frozenset(facts.get("unreadable", ())), int(facts.get("rounds", 0)))
