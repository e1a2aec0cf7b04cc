"""What `embedctl status` says of one job, name by name, and what keeps a job from its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from embedctl.destinations.registry import is_database
from embedctl.queueing.routing import how_to_serve, no_worker_for, redis_full
from embedctl.store import GoneWorker, JobState, JobStatus, Suspect, WorkerRow
from embedctl.waiting.overview import JobPace
from embedctl_config import tenants
from embedctl_config.wire import ErrorCode

#: A name and what is said under it.
Fact = tuple[str, str]


@dataclass(frozen=True, slots=True)
class JobView:
    """A job and its workers at one moment. `high_water_bytes` of its text may wait before its producer does.
    `full_bytes` are what a full Redis uses and may use; None if there is room. `causes` counts the codes of the first
    records that failed, once it has ended."""

    pace: JobPace
    workers: list[WorkerRow]
    gone: list[GoneWorker]
    suspects: list[Suspect]
    high_water_bytes: int
    full_bytes: tuple[int, int] | None = None
    causes: Mapping[ErrorCode, int] = field(default_factory=dict)

    @property
    def job(self) -> JobStatus:
        return self.pace.job


def all_facts(view: JobView) -> list[Fact]:
    """What the job is, then what keeps it from its end, then all else."""
    job = view.job
    first = [] if job.state.ended else list(_blocking(view))
    facts = _plain_facts(view)
    if not job.state.ended:
        facts += [("gone", f"{each.worker.name}, {each.seconds:.0f} s ago: {each.how}") for each in view.gone]
        facts += [fact for suspect in view.suspects if not suspect.stuck for fact in _history(suspect)]
    named = {name for name, _ in first if name}
    return [*facts[:2], *first, *(fact for fact in facts[2:] if fact[0] not in named)]


def state(job: JobStatus) -> str:
    return f"{job.state}{' (stalled)' if job.stalled else ''}"


def stalled(job: JobStatus) -> str:
    return (
        f"The producer of job {job.id} died after {job.records:,} records. Submit its corpus again with the same "
        f"idempotency key or with --resume {job.id}, or cancel the job"
    )


def troubles(job: JobStatus) -> list[Fact]:
    """What went wrong with a job, as far as its status says, the gravest first."""
    found = []
    if job.lost_chunks:
        first, last = job.lost_chunks
        found.append(
            ("lost", f"Redis lost chunks {first} to {last}; the same corpus with --resume {job.id} repairs them")
        )
    if job.mismatch:
        found.append(("mismatch", no_worker_for(job)))
    if job.trouble and not job.state.ended:
        found.append(("trouble", job.trouble))
    return found


def _blocking(view: JobView) -> Iterator[Fact]:
    """What keeps a job from its end, the gravest first."""
    job, workers = view.job, view.workers
    wrong = dict(troubles(job))
    if "lost" in wrong:
        yield "lost", wrong["lost"]
    if view.full_bytes:
        yield "redis", redis_full(view.full_bytes)
    if job.stalled:
        yield "stalled", stalled(job)
    if not workers:
        yield _live(view)
    elif all(worker.precision != job.precision for worker in workers):
        offered = ", ".join(sorted({worker.precision for worker in workers}))
        yield "workers", f"{len(workers)} live, but they offer {offered}, and the job asks for {job.precision}"
    if "mismatch" in wrong:
        yield "mismatch", wrong["mismatch"]
    hung = [_hung(worker) for worker in workers if worker.activity == "hung"]
    if len(hung) == len(workers):
        yield from hung
    for suspect in view.suspects:
        if suspect.stuck:
            yield from _history(suspect)
    if job.state is JobState.SUBMITTING and job.producer_alive and job.waiting_bytes > view.high_water_bytes:
        yield (
            "waits",
            f"its producer waits for workers to make room: {job.waiting_bytes:,} bytes of text are not encoded",
        )
    if job.waits_for_reader:
        place = job.drained_to or "DIR"
        where = f"'{place}'" if is_database(place) else f"{place}/"
        yield (
            "waits",
            f"waiting for a reader: Redis holds {job.result_bytes:,} bytes of its results; "
            f"embedctl fetch {job.id} -o {where}",
        )
    if "trouble" in wrong:
        yield "trouble", wrong["trouble"]


def _plain_facts(view: JobView) -> list[Fact]:
    """Everything that the job and its workers say of themselves, without empty facts."""
    job, workers = view.job, view.workers
    ended_by = f" (ended by {job.stopped_by})" if job.stopped_by and job.state is JobState.FAILED else ""
    facts = [
        ("job", job.id),
        ("state", state(job) + ended_by),
        ("model", job.model),
        ("class", f"{job.hardware} ({job.precision})"),
        *([("tenant", job.tenant)] if job.tenant != tenants.DEFAULT else []),
        *([("lane", job.lane)] if job.lane != tenants.NORMAL else []),
        _live(view),
        *(("engine", line) for line in _engines(job.model, workers)),
        *(_hung(worker) for worker in workers if worker.activity == "hung"),
        *(
            ("bounds", f"{worker.name} is held to {worker.bounds} in place of {worker.precision}'s own")
            for worker in workers
            if worker.bounds
        ),
        ("records", f"{job.records:,}{'' if job.sealed else ' so far'}"),
        ("done", f"{job.done:,}"),
        ("failed", _failed(view)),
        ("truncated", f"{job.truncated:,}"),
        ("chunks", f"{job.chunks_done:,} of {job.chunks:,}"),
        ("drained", f"{job.drained_chunks:,} chunks to {job.drained_to}" if job.drained_to else ""),
        (
            "repeated",
            f"leases lapsed: {job.lapsed:,}, of workers gone: {job.deaths:,}, late results: {job.refused:,}"
            if job.lapsed or job.refused
            else "",
        ),
        ("created", _when(job.created_at)),
        ("started", _when(job.started_at)),
        ("ended", _when(job.ended_at)),
        ("expires", f"in {job.expires_in.total_seconds() / 3600:,.1f} hours"),
        *troubles(job),
    ]
    return [(name, value) for name, value in facts if value]


def _failed(view: JobView) -> str:
    """How many records failed; and why, as far as that is known."""
    causes, known = ", ".join(f"{code} {count:,}" for code, count in view.causes.items()), sum(view.causes.values())
    first = f"the first {known:,}: " if known < view.job.failed else ""
    return f"{view.job.failed:,}" + (f" ({first}{causes})" if causes else "")


def _live(view: JobView) -> Fact:
    """The live workers by what they do; if there is none, why, or how to start one."""
    job, workers = view.job, view.workers
    activities = Counter(worker.activity for worker in workers)
    live = f"{len(workers)} live"
    if activities:
        live += f": {', '.join(f'{count} {activity}' for activity, count in sorted(activities.items()))}"
    elif job.hindrance and not view.full_bytes:
        live += f". {job.hindrance}"
    elif not (job.hindrance or job.state.ended):
        live += f"{'.' if job.near_models else ';'} {how_to_serve(job.hardware, job.model, job.near_models)}"
    return "workers", live


def _engines(model: str, workers: Sequence[WorkerRow]) -> list[str]:
    """What executes a model, and how fast all workers together have executed it so far."""
    rates: dict[str, float] = {}
    for worker in workers:
        served = worker.models.get(model)
        if served is not None and served.engine:
            rates[served.engine] = rates.get(served.engine, 0.0) + served.tokens_per_s
    return [f"{engine}; {rate:,.0f} tokens/s" if rate else engine for engine, rate in sorted(rates.items())]


def _hung(worker: WorkerRow) -> Fact:
    return "hung", f"{worker.name}: no batch finished for {worker.quiet_s:.0f} s"


def _history(suspect: Suspect) -> Iterator[Fact]:
    """What is known of a chunk whose owners died: a line for it and one for each death."""
    so_far = f"rows given up: {', '.join(map(str, suspect.given_up))}" if suspect.given_up else "no row named yet"
    yield "stuck" if suspect.stuck else "suspect", f"chunk {suspect.chunk}: encoded alone, record by record; {so_far}"
    for death in suspect.deaths:
        at_row = "" if death.row is None else f" at row {death.row}"
        yield "", f"{_when(death.at)}: {death.worker} died{at_row}"


def _when(moment: datetime | None) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC" if moment else ""
