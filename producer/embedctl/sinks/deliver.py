"""Delivers a job's vectors to a sink, chunk after chunk, while the job runs or after its end.

The order that must hold: the database has acknowledged records; then the resume point is noted. Whatever dies in
between, the records after the last resume point are written again, which changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from embedctl.output.batch import is_of_batch
from embedctl.output.numbers import OutputType, numbers_of
from embedctl.reader import ResultReader
from embedctl.results import ChunkVectors
from embedctl.retrying import TimeLimit
from embedctl.sinks.base import Batch, Provenance, Sink, Target, Verified
from embedctl.sinks.ids import Duplicates, LeftOut, decided, no_id
from embedctl.store import JobStatus
from embedctl.waiting import Waiter
from embedctl_config.errors import JobError, OutputError, SettingsError, SinkRefused, SinkUnavailable
from embedctl_config.fingerprint import job_fingerprint
from embedctl_config.retry import OUTSIDE, Streak

log = logging.getLogger(__name__)

#: A batch that fails is tried this often.
TRIES = 5
#: A batch is committed once it holds this much, however few its records are.
_MOST_BYTES = 128 * 1024 * 1024
#: Records that are read back at the end, and of each batch.
_SAMPLE, _OF_EACH = 100, 10
#: Ids that a message names.
_NAMED = 10

Progress = Callable[[JobStatus], None]
Written = Callable[[ChunkVectors], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Options:
    """How a job is delivered.

    Attributes:
        duplicates: which record is written if several have the same id.
        ids_are_unique: the caller has found the ids to be there and unique, so they are not read beforehand.
        allow_mixed: write into a table with another model's vectors.
        output_type: float32 or float16; None: float32, but not restored from what is coarser.
    """

    duplicates: Duplicates = Duplicates.ERROR
    ids_are_unique: bool = False
    allow_mixed: bool = False
    output_type: OutputType | None = None

    def __post_init__(self) -> None:
        if self.output_type not in (None, OutputType.FLOAT32, OutputType.FLOAT16):
            raise SettingsError(f"a database takes float32 or float16, not {self.output_type}")

    @property
    def positions(self) -> bool:
        """Whether ids are made of the job and the position, in place of the records' own."""
        return self.duplicates is Duplicates.POSITION


def options_of(duplicates: str, output_type: str | None, *, allow_mixed: bool) -> Options:
    """Options from the words that users give.

    Raises:
        SettingsError: a word is unknown.
    """
    if duplicates not in list(Duplicates):
        raise SettingsError(f"for a database, duplicates is one of {', '.join(Duplicates)}, not {duplicates!r}")
    numbers = numbers_of(output_type, None)
    return Options(
        Duplicates(duplicates), allow_mixed=allow_mixed, output_type=None if numbers is None else numbers.kind
    )


@dataclass(frozen=True, slots=True)
class Delivered:
    """What one delivery did.

    Attributes:
        records: written by it, those that were there already included.
        continued_at: chunks that an earlier delivery had committed.
        left_out: records that are not written, because another one has their id.
    """

    records: int
    continued_at: int
    left_out: int


def deliver(
    waiter: Waiter,
    sink: Sink,
    options: Options,
    *,
    progress: Progress | None = None,
    written: Written | None = None,
) -> Delivered:
    """Write a job's records into a sink, and wait for those that are not there yet. Failed records are left out.

    If this dies, the same call continues where it stopped. Memory holds a batch.

    Args:
        progress: called with the job's status while a chunk is waited for.
        written: called with each chunk whose records are durable in the database.

    Raises:
        SettingsError: the job was made of a batch file, or was drained as something coarser than is asked for.
        InputError: ids are missing or not unique; nothing was written.
        MixedVectors, SinkRefused, SinkUnavailable, OutputError: as the sink says.
        JobFailed: the job's error budget ended it; what is done was delivered.
        JobCancelled, JobLost, JobStalled: as by :meth:`Job.iter_results`.
    """
    reader = ResultReader(waiter)
    status = waiter.status()
    if is_of_batch(status):
        raise SettingsError(f"job {status.id} was made of a batch file: it is answered in a .jsonl, which -o names")
    left_out = None
    try:
        if not (options.positions or options.ids_are_unique):
            left_out = _decided(reader, waiter, options, progress)
        delivery = _Delivery(reader, waiter, sink, options, left_out, progress, written)
        delivery.run()
        return Delivered(delivery.records, delivery.continued_at, 0 if left_out is None else left_out.count)
    finally:
        sink.close()


def _decided(reader: ResultReader, waiter: Waiter, options: Options, progress: Progress | None) -> LeftOut:
    """Which records are not written. Waits for the job's end, because only then all ids are known."""
    records = waiter.until_ended(TimeLimit.from_now(None), progress).records
    return decided(reader.heads(progress), records, options.duplicates)


class _Delivery:
    """One delivery. `records` and `continued_at` are as in :class:`Delivered`."""

    def __init__(
        self,
        reader: ResultReader,
        waiter: Waiter,
        sink: Sink,
        options: Options,
        left_out: LeftOut | None,
        progress: Progress | None,
        written: Written | None,
    ) -> None:
        self._reader, self._waiter, self._sink, self._options = reader, waiter, sink, options
        self._progress, self._written = progress, written
        self._batch = _Gathered(waiter.job_id, options, left_out)
        self._sample = _Sample()
        #: Chunks taken, those of them that are committed, and the resume point that may be noted, which stays before
        #: the first chunk that was not encoded: a stopped job may go on.
        self._taken = self._committed = 0
        self._gap: int | None = None
        self.records = self.continued_at = 0

    def run(self) -> None:
        first = self._first_with_vectors()
        if first is None:
            return  # no record has a vector
        self._taken = self._committed = self.continued_at = self._open(first)
        try:
            for chunk in self._reader.chunks(self._taken, progress=self._progress):
                self._take(chunk)
        except JobError:  # what is done is delivered, also if nothing more comes
            self._flush()
            self._finish()
            raise
        self._flush()
        self._finish()

    def _first_with_vectors(self) -> ChunkVectors | None:
        """The first chunk in which a record has a vector; before it, the job's model and dimensions are not known."""
        for chunk in self._reader.chunks(progress=self._progress):
            if len(chunk.errors) < len(chunk.positions):
                return chunk
        return None

    def _open(self, first: ChunkVectors) -> int:
        status = self._waiter.status()
        begin = self._sink.open(target_of(status, first.vectors.shape[1], self._options))
        if begin and not self._is_there(begin - 1):
            log.warning("%s lacks records that an earlier delivery wrote; beginning again", self._sink.name)
            return 0
        return begin

    def _is_there(self, chunk: int) -> bool:
        """Whether the database has the records of the last chunk that was noted: a table may have been emptied."""
        for found in self._reader.chunks(chunk, progress=self._progress):
            gathered = _Gathered(self._waiter.job_id, self._options, self._batch.left_out)
            gathered.add(found)
            rows = gathered.taken()
            return not len(rows) or not self._sink.verify(rows.part(slice(_SAMPLE))).missing
        return False  # the job has fewer chunks than the note says

    def _take(self, chunk: ChunkVectors) -> None:
        if self._gap is None and not len(chunk.positions):
            self._gap = self._taken
        self._batch.add(chunk)
        self._taken += 1
        if self._batch.rows >= self._sink.rows_per_commit or self._batch.size >= _MOST_BYTES:
            self._flush()

    def _flush(self) -> None:
        resume = self._taken if self._gap is None else self._gap
        chunks, batch = list(self._batch.chunks), self._batch.taken()
        if not len(batch) and resume == self._committed:
            return
        write_and_commit(self._sink, batch, resume)
        self._committed = resume
        self.records += len(batch)
        self._sample.add(batch)
        if self._written is not None:
            for chunk in chunks:
                self._written(chunk)

    def _finish(self) -> None:
        if not self.records:
            return
        self._sink.finish()
        if (sample := self._sample.batch) is not None:
            _refuse_differences(self._sink.name, self._sink.verify(sample))


@dataclass(slots=True)
class _Gathered:
    """Records of consecutive chunks that are not written yet."""

    job: str
    options: Options
    left_out: LeftOut | None
    chunks: list[ChunkVectors] = field(default_factory=list)
    rows: int = 0
    size: int = 0

    def add(self, chunk: ChunkVectors) -> None:
        _refuse_coarse(chunk, self.options)
        self.chunks.append(chunk)
        self.rows += len(chunk.positions)
        self.size += chunk.vectors.nbytes + (0 if chunk.kept is None else sum(map(len, map(str, chunk.kept))))

    def taken(self) -> Batch:
        """All that is gathered; nothing is left then.

        Raises:
            InputError: a record has no id.
        """
        parts = [part for chunk in self.chunks if len(part := self._rows(chunk))]
        self.chunks, self.rows, self.size = [], 0, 0
        if not parts:
            return Batch([], np.empty((0, 0), np.float32))
        return Batch(
            [label for part in parts for label in part.ids],
            np.concatenate([part.vectors for part in parts]),
            None if parts[0].kept is None else [fields for part in parts for fields in part.kept or ()],
        )

    def _rows(self, chunk: ChunkVectors) -> Batch:
        good = ~np.isin(chunk.positions, [error.position for error in chunk.errors])
        if self.left_out is not None:
            good &= ~self.left_out.among(chunk.positions)
        rows = np.flatnonzero(good)
        kept = chunk.kept
        return Batch(
            [self._id(chunk, row) for row in rows.tolist()],
            chunk.vectors[rows],
            None if kept is None else [json.dumps(kept[row], ensure_ascii=False) for row in rows.tolist()],
        )

    def _id(self, chunk: ChunkVectors, row: int) -> str:
        if self.options.positions:
            return f"{self.job}:{chunk.positions[row]}"
        label = chunk.ids[row]
        if label is None:
            raise no_id(1, [int(chunk.positions[row])])
        return label


class _Sample:
    """Some of the records that were written, at random."""

    def __init__(self) -> None:
        self.batch: Batch | None = None
        self._random = np.random.default_rng()

    def add(self, batch: Batch) -> None:
        if not len(batch):
            return
        few = batch.part(self._random.choice(len(batch), min(_OF_EACH, len(batch)), replace=False))
        before = self.batch
        if before is not None:
            kept = None if before.kept is None else [*before.kept, *(few.kept or ())]
            few = Batch([*before.ids, *few.ids], np.concatenate([before.vectors, few.vectors]), kept)
        if len(few) > _SAMPLE:
            few = few.part(self._random.choice(len(few), _SAMPLE, replace=False))
        self.batch = few


def write_and_commit(sink: Sink, batch: Batch, chunks: int) -> None:
    """Write a batch, and note the resume point after it. What fails is tried again.

    Raises:
        SinkRefused: the database refused it each time; the message names the records.
        SinkUnavailable: the database was away each time.
    """
    _refuse_unfit(sink, batch)

    def step() -> None:
        if len(batch):
            sink.write(batch)
        sink.commit(chunks)

    tried(sink, step, lambda error: _final(sink, batch, error))


def tried(sink: Sink, step: Callable[[], T], final: Callable[[OutputError], OutputError]) -> T:
    """What a step returns, which is tried again if the sink fails.

    Args:
        final: the error to raise if the last try fails, made of that try's error.
    """
    failed = Streak()

    def once() -> T:
        if failed.failures:
            sink.recover()
        return step()

    try:
        return OUTSIDE.call(
            once,
            (SinkRefused, SinkUnavailable),
            failed=lambda error, _: log.warning("%s. Trying again", error),
            tries=TRIES,
            streak=failed,
        )
    except (SinkRefused, SinkUnavailable) as error:
        raise final(error) from error


def _final(sink: Sink, batch: Batch, error: OutputError) -> OutputError:
    if isinstance(error, SinkUnavailable):
        return SinkUnavailable(f"{error}. Tried {TRIES} times; the same command continues")
    culprits, reason = _culprits(sink, batch, str(error))
    return SinkRefused(
        f"{reason}. Tried {TRIES} times. Records: {_listed(culprits)}. What comes before them is delivered; once they "
        "or the table are mended, the same command continues"
    )


def _culprits(sink: Sink, batch: Batch, reason: str) -> tuple[Batch, str]:
    """The smallest part of a batch that is found by halving it and that the database refuses, and why it does."""
    while len(batch) > 1:
        half = len(batch) // 2
        for part in (batch.part(slice(half)), batch.part(slice(half, None))):
            sink.recover()
            try:
                sink.write(part)
            except SinkRefused as error:
                batch, reason = part, str(error)
                break
        else:
            break  # each half alone is good, so it is not about single records
    sink.recover()
    return batch, reason


def _refuse_unfit(sink: Sink, batch: Batch) -> None:
    """Refuse what no database takes, or what some take and then hold twice.

    Raises:
        SinkRefused: an id occurs twice, or a vector is not finite.
    """
    if len(set(batch.ids)) < len(batch):
        seen: set[str] = set()
        twice = [label for label in batch.ids if label in seen or seen.add(label)]  # type: ignore[func-returns-value]  # add() returns None on purpose
        raise SinkRefused(f"{sink.name}: ids occur twice in the job: {', '.join(map(repr, twice[:_NAMED]))}")
    if len(batch) and not (good := np.isfinite(batch.vectors).all(axis=1)).all():
        raise SinkRefused(f"{sink.name}: vectors are not finite. Records: {_listed(batch.part(np.flatnonzero(~good)))}")


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


def _refuse_differences(name: str, found: Verified) -> None:
    """Raise if the database does not hold what it has acknowledged.

    Raises:
        OutputError: it does not.
    """
    if found.missing or found.different:
        words = [f"{len(found.missing)} of {_SAMPLE} sampled records are missing"] if found.missing else []
        words += [f"{len(found.different)} have other vectors"] if found.different else []
        ids = ", ".join(map(repr, [*found.missing, *found.different][:_NAMED]))
        raise OutputError(
            f"{name} does not hold what it has acknowledged: {', and '.join(words)}: {ids}. If nothing else writes to "
            "the table, look at the database's log"
        )


def _listed(batch: Batch) -> str:
    return ", ".join(map(repr, batch.ids[:_NAMED])) + (f" and {len(batch) - _NAMED:,} more" * (len(batch) > _NAMED))


def target_of(status: JobStatus, dim: int, options: Options) -> Target:
    """What a sink is to know of a job whose vectors have `dim` dimensions."""
    fingerprint = job_fingerprint(status.model_fingerprint or "", status.options)
    return Target(
        job=status.id,
        variant=_variant(status, options),
        provenance=Provenance(fingerprint, status.precision, status.model, dim),
        keeps=bool(status.options.get("keep")),
        half=options.output_type is OutputType.FLOAT16,
        allow_mixed=options.allow_mixed,
    )


def _variant(status: JobStatus, options: Options) -> str:
    """What must be the same for a resume point to count. A retry of failed records adds to chunks before it."""
    retried = status.chunks - (status.original_chunks or status.chunks)
    facts = [retried, options.duplicates, options.positions, options.output_type is OutputType.FLOAT16]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
