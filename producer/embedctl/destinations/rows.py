"""Writes a job's records as rows of a database, batch by batch."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from embedctl.corpus.digests import DIGEST_BYTES
from embedctl.destinations.ids import NAMED, Duplicates, LeftOut, no_id
from embedctl.destinations.interface import Batch, Contract, Destination, Row, Stored
from embedctl.destinations.loop import Delivered, Refused, RefusedRecord
from embedctl.destinations.numbers import FLOAT32, Dtype, Numbers, not_finite, numbers_of
from embedctl.destinations.writing import sources_of, tried, write
from embedctl.waiting.results import ChunkVectors
from embedctl.waiting.waiter import Waiter
from embedctl_config.errors import InputError, OutputError, SettingsError
from embedctl_config.record_ids import IdType, RecordId

T = TypeVar("T")

#: About how many bytes an id takes that is no text.
_NUMBER = 8
#: Records that are looked for at the end, and of each batch.
_SAMPLE, _OF_EACH = 100, 10


@dataclass(frozen=True, slots=True)
class Options:
    """How a job is delivered.

    Attributes:
        ids_are_unique: the caller has found the ids to be there and unique, so they are not read beforehand.
        dtype: of the dense vectors; None: float32, but not restored from what is coarser.
    """

    duplicates: Duplicates = Duplicates.ERROR
    ids_are_unique: bool = False
    dtype: Dtype | None = None

    @classmethod
    def of(cls, duplicates: str, dtype: str | None) -> Options:
        """Options from the words that users give, or a SettingsError."""
        if duplicates not in list(Duplicates):
            raise SettingsError(f"for a database, duplicates is one of {', '.join(Duplicates)}, not {duplicates!r}")
        numbers = numbers_of(dtype, None)
        return cls(Duplicates(duplicates), dtype=None if numbers is None else numbers.kind)

    @property
    def stored_as(self) -> Dtype:
        return self.dtype or Dtype.FLOAT32

    @property
    def knows_ids(self) -> bool:
        """Whether all ids are known to be unique before the job has ended."""
        return self.positions or self.ids_are_unique

    @property
    def positions(self) -> bool:
        """Whether ids are made of the job and the position, in place of the records' own."""
        return self.duplicates is Duplicates.POSITION


@dataclass(slots=True)
class Gathered:
    """Records of consecutive chunks that are not written yet. `positions_for` is the job, if ids are made of it and of
    positions; empty if they are the records' own. Rows hold kept fields if it `keeps` them. `refuse` takes a record
    whose vector can't be stored; `held` gives ids as they are
    in the table."""

    contract: Contract
    left_out: LeftOut | None
    positions_for: str
    keeps: bool
    refuse: Refused
    held: Callable[[Sequence[RecordId]], Sequence[RecordId]]
    chunks: list[ChunkVectors] = field(default_factory=list)
    rows: int = 0
    size: int = 0
    _vectors: Stored | None = None  # of the last batch, in memory that the next one takes

    def add(self, chunk: ChunkVectors) -> None:
        self.chunks.append(chunk)
        self.rows += len(chunk.positions)
        self.size += chunk.nbytes
        try:
            self.size += len("".join(cast("Sequence[str]", chunk.ids)))
        except TypeError:  # they are no texts
            self.size += _NUMBER * len(chunk.ids)
        if self.keeps and chunk.kept is not None:
            self.size += sum(len(str(each)) for each in chunk.kept)

    def taken(self, most_bytes: int) -> Iterator[Batch]:
        """All that is gathered, in batches of about so many bytes; nothing is left then. Their vectors are there until
        the next call. InputError: a record has no id, or an id occurs twice."""
        parts = [part for chunk in self.chunks if len(part := self._rows(chunk))]
        pieces = -(-self.size // most_bytes)
        self.chunks, self.rows, self.size = [], 0, 0
        if not parts:
            return
        whole = self._joined(parts)
        _refuse_twice(whole)
        rows_of_each = -(-len(whole) // max(1, pieces))
        for first in range(0, len(whole), rows_of_each):
            yield whole.part(slice(first, first + rows_of_each))

    def _rows(self, chunk: ChunkVectors) -> Batch:
        good = ~np.isin(chunk.positions, [error.position for error in chunk.errors])
        if self.left_out is not None:
            good &= ~self.left_out.among(chunk.positions)
        numbers, kind = Numbers(Dtype(self.contract.dtype)), self.contract.multi_type
        if (unfit := good & not_finite(chunk, kind)).any():
            infinite, refused = not_finite(chunk, FLOAT32.dtype), np.flatnonzero(unfit)
            for row, label in zip(refused.tolist(), self._ids(chunk, refused), strict=True):
                what = "is not finite" if infinite[row] else f"overflows {kind}"
                self.refuse(RefusedRecord(int(chunk.positions[row]), label, f"the vector {what}"))
            good &= ~unfit
        rows = np.flatnonzero(good)
        kept, digests, sources = chunk.kept, chunk.digests, self.contract.sources
        return Batch(
            self._ids(chunk, rows),
            numbers.of(chunk.vectors if good.all() else chunk.vectors[rows]),
            None if digests is None else sources(digests[rows].view(f"V{DIGEST_BYTES}")[:, 0].tolist()),
            [json.dumps(kept[row], ensure_ascii=False) for row in rows] if self.keeps and kept is not None else None,
            chunk.positions[rows],
            None if chunk.sparse is None else chunk.sparse.select(rows),
            None if chunk.multi is None else chunk.multi.select(rows).astype(kind),
        )

    def _joined(self, parts: list[Batch]) -> Batch:
        first, rows = parts[0], sum(map(len, parts))
        if self._vectors is None or len(self._vectors) < rows:  # new memory costs more than the copy
            self._vectors = np.empty((rows, first.vectors.shape[1]), first.vectors.dtype)
        return Batch(
            list(chain.from_iterable(part.ids for part in parts)),
            np.concatenate([part.vectors for part in parts], out=self._vectors[:rows]),
            None if first.sources is None else list(chain.from_iterable(part.sources or () for part in parts)),
            None if first.kept is None else list(chain.from_iterable(part.kept or () for part in parts)),
            np.concatenate([part.positions for part in parts if part.positions is not None]),
            None if first.sparse is None else first.sparse.joined([p.sparse for p in parts if p.sparse is not None]),
            None if first.multi is None else first.multi.joined([p.multi for p in parts if p.multi is not None]),
        )

    def _ids(self, chunk: ChunkVectors, rows: npt.NDArray[np.int64]) -> Sequence[RecordId]:
        if self.positions_for:
            return [f"{self.positions_for}:{position}" for position in chunk.positions[rows].tolist()]
        found = chunk.ids if len(rows) == len(chunk.ids) else [chunk.ids[row] for row in rows.tolist()]
        if None in found:
            raise no_id(1, [int(chunk.positions[rows[found.index(None)]])])
        return self.held(cast("Sequence[RecordId]", found))


def _refuse_twice(batch: Batch) -> None:
    """Refuse ids that occur twice: they were unique when they were looked at, and the corpus has changed since."""
    if len(set(batch.ids)) < len(batch):
        twice = [label for label, count in Counter(batch.ids).items() if count > 1]
        raise InputError(f"ids occur twice in the job: {', '.join(map(repr, twice[:NAMED]))}")


class Rows:
    """The rows of one job in a database, in batches. `done` counts those that were written, were there, or were
    refused; `refused` is called with the last ones. Memory holds a batch."""

    def __init__(
        self,
        waiter: Waiter,
        destination: Destination,
        options: Options,
        left_out: LeftOut | None,
        refused: Refused,
    ) -> None:
        self._waiter, self._destination, self._options = waiter, destination, options
        self._left_out, self._refused = left_out, refused
        #: None until the first record with a vector, which tells the model and the dimensions.
        self._batch: Gathered | None = None
        self._holds_rows = False
        #: Some of the rows that were written.
        self._sample: list[Row] = []
        #: The id of a row of the last batch; None if it has none.
        self.last_id: RecordId | None = None
        self.done = Delivered()

    @property
    def is_full(self) -> bool:
        """Whether a batch is to be written."""
        batch, most = self._batch, self._destination
        return batch is not None and (batch.rows >= most.batch_records or batch.size >= most.batch_bytes)

    def open(self, sizes: Mapping[str, Any], ids: Sequence[RecordId | None]) -> None:
        """Open the table for vectors of these sizes (`dim`, `sparse_dim`, `multi_dim` of the contract), and ids such as
        some of these, if it is not open for them; raises as :meth:`Destination.open`."""
        if self._batch is None or not self._batch.contract.is_sized:
            status = self._waiter.status()
            some: RecordId | None = "" if self._options.positions else next(filter(_is_id, ids), None)
            id_type = "" if some is None else str(IdType.of(some))
            contract = replace(Contract.of(status, dtype=self._options.stored_as), ids=id_type, **sizes)
            self._holds_rows = tried(lambda: self._destination.open(contract))
            positions_for = status.id if self._options.positions else ""
            keeps = bool(status.options.get("keep"))
            self._batch = Gathered(contract, self._left_out, positions_for, keeps, self._refuse, self._destination.held)

    def lacks(self, ids: Sequence[RecordId]) -> int:
        """How many of some ids, not more than a batch has, the open table does not hold."""
        return len(ids) - len(sources_of(self._destination, ids)) if self._holds_rows else len(ids)

    def add(self, chunk: ChunkVectors) -> None:
        _refuse_coarse(chunk, self._options)
        if self._batch is None and len(chunk.errors) == len(chunk.positions):
            return  # its model and its dimensions are not known yet
        sizes = {
            "dim": chunk.vectors.shape[1],
            "sparse_dim": 0 if chunk.sparse is None else chunk.sparse.width,
            "multi_dim": 0 if chunk.multi is None else chunk.multi.width,
        }
        self.open(sizes, chunk.ids)
        if self._batch is not None:
            self._batch.add(chunk)

    def flush(self) -> list[ChunkVectors]:
        """Write all that was added, durably; returns these chunks."""
        if self._batch is None:
            return []
        chunks, self.last_id = list(self._batch.chunks), None
        for batch in self._batch.taken(self._destination.batch_bytes):
            if len(fresh := self._without_what_is_there(batch)):
                self._write(fresh)
            else:
                self.last_id = batch.ids[-1]
        return chunks

    def _without_what_is_there(self, batch: Batch) -> Batch:
        """The rows that the destination lacks. Kept fields are no part of a source, so with them all are written."""
        if batch.sources is None or batch.kept is not None or not self._holds_rows:
            return batch
        if not (found := sources_of(self._destination, batch.ids)):
            return batch
        lacking = [row for row, (label, source) in enumerate(batch.rows) if found.get(label) != source]
        self.done.unchanged += len(batch) - len(lacking)
        return batch if len(lacking) == len(batch) else batch.part(np.array(lacking, np.int64))

    def _write(self, batch: Batch) -> None:
        refused = set()
        for each in write(self._destination, batch):
            self._refuse(each)
            refused.add(each.id)
        self.done.written += len(batch) - len(refused)
        written = np.flatnonzero([label not in refused for label in batch.ids]) if refused else np.arange(len(batch))
        self.last_id = batch.ids[written[-1]] if len(written) else self.last_id
        some = batch.part(np.array(_some(written.tolist(), _OF_EACH), np.int64)).rows
        self._sample = _some([*self._sample, *some], _SAMPLE)

    def _refuse(self, record: RefusedRecord) -> None:
        self.done.refused += 1
        self._refused(record)

    def refuse_missing(self) -> None:
        """Look for some of the records that were written; OutputError if the destination does not hold what it has
        acknowledged."""
        if not self._sample:
            return
        names = [label for label, _ in self._sample]
        found = sources_of(self._destination, names)
        wrong = [label for label, source in self._sample if label not in found or found[label] != source]
        if wrong:
            raise OutputError(
                f"{self._destination.name} does not hold what it has acknowledged: of {len(names)} sampled records, "
                f"{len(wrong)} are missing or others: {', '.join(map(repr, wrong[:NAMED]))}. If nothing else writes "
                "there, look at the database's log"
            )

    def close(self) -> None:
        if self._batch is not None:
            tried(self._destination.close)


def _is_id(label: RecordId | None) -> bool:
    return label is not None


def _some(rows: list[T], most: int) -> list[T]:
    # Not the generator that the caller may have seeded.
    return random.SystemRandom().sample(rows, min(most, len(rows)))


def _refuse_coarse(chunk: ChunkVectors, options: Options) -> None:
    """Refuse vectors that a part has stored as something else, unless that is near, or was asked for."""
    stored = chunk.stored_as
    if stored == Dtype.BINARY and options.dtype is not Dtype.BINARY:
        raise SettingsError("the job was drained as binary, and vectors can't be restored from that")
    if stored == Dtype.INT8 and options.dtype in (None, Dtype.BINARY):
        raise SettingsError(
            "the job was drained as int8: deliver vectors that are restored from that with --dtype float32 "
            "(dtype= in Python)"
        )
