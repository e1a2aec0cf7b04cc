"""Writes a job's records as rows of a database, batch by batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embedctl.destinations.gathering import Gathered
from embedctl.destinations.ids import NAMED, Duplicates, LeftOut
from embedctl.destinations.interface import Batch, Contract, Destination, Row
from embedctl.destinations.loop import Delivered, Refused, RefusedRecord
from embedctl.destinations.numbers import OutputType, numbers_of
from embedctl.destinations.writing import sources_of, tried, write
from embedctl.waiting.results import ChunkVectors
from embedctl.waiting.waiter import Waiter
from embedctl_config.errors import OutputError, SettingsError

#: Records that are looked for at the end, and of each batch.
_SAMPLE, _OF_EACH = 100, 10


@dataclass(frozen=True, slots=True)
class Options:
    """How a job is delivered.

    Attributes:
        ids_are_unique: the caller has found the ids to be there and unique, so they are not read beforehand.
        output_type: float32 or float16; None: float32, but not restored from what is coarser.
    """

    duplicates: Duplicates = Duplicates.ERROR
    ids_are_unique: bool = False
    output_type: OutputType | None = None

    def __post_init__(self) -> None:
        if self.output_type not in (None, OutputType.FLOAT32, OutputType.FLOAT16):
            raise SettingsError(f"a database takes float32 or float16, not {self.output_type}")

    @classmethod
    def of(cls, duplicates: str, output_type: str | None) -> Options:
        """Options from the words that users give, or a SettingsError."""
        if duplicates not in list(Duplicates):
            raise SettingsError(f"for a database, duplicates is one of {', '.join(Duplicates)}, not {duplicates!r}")
        numbers = numbers_of(output_type, None)
        return cls(Duplicates(duplicates), output_type=None if numbers is None else numbers.kind)

    @property
    def dtype(self) -> str:
        return str(self.output_type or OutputType.FLOAT32)

    @property
    def knows_ids(self) -> bool:
        """Whether all ids are known to be unique before the job has ended."""
        return self.positions or self.ids_are_unique

    @property
    def positions(self) -> bool:
        """Whether ids are made of the job and the position, in place of the records' own."""
        return self.duplicates is Duplicates.POSITION


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
        self.last_id: str | None = None
        self.done = Delivered()

    @property
    def is_full(self) -> bool:
        """Whether a batch is to be written."""
        batch, most = self._batch, self._destination
        return batch is not None and (batch.rows >= most.batch_records or batch.size >= most.batch_bytes)

    def open(self, dim: int) -> None:
        """Open the table for vectors of this length, if it is not open; raises as :meth:`Destination.open`."""
        if self._batch is None:
            status = self._waiter.status()
            contract = Contract.of(status, dim, self._options.dtype)
            self._holds_rows = tried(lambda: self._destination.open(contract))
            positions_for = status.id if self._options.positions else ""
            keeps = bool(status.options.get("keep"))
            self._batch = Gathered(contract, self._left_out, positions_for, keeps, self._refuse)

    def lacks(self, ids: Sequence[str]) -> int:
        """How many of some ids, not more than a batch has, the open table does not hold."""
        return len(ids) - len(sources_of(self._destination, ids)) if self._holds_rows else len(ids)

    def add(self, chunk: ChunkVectors) -> None:
        _refuse_coarse(chunk, self._options)
        if self._batch is None and len(chunk.errors) == len(chunk.positions):
            return  # its model and its dimensions are not known yet
        self.open(chunk.vectors.shape[1])
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
        found = sources_of(self._destination, batch.ids)
        lacking = [row for row, (label, source) in enumerate(batch.rows) if found.get(label) != source]
        self.done.unchanged += len(batch) - len(lacking)
        return batch if len(lacking) == len(batch) else batch.part(np.array(lacking, np.int64))

    def _write(self, batch: Batch) -> None:
        refused = set()
        for each in write(self._destination, batch):
            self._refuse(each)
            refused.add(each.id)
        self.done.written += len(batch) - len(refused)
        rows = [row for row in batch.rows if row[0] not in refused]
        self.last_id = rows[-1][0] if rows else self.last_id
        self._sample = _some([*self._sample, *_some(rows, _OF_EACH)], _SAMPLE)

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


def _some(rows: list[Row], most: int) -> list[Row]:
    # Not the generator that the caller may have seeded.
    return random.SystemRandom().sample(rows, min(most, len(rows)))


def _refuse_coarse(chunk: ChunkVectors, options: Options) -> None:
    """Refuse vectors that a part has stored as something else, unless that is near, or was asked for."""
    stored = chunk.stored_as
    if stored == OutputType.UBINARY:
        raise SettingsError("the job was drained as ubinary, and vectors can't be restored from that")
    if stored == OutputType.INT8 and options.output_type is None:
        raise SettingsError(
            "the job was drained as int8: deliver vectors that are restored from that with --output-type float32 "
            "(output_type= in Python)"
        )
