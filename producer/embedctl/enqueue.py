"""Submitting: create the job, add its chunks, send tickets, and pause where Redis has enough."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, get_args

from embedctl.broker import Broker
from embedctl.chunking import chunks_of
from embedctl.job import Job
from embedctl.patience import patiently
from embedctl.reaper import Reaper
from embedctl.records import Record, RecordLike, records_of
from embedctl.routing import resolve
from embedctl.store import Added, JobSpec, JobStatus
from embedctl_config import keys, wire
from embedctl_config.errors import (
    BrokerUnavailable,
    CorpusChanged,
    EmbedctlError,
    JobError,
    JobFailed,
    JobLost,
    JobNotFound,
    SettingsError,
)
from embedctl_config.settings import MAX_TTL_S, Settings, check_model_name, load_settings
from embedctl_config.wire import ChunkInput

log = logging.getLogger(__name__)

T = TypeVar("T")
Truncation = Literal["truncate", "error"]

#: Called now and then while submitting with the records added so far and what the producer waits for, if for anything.
SubmitProgress = Callable[[int, str], None]
_ANOTHER_PRODUCER, _REDIS, _WORKERS = "another producer of this job", "Redis", "workers to make room"


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What a job is submitted with; None takes the value of the settings.

    `resume` is the id of a job that a producer began and did not finish: it goes on with the same records, and what is
    given here besides must be what the job was begun with.
    """

    model: str | None = None
    hardware: str | None = None
    precision: str | None = None
    prompt: str | None = None
    truncation: Truncation = "truncate"
    normalize: bool = True
    chunk_size: int | None = None
    ttl: float | None = None
    idempotency_key: str | None = None
    max_errors: int | None = None
    max_errors_share: float | None = None
    resume: str | None = None


def enqueue_embeddings(
    texts: Iterable[RecordLike],
    *,
    model: str | None = None,
    hardware: str | None = None,
    precision: str | None = None,
    ids: Iterable[str | int] | None = None,
    prompt: str | None = None,
    truncation: Truncation = "truncate",
    normalize: bool = True,
    chunk_size: int | None = None,
    ttl: float | None = None,
    idempotency_key: str | None = None,
    settings: Settings | None = None,
) -> Job:
    """Queue texts for embedding.

    Returns once every text is stored in Redis; workers begin with the first chunk. Blocks while more than
    `high_water_bytes` of the job's text waits for workers, while Redis is full, and for two minutes while it is away.

    Args:
        texts: strings, or mappings with a `text` and perhaps an `id`; any iterable, read as it is needed. What is no
            text, or empty, becomes a record error and costs no other record its vector.
        model: the name under which workers serve it; the settings' model where None.
        hardware: a hardware class, or "auto" for the fastest that is alive and offers the precision.
        precision: "fp32", "fp16" or "int8"; what the class offers where None, and fp32 with "auto".
        ids: labels that come back with the vectors, one a text; they may repeat.
        prompt: put before every text; the model's own default prompt where None, nothing where empty.
        truncation: "truncate" encodes the first tokens of a text that is too long and reports it; "error" fails it.
        normalize: make every vector of unit length.
        chunk_size: most records in a chunk.
        ttl: seconds that the job is kept after its last progress.
        idempotency_key: a second call with this key and the same texts gives the same job; a call that died half-way
            is taken up where it stopped. Kept as long as the job.
        settings: from the environment and configuration files where None.

    Raises:
        SettingsError: an argument or a setting is wrong.
        InputError: an item of `texts` or of `ids` can't be a record.
        CorpusChanged: the idempotency key belongs to a job with other texts or options.
        BrokerUnavailable: Redis can't be reached.
        JobLost: Redis came back without its last writes; the same call with an idempotency key goes on.
    """
    settings = load_settings() if settings is None else settings
    options = JobOptions(model, hardware, precision, prompt, truncation, normalize, chunk_size, ttl, idempotency_key)
    broker = Broker.connect(settings)
    return submit(broker, records_of(texts, ids=ids, max_bytes=settings.max_text_bytes), options)


def submit(
    broker: Broker, records: Iterable[Record], options: JobOptions, progress: SubmitProgress | None = None
) -> Job:
    """Queue records; see :func:`enqueue_embeddings`."""
    broker.connection.check_server()
    job = _begun(broker, options)
    chunks = chunks_of(records, max_rows=job.options["chunk_size"], max_bytes=job.options["chunk_bytes"])
    resumable = options.idempotency_key is not None or options.resume is not None
    try:
        with _Submission(broker, job, progress) as submission:
            for chunk in _cancelling(chunks, broker, job.id, unless=resumable):
                submission.add(chunk)
            submission.seal()
    except KeyboardInterrupt:
        if not resumable:
            broker.jobs.cancel(job.id)
        raise
    return Job(job.id, broker)


def _begun(broker: Broker, options: JobOptions) -> JobStatus:
    """The job to add to: a new one, the one of this idempotency key, or the one to resume."""
    if options.resume is not None:
        if options.idempotency_key is not None:
            raise SettingsError("resume names the job; an idempotency key besides could name another: leave one out")
        for name in ("ttl", "max_errors", "max_errors_share"):
            if getattr(options, name) is not None:
                raise SettingsError(f"a job that is resumed keeps the {name} that it was begun with: leave it out")
        job = broker.jobs.status(options.resume)
        _check_same(job, _given(options))
        return job
    spec = job_spec(broker, options)
    job_id, created = broker.jobs.create(spec)
    job = broker.jobs.status(job_id)
    if not created:
        # Hardware may differ: with `auto` it depends on who is alive.
        _check_same(job, {"model": spec.model, "precision": spec.precision, **spec.options})
    return job


def _given(options: JobOptions) -> dict[str, Any]:
    """What is said of a job that is resumed: all but what was left at its default."""
    plain = JobOptions()
    deciding = ("model", "hardware", "precision", "prompt", "truncation", "normalize", "chunk_size")
    given = {name: value for name in deciding if (value := getattr(options, name)) != getattr(plain, name)}
    return {name: value for name, value in given.items() if (name, value) != ("hardware", "auto")}


def job_spec(broker: Broker, options: JobOptions) -> JobSpec:
    """What a job of these options is made with: settings filled in, the hardware class resolved, all of it checked.

    Raises:
        SettingsError: an option is wrong.
    """
    settings = broker.settings
    model = settings.model if options.model is None else options.model
    if wrong := check_model_name(model):
        raise SettingsError(wrong)
    if options.truncation not in get_args(Truncation):
        raise SettingsError(f"truncation {options.truncation!r} is neither 'truncate' nor 'error'")
    chunk_size = settings.chunk_size if options.chunk_size is None else options.chunk_size
    ttl = settings.ttl_s if options.ttl is None else options.ttl
    if chunk_size < 1:
        raise SettingsError(f"chunk_size {chunk_size} is below 1")
    if not 1 <= ttl <= MAX_TTL_S:
        raise SettingsError(f"ttl {ttl} is not between 1 and {MAX_TTL_S:.0f} seconds")
    hardware, precision = resolve(
        settings,
        broker.workers,
        model=model,
        hardware=options.hardware or settings.hardware,
        precision=options.precision,
    )
    deciding: dict[str, Any] = {
        "prompt": options.prompt,
        "truncation": options.truncation,
        "normalize": options.normalize,
        "chunk_size": chunk_size,
        "chunk_bytes": settings.chunk_bytes,
    }
    return JobSpec(
        model,
        hardware,
        precision,
        deciding,
        ttl,
        options.idempotency_key,
        options.max_errors,
        options.max_errors_share,
    )


def _check_same(job: JobStatus, now: Mapping[str, Any]) -> None:
    before = {"model": job.model, "hardware": job.hardware, "precision": job.precision, **job.options}
    changed = [f"{name} was {before.get(name)!r} and is {now[name]!r}" for name in now if before.get(name) != now[name]]
    if changed:
        raise CorpusChanged(
            f"job {job.id} was begun with other options: {'; '.join(changed)}. Use the same ones, or submit a new job."
        )


def _cancelling(chunks: Iterator[ChunkInput], broker: Broker, job_id: str, *, unless: bool) -> Iterator[ChunkInput]:
    """The chunks; where reading them fails, nobody can resume the job unless it has a key, so it is cancelled."""
    try:
        yield from chunks
    except Exception:
        if not unless:
            broker.jobs.cancel(job_id)
        raise


class _Submission:
    """Adds chunks to one job as its only live producer. A context: while it lasts, nobody else may add."""

    def __init__(self, broker: Broker, job: JobStatus, progress: SubmitProgress | None) -> None:
        self._broker = broker
        self._job_id = job.id
        self._queue = job.queue
        self._progress = progress
        self._token = secrets.token_hex(8)
        self._added = self._records = 0
        self._reaper = Reaper(broker)
        self._over = threading.Event()
        self._holder = threading.Thread(target=self._keep_right, name="producer", daemon=True)

    def __enter__(self) -> Self:
        self._holder.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._holder.join(1.0)  # it may wait for a Redis that is away
        if error is not None and not isinstance(error, BrokerUnavailable):
            with suppress(EmbedctlError):  # then the right ends by itself, only later
                self._broker.jobs.hold(self._job_id, self._token, lease_s=0)

    def add(self, chunk: ChunkInput) -> None:
        payload = wire.encode_input(chunk)
        answer, waiting = self._patiently(lambda: self._add(chunk, payload))
        while answer is Added.HELD:
            self._report(_ANOTHER_PRODUCER)
            time.sleep(1.0)  # another producer lives; it ends, or its lease does
            answer, waiting = self._patiently(lambda: self._add(chunk, payload))
        if answer is Added.SEALED:
            raise CorpusChanged(f"job {self._job_id} ended after record {self._records - 1}; the corpus now has more")
        if answer is Added.STOPPED:
            raise JobFailed(f"job {self._job_id} was ended by its error budget (max_errors) while it was submitted")
        if answer is Added.DIFFERS:
            raise CorpusChanged(self._first_difference(chunk))
        self._added += 1
        self._records += len(chunk)
        if answer is Added.OK:
            self._patiently(self._send_tickets)
        self._report()
        if waiting > self._broker.settings.high_water_bytes:
            self._patiently(self._wait_for_workers)

    def seal(self) -> None:
        while not self._patiently(lambda: self._broker.jobs.hold(self._job_id, self._token)):
            self._report(_ANOTHER_PRODUCER)
            time.sleep(1.0)
        self._patiently(lambda: self._broker.jobs.seal(self._job_id, self._added))
        self._patiently(self._send_tickets)

    def _add(self, chunk: ChunkInput, payload: bytes) -> tuple[Added, int]:
        return self._broker.jobs.add(
            self._job_id, self._added, payload, digest=wire.digest_of(payload), rows=len(chunk), token=self._token
        )

    def _patiently(self, ask: Callable[[], T]) -> T:
        """Ask Redis until it answers.

        Raises:
            BrokerUnavailable: it stayed away; says how to go on.
            JobLost: it does not know the job any more.
        """
        try:
            return patiently(ask, pausing=lambda: self._report(_REDIS))
        except JobLost:
            raise
        except JobNotFound as error:
            raise JobLost(
                f"job {self._job_id} is gone from Redis, while it was submitted: discarded by somebody, or lost. "
                "Submit its corpus again."
            ) from error
        except BrokerUnavailable as error:
            raise BrokerUnavailable(
                f"{error} Job {self._job_id} holds the first {self._records} records: go on with embedctl submit "
                f"CORPUS --resume {self._job_id}"
            ) from error

    def _keep_right(self) -> None:
        """Renew the right to add while the corpus is slow to give its next record, or Redis to take it."""
        while not self._over.is_set():
            try:
                self._broker.jobs.hold(self._job_id, self._token)
            except BrokerUnavailable as error:
                log.info("job %s: %s", self._job_id, error)
            except JobError:
                return  # it is cancelled or gone, as the next chunk is told too
            self._over.wait(keys.PRODUCER_LEASE_S / 3)

    def _send_tickets(self) -> None:
        self._broker.send_issued(self._job_id, self._queue)

    def _wait_for_workers(self) -> None:
        """Back-pressure: wait until workers have brought the text that waits below the mark."""
        seen = "$"
        while self._broker.jobs.status(self._job_id).waiting_bytes > self._broker.settings.high_water_bytes:
            self._report(_WORKERS)
            seen = self._broker.jobs.wait_event(self._job_id, seen, timeout_s=1.0)
            self._reaper.round()

    def _first_difference(self, chunk: ChunkInput) -> str:
        stored = self._stored_checksums()
        mine = chunk.row_checksums()
        differing = [row for row, (a, b) in enumerate(zip(stored, mine, strict=False)) if a != b]
        row = differing[0] if differing else min(len(stored), len(mine))
        return (
            f"the corpus changed: record {chunk.first + row} is not the one that job {self._job_id} was begun with. "
            "Restore it, or submit it as a new job with another idempotency key."
        )

    def _stored_checksums(self) -> list[int]:
        result = self._broker.jobs.result(self._job_id, self._added)
        if result is not None:
            return list(wire.decode_result(result).checksums)
        stored = self._broker.jobs.input(self._job_id, self._added)
        return [] if stored is None else wire.decode_input(stored).row_checksums()

    def _report(self, waiting_for: str = "") -> None:
        if self._progress is not None:
            self._progress(self._records, waiting_for)
