"""Workers, queues and jobs at one moment. The size of the reads does not grow with any job."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain, islice
from operator import itemgetter

from embedctl.common.rates import Rate, seconds_left
from embedctl.queueing.broker import Broker
from embedctl.store import GoneWorker, JobStatus, ServedModel, Starting, WorkerRow
from embedctl_config import keys
from embedctl_config.model_names import near_names

#: Most active jobs to look at: those with chunks at workers, the newest, and those that have waited longest.
JOBS_LOOKED_AT = 100
#: Most recently ended jobs to show.
ENDED_SHOWN = 5
#: Recently ended jobs are looked for among this many of the newest jobs.
_NEWEST = 20
#: Most workers that are gone to look at: a restart of a whole service leaves so many.
GONE_LOOKED_AT = 1000
#: After this long without progress, a job's pace counts as unknown (seconds).
_FRESH_S = 60.0


@dataclass(frozen=True, slots=True)
class JobPace:
    """A job and how fast it goes: over the last seconds; on average since the job's start if these show no growth; over
    the whole run of an ended job. The pace is None if it is unknown, or if the job does not move. `seconds_left` until
    all its records are done is None also while more may be added."""

    job: JobStatus
    records_per_s: float | None
    tokens_per_s: float | None
    seconds_left: float | None

    @property
    def finished(self) -> int:
        """Records with a vector or an error."""
        return self.job.done + self.job.failed


@dataclass(frozen=True, slots=True)
class QueueState:
    """The queue of a class and a model.

    Attributes:
        chunks: those of the jobs looked at that are not encoded.
        oldest_s: for how long one of these jobs has made no progress, at most (seconds); None if none waits.
        workers: live ones.
        near_models: without a live worker, the models with a similar name that live workers serve.
    """

    hardware: str
    model: str
    chunks: int
    oldest_s: float | None
    workers: int
    near_models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A live worker and the model that it is encoding with; None while it is idle or hung."""

    row: WorkerRow
    encodes: ServedModel | None


@dataclass(frozen=True, slots=True)
class Overview:
    """Everything at one moment, `at` by Redis' clock.

    `gone` are workers that disappeared in the last minutes without signing off, at most :data:`GONE_LOOKED_AT`.
    `queues` are those that a live worker consumes or an active job sends to. `active` jobs have not ended: at most
    :data:`JOBS_LOOKED_AT` of `active_count`, first those that a worker has begun, and among these and the others the
    newest first. `ended` are recently ended jobs, the last one first. `full_bytes` are what a full Redis uses and may
    use; None if there is room. `starting` workers take no chunks yet.
    """

    at: datetime
    workers: tuple[WorkerState, ...]
    gone: tuple[GoneWorker, ...]
    queues: tuple[QueueState, ...]
    active: tuple[JobPace, ...]
    active_count: int
    ended: tuple[JobPace, ...]
    full_bytes: tuple[int, int] | None = None
    starting: tuple[Starting, ...] = ()

    @property
    def rows_per_s(self) -> float:
        """Rows that all busy workers together encode per second."""
        return sum(each.encodes.rows_per_s for each in self.workers if each.encodes)

    @property
    def tokens_per_s(self) -> float:
        """Tokens that all busy workers together encode per second."""
        return sum(each.encodes.tokens_per_s for each in self.workers if each.encodes)

    @property
    def chunks(self) -> int:
        return sum(queue.chunks for queue in self.queues)


class Paces:
    """How fast jobs go, by comparison with their earlier counts."""

    def __init__(self) -> None:
        self._rates: dict[str, Rate] = {}

    def of(self, jobs: Iterable[JobStatus], now_ms: int) -> list[JobPace]:
        """The pace of each of these jobs at a time of Redis' clock. The counts of all other jobs are forgotten."""
        known, self._rates = self._rates, {}
        paces = []
        for job in jobs:
            rate = self._rates[job.id] = known.get(job.id) or Rate()
            lately = rate.add(time.monotonic(), job.done + job.failed, job.tokens)
            paces.append(_pace(job, lately, now_ms))
        return paces


class Gatherer:
    """Reads an overview from Redis, again and again."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._paces = Paces()
        self._active: list[str] = []

    def look(self) -> Overview:
        """Everything at this moment; raises BrokerUnavailable if Redis can't be reached."""
        workers = list(self._broker.workers.alive())
        upkept, upkept_count = self._broker.jobs.active_ids(JOBS_LOOKED_AT)
        newest = self._broker.jobs.newest_ids(_NEWEST)
        held = dict.fromkeys(job_id for worker in workers for job_id, _ in worker.holding)
        # A job that was active at the last look may have ended, and be too old for the newest ones.
        ids = dict.fromkeys(chain(islice(held, JOBS_LOOKED_AT), upkept, newest, self._active))
        jobs = self._broker.jobs.find(list(ids))
        now_ms = self._broker.connection.about_now_ms()

        kinds = Counter((each.hardware, tuple(each.models), tuple(each.loaded)) for each in workers)
        live = Counter[str]()
        for (hardware, models, _), count in kinds.items():
            live.update({keys.queue(hardware, model): count for model in models})
        loaded = {(hardware, model) for hardware, _, models in kinds for model in models}
        paces = self._paces.of((replace(job, live_workers=live[job.queue]) for job in jobs), now_ms)
        active = [pace for pace in paces if not pace.job.state.ended]
        active.sort(key=lambda pace: (pace.job.started_at is None, -pace.job.created_at.timestamp()))
        ended = [(pace.job.ended_at, pace) for pace in paces if pace.job.ended_at]
        ended.sort(key=itemgetter(0), reverse=True)
        # Some jobs that need upkeep have ended or are gone.
        active_count = upkept_count - len(set(upkept) - {pace.job.id for pace in active})
        pairs = loaded | {(pace.job.hardware, pace.job.model) for pace in active}
        del active[JOBS_LOOKED_AT:]
        self._active = [pace.job.id for pace in active]
        return Overview(
            at=datetime.fromtimestamp(now_ms / 1000, UTC),
            workers=tuple(WorkerState(worker, _encodes(worker, jobs)) for worker in workers),
            gone=tuple(islice(self._broker.workers.gone(), GONE_LOOKED_AT)),
            queues=tuple(_queues(sorted(pairs), live, {model for _, model in loaded}, active, now_ms)),
            active=tuple(active),
            active_count=max(len(active), active_count),
            ended=tuple(pace for _, pace in ended[:ENDED_SHOWN]),
            full_bytes=self._broker.connection.full_bytes(),
            starting=tuple(self._broker.workers.not_ready.all()),
        )


def _queues(
    pairs: Iterable[tuple[str, str]],
    live: Mapping[str, int],
    served: Collection[str],
    active: Iterable[JobPace],
    now_ms: int,
) -> Iterator[QueueState]:
    waiting = [pace.job for pace in active if pace.job.chunks > pace.job.chunks_done]
    for hardware, model in pairs:
        name = keys.queue(hardware, model)
        jobs = [job for job in waiting if job.queue == name]
        oldest = min((job.progressed_at.timestamp() for job in jobs), default=None)
        oldest_s = None if oldest is None else max(0.0, now_ms / 1000 - oldest)
        near = () if live[name] else near_names(model, served)
        yield QueueState(hardware, model, sum(job.chunks - job.chunks_done for job in jobs), oldest_s, live[name], near)


def _encodes(worker: WorkerRow, jobs: Sequence[JobStatus]) -> ServedModel | None:
    """The model that a busy worker encodes with; of several, the model of the chunk that it took first."""
    if worker.activity != "busy":
        return None
    if len(worker.loaded) == 1:
        return next(iter(worker.loaded.values()))
    model_of = {job.id: job.model for job in jobs}
    held = (model_of.get(job_id, "") for job_id, _ in worker.holding)
    return next((worker.models[model] for model in held if model in worker.models), None)


def _pace(job: JobStatus, lately: tuple[float, ...] | None, now_ms: int) -> JobPace:
    """A job's pace: its growth over the last seconds, otherwise its average since its start."""
    if job.state.ended:
        return JobPace(job, *average(job, job.ended_at), seconds_left=None)
    idle_s = now_ms / 1000 - job.progressed_at.timestamp()
    if lately is None and (idle_s > _FRESH_S or not job.live_workers):
        return JobPace(job, None, None, None)
    records_per_s, tokens_per_s = lately or average(job, job.progressed_at)
    left_s = seconds_left(job.records - job.done - job.failed, records_per_s) if job.sealed else None
    return JobPace(job, records_per_s, tokens_per_s, left_s)


def average(job: JobStatus, until: datetime | None) -> tuple[float | None, float | None]:
    """Records and tokens per second from a job's start until then; None if nothing was done."""
    if job.started_at is None or until is None or not job.tokens or until <= job.started_at:
        return None, None
    seconds = (until - job.started_at).total_seconds()
    return (job.done + job.failed) / seconds, job.tokens / seconds
