"""A claimed chunk, with what it takes to encode it and to store its result; which small ones share a batch; and the
jobs whose chunks this worker has handled lately."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from threading import Lock

from embedctl.store import JobStatus, JobStore
from embedctl_config.wire import ChunkInput
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.serving.in_hand import Held

#: A token is about so many bytes of text.
_TOKEN_BYTES = 4
#: Most jobs that are remembered.
_MOST_KNOWN = 256


@dataclass(frozen=True, slots=True)
class ClaimedChunk:
    """A chunk that this worker holds, its input as it is stored, and the same decoded.

    `given_up` are rows at which earlier owners died; None if the chunk is not suspect for that reason.
    """

    held: Held
    job: JobStatus
    encoder: ChunkEncoder
    payload: bytes
    chunk: ChunkInput
    given_up: Collection[int] | None

    @property
    def is_suspect(self) -> bool:
        """Whether workers died or fell sick over it."""
        return self.given_up is not None or (self.held.doubts is not None and self.held.doubts.is_suspect)


def is_small(claimed: ClaimedChunk) -> bool:
    """Whether other chunks are to be joined to a claimed one."""
    return 2 * len(claimed.payload) <= _budget(claimed) and may_be_joined(claimed)


def may_be_joined(claimed: ClaimedChunk) -> bool:
    """Whether a claimed chunk may be in one batch with others: not if anybody has failed with it."""
    return (
        claimed.held.attempt == 1
        and not claimed.is_suspect
        and claimed.job.data is None  # else its place may keep the others waiting
        and claimed.job.model == claimed.held.model
        and not claimed.encoder.backend.joins
    )


def room(claimed: ClaimedChunk) -> int:
    """How many bytes of other chunks fit into one batch with a claimed one."""
    return _budget(claimed) - len(claimed.payload)


def _budget(claimed: ClaimedChunk) -> int:
    return claimed.encoder.token_budget * _TOKEN_BYTES


class KnownJobs:
    """Jobs by their ids. Threads may share it."""

    def __init__(self, jobs: JobStore) -> None:
        self._jobs = jobs
        self._lock = Lock()
        self._known: OrderedDict[str, JobStatus] = OrderedDict()

    def known(self, job_id: str, read: JobStatus | None = None) -> JobStatus:
        """A job, as it was `read`; if it was not, and is not known, it is read. Raises as :meth:`JobStore.status`.

        The job that was not asked for the longest is forgotten.
        """
        with self._lock:
            if job := self._known.get(job_id):
                self._known.move_to_end(job_id)
                return job
        job = self._jobs.status(job_id) if read is None else read
        with self._lock:
            self._known[job_id] = job
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        return job
