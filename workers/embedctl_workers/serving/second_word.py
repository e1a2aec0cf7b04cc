"""Who decides that a worker could not do something with a chunk: that worker alone, or two workers.

A worker may be unable to do what any other can, without knowing it. If it encodes all but a few rows of a chunk, and
its known good text before and after them, its word counts: those rows fail. Otherwise its word is a first word: the
chunk is given back, and a record fails when a second worker says the same. If no other worker takes the chunk within
seconds, the first worker's second word counts.
"""

from __future__ import annotations

from collections.abc import Callable

from embedctl.store import Doubts
from embedctl_config.retry import Policy, Streak
from embedctl_workers.encoding.encoder import EncodedChunk

#: How often a chunk is given back for another worker, at most.
MOST_ROUNDS = 3
#: Rows of a chunk that may fail at one worker's word: this many, or this part of them.
_FEW = 3
_FEW_PART = 0.1
#: A worker that gave back more than this many chunks in a row, each for more than half of its rows, rests after each:
#: it finds out that it can't encode a chunk faster than others encode one, and would draw the whole job to itself.
_UNSURE_AFTER = 2
_RESTS = Policy(1.0, 5.0)


def rest_s(unsure: Streak, encoded: EncodedChunk) -> float:
    """Seconds to rest after giving back a chunk; `unsure` counts those in a row that were encoded less than half."""
    if 2 * len(encoded.doubtful) <= len(encoded.vectors):
        return 0.0
    unsure.failures += 1
    tries = unsure.failures - _UNSURE_AFTER
    return _RESTS.pause_s(tries) if tries > 0 else 0.0


def counts(encoded: EncodedChunk, doubts: Doubts | None, me: str, others: Callable[[], bool]) -> bool:
    """Whether the rows that this worker, instance `me`, could not encode, although it tried each twice, fail for good.

    `others` tells whether there are other workers; called only if that decides.
    """
    failed = encoded.doubtful
    if _are_few(encoded):
        return True
    doubts = doubts or Doubts()
    said = frozenset().union(*(rows for instance, rows in doubts.rows.items() if instance != me))
    mine = doubts.rows.get(me, frozenset())
    return said >= failed or mine >= failed or doubts.rounds >= MOST_ROUNDS or not others()


def counts_as_unreadable(doubts: Doubts | None) -> bool:
    """Whether an input that this worker can't read is damaged: a worker, perhaps this one, could not read it before."""
    return doubts is not None and bool(doubts.unreadable)


def _are_few(encoded: EncodedChunk) -> bool:
    failed = len(encoded.doubtful)
    tried = len(encoded.vectors) - len(encoded.errors) + failed
    return not failed or (not encoded.elsewhere and 2 * failed <= tried and failed <= max(_FEW, int(_FEW_PART * tried)))
