"""The vectors of a whole corpus: those of a job for its difference, laid between those that are copied."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice

import numpy as np
import numpy.typing as npt

from embedctl.changes.block import Block
from embedctl.changes.encoded import Encoded
from embedctl.changes.plan import ENCODE, FIRST_HIT, Plan, changed, mark_of
from embedctl.destinations.about import About
from embedctl.destinations.numbers import FLOAT32, Numbers
from embedctl.job import Job
from embedctl.records import Record
from embedctl.results import ChunkVectors
from embedctl.store import JobSpec, JobState, JobStatus
from embedctl_config.errors import EmbedctlError, OutputError

#: Records that are written together. It never changes, because what a parquet file's row groups hold follows from it.
BLOCK = 1000


class OtherVectors(EmbedctlError):
    """Raised when a job's vectors are of other model files than those that were to be copied.

    Args:
        model_fingerprint: of the job.
    """

    def __init__(self, model_fingerprint: str) -> None:
        super().__init__(f"the job was encoded with other model files ({model_fingerprint[:12]})")


class Merged:
    """The results of a corpus in the form of a job's, for :func:`embedctl.destinations.files`: in blocks of equal size.

    Args:
        plan: where each vector comes from.
        records: reads the corpus once more.
        spec: of the job, whether it was made or not.
        job: of the difference; None if there is none.
        about: what the copied vectors are; None if none is copied.
    """

    def __init__(
        self,
        plan: Plan,
        records: Callable[[], Iterator[Record]],
        spec: JobSpec,
        job: Job | None,
        about: About | None,
    ) -> None:
        self._plan, self._records, self._spec, self._job, self._about = plan, records, spec, job, about
        self._copies = bool(plan.unchanged or plan.cached)
        self.id = "" if job is None else job.id

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return -(-len(self._plan.sources) // BLOCK)

    def status(self) -> JobStatus:
        """The job's status, but with all records, and with blocks in place of chunks."""
        status = _done(self._spec) if self._job is None else self._job.status()
        copied = len(self._plan.sources) - self._plan.to_encode
        model = status.model_fingerprint or (None if self._about is None else self._about.model_fingerprint)
        state = status.state
        if state is JobState.FAILED and status.stopped_by is None and copied:  # all of the difference failed
            state = JobState.COMPLETED_WITH_ERRORS
        return dataclasses.replace(
            status,
            state=state,
            records=len(self._plan.sources),
            done=status.done + copied,
            chunks=self.blocks,
            chunks_done=self.blocks,
            original_chunks=self.blocks,
            model_fingerprint=model,
            dim=status.dim or self._dim(),
        )

    def wait_until_sealed(self, progress: Callable[[JobStatus], None] | None = None) -> JobStatus:
        """Wait until the job has all its records, as :meth:`Job.wait_until_sealed`; returns :meth:`status`."""
        if self._job is not None:
            self._job.wait_until_sealed(progress)
        return self.status()

    def stored_numbers(self) -> Numbers:
        """Nothing of it is in parts."""
        return FLOAT32

    def iter_results(self, *, progress: Callable[[JobStatus], None] | None = None) -> Iterator[ChunkVectors]:
        """The blocks in order, as :meth:`Job.iter_results` gives chunks.

        Raises:
            InputError: the corpus has changed since it was compared.
            OtherVectors: the job's vectors must not stand beside those that are copied.
            OutputError: what is to be copied is damaged.
        """
        sources = self._plan.sources
        encoded = None if self._job is None else Encoded(self._job.iter_results(progress=progress))
        records = self._records() if self._copies else None
        marks = self._plan.all_marks()
        taken, checked = 0, False
        for first in range(0, len(sources), BLOCK):
            block = sources[first : first + BLOCK]
            held = None if records is None else list(islice(records, len(block)))
            if held is not None:
                _check(held, [mark for _, mark in zip(block, marks, strict=False)], first)
            wanted = np.flatnonzero(block == ENCODE)
            parts = [] if encoded is None else encoded.up_to(taken + len(wanted))
            if parts and not checked:
                self._check_model()
                checked = True
            yield self._block(first, block, held, wanted, parts, taken)
            taken += len(wanted)
        if records is not None and next(records, None) is not None:
            raise changed(len(sources))
        if encoded is not None:
            encoded.finish()
            self._check_model()

    def _check_model(self) -> None:
        """See that the job's model is that of the copied vectors, once the job has a result.

        Raises:
            OtherVectors: it is another one.
        """
        if self._job is None or self._about is None or not self._copies:
            return
        model = self._job.status().model_fingerprint
        if model is not None and model != self._about.model_fingerprint:
            raise OtherVectors(model)

    def _block(
        self,
        first: int,
        sources: npt.NDArray[np.int64],
        records: list[Record] | None,
        wanted: npt.NDArray[np.int64],
        parts: list[ChunkVectors],
        taken: int,
    ) -> ChunkVectors:
        """One block: the copied rows, and those of the job that are there."""
        block = Block(len(sources), self._dim_of(parts))
        if records is not None:
            self._copy(block, sources, records)
        for part in parts:
            block.lay_in(wanted[part.positions - taken], part, records)
        return block.as_chunk(first, self._spec.precision, keeps=bool(self._spec.options.get("keep")))

    def _copy(self, block: Block, sources: npt.NDArray[np.int64], records: list[Record]) -> None:
        copied, hit = np.flatnonzero(sources >= 0), np.flatnonzero(sources <= FIRST_HIT)
        if len(copied):
            assert self._plan.earlier is not None
            block.copy(copied, self._plan.earlier.take(sources[copied]), records, self._plan.earlier.name)
        if len(hit):
            block.copy(hit, self._plan.hits.take(FIRST_HIT - sources[hit]), records, "the cache")

    def _dim(self) -> int | None:
        if self._plan.earlier is not None and self._plan.unchanged:
            return self._plan.earlier.dim
        return self._plan.hits.dim

    def _dim_of(self, parts: list[ChunkVectors]) -> int:
        """The dimensions of the vectors of a block.

        Raises:
            OutputError: they differ.
        """
        dims = {part.vectors.shape[1] for part in parts} | {self._dim() or 0}
        dims -= {0}
        if len(dims) > 1:
            raise OutputError(f"vectors of {' and '.join(map(str, sorted(dims)))} dimensions can't stand in one output")
        return dims.pop() if dims else self.status().dim or 0


def _check(records: Sequence[Record], marks: Sequence[bytes], first: int) -> None:
    """See that these records are those that were compared.

    Raises:
        InputError: they are not.
    """
    for at, (record, mark) in enumerate(zip(records, marks, strict=False)):
        if mark_of(record) != mark:
            raise changed(first + at)
    if len(records) != len(marks):
        raise changed(first + len(records))


def _done(spec: JobSpec) -> JobStatus:
    """The status of a job that need not be made."""
    now = datetime.now(UTC)
    return JobStatus(
        id="",
        state=JobState.COMPLETED,
        model=spec.model,
        hardware=spec.hardware,
        precision=spec.precision,
        options=spec.options,
        created_at=now,
        progressed_at=now,
        started_at=None,
        ended_at=None,
        expires_in=timedelta(0),
        ttl_s=spec.ttl_s,
        max_errors=spec.max_errors,
        max_errors_share=spec.max_errors_share,
        sealed=True,
        original_chunks=0,
        tenant=spec.tenant,
        lane=spec.lane,
    )
