"""Runs batches: each gateway has a few threads that take one after the other, and do its next step. Every step can be
done again: if a gateway dies, another one resumes once the lease has lapsed, and the job goes on by itself
meanwhile."""

from __future__ import annotations

import json
import logging
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import IO

from embedctl.common.notices import Reminder
from embedctl.corpus.batch import KEPT_OF_REQUEST, URLS, BatchCorpus
from embedctl.destinations.answers import EXPIRED, STOPPED, Reason
from embedctl.jobs import enqueue
from embedctl.jobs.job import Job
from embedctl.jobs.options import Kept, SubmitOptions
from embedctl.queueing.broker import Broker
from embedctl.store import JobStatus
from embedctl.store.batches import BatchStore, Step, StoredBatch
from embedctl.store.lease import Lease
from embedctl.store.stored_files import FileGone, FileStore
from embedctl_config import keys
from embedctl_config.errors import (
    BrokerRefused,
    BrokerUnavailable,
    EmbedctlError,
    InputError,
    JobCancelled,
    JobFailed,
    JobLost,
    JobNotFound,
    JobStopped,
    NotPermitted,
    QuotaExceeded,
    SettingsError,
)
from embedctl_config.hardware import PRECISIONS
from embedctl_config.retry import ASIDE, Growing
from embedctl_config.tenants import NORMAL
from embedctl_gateway.batches.answers import Written, answers_by_chunk, write
from embedctl_gateway.batches.looks import Looks
from embedctl_gateway.batches.requests import GONE, Refused, Requests, check, told
from embedctl_gateway.http.refusals import log_failure

log = logging.getLogger(__name__)

#: Reads the requests of a batch: the custom_id of each, and how many inputs it has.
Read = Callable[[], Iterator[tuple[str, int]]]
#: Batches that a gateway works on at once, of any size and small ones only. One whose job goes on by itself takes no
#: place.
_OF_ANY_SIZE, _SMALL = 3, 3
#: The requests of a small batch (bytes).
_SMALL_BYTES = 4 * 1024 * 1024
#: Seconds between two looks for a batch, between two looks at what a long step should know, and until a batch that
#: waits for something is looked at again.
_LOOK_S, _CHECK_S, _PAUSE_S = 0.5, 1.0, 2.0
#: A job is looked at again after a part of the time that it has taken. Nobody hears its events.
_JOB = Growing(1 / 20, 0.3, 5.0)
#: A batch that its tenant's limits leave no room for, or that has met a fault, is tried again after this (seconds).
_NO_ROOM_S = 10.0
#: A submission that takes longer gives way to other batches (seconds).
_TURN_S = 60.0
#: How long the results of a batch's job are kept until they are files (seconds).
_RESULTS_TTL_S = 24 * 3600.0
#: Answers are text in a file, of about four times the bytes of the results that they are made of, which are there too.
_KEPT_TIMES = 5
#: How long a gateway that ends waits for its threads (seconds).
_STOP_S = 3.0


class _Lost(Exception):
    """Raised when another runner has the batch, or it is gone."""


class _Turn(Exception):
    """Raised when the batch is to be looked at again: its state has changed, others wait, or this process ends."""


class Runner:
    """The threads of one gateway that run batches. With `tells`, a webhook is to tell that a batch has ended."""

    def __init__(self, broker: Broker, files: FileStore, batches: BatchStore, *, tells: bool) -> None:
        self.broker = broker
        self.files = files
        self.batches = batches
        self.tells = tells
        self.stopping = threading.Event()
        self.looks = Looks()
        self._remind = Reminder(log.warning)
        self._work = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        self.stopping.clear()
        self._threads = [
            threading.Thread(
                target=ASIDE.serve,
                args=(partial(self._next, most), self._failed, self.stopping),
                name=f"batches-{number}",
                daemon=True,
            )
            for number, most in enumerate([keys.KEPT_BYTES] * _OF_ANY_SIZE + [_SMALL_BYTES] * _SMALL)
        ]
        looking = (self._end_late, self._failed, self.stopping)
        self._threads.append(threading.Thread(target=ASIDE.serve, args=looking, name="deadlines", daemon=True))
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        self._work.set()

    def stop(self) -> None:
        """End soon. What is not done is resumed by another gateway, or by the next one."""
        self.stopping.set()
        self._work.set()
        deadline = time.monotonic() + _STOP_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _next(self, most_bytes: int) -> None:
        if not self._one(most_bytes):
            self._work.wait(_LOOK_S)
            self._work.clear()

    def _end_late(self) -> float:
        for job_id in self.batches.end_late(told=self.tells):
            discard(self.broker, job_id)
        return _CHECK_S

    def _failed(self, error: Exception, _: float) -> None:
        if isinstance(error, NotPermitted):  # the operator, who can mend Redis' access list, is to know
            self._remind(f"no batch is run: {error}")
        else:
            _log(error)

    def _one(self, most_bytes: int) -> bool:
        """Do a step of a batch, with requests of so many bytes at most; false if none waits for one."""
        token = secrets.token_hex(8)
        batch = self.batches.take(token, keys.BATCH_LEASE_S, most_bytes)
        if batch is None:
            return False
        held = _Held(self, batch, token, most_bytes)
        with held.lease:
            try:
                _Work(self, held).step()
                return True
            except _Lost:
                return True
            except _Turn:
                pause_s = 0.0
            except QuotaExceeded:
                pause_s = _NO_ROOM_S
            except Exception as error:  # noqa: BLE001  (this batch is tried again, until its time is over)
                pause_s = _PAUSE_S if isinstance(error, BrokerUnavailable) else _NO_ROOM_S
                _log(error)
            with suppress(_Lost):
                held.release(pause_s)
        return True


class _Held:
    """A batch that this process runs, and its lease."""

    def __init__(self, runner: Runner, batch: StoredBatch, token: str, most_bytes: int) -> None:
        self.batch = batch
        self.others_wait = partial(runner.batches.are_due, most_bytes)
        self.lease = Lease(self._renew, keys.BATCH_LEASE_S / 3)
        self._runner = runner
        self._batches = runner.batches
        self._token = token
        self._checked = time.monotonic()

    def check(self) -> None:
        """See that this process is to go on; asks Redis once in a second. Raises _Lost if it has lost the batch, and
        _Turn if the batch's state is another one, or the process ends."""
        if self.lease.lost.is_set():
            raise _Lost
        if self._runner.stopping.is_set():
            raise _Turn
        now = time.monotonic()
        if now - self._checked > _CHECK_S:
            self._checked = now
            if self._batches.status(self.batch) != self.batch.status:
                raise _Turn

    def note(self, facts: Mapping[str, object]) -> None:
        """Note facts, if the batch has the state that this process knows; raises _Turn if it has another one, and _Lost
        if this process has lost the batch."""
        self._step(Step(facts, before=self.batch.status))
        known = {name: str(value) for name, value in facts.items()}
        self.batch = StoredBatch(self.batch.id, {**self.batch.facts, **known})

    def release(self, after_s: float, facts: Mapping[str, object] | None = None) -> None:
        """Leave the batch; a runner may look at it again after some time (seconds). Raises as :meth:`note`."""
        self.lease.end()
        next_s = self._runner.looks.pause_s(self.batch.tenant, after_s) if after_s else 0.0
        self._step(Step(facts or {}, after="release", next_s=next_s))

    def end(self, facts: Mapping[str, object], written: Written | None = None) -> None:
        """End the batch, and make its files. Raises as :meth:`note`."""
        files = () if written is None else written.files
        self.lease.end()
        self._step(Step(facts, before=self.batch.status, after="end", files=files, told=self._runner.tells))

    def _step(self, step: Step) -> None:
        status = self._batches.note(self.batch, self._token, step)
        if status is None:
            raise _Lost
        if step.before and status != step.facts.get("status", step.before):
            raise _Turn

    def _renew(self) -> bool:
        return self._batches.note(self.batch, self._token, Step()) is not None


class _Work:
    """One step of a batch."""

    def __init__(self, runner: Runner, held: _Held) -> None:
        self._broker = runner.broker
        self._files = runner.files
        self._held = held
        self._began = self._looked = time.monotonic()

    @property
    def _batch(self) -> StoredBatch:
        return self._held.batch

    def step(self) -> None:
        """Do the next step. What it raises says that it is to be tried again, here or by another process."""
        status = self._batch.status
        if status == "cancelling":
            self._wind_up("cancelled", STOPPED)
        elif status == "finalizing" and "ends_as" in self._batch.facts:
            self._wind_up(self._batch.facts["ends_as"], EXPIRED)
        elif status == "finalizing":
            self._finish("completed", self._batch.facts["job"], self._why_not_run)
        elif status == "in_progress" and self._batch.number("submitted"):
            self._look()
        elif "total" in self._batch.facts and self._waits_for_workers():
            self._held.release(_PAUSE_S)
        else:
            self._prepare()

    def _waits_for_workers(self) -> bool:
        """Whether there is no job yet, and nobody serves its model, so that it is not known in which class it is to be;
        that of a job stays."""
        if self._batch.facts.get("job") or self._broker.settings.hardware != "auto":
            return False
        return not self._precisions(self._batch.facts["model"])

    def _prepare(self) -> None:
        try:
            with self._requests().copied() as corpus:
                if "total" not in self._batch.facts:
                    self._validate(corpus)
                if self._waits_for_workers():
                    self._held.release(_PAUSE_S)
                    return
                self._submit(corpus)
        except Refused as refused:
            discard(self._broker, self._batch.facts.get("job", ""))
            self._held.end({"status": "failed", "errors": json.dumps(refused.args[0])})
            return
        self._begin()
        self._held.release(0.0)

    def _validate(self, corpus: BatchCorpus) -> None:
        model, dimensions = check(corpus)
        model = model or self._broker.settings.model
        counted = {name: getattr(corpus, name) for name in ("inputs", "text_bytes", "field_bytes")}
        self._held.note({"total": corpus.checked, **counted, "model": model, "dimensions": dimensions or ""})

    def _precisions(self, model: str) -> list[str]:
        """Those in which live workers serve a model, the best first."""
        settings = self._broker.settings
        offered = {
            precision
            for hardware, name, precision in self._broker.workers.offers()
            if name == model and hardware in settings.classes
        }
        return [each for each in PRECISIONS if each in offered]

    def _submit(self, corpus: BatchCorpus) -> None:
        if "precision" not in self._batch.facts:  # the same each time, and as for single requests
            is_auto = self._broker.settings.hardware == "auto"
            self._held.note({"precision": self._precisions(self._batch.facts["model"])[0] if is_auto else ""})
        facts = self._batch.facts
        options = SubmitOptions(
            model=facts["model"],
            dimensions=self._batch.number("dimensions") or None,
            precision=facts["precision"] or None,
            long="error",
            ttl=_RESULTS_TTL_S,
            idempotency_key=self._key,
            keep=KEPT_OF_REQUEST,
            count_tokens=True,
            batch_file=True,
            vectors=[URLS[facts["endpoint"]].output],
            tenant=self._batch.tenant,
            lane=NORMAL,
            kept=self._kept(),
        )
        try:
            enqueue.submit(self._broker, corpus.records(), options, self._submitting, on_job=self._on_job, at_hand=True)
        except (JobFailed, JobStopped, JobCancelled):
            pass  # somebody has ended it: what is not done is told so
        except QuotaExceeded as error:
            if not error.is_final:
                self._held.note({"job": ""})  # the library has cancelled it
                raise
            self._keep_what_fits(error)
        except (SettingsError, InputError) as error:
            raise Refused([told("invalid_value", str(error))]) from None
        self._held.note({"submitted": 1})

    def _keep_what_fits(self, error: QuotaExceeded) -> None:
        """End the job of a batch for whose other requests there is never room; raises Refused if there is no such job,
        so nothing was run."""
        try:
            Job(self._batch.facts.get("job", ""), self._broker).stop()
        except (JobCancelled, JobNotFound):
            raise Refused([told("quota_exceeded", str(error))]) from None
        self._held.note({"no_room": str(error)})

    @property
    def _why_not_run(self) -> Reason:
        """Of requests that the job of a completed batch has not run."""
        no_room = self._batch.facts.get("no_room")
        return Reason("quota_exceeded", f"This request was not executed: {no_room}") if no_room else STOPPED

    def _kept(self) -> Kept:
        known = (self._batch.number(name) for name in ("inputs", "text_bytes", "field_bytes", "input_bytes"))
        return Kept(_KEPT_TIMES, *known)

    @property
    def _key(self) -> str:
        """The job's idempotency key: a runner that submits it again resumes this job."""
        return f"gateway {self._batch.id}"

    def _on_job(self, job: JobStatus) -> None:
        self._held.note({"job": job.id})

    def _submitting(self, records: int, _: str) -> None:
        self._held.check()
        if records and self._batch.status == "validating":
            self._begin()
        now = time.monotonic()
        if now - self._looked > _PAUSE_S:
            self._looked = now
            if now - self._began > _TURN_S and self._held.others_wait():
                raise _Turn
            if job_id := self._batch.facts.get("job"):  # there is none while Redis is full
                self._held.note(self._counts(self._broker.jobs.status(job_id)))

    def _begin(self) -> None:
        self._held.note({"status": "in_progress"} if self._batch.status == "validating" else {})

    def _look(self) -> None:
        try:
            job = self._broker.jobs.status(self._batch.facts["job"])
        except JobNotFound:  # Redis has forgotten it
            self._held.release(0.0, {"submitted": 0, "job": ""})
            return
        if job.lost_chunks is not None:
            self._held.release(_PAUSE_S, {"submitted": 0})
        elif job.state.ended:
            self._held.note({"status": "finalizing"})
            self._finish("completed", job.id, self._why_not_run)
        else:
            age_s = self._broker.connection.recent_now_ms() / 1000 - self._batch.number("in_progress_at")
            self._held.release(_JOB.pause_s(age_s), self._counts(job))

    def _counts(self, job: JobStatus) -> dict[str, object]:
        """The counts of requests, from those of records: exact where each request has one text."""
        share = self._batch.number("total") / max(1, self._batch.number("inputs"))
        return {"completed": int(job.done * share), "failed": int(job.failed * share)}

    def _wind_up(self, status: str, reason: Reason) -> None:
        """End the job of a batch before its end, and keep what is done."""
        job_id = self._batch.facts.get("job") or self._broker.jobs.with_key(self._key, self._batch.tenant)
        if job_id:
            try:
                Job(job_id, self._broker).stop()
            except JobCancelled:
                pass
            except JobNotFound:
                job_id = None
        self._finish(status, job_id or "", reason)

    def _finish(self, status: str, job_id: str, reason: Reason) -> None:
        """Write the files of a batch whose job has ended, and end it. If there is no job, nothing was run. `reason`
        says why requests were not run, if the job does not tell."""
        job = Job(job_id, self._broker) if job_id else None
        errors: dict[str, object] = {}
        try:
            try:
                with tempfile.TemporaryFile() as copy:
                    written = self._written(job, self._reader(copy), reason)
            except FileGone:  # requests that were not run have no lines, because nobody knows them any more
                errors = {"errors": json.dumps([GONE])}
                written = self._written(job, None, reason)
        except JobNotFound as error:
            self._lost_results(status, reason, lost=isinstance(error, JobLost))
            return
        facts = {
            **errors,
            "status": status,
            "completed": written.completed,
            "failed": self._batch.number("total") - written.completed if errors else written.failed,
            "tokens": written.tokens,
            "output_file_id": written.output.id if written.output else "",
            "error_file_id": written.error.id if written.error else "",
        }
        try:
            self._held.end(facts, written)
        except (_Lost, _Turn):
            if self._withdraw(written):
                raise
        discard(self._broker, job_id)

    def _written(self, job: Job | None, read: Read | None, reason: Reason) -> Written:
        return write(self._files, self._batch, answers_by_chunk(self._batch, job, read, reason), self._held.check)

    def _withdraw(self, written: Written) -> bool:
        """Remove files that nobody will see. False if the step was done, and only the answer lost."""
        if written.files and self._files.get(written.files[0].id, self._batch.tenant) is not None:
            return False
        for file in written.files:
            with suppress(EmbedctlError):  # it goes with its time to live
                self._files.remove(file)
        return True

    def _lost_results(self, status: str, reason: Reason, *, lost: bool) -> None:
        """Redis has lost results, or all of the job: submit it again, or end the batch without what it has done."""
        if status == "completed":
            again = {"submitted": 0, **({} if lost else {"job": ""})}
            self._held.note({"status": "in_progress", **again})
            self._held.release(_PAUSE_S)
        else:
            self._finish(status, "", reason)

    def _requests(self) -> Requests:
        most = self._broker.settings.max_text_bytes
        return Requests(self._files, self._batch, most, self._held.check)

    def _reader(self, copy: IO[bytes]) -> Read | None:
        """Reads the requests, if they are needed, and raises FileGone as :meth:`Requests.copied_to` does; None if they
        were not valid."""
        return (lambda: self._requests().copied_to(copy).requests()) if "total" in self._batch.facts else None


def discard(broker: Broker, job_id: str) -> None:
    """Free a batch's job, if there is one."""
    if job_id:
        with suppress(EmbedctlError):  # otherwise its time to live frees it
            Job(job_id, broker).discard()


def _log(error: Exception) -> None:
    if isinstance(error, BrokerRefused) or not isinstance(error, BrokerUnavailable):
        log_failure("a batch is tried again after", error)
