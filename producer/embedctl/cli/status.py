"""Looking at everything, or at one job: once, or again and again."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, TypeVar

import click
from rich.console import Console
from rich.text import Text

from embedctl.broker import Broker
from embedctl.cli.options import json_option, option
from embedctl.job import Job
from embedctl.overview import Gatherer, JobPace, Overview, Paces
from embedctl.routing import start_command
from embedctl.store import GoneWorker, JobState, JobStatus, Suspect, WorkerRow
from embedctl.store.connection import without_password
from embedctl.terminal.drawing import job_lines, overview_lines
from embedctl_config.errors import BrokerUnavailable
from embedctl_config.printable import printable
from embedctl_config.settings import load_settings

T = TypeVar("T")

#: A name and what is said under it.
Fact = tuple[str, str]


@click.command()
@click.argument("job_id", metavar="[JOB]", required=False)
@option(
    "--watch",
    "-w",
    is_flag=True,
    help="Look every 2 s until q or Ctrl-C is pressed, or the job has ended. Needs a terminal; or, with --json, prints "
    "a line each time.",
)
@json_option
def status(job_id: str | None, watch: bool, as_json: bool) -> None:
    """Show how everything stands: workers, queues and jobs; or one job."""
    broker = Broker.shared(load_settings())
    if job_id is None:
        _show(_everything(broker), watch=watch, as_json=as_json)
    else:
        _show(_one_job(broker, job_id), watch=watch, as_json=as_json)


@dataclass(frozen=True, slots=True)
class _View(Generic[T]):
    """Something to look at, and the forms in which it is shown.

    Attributes:
        look: raises BrokerUnavailable when Redis can't be reached.
        tell: prints it once, for people.
        draw: lines for so many columns and at most so many rows.
        is_last: whether nothing will change any more.
    """

    title: str
    look: Callable[[], T]
    tell: Callable[[T], None]
    to_json: Callable[[T], str]
    draw: Callable[[T, int, int], Sequence[Text]]
    is_last: Callable[[T], bool]


def _show(view: _View[T], *, watch: bool, as_json: bool) -> None:
    if not watch:
        seen = view.look()
        if as_json:
            click.echo(view.to_json(seen))
        else:
            view.tell(seen)
        return
    try:
        if as_json:
            _print_lines(view)
        else:
            _draw(view)
    except KeyboardInterrupt:
        # That is how one leaves it.
        return


def _draw(view: _View[T]) -> None:
    # Only here: not every system that submits jobs has such terminals.
    from embedctl.terminal.watch import can_draw, watch

    if not can_draw():
        raise click.UsageError(
            "--watch draws on a terminal, and standard output is none. Leave it out to look once, or add --json for a "
            "line every 2 s."
        )
    seen = watch(view.look, view.draw, title=view.title, until=view.is_last)
    if view.is_last(seen):
        view.tell(seen)


def _print_lines(view: _View[T]) -> None:
    from embedctl.terminal.watch import looks

    for seen in looks(view.look):
        if isinstance(seen, BrokerUnavailable):
            click.echo(json.dumps({"at": datetime.now(UTC).isoformat(), "unavailable": str(seen)}))
            continue
        click.echo(view.to_json(seen))
        if view.is_last(seen):
            return


# Everything


def _everything(broker: Broker) -> _View[Overview]:
    return _View(
        title=f"embedctl at {without_password(broker.settings.redis_url)}",
        look=Gatherer(broker).look,
        tell=_tell_overview,
        to_json=_overview_json,
        draw=overview_lines,
        is_last=lambda _: False,
    )


def _tell_overview(overview: Overview) -> None:
    console = Console(highlight=False)
    # What is not read by a person at a terminal is not cut to the width of one.
    width = console.width if sys.stdout.isatty() else None
    for line in overview_lines(overview, width):
        console.print(line, soft_wrap=True)


def _overview_json(overview: Overview) -> str:
    facts = {
        "at": overview.at,
        "live_workers": len(overview.workers),
        "rows_per_s": overview.rows_per_s,
        "tokens_per_s": overview.tokens_per_s,
        "tickets": overview.tickets,
        "active_jobs": overview.active_count,
        "workers": [_worker_facts(each.row) for each in overview.workers],
        "gone": [asdict(each) for each in overview.gone],
        "queues": [asdict(queue) for queue in overview.queues],
        "jobs": [
            {
                **_job_facts(pace.job),
                "records_per_s": pace.records_per_s,
                "tokens_per_s": pace.tokens_per_s,
                "seconds_left": pace.seconds_left,
            }
            for pace in (*overview.active, *overview.ended)
        ],
    }
    return json.dumps(facts, default=_as_json)


# One job


@dataclass(frozen=True, slots=True)
class _JobSight:
    pace: JobPace
    workers: list[WorkerRow]
    gone: list[GoneWorker]
    suspects: list[Suspect]
    #: How much text of it may wait before its producer does.
    high_water_bytes: int

    @property
    def job(self) -> JobStatus:
        return self.pace.job


def _one_job(broker: Broker, job_id: str) -> _View[_JobSight]:
    job, paces = Job(job_id, broker), Paces()

    def look() -> _JobSight:
        (pace,) = paces.of([job.status()], broker.connection.about_now_ms())
        room = broker.settings.high_water_bytes
        return _JobSight(pace, job.workers(), job.gone_workers(), job.suspects(), room)

    return _View(
        title="embedctl status",
        look=look,
        tell=lambda seen: click.echo("\n".join(printable(f"{name:<10} {value}") for name, value in _all_facts(seen))),
        to_json=_job_sight_json,
        draw=lambda seen, width, height: job_lines(seen.pace, _all_facts(seen), width, height),
        is_last=lambda seen: seen.job.state.ended,
    )


def _all_facts(seen: _JobSight) -> list[Fact]:
    """What `status` shows of a job: what it is, what keeps it from its end, and all else."""
    job = seen.job
    first = [] if job.state.ended else list(_blocking(seen))
    lines = _facts(job, seen.workers)
    if not job.state.ended:
        lines += [("gone", f"{each.worker.name}, {each.seconds:.0f} s ago: {each.how}") for each in seen.gone]
        lines += [line for suspect in seen.suspects if not suspect.stuck for line in _history(suspect)]
    said = {name for name, _ in first if name}
    return [*lines[:2], *first, *(line for line in lines[2:] if line[0] not in said)]


def _blocking(seen: _JobSight) -> Iterator[Fact]:
    """What keeps a job from its end, the gravest first."""
    job, workers = seen.job, seen.workers
    if job.lost_chunks:
        yield _lost(job)
    if job.stalled:
        yield (
            "stalled",
            f"its producer died after {job.records:,} records. Submit its corpus again with the same idempotency key "
            f"or with --resume {job.id}, or cancel the job",
        )
    if not workers:
        yield _alive(job, workers)
    elif all(worker.precision != job.precision for worker in workers):
        offered = ", ".join(sorted({worker.precision for worker in workers}))
        yield "workers", f"{len(workers)} live, but they offer {offered}, and the job asks for {job.precision}"
    fingerprints = {worker.models[job.model].fingerprint for worker in workers if job.model in worker.models}
    if job.mismatch and job.model_fingerprint not in fingerprints:
        yield _mismatch(job)
    hung = [_hung(worker) for worker in workers if worker.activity == "hung"]
    if len(hung) == len(workers):
        yield from hung
    for suspect in seen.suspects:
        if suspect.stuck:
            yield from _history(suspect)
    if job.state is JobState.SUBMITTING and job.producer_alive and job.waiting_bytes > seen.high_water_bytes:
        yield (
            "waits",
            f"its producer waits for workers to make room: {job.waiting_bytes:,} bytes of text are not encoded",
        )
    if job.trouble:
        yield "trouble", job.trouble


def _job_sight_json(seen: _JobSight) -> str:
    return job_json(
        seen.job,
        workers=[_worker_facts(worker) for worker in seen.workers],
        gone=[asdict(each) for each in seen.gone],
        suspects=[asdict(each) for each in seen.suspects],
    )


def job_json(job: JobStatus, **more: Sequence[Any]) -> str:
    """A job's facts as a JSON object in a line, with what stands beside them."""
    return json.dumps({**_job_facts(job), **more}, default=_as_json)


def _job_facts(job: JobStatus) -> dict[str, Any]:
    return {**asdict(job), "stalled": job.stalled}


def _worker_facts(worker: WorkerRow) -> dict[str, Any]:
    return {**asdict(worker), "activity": worker.activity}


def _engines(model: str, workers: Sequence[WorkerRow]) -> list[str]:
    """What executes a model, and how fast all workers that use it were so far."""
    rates: dict[str, float] = {}
    for worker in workers:
        served = worker.models.get(model)
        if served is not None and served.engine:
            rates[served.engine] = rates.get(served.engine, 0.0) + served.tokens_per_s
    return [f"{engine}; {rate:,.0f} tokens/s" if rate else engine for engine, rate in sorted(rates.items())]


def _alive(job: JobStatus, workers: Sequence[WorkerRow]) -> Fact:
    activities = Counter(worker.activity for worker in workers)
    alive = f"{len(workers)} live"
    if activities:
        alive += f": {', '.join(f'{count} {activity}' for activity, count in sorted(activities.items()))}"
    elif not job.state.ended:
        alive += f"; start one: {start_command(job.hardware, job.model)}"
    return "workers", alive


def _hung(worker: WorkerRow) -> Fact:
    return "hung", f"{worker.name}: no batch finished for {worker.quiet_s:.0f} s"


def _mismatch(job: JobStatus) -> Fact:
    return "mismatch", f"{job.mismatch} was refused: {job.pinned_by} serves {job.model_fingerprint}"


def _lost(job: JobStatus) -> Fact:
    first, last = job.lost_chunks or (0, 0)
    return "lost", f"lost by the broker: chunks {first} to {last}; the same corpus with --resume {job.id} repairs them"


def _facts(job: JobStatus, workers: Sequence[WorkerRow]) -> list[Fact]:
    """The plain facts, name by name; leaves out what has nothing to say."""
    state = f"{job.state}{' (stalled)' if job.stalled else ''}"
    if job.stopped_by is not None:
        state += f" (ended by {job.stopped_by})"
    facts = [
        ("job", job.id),
        ("state", state),
        ("model", job.model),
        ("class", f"{job.hardware} ({job.precision})"),
        _alive(job, workers),
        *(("engine", line) for line in _engines(job.model, workers)),
        *(_hung(worker) for worker in workers if worker.activity == "hung"),
        *(
            ("bounds", f"{worker.name} is held to {worker.bounds} in place of {worker.precision}'s own")
            for worker in workers
            if worker.bounds
        ),
        ("records", f"{job.records:,}{'' if job.sealed else ' so far'}"),
        ("done", f"{job.done:,}"),
        ("failed", f"{job.failed:,}"),
        ("truncated", f"{job.truncated:,}"),
        ("chunks", f"{job.chunks_done:,} of {job.chunks:,}"),
        (
            "repeated",
            f"leases lapsed: {job.lapsed:,}, of workers gone: {job.deaths:,}, late results: {job.refused:,}"
            if job.lapsed or job.refused
            else "",
        ),
        ("created", _when(job.created_at)),
        ("started", _when(job.started_at)),
        ("ended", _when(job.ended_at)),
        ("kept", f"{job.expires_in.total_seconds() / 3600:,.1f} hours more"),
    ]
    if job.mismatch:
        facts.append(_mismatch(job))
    if job.trouble and not job.state.ended:
        facts.append(("trouble", job.trouble))
    if job.lost_chunks:
        facts.append(_lost(job))
    return [(name, value) for name, value in facts if value]


def _when(moment: datetime | None) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC" if moment else ""


def _history(suspect: Suspect) -> Iterator[Fact]:
    """What is known of a chunk whose owners died, a line for it and one for each death."""
    so_far = f"rows given up: {', '.join(map(str, suspect.given_up))}" if suspect.given_up else "no row named yet"
    yield "stuck" if suspect.stuck else "suspect", f"chunk {suspect.chunk}: encoded alone, record by record; {so_far}"
    for death in suspect.deaths:
        at_row = "" if death.row is None else f" at row {death.row}"
        yield "", f"{_when(death.at)}: {death.worker} died{at_row}"


def _as_json(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    raise TypeError(f"{type(value).__name__} has no JSON form")
