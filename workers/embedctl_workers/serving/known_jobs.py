"""The jobs whose chunks this worker has handled lately. A job's options never change, so its facts are read once."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from embedctl.store import JobStatus, JobStore

_MOST = 256


class KnownJobs:
    """Jobs by their ids. Threads may share it."""

    def __init__(self, jobs: JobStore) -> None:
        self._jobs = jobs
        self._lock = Lock()
        self._known: OrderedDict[str, JobStatus] = OrderedDict()

    def find(self, job_id: str) -> JobStatus | None:
        """A job, as it was when it was read; None if it is not known."""
        with self._lock:
            job = self._known.get(job_id)
            if job is not None:
                self._known.move_to_end(job_id)
            return job

    def add(self, job: JobStatus) -> None:
        """Remember a job; the one that was not asked for the longest is forgotten."""
        with self._lock:
            self._known[job.id] = job
            if len(self._known) > _MOST:
                self._known.popitem(last=False)

    def known(self, job_id: str, read: JobStatus | None = None) -> JobStatus:
        """A job, as it was `read`; if it was not, and is not known, it is read. Raises as :meth:`JobStore.status`."""
        job = self.find(job_id)
        if job is None:
            job = self._jobs.status(job_id) if read is None else read
            self.add(job)
        return job
