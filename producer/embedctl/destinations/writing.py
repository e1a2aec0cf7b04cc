"""Writes batches into a destination: what may pass is tried again, and what is refused is found by halving."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from embedctl.destinations.interface import Batch, Destination
from embedctl.destinations.loop import RefusedRecord
from embedctl_config.errors import DestinationRefused, DestinationUnavailable, OutputError
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


def sources_of(destination: Destination, ids: Sequence[str]) -> Mapping[str, bytes | None]:
    """The sources of those rows that are there. An id that a destination refuses to look for has none."""
    try:
        return tried(lambda: destination.sources(ids))
    except DestinationRefused:
        if len(ids) == 1:
            return {}
    half = len(ids) // 2
    return {**sources_of(destination, ids[:half]), **sources_of(destination, ids[half:])}


def write(destination: Destination, batch: Batch) -> Iterator[RefusedRecord]:
    """Write what a destination takes of a batch; yields the records that it refuses. The others are durable at the end.
    OutputError: it refuses all, and so it is not about single records."""
    try:
        tried(lambda: destination.write(batch))
        return
    except DestinationRefused as error:
        refused = error
    if len(batch) > 2 * _SPREAD:
        _refuse_all_alike(destination, batch, refused)
    yield from _halved(destination, batch, refused)


def _halved(destination: Destination, batch: Batch, refused: DestinationRefused) -> Iterator[RefusedRecord]:
    if len(batch) == 1:
        position = -1 if batch.positions is None else int(batch.positions[0])
        yield RefusedRecord(position, batch.ids[0], str(refused))
        return
    half = len(batch) // 2
    for part in (batch.part(slice(half)), batch.part(slice(half, None))):
        try:
            tried(lambda part=part: destination.write(part))  # type: ignore[misc]  # bound in each round
        except DestinationRefused as error:
            yield from _halved(destination, part, error)


def _refuse_all_alike(destination: Destination, batch: Batch, refused: DestinationRefused) -> None:
    """Raise if single records from all over a batch are refused for the reason that the whole batch is refused for."""
    for row in np.linspace(0, len(batch) - 1, _SPREAD).astype(np.int64):
        try:
            tried(lambda row=row: destination.write(batch.part(slice(row, row + 1))))  # type: ignore[misc]  # bound in each round
        except DestinationRefused as error:
            if str(error) != str(refused):
                return
        else:
            return
    raise OutputError(f"{refused}. Records from all over the batch are refused alike, so nothing more is written")
