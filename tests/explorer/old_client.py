"""Client code as it was before faults of the protocol were mended in it: only the explorer runs it.

It stands here to show that the explorer finds those faults. Do not mend it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from embedctl.broker import Broker
from embedctl.chunking import chunks_of
from embedctl.records import records_of
from embedctl.store import Added, JobState, JobStatus
from embedctl_config import keys, wire
from embedctl_config.errors import CorpusChanged, JobCancelled, JobFailed, JobLost

#: Its clock and its dice are the explorer's.
SUBMISSION: Any = import_module("embedctl.submission")
_SCRIPTS = Path(__file__).parent / "old_scripts"


@cache
def old_script(name: str) -> str:
    """The text of a script as it was, with its constants."""
    own = (_SCRIPTS / f"{name}.lua").read_text(encoding="utf-8")
    if name == "create":
        return own
    constants = (
        f"local WIRE_VERSION, CHUNK_TTL_FACTOR, EVENTS_KEPT, ROWS_AT, BIRTH, JOBS, WORKERS, DIED, LEFT = "
        f"{wire.VERSION}, {keys.CHUNK_TTL_FACTOR}, {keys.EVENTS_KEPT}, {wire.ROWS_AT}, '{keys.BIRTH}', '{keys.JOBS}', "
        f"'{keys.WORKERS}', '{keys.died('')}', '{keys.LEFT}'\n"
    )
    shared = ("prelude", "deaths") if name == "reap" else ("prelude",)
    return "".join([constants, *((_SCRIPTS / f"{part}.lua").read_text(encoding="utf-8") for part in shared), own])


class OldJob:
    """Waited for whatever job, and retried without patience."""

    def __init__(self, job_id: str, broker: Broker) -> None:
        self._id, self._broker = job_id, broker

    def wait(self) -> JobStatus:
        while True:
            status = self._broker.jobs.status(self._id)
            if status.state.ended:
                return status
            if status.lost_chunks is not None:
                raise JobLost("Redis lost chunks")
            self._broker.jobs.events(self._id, "$", 1.0)

    def cancel(self) -> JobStatus:
        if self._broker.jobs.cancel(self._id) is JobState.CANCELLED:
            self._broker.upkeep.free(self._id, self._broker.jobs.status(self._id).chunks)
        return self._broker.jobs.status(self._id)

    def retry_failed(self) -> int:
        jobs = self._broker.jobs
        status = jobs.status(self._id)
        if status.state is JobState.CANCELLED:
            raise JobCancelled(f"job {self._id} was cancelled: submit its corpus again")
        token = SUBMISSION.secrets.token_hex(8)
        chunks, retried = status.chunks, 0
        for chunk in jobs.failed_chunks(self._id, 0, status.chunks):
            records = jobs.retry(self._id, chunk, chunks, token)
            if records:
                retried += records
                chunks += 1
                self._broker.send_issued(status)
        if retried or (status.original_chunks is not None and not status.sealed):
            jobs.seal(self._id, chunks)
            self._broker.send_issued(status)
        return retried


class OldReaper:
    """Closed no retry."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def _look_after(self, job: JobStatus, now_ms: int) -> None:
        upkeep: Any = self._broker.upkeep
        if job.state is JobState.CANCELLED:
            if upkeep.free_slice(job.id, job.chunks):
                upkeep.forget(job.id)
            return
        if job.stopped_by is not None:
            if upkeep.free_slice(job.id, job.chunks, results=False):
                upkeep.forget(job.id)
            return
        again = upkeep.reap(job.id, job.queue)
        if again:
            self._broker.tickets.send(job.queue, job.id, again, version=job.version)
        self._broker.send_issued(job)
        if job.sealed and now_ms - job.progressed_at.timestamp() * 1000 > 60_000:
            upkeep.audit(job.id)


def looks_after(broker: Broker, job_id: str) -> None:
    """What a round did for one job."""
    OldReaper(broker)._look_after(broker.jobs.status(job_id), broker.connection.now_ms() + 1000)


class OldSubmission:
    """Waited for room in whatever job."""

    def __init__(self, broker: Broker, job: JobStatus) -> None:
        self._broker, self._job = broker, job
        self._token = SUBMISSION.secrets.token_hex(8)
        self._added = 0

    def add(self, chunk: wire.ChunkInput) -> None:
        payload = wire.encode_input(chunk, self._job.version)
        answer, waiting = self._add(chunk, payload)
        while answer is Added.HELD:
            SUBMISSION.time.sleep(1.0)
            answer, waiting = self._add(chunk, payload)
        if answer in (Added.SEALED, Added.DIFFERS):
            raise CorpusChanged(f"job {self._job.id} was begun with another corpus")
        if answer is Added.STOPPED:
            raise JobFailed(f"job {self._job.id} was ended by its error budget")
        self._added += 1
        if answer is Added.OK:
            self._broker.send_issued(self._job)
        if waiting > self._broker.settings.high_water_bytes:
            self._wait_for_workers()

    def seal(self) -> None:
        while not self._broker.jobs.hold(self._job.id, self._token):
            SUBMISSION.time.sleep(1.0)
        self._broker.jobs.seal(self._job.id, self._added)
        self._broker.send_issued(self._job)

    def _add(self, chunk: wire.ChunkInput, payload: bytes) -> tuple[Added, int]:
        answer, waiting = self._broker.jobs.add(
            self._job.id, self._added, payload, digest=wire.digest_of(payload), rows=len(chunk), token=self._token
        )
        return Added(answer), waiting

    def _wait_for_workers(self) -> None:
        jobs = self._broker.jobs
        while jobs.status(self._job.id).waiting_bytes > self._broker.settings.high_water_bytes:
            jobs.events(self._job.id, "$", 1.0)


def submits(texts: Sequence[str]) -> Any:
    """A producer as it was: see `bodies.submits`."""

    def body(broker: Broker, job_id: str) -> str:
        job = broker.jobs.status(job_id)
        old = OldSubmission(broker, job)
        rows, size = job.options["chunk_size"], job.options["chunk_bytes"]
        for chunk in chunks_of(records_of(texts, max_bytes=1000), max_rows=rows, max_bytes=size):
            old.add(chunk)
        old.seal()
        return str(OldJob(job_id, broker).wait().state)

    return body
