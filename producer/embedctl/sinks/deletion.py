"""Deletes records from a sink, in batches that are tried again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from embedctl.sinks.base import Sink, Target
from embedctl.sinks.deliver import TRIES, tried
from embedctl_config.errors import OutputError

#: Ids of a batch, and about as many characters, unless a single id is longer.
_MOST_IDS, _MOST_CHARACTERS = 1_000, 1_000_000


def delete_all(sink: Sink, target: Target, ids: Iterable[str]) -> int:
    """Delete records by their ids. Memory holds a batch.

    A second call deletes what the first one has left. An id that is not there is no error.

    Args:
        target: whose vectors the table must hold, so that nothing is deleted from another table.

    Returns:
        How many were there.

    Raises:
        SettingsError: the sink can't delete.
        MixedVectors, SinkRefused, SinkUnavailable, OutputError: as the sink says.
    """
    deleted = 0
    try:
        sink.open(target)
        for batch in _batches(ids):
            deleted += _delete(sink, batch)
        if deleted:
            sink.finish()
    finally:
        sink.close()
    return deleted


def _delete(sink: Sink, batch: list[str]) -> int:
    def final(error: OutputError) -> OutputError:
        return type(error)(f"{error}. Tried {TRIES} times; the same command continues")

    return tried(sink, lambda: sink.delete(batch), final)


def _batches(ids: Iterable[str]) -> Iterator[list[str]]:
    held: list[str] = []
    size = 0
    for label in ids:
        if held and (len(held) == _MOST_IDS or size + len(label) > _MOST_CHARACTERS):
            yield held
            held, size = [], 0
        held.append(label)
        size += len(label)
    if held:
        yield held
