"""Writes batches into a destination: what may pass is tried again, and what is refused is found by halving."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from embedctl.destinations.interface import Batch, Destination
from embedctl.destinations.loop import RefusedRecord
from embedctl_config.errors import DestinationRefused, DestinationUnavailable, OutputError
from embedctl_config.record_ids import RecordId
from embedctl_config.retry import OUTSIDE

log = logging.getLogger(__name__)

#: What may pass is tried this often.
TRIES = 5
#: So many records alone, spread over a batch, show that a refusal is not about single records.
_SPREAD = 16

T = TypeVar("T")


def tried(step: Callable[[], T]) -> T:
    """What a step returns, which is tried again while its error may pass."""
    try:
        return OUTSIDE.call(
            step, DestinationUnavailable, failed=lambda error, _: log.warning("%s. Trying again", error), tries=TRIES
        )
    except DestinationUnavailable as error:
        raise DestinationUnavailable(f"{error}. Tried {TRIES} times; the same command resumes") from error


def halved(step: Callable[[slice], T], first: int, end: int) -> Iterator[tuple[int, T | DestinationRefused]]:
    """What a step returns for some rows, after the number of the first one. If the destination refuses these, it is
    asked for their halves; a row that stands alone comes with the refusal."""
    try:
        found: T | DestinationRefused = tried(lambda: step(slice(first, end)))
    except DestinationRefused as error:
        if end - first > 1:
            middle = (first + end) // 2
            yield from halved(step, first, middle)
            yield from halved(step, middle, end)
            return
        found = error
    yield first, found


def sources_of(destination: Destination, ids: Sequence[RecordId]) -> Mapping[RecordId, bytes | None]:
    """The sources of those rows that are there. An id that a destination refuses to look for has none."""
    found: dict[RecordId, bytes | None] = {}
    for _, part in halved(lambda rows: destination.sources(ids[rows]), 0, len(ids)):
        found |= {} if isinstance(part, DestinationRefused) else part
    return found


def write(destination: Destination, batch: Batch) -> Iterator[RefusedRecord]:
    """Write what a destination takes of a batch; yields the records that it refuses. The others are durable at the end.
    OutputError: it refuses all, and so it is not about single records."""
    may_be_of_all = len(batch) > 2 * _SPREAD
    for row, refused in halved(lambda rows: destination.write(batch.part(rows)), 0, len(batch)):
        if refused is not None:
            if may_be_of_all:
                _refuse_all_alike(destination, batch, refused)
                may_be_of_all = False
            position = -1 if batch.positions is None else int(batch.positions[row])
            yield RefusedRecord(position, batch.ids[row], str(refused))


def _refuse_all_alike(destination: Destination, batch: Batch, refused: DestinationRefused) -> None:
    """Raise if single records from all over a batch are refused for the same reason."""
    for row in np.linspace(0, len(batch) - 1, _SPREAD).astype(np.int64).tolist():
        ((_, found),) = halved(lambda rows: destination.write(batch.part(rows)), row, row + 1)
        if str(found) != str(refused):
            return
    raise OutputError(f"{refused}. Records from all over the batch are refused alike, so nothing more is written")
