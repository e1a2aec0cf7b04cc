"""The vectors of a whole corpus: those of a job for what was lacking, laid between those that are copied."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embedctl.corpus.digests import as_rows, digest_of
from embedctl.corpus.records import Record
from embedctl.destinations.files import Readable
from embedctl.destinations.interface import Contract
from embedctl.destinations.loop import Progress
from embedctl.destinations.numbers import FLOAT32, Numbers, not_finite
from embedctl.queueing.chunk_sizes import groups_of
from embedctl.store import JobSpec, JobState, JobStatus
from embedctl.sync.comparison import LACKING, Difference, compare_texts, corpus_changed
from embedctl.sync.known import Earlier, Known, Rows
from embedctl.waiting.results import ChunkVectors, FailedRecord, TruncatedRecord, no_records
from embedctl_config.errors import EmbedctlError, JobFailed, OutputError
from embedctl_config.outputs import Output, asked_by

#: Records that are written together, and bytes of their texts if each token has a vector: these are then 64 MB, if four
#: bytes are a token and a vector has 1,024 dimensions. Neither ever changes, because what a parquet file's row groups
#: hold follows from them.
BLOCK, _TEXTS = 1000, 64 * 1024


class OtherVectors(EmbedctlError):
    """Raised when a job's vectors are of other model files than those that were to be copied."""

    def __init__(self, model_fingerprint: str) -> None:
        super().__init__(f"the job was encoded with other model files ({model_fingerprint[:12]})")


@dataclasses.dataclass(frozen=True, slots=True)
class Sources:
    """Where vectors come from, other than from a job. `about` says what they are; None if nothing tells. They are
    `confirmed` if the settings or live workers tell the model's files."""

    earlier: Earlier | None = None
    cached: Known | None = None
    about: Contract | None = None
    confirmed: bool = False

    @property
    def known(self) -> list[Known]:
        return [each for each in (self.earlier, self.cached) if each is not None]

    def compared(self, records: Iterator[Record], say: Callable[[str], None]) -> Difference:
        if self.known:
            say(f"Comparing the corpus with {' and '.join(each.name for each in self.known)}")
        return compare_texts(self.known, records)

    def copied(self, difference: Difference) -> tuple[int, int]:
        """How many records were found in the earlier output, and in the cache."""
        numbers = {id(each): difference.count(number) for number, each in enumerate(self.known)}
        return numbers.get(id(self.earlier), 0), numbers.get(id(self.cached), 0)


class _Result(NamedTuple):
    """What became of a record: the row that has its vectors, none if it failed."""

    rows: Rows
    at: int
    error: FailedRecord | None = None


class Merged:
    """The results of a corpus in the form of a job's, for :func:`embedctl.destinations.files.fetch`: in blocks of equal
    size. `difference` says from which of the sources each vector comes; `records` reads the corpus once more. There
    is no job if nothing is lacking."""

    def __init__(
        self,
        difference: Difference,
        sources: Sources,
        records: Callable[[], Iterator[Record]],
        spec: JobSpec,
        job: Readable | None,
    ) -> None:
        self._difference, self._known, self._records = difference, sources.known, records
        self._spec, self._job = spec, job
        self._about = sources.about if difference.unchanged else None
        self._most_bytes = _TEXTS if Output.MULTI in asked_by(spec.options) else sys.maxsize
        used = (each.widths for number, each in enumerate(sources.known) if difference.count(number))
        self._widths = dict(next(used, {}))
        self._ended_by: JobFailed | None = None
        self.id = "" if job is None else job.id

    def status(self) -> JobStatus:
        """The job's status, but with all records; those that are copied are done."""
        return self._whole(_done(self._spec) if self._job is None else self._job.status())

    def wait(self, timeout: float | None = None, progress: Progress | None = None) -> JobStatus:
        """Wait until the job has ended, as :meth:`Job.wait`; returns :meth:`status`."""
        return self.status() if self._job is None else self._whole(self._job.wait(timeout, self._of_all(progress)))

    def wait_until_sealed(self, progress: Progress | None = None) -> JobStatus:
        """Wait until the job has all its records, as :meth:`Job.wait_until_sealed`; returns :meth:`status`."""
        if self._job is not None:
            self._job.wait_until_sealed(self._of_all(progress))
        return self.status()

    def stored_numbers(self) -> Numbers:
        """Nothing of it is in parts."""
        return FLOAT32

    def iter_results(self, *, progress: Progress | None = None) -> Iterator[ChunkVectors]:
        """The blocks in order, as :meth:`Job.iter_results` gives chunks. InputError: the corpus has changed since it
        was compared. OtherVectors: the job's vectors must not stand beside those that are copied. OutputError: what is
        to be copied is damaged. JobFailed: the job's error budget ended it; what is copied has come before."""
        encoded = self._encoded(self._of_all(progress))
        if progress is not None:
            progress(self.status())
        corpus, first = (record for record, _ in self._difference.again(self._records())), 0
        for records in groups_of(corpus, max_rows=BLOCK, max_bytes=self._most_bytes):
            yield self._block(first, records, self._difference.found[first : first + len(records)], encoded)
            first += len(records)
        for _ in encoded:
            raise corpus_changed()
        self._check_model()
        if self._ended_by is not None:
            raise self._ended_by

    def _whole(self, status: JobStatus) -> JobStatus:
        model = None if self._about is None else self._about.model_fingerprint
        copied, state = self._difference.unchanged, status.state
        if state is JobState.FAILED and status.stopped_by is None and copied:  # all that was lacking failed
            state = JobState.COMPLETED_WITH_ERRORS
        return dataclasses.replace(
            status,
            state=state,
            records=len(self._difference.found),
            done=status.done + copied,
            model_fingerprint=status.model_fingerprint or model,
            dim=status.dim or self._widths.get(Output.DENSE),
        )

    def _of_all(self, progress: Progress | None) -> Progress | None:
        return None if progress is None else lambda status: progress(self._whole(status))

    def _encoded(self, progress: Progress | None) -> Iterator[_Result | None]:
        """What became of one record of the job after the other; None for one that was not encoded."""
        if self._job is None:
            return
        position = 0
        try:
            for chunk in self._job.iter_results(progress=progress):
                if not len(chunk.positions):
                    continue
                if not position:
                    self._check_model()
                if chunk.digests is None:
                    raise OutputError(f"job {self._job.id} has no digests: discard it, and start again")
                while position < chunk.positions[0]:
                    yield None
                    position += 1
                cuts = np.zeros((len(chunk.positions), 2), np.uint32)
                for cut in chunk.truncations:
                    cuts[np.searchsorted(chunk.positions, cut.position)] = cut.used, cut.lost
                rows = Rows(chunk.digests, cuts, chunk.vectors, chunk.sparse, chunk.multi)
                errors = {error.position: error for error in chunk.errors}
                for at, position in enumerate(chunk.positions.tolist()):
                    yield _Result(rows, at, errors.get(position))
                position += 1
        except JobFailed as error:
            self._ended_by = error

    def _check_model(self) -> None:
        """Once the job has a result, raise OtherVectors unless its model is that of the copied vectors."""
        if self._job is not None and self._about is not None:
            model = self._job.status().model_fingerprint
            if model is not None and model != self._about.model_fingerprint:
                raise OtherVectors(model)

    def _block(
        self, first: int, records: Sequence[Record], found: npt.NDArray[np.int8], encoded: Iterator[_Result | None]
    ) -> ChunkVectors:
        digests = as_rows(b"".join(map(digest_of, records)))
        results: list[_Result | None] = [next(encoded, None) if each == LACKING else None for each in found.tolist()]
        for number, known in enumerate(self._known):
            if len(places := np.flatnonzero(found == number)):
                rows = known.take(digests[places])
                if not np.array_equal(rows.digests, digests[places]):
                    raise _damaged(known)
                for row, at in enumerate(places.tolist()):
                    results[at] = _Result(rows, row)
        there = [at for at, result in enumerate(results) if result is not None]
        if not there:  # the job was ended before
            return no_records(self.status().dim or 0)
        whole = self._joined([result for result in results if result is not None])
        if not np.array_equal(whole.digests, digests[there]):
            raise corpus_changed()
        errors = ((at, result.error) for at, result in enumerate(results) if result is not None)
        block = ChunkVectors(
            positions=np.array(there, np.int64) + first,
            ids=[records[at].id for at in there],
            vectors=whole.vectors,
            errors=[dataclasses.replace(error, position=first + at) for at, error in errors if error is not None],
            truncations=[
                TruncatedRecord(first + at, records[at].id, *cut)
                for at, cut in zip(there, whole.cuts.tolist(), strict=True)
                if any(cut)
            ],
            precision=self._spec.precision,
            kept=[json.loads(records[at].kept or b"{}") for at in there] if self._spec.options.get("keep") else None,
            digests=whole.digests,
            sparse=whole.sparse,
            multi=whole.multi,
        )
        copied = found[there]
        if (damaged := not_finite(block, FLOAT32.dtype) & (copied != LACKING)).any():
            raise _damaged(self._known[copied[damaged][0]])
        return block

    def _joined(self, results: Sequence[_Result]) -> Rows:
        """The rows of results, in their order; OutputError if they have vectors of other sizes than those before."""
        taken: dict[int, tuple[Rows, list[int], list[int]]] = {}
        for place, result in enumerate(results):
            _, rows, places = taken.setdefault(id(result.rows), (result.rows, [], []))
            rows.append(result.at)
            places.append(place)
        for each, _, _ in taken.values():
            self._widths = self._widths or each.widths
            if each.widths != self._widths:
                sizes = (", ".join(map(str, found.values())) for found in (self._widths, each.widths))
                raise OutputError(f"vectors of {' and '.join(sizes)} dimensions can't stand in one output")
        return Rows.joined([(each.select(np.array(rows)), places) for each, rows, places in taken.values()])


def _damaged(known: Known) -> OutputError:
    """The error for vectors that are not finite, or not of the texts that they were asked for."""
    return OutputError(f"{known.name} is damaged, or was changed meanwhile: start again, or remove it")


def _done(spec: JobSpec) -> JobStatus:
    now = datetime.now(UTC)
    return spec.as_status(
        id="",
        state=JobState.COMPLETED,
        created_at=now,
        progressed_at=now,
        started_at=None,
        ended_at=None,
        expires_in=timedelta(0),
        sealed=True,
        original_chunks=0,
    )
