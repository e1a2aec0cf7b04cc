"""Brings a job's vectors to a database, each under its record's id."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from embedctl.destinations.answers import is_of_batch
from embedctl.destinations.gathering import Gathered
from embedctl.destinations.ids import NAMED, Duplicates, LeftOut, decided
from embedctl.destinations.interface import Batch, Contract, Destination, Row
from embedctl.destinations.loop import Delivered, Progress, Refused, RefusedRecord, Taker, Written, run
from embedctl.destinations.numbers import OutputType, numbers_of
from embedctl.destinations.reader import ResultReader
from embedctl.destinations.writing import sources_of, tried, write
from embedctl.queueing.retrying import TimeLimit
from embedctl.waiting.results import ChunkVectors
from embedctl.waiting.waiter import Waiter
from embedctl_config.errors import JobError, OutputError, SettingsError

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
    def positions(self) -> bool:
        """Whether ids are made of the job and the position, in place of the records' own."""
        return self.duplicates is Duplicates.POSITION


def deliver(
    waiter: Waiter,
    destination: Destination,
    options: Options,
    *,
    progress: Progress | None = None,
    written: Written | None = None,
    refused: Refused | None = None,
) -> Delivered:
    """Bring a job's records to a destination, and wait for those that are not there yet; arguments and errors are those
    of :meth:`Job.deliver`. Failed records are left out. If this dies, the same call resumes. Memory holds a batch."""
    reader = ResultReader(waiter)
    status = waiter.status()
    if is_of_batch(status):
        raise SettingsError(f"job {status.id} was made of a batch file: it is answered in a .jsonl, which -o names")
    left_out = None
    if not (options.positions or options.ids_are_unique):
        # Only at the job's end, all ids are known.
        records = waiter.until_ended(TimeLimit.from_now(None), progress).records
        left_out = decided(reader.heads(progress), records, options.duplicates)
    delivery = _Delivery(waiter, destination, options, left_out, written, refused)
    try:
        run(lambda: reader.chunks(progress=progress), delivery, waiter.status)
    finally:
        with suppress(OutputError):  # the delivery has closed it, if it came to its end
            destination.close()
    return delivery.done


@dataclass
class _Delivery(Taker[ChunkVectors]):
    _waiter: Waiter
    _destination: Destination
    _options: Options
    _left_out: LeftOut | None
    _written: Written | None
    _refused: Refused | None
    #: None until the first record with a vector, which tells the model and the dimensions.
    _batch: Gathered | None = None
    _holds_rows: bool = False
    #: Some of the rows that were written.
    _sample: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.done = Delivered(left_out=0 if self._left_out is None else self._left_out.count)

    def take(self, chunk: ChunkVectors) -> None:
        _refuse_coarse(chunk, self._options)
        self.done.failed += len(chunk.errors)
        if self._batch is None:
            if len(chunk.errors) == len(chunk.positions):
                return  # its model and its dimensions are not known yet
            self._batch = self._opened(chunk.vectors.shape[1])
        self._batch.add(chunk)
        most = self._destination
        if self._batch.rows >= most.batch_records or self._batch.size >= most.batch_bytes:
            self._flush(self._batch)

    def _opened(self, dim: int) -> Gathered:
        status = self._waiter.status()
        contract = Contract.of(status, dim, self._options.dtype)
        self._holds_rows = tried(lambda: self._destination.open(contract))
        positions_for = status.id if self._options.positions else ""
        return Gathered(contract, self._left_out, positions_for, bool(status.options.get("keep")), self._refuse)

    def _flush(self, gathered: Gathered) -> None:
        chunks = list(gathered.chunks)
        for batch in gathered.taken(self._destination.batch_bytes):
            if len(fresh := self._without_what_is_there(batch)):
                self._write(fresh)
        if self._written is not None:
            for chunk in chunks:
                self._written(chunk)

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
        self._sample = _some([*self._sample, *_some(rows, _OF_EACH)], _SAMPLE)

    def _refuse(self, record: RefusedRecord) -> None:
        self.done.refused += 1
        if self._refused is not None:
            self._refused(record)

    def end(self) -> None:
        if self._batch is not None:
            self._flush(self._batch)
            self._refuse_missing()

    def close(self) -> None:
        if self._batch is not None:
            tried(self._destination.close)

    def cut_short(self, error: JobError) -> None:
        """What is done is delivered, also if nothing more comes."""
        self.end()
        self.close()

    def _refuse_missing(self) -> None:
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
