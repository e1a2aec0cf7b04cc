"""Looking at everything, or at one job: once, or again and again."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Generic, TypeVar

import click
from rich.console import Console, Group
from rich.text import Text

from embedctl.cli.json_forms import overview_json, view_json
from embedctl.cli.options import complete_job, json_option, option
from embedctl.jobs.job import Job
from embedctl.queueing.broker import Broker
from embedctl.store import JobStatus
from embedctl.store.connection import without_password
from embedctl.terminal.drawing import job_lines, overview_lines
from embedctl.terminal.job_facts import JobView, all_facts
from embedctl.waiting.overview import Gatherer, Overview, Paces
from embedctl_config.errors import BrokerUnavailable, JobError, NotPermitted
from embedctl_config.loading import load_settings
from embedctl_config.printable import printable
from embedctl_config.wire import ErrorCode

T = TypeVar("T")

#: Of how many chunks, and of how many records, it is said why they failed.
_CHUNKS_READ, _CAUSES = 1000, 20


@click.command()
@click.argument("job_id", metavar="[JOB]", required=False, shell_complete=complete_job)
@option(
    "--watch",
    "-w",
    is_flag=True,
    help="Refresh every 2 s until you press q or Ctrl-C, or the job has ended. Needs a terminal, except with --json, "
    "which prints one line per refresh.",
)
@json_option
def status(job_id: str | None, watch: bool, as_json: bool) -> None:
    """Show all workers, queues and jobs, or one job."""
    broker = Broker.shared(load_settings())
    if job_id is None:
        _show(_everything(broker), watch=watch, as_json=as_json)
    else:
        _show(_one_job(broker, job_id), watch=watch, as_json=as_json)


@dataclass(frozen=True, slots=True)
class _Subject(Generic[T]):
    """Something to look at, and the forms in which it is shown: printed for people, or drawn in lines, given the
    columns of the terminal and the most rows. A `look` raises BrokerUnavailable if Redis can't be reached. After the
    last one, nothing changes any more."""

    title: str
    look: Callable[[], T]
    print_once: Callable[[T], None]
    to_json: Callable[[T], str]
    draw: Callable[[T, int, int], Sequence[Text]]
    is_last: Callable[[T], bool]


def _show(subject: _Subject[T], *, watch: bool, as_json: bool) -> None:
    if not watch:
        seen = subject.look()
        if as_json:
            click.echo(subject.to_json(seen))
        else:
            subject.print_once(seen)
        return
    try:
        if as_json:
            _print_lines(subject)
        else:
            _draw(subject)
    except KeyboardInterrupt:
        # Ctrl-C is how a user leaves it.
        return


def _draw(subject: _Subject[T]) -> None:
    # Imported only here: not every system that submits jobs has such terminals.
    from embedctl.terminal.watch import can_draw, watch

    if not can_draw():
        raise click.UsageError(
            "--watch draws on a terminal, and standard output is not one. Omit --watch to look once, or add --json for "
            "one line every 2 s."
        )
    seen = watch(subject.look, subject.draw, title=subject.title, until=subject.is_last)
    if subject.is_last(seen):
        subject.print_once(seen)


def _print_lines(subject: _Subject[T]) -> None:
    from embedctl.terminal.watch import looks

    for seen in looks(subject.look):
        if isinstance(seen, BrokerUnavailable):
            click.echo(json.dumps({"at": datetime.now(UTC).isoformat(), "unavailable": str(seen)}))
            continue
        click.echo(subject.to_json(seen))
        if subject.is_last(seen):
            return


def _everything(broker: Broker) -> _Subject[Overview]:
    return _Subject(
        title=f"embedctl at {without_password(broker.settings.redis_url)}",
        look=Gatherer(broker).look,
        print_once=_print_overview,
        to_json=overview_json,
        draw=overview_lines,
        is_last=lambda _: False,
    )


def _print_overview(overview: Overview) -> None:
    console = Console(highlight=False)
    # Lines are cut to the terminal's width only if standard output is a terminal.
    width = console.width if sys.stdout.isatty() else None
    console.print(Group(*overview_lines(overview, width)), soft_wrap=True)


def _one_job(broker: Broker, job_id: str) -> _Subject[JobView]:
    job, paces = Job(broker.jobs.resolve(job_id), broker), Paces()

    def look() -> JobView:
        (pace,) = paces.of([job.status()], broker.connection.about_now_ms())
        room = broker.high_water()
        full = None if pace.job.state.ended else broker.connection.full_bytes()
        return JobView(pace, job.workers(), job.gone_workers(), job.suspects(), room, full, _causes(job, pace.job))

    return _Subject(
        title="embedctl status",
        look=look,
        print_once=_print_job,
        to_json=view_json,
        draw=lambda view, width, height: job_lines(view.pace, all_facts(view), width, height),
        is_last=lambda view: view.job.state.ended,
    )


def _causes(job: Job, status: JobStatus) -> Counter[ErrorCode]:
    """The codes of the first records of an ended job that failed. None where they can't be read here, as by a monitor,
    who sees no results: `embedctl errors` says why not."""
    causes = Counter[ErrorCode]()
    if status.failed and status.state.ended:
        with suppress(JobError, NotPermitted):
            causes.update(error.code for error in islice(job.iter_errors(chunks=_CHUNKS_READ), _CAUSES))
    return causes


def _print_job(view: JobView) -> None:
    for name, value in all_facts(view):
        click.echo(printable(f"{name:<10} {value}"))
