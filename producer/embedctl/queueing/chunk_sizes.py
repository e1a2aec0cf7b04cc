"""Decides how much text the chunks of a job hold, by what the workers that live when it is made can do. The answer is
one number of bytes, which is stored with the job: who resumes it makes the same chunks, whichever workers live by
then."""

from __future__ import annotations

import heapq
import math
import sys
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from embedctl.corpus.records import Record
from embedctl_config.wire import ChunkInput

#: Bytes per token, a rule of thumb: English text, WordPiece or BPE vocabularies of about 30,000 entries. With the
#: vocabulary of MiniLM, it is 4.0 in Python's docstrings, 2.9 in Chinese and 2.2 in Russian.
BYTES_PER_TOKEN = 4.2
#: A worker's time for a chunk (seconds): long enough that a chunk's own cost of milliseconds does not matter.
CHUNK_S = 2.0
#: A job is divided among workers in parts of at least this time (seconds),
_LEAST_S = 0.1
#: or of this much text, if no worker has measured its rate (bytes).
_LEAST_BYTES = 8 * 1024
#: A job of at most this many chunks for each worker is divided evenly. The last chunks of a longer one matter little.
_CHUNKS_EACH = 8
#: A job gets more chunks than it needs if the busiest worker then has this part of its work, or less.
_MUCH_LESS = 0.97
#: No more is read ahead, however many workers there are.
_MOST_RECORDS, _MOST_BYTES, _MOST_S = 16_384, 8 * 1024 * 1024, 0.5


def chunks_of(records: Iterable[Record], *, max_rows: int, max_bytes: int) -> Iterator[ChunkInput]:
    """Cut records into chunks of consecutive records. The bytes of a record are those of its text and its kept fields.
    A record longer than `max_bytes` becomes a chunk with this record alone."""
    first = 0
    for group in groups_of(records, max_rows=max_rows, max_bytes=max_bytes):
        yield _chunk(first, group)
        first += len(group)


def groups_of(records: Iterable[Record], *, max_rows: int, max_bytes: int) -> Iterator[list[Record]]:
    """The records of each chunk of :func:`chunks_of`."""
    held: list[Record] = []
    size = 0
    for record in records:
        added = size_of(record)
        if held and (len(held) == max_rows or size + added > max_bytes):
            yield held
            held, size = [], 0
        held.append(record)
        size += added
    if held:
        yield held


def size_of(record: Record) -> int:
    """The bytes of a record's text and its kept fields."""
    return len(record.text) + len(record.kept or b"")


def _chunk(first: int, records: list[Record]) -> ChunkInput:
    ids = [record.id for record in records]
    return ChunkInput(
        first=first,
        kinds=bytes(record.kind for record in records),
        texts=[record.text for record in records],
        ids=None if all(label is None for label in ids) else ids,
        kept=None if records[0].kept is None else [record.kept or b"{}" for record in records],
    )


@dataclass(frozen=True, slots=True)
class Workers:
    """The live workers that take a job. `tokens_per_s` is the rate of one of them, the mean of those that have measured
    theirs; 0 if none has. Texts longer than `max_tokens` are truncated; 0 if that is unknown. `prefetch` is how many
    chunks one worker holds at once."""

    count: int = 0
    tokens_per_s: float = 0.0
    max_tokens: int = 0
    prefetch: int = 1


class ReadAhead:
    """Records. Some are read before their turn if they are `at_hand`, so that nobody has to write them first. Iterating
    gives them all."""

    def __init__(self, records: Iterable[Record], *, at_hand: bool) -> None:
        self._rest = iter(records)
        self._at_hand = at_hand
        self._held: deque[Record] = deque()
        self.whole = False

    @property
    def is_one(self) -> bool:
        """Whether it is known that there is no second record."""
        return len(self.read(2, sys.maxsize)) < 2 and self.whole

    def whole_within(self, records: int, size: int) -> Sequence[Record] | None:
        """All records, if it is known that they are at most so many and smaller than that (bytes); otherwise None."""
        held = self.read(records + 1, size)
        return held if self.whole and len(held) <= records and sum(map(size_of, held)) < size else None

    def __iter__(self) -> Iterator[Record]:
        while self._held:
            yield self._held.popleft()
        yield from self._rest

    def read(self, records: int, size: int) -> Sequence[Record]:
        """The first records: all of them if `whole` is true afterwards, otherwise about as many as asked for."""
        until = time.monotonic() + _MOST_S
        held = sum(map(size_of, self._held))
        while self._at_hand and len(self._held) < records and held < size and time.monotonic() < until:
            record = next(self._rest, None)
            if record is None:
                self.whole = True
                break
            self._held.append(record)
            held += size_of(record)
        return self._held


def chunk_bytes(ahead: ReadAhead, workers: Workers, options: Mapping[str, Any]) -> int:
    """The most bytes in a chunk, so that one worker encodes it in about :data:`CHUNK_S`; at most the job's limit in
    `options`. If all records could be read ahead, they are divided evenly among the workers."""
    rows: int = options["chunk_size"]
    most: int = options["chunk_bytes"]
    if not workers.count:
        return most
    several = workers.count * _CHUNKS_EACH
    sample = ahead.read(min(several * rows, _MOST_RECORDS), min(several * most, _MOST_BYTES))
    sizes = [size_of(record) for record in sample]
    work = _work(sample, workers, options)
    aim = workers.tokens_per_s * CHUNK_S * BYTES_PER_TOKEN or math.inf
    if work and any(sizes):
        most = max(1, int(min(most, aim * sum(sizes) / work)))
    elif not options.get("keep"):  # otherwise nobody knows how much of the bytes is text
        most = max(1, int(min(most, aim)))
    if not ahead.whole:
        return most
    rounds = max(work / aim, len(sizes) / rows, sum(sizes) / options["chunk_bytes"]) / workers.count
    # With fewer chunks, some workers could take all of them while another is about to ask.
    rounds = max(workers.prefetch, math.ceil(rounds)) if workers.count > 1 else math.ceil(rounds)
    least = aim * _LEAST_S / CHUNK_S if workers.tokens_per_s else _LEAST_BYTES
    return _shared(sizes, min(workers.count * rounds, work / least), workers.count, rows, most)


def _work(records: Iterable[Record], workers: Workers, options: Mapping[str, Any]) -> float:
    """The bytes that are encoded: with the prompt, and without kept fields and what is truncated."""
    prompt = len((options["prompt"] or "").encode())
    truncated = workers.max_tokens and options["long"] != "mean"
    longest = workers.max_tokens * BYTES_PER_TOKEN if truncated else math.inf
    return sum(min(prompt + len(record.text), longest) for record in records)


def _shared(sizes: Sequence[int], chunks: float, workers: int, max_rows: int, max_bytes: int) -> int:
    """The limit in bytes that makes about so many chunks and gives every worker about the same amount. One of two
    workers would encode two of three equal chunks. So the number of chunks is to be a multiple of the number of
    workers. The records may not fill the nearest multiple; then it is the next one."""
    ends = list(accumulate(sizes))
    if chunks <= workers:
        return _even(ends, int(chunks), max_rows, max_bytes)
    each = math.floor(chunks / workers + 0.5)
    limits = [_even(ends, workers * rounds, max_rows, max_bytes) for rounds in (each, each + 1)]
    fewer, more = (_longest_share(_chunks(ends, max_rows, limit), workers) for limit in limits)
    return limits[more < _MUCH_LESS * fewer]


def _longest_share(chunks: Iterable[int], workers: int) -> int:
    """The most bytes that one of the workers encodes, if each takes the next chunk when it has done one."""
    busy = [0] * workers
    for size in chunks:
        heapq.heapreplace(busy, busy[0] + size)
    return max(busy)


def _even(ends: Sequence[int], chunks: int, max_rows: int, max_bytes: int) -> int:
    """The lowest limit in bytes that makes no more chunks than these; `max_bytes` if that makes more already."""
    return bisect_left(range(max_bytes), True, 1, key=lambda limit: len(_chunks(ends, max_rows, limit)) <= chunks)


def _chunks(ends: Sequence[int], max_rows: int, max_bytes: int) -> list[int]:
    """The bytes of each chunk that :func:`~embedctl.queueing.chunk_sizes.chunks_of` makes of records that end there."""
    at = before = 0
    chunks = []
    while at < len(ends):
        fitting = bisect_right(ends, before + max_bytes, at, min(at + max_rows, len(ends)))
        at = max(fitting, at + 1)
        chunks.append(ends[at - 1] - before)
        before = ends[at - 1]
    return chunks
