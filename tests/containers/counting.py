"""Jobs of a stack that is broken meanwhile, and the count of their records."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np

from embedctl import Job, JobState, enqueue_embeddings
from embedctl_config.errors import BrokerUnavailable
from embedctl_config.loading import load_settings
from embedctl_workers.arrays.tokens import Vectors
from tests.containers.boxes import Boxes
from tests.support.jobs import reference
from tests.support.waiting import eventually

#: A row for each fault, once its test has passed.
TABLE: list[str] = []
RECORDS = 300
#: For a worker that comes back after a lease, a pause and a start, on a busy machine (seconds).
_END_S = 600.0
#: Two engines of one model, as between a cache's kernels and torch's own, differ by less.
_CLOSE = 1e-4


@dataclass
class Counted:
    """A job that a fault happens to, with the texts of its records.

    Attributes:
        failed: what a record ends as that may not have a vector, by its position.
    """

    job: Job
    texts: list[str]
    expected: Vectors
    failed: dict[int, str] = field(default_factory=dict)

    def chunks_done(self) -> int:
        return self.job.status().chunks_done

    def waits_for(self, chunks: int) -> None:
        """Wait until so many chunks are done, and some are not."""
        eventually(lambda: self.chunks_done() >= chunks, what=f"{chunks} chunks")
        assert self.job.status().state is JobState.RUNNING, "the job was too short for the fault"

    def goes_on(self, after: int) -> None:
        """Wait until more chunks are done than so many."""
        eventually(lambda: self.chunks_done() > after, _END_S, what="more chunks")

    def has_ended(self) -> bool:
        with suppress(BrokerUnavailable):
            return self.job.status().state.ended
        return False

    def count(self) -> tuple[int, int]:
        """Wait for the end. How many records are lost, and how many doubled; vectors and errors are right."""
        eventually(self.has_ended, _END_S, what="the end", show=lambda: repr(self.job.status()))
        status = self.job.status()
        assert (status.records, status.done, status.failed) == (
            len(self.texts),
            len(self.texts) - len(self.failed),
            len(self.failed),
        )
        codes = {each.position: str(each.code) for each in self.job.errors()}
        assert codes == self.failed, codes
        seen = Counter(at for chunk in self.job.iter_results() for at in chunk.positions)
        good = np.array([at for at in range(len(self.texts)) if at not in self.failed])
        np.testing.assert_allclose(self.job.vectors()[good], self.expected[good], atol=_CLOSE)
        return len(self.texts) - len(seen | Counter(self.failed.keys())), sum(seen.values()) - len(seen)


@contextmanager
def counted(
    boxes: Boxes,
    fault: str,
    extra: dict[int, str] | None = None,
    failed: dict[int, str] | None = None,
    instead: tuple[list[str], Vectors] | None = None,
) -> Iterator[Counted]:
    """A job of 300 records, which the block breaks something under; then they are counted.

    Args:
        fault: for the table.
        extra: texts instead of the usual ones, by position.
        failed: the records that have an error at the end, with its code.
        instead: texts and their vectors, where the workers have a real model.
    """
    usual = [(extra or {}).get(at, f"text {at} " + "word " * 20) for at in range(RECORDS)]
    texts, expected = instead or (usual, reference(usual))
    job = enqueue_embeddings(texts, chunk_size=10, hardware="cpu", settings=load_settings(boxes.variables))
    begun = time.monotonic()
    one = Counted(job, texts, expected, failed or {})
    yield one
    lost, doubled = one.count()
    TABLE.append(f"| {fault} | {RECORDS} | {lost} | {doubled} | {len(one.failed)} | {time.monotonic() - begun:.0f} s |")
    assert (lost, doubled) == (0, 0)
