"""Whose word counts when a worker can't do something with a chunk: two workers', where there are two.

A worker may be unable to do what any other can, without knowing it. So what it says of a record is a first word: the
chunk is given back, and the record fails where a second worker says the same. Where there is none, or none comes by in
so many rounds, the first one's second word counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from embedctl.store import Doubts

#: How often a chunk is given back for another worker at most.
MOST_ROUNDS = 6
_LONGEST_DELAY_S = 60.0


def is_for_another(doubts: Doubts | None, me: str, others: Callable[[], bool]) -> bool:
    """Whether a chunk that was claimed is better left to another: only this worker has tried it as yet.

    Args:
        others: whether there are other workers; asked only where it matters.
    """
    if doubts is None or doubts.instances != {me} or doubts.rounds >= MOST_ROUNDS:
        return False
    return others()


def counts(failed: Collection[int], doubts: Doubts | None, me: str, others: Callable[[], bool]) -> bool:
    """Whether rows that this worker could not encode, each tried twice, are to fail for good."""
    doubts = doubts or Doubts()
    said = frozenset().union(*(rows for instance, rows in doubts.rows.items() if instance != me))
    return said.issuperset(failed) or doubts.rounds >= MOST_ROUNDS or not others()


def counts_as_unreadable(doubts: Doubts | None, me: str, others: Callable[[], bool]) -> bool:
    """Whether an input that this worker can't read is damaged: another said so, or it did itself of an earlier copy."""
    doubts = doubts or Doubts()
    if doubts.unreadable - {me}:
        return True
    return me in doubts.unreadable and (doubts.rounds >= MOST_ROUNDS or not others())


def delay_s(doubts: Doubts, shortest_s: float) -> float:
    """Seconds until a chunk that is left to another worker is offered again: longer from round to round."""
    return min(_LONGEST_DELAY_S, shortest_s * 2.0 ** max(0, doubts.rounds - 1))
