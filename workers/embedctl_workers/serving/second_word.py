"""Whose word counts when a worker can't do something with a chunk: its own, or that of two workers.

A worker may be unable to do what any other can, without knowing it. Where it encodes all but a few rows of a chunk, and
a text of its own before and after them, it knows enough: those rows fail. Otherwise what it says is a first word: the
chunk is given back, and the record fails where a second worker says the same. Where none comes by within seconds, the
first one's second word counts.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from embedctl.store import Doubts
from embedctl_workers.encoding.encoder import EncodedChunk

#: How often a chunk is given back for another worker at most.
MOST_ROUNDS = 3
#: How often a worker passes on the ticket of a chunk that it has doubted itself, before it takes it again.
MOST_PASSES = 8
#: How long its thread rests after it (seconds), where it has nothing else to do: a worker that waits for tickets gets
#: this one meanwhile.
PASS_REST_S = 0.5
#: Rows of a chunk that may fail at one worker's word: as many, or this part of them.
_FEW = 3
_FEW_PART = 0.1
_MOST_REMEMBERED = 4096


class Passed:
    """The chunks that this worker has doubted and leaves to another for some time. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._circling = False

    def leave(self, job_id: str, chunk: int) -> None:
        """This worker has doubted a chunk."""
        with self._lock:
            self._left[job_id, chunk] = MOST_PASSES
            if len(self._left) > _MOST_REMEMBERED:
                self._left.popitem(last=False)

    def rest_s(self, job_id: str, chunk: int, others: Callable[[], bool]) -> float | None:
        """Whether the ticket of a chunk is passed on, and how long its thread then rests, in seconds; None if not.

        Args:
            others: whether there are other workers; asked only where it matters.
        """
        if (job_id, chunk) not in self._left:
            self._circling = False
            return None
        there_are = others()
        with self._lock:
            left = self._left.pop((job_id, chunk), 0)
            if not left or not there_are:
                return None
            self._left[job_id, chunk] = left - 1
            before, self._circling = self._circling, True
            return PASS_REST_S if before else 0.0


def counts(encoded: EncodedChunk, doubts: Doubts | None, me: str, others: Callable[[], bool]) -> bool:
    """Whether rows that this worker could not encode, each tried twice, are to fail for good."""
    failed = encoded.doubtful
    if _are_few(encoded):
        return True
    doubts = doubts or Doubts()
    said = frozenset().union(*(rows for instance, rows in doubts.rows.items() if instance != me))
    mine = doubts.rows.get(me, frozenset())
    return said >= failed or mine >= failed or doubts.rounds >= MOST_ROUNDS or not others()


def counts_as_unreadable(doubts: Doubts | None) -> bool:
    """Whether an input that this worker can't read is damaged: another said so, or it did itself of an earlier copy."""
    return doubts is not None and bool(doubts.unreadable)


def _are_few(encoded: EncodedChunk) -> bool:
    failed = len(encoded.doubtful)
    tried = len(encoded.vectors) - len(encoded.errors) + failed
    return not failed or (not encoded.elsewhere and 2 * failed <= tried and failed <= max(_FEW, int(_FEW_PART * tried)))
