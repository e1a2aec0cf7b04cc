"""Commands that change jobs that are there: retry, stop, cancel, discard. Each takes several jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from embedctl.cli.json_forms import printed_array
from embedctl.cli.options import complete_job, duration, json_option, option
from embedctl.jobs.job import Job
from embedctl.queueing.broker import Broker
from embedctl.store import JobState, JobStatus
from embedctl_config.errors import (
    BrokerRefused,
    BrokerUnavailable,
    EmbedctlError,
    ExitStatus,
    JobNotFound,
    NotPermitted,
)
from embedctl_config.loading import load_settings
from embedctl_config.printable import printable

#: Does something with a job. Returns what was done, in words and as facts.
Deed = Callable[[Job], tuple[str, Mapping[str, Any]]]

_ENDED = [str(state) for state in JobState if state.ended]


def _command(deed: Deed) -> click.Command:
    """A command that does a deed to each job that it is given. The deed gives it its name and its help."""

    @click.command(deed.__name__, help=deed.__doc__)
    @click.argument("job_ids", metavar="JOB...", nargs=-1, required=True, shell_complete=complete_job)
    @json_option
    @click.pass_context
    def command(ctx: click.Context, /, job_ids: tuple[str, ...], as_json: bool) -> None:
        with _outcomes(ctx, as_json=as_json) as outcomes:
            _do_to_each(outcomes, job_ids, deed)

    return command


@_command
def retry(job: Job) -> tuple[str, Mapping[str, Any]]:
    """Queue the failed records of ended jobs again."""
    records = job.retry_failed()
    return f"{records:,} records queued again", {"records": records}


@_command
def stop(job: Job) -> tuple[str, Mapping[str, Any]]:
    """End jobs now and keep what is done, for `embedctl fetch`. A job that has already ended is left unchanged.

    To resume a stopped job, submit the same corpus with --resume JOB or with its idempotency key.
    """
    status = job.stop()
    facts = {"state": status.state, "records": status.records, "done": status.done, "failed": status.failed}
    return f"{status.state}; {status.done:,} of {status.records:,} records have a vector", facts


@_command
def cancel(job: Job) -> tuple[str, Mapping[str, Any]]:
    """End jobs now and free their data in Redis, vectors too. A job that has already ended is left unchanged."""
    state = job.cancel().state
    return state, {"state": state}


@click.command()
@click.argument("job_ids", metavar="[JOB]...", nargs=-1, shell_complete=complete_job)
@click.option(
    "--state",
    "states",
    type=click.Choice(_ENDED),
    multiple=True,
    help="Discard all jobs in this state. Can be repeated.",
)
@click.option(
    "--older-than",
    type=duration,
    metavar="DURATION",
    help="Discard all jobs that ended longer ago than this, such as 30m, 12h or 7d. With --state: only those of them "
    "in this state.",
)
@option("--dry-run", is_flag=True, help="Discard nothing; print the jobs that would be discarded.")
@json_option
@click.pass_context
def discard(
    ctx: click.Context,
    /,
    job_ids: tuple[str, ...],
    states: tuple[str, ...],
    older_than: timedelta | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Delete jobs and all their data from Redis now. Vectors that you have not fetched are lost.

    Name the jobs, or choose them with --state and --older-than, which never choose a job that has not ended.
    """
    by_filter = bool(states) or older_than is not None
    if bool(job_ids) == by_filter:
        raise click.UsageError("Name the jobs to discard, or choose them with --state or --older-than.")
    verb = "would be discarded" if dry_run else "discarded"

    def deed(job: Job) -> tuple[str, Mapping[str, Any]]:
        if dry_run:
            job.status()  # it is there, and can be read
        else:
            job.discard()
        return verb, {"discarded": not dry_run}

    with _outcomes(ctx, as_json=as_json, asked_for=dry_run) as outcomes:
        if not by_filter:
            _do_to_each(outcomes, job_ids, deed)
            return
        _do_to_ended(outcomes, states, older_than or timedelta(), deed)
        if not as_json:
            click.echo(f"{outcomes.done:,} jobs {verb}", err=True)


class _Outcomes:
    """Prints what became of each job, or gives its facts to `add`, and keeps the status of the first failure. If they
    are `asked_for`, the outcomes are what the user wants to know, and not only a message."""

    def __init__(self, add: Callable[[object], None] | None, *, asked_for: bool) -> None:
        self._add = add
        self._asked_for = asked_for
        self.status: int = ExitStatus.SUCCESS
        self.done = 0

    def did(self, job_id: str, said: str, facts: Mapping[str, Any]) -> None:
        self.done += 1
        if self._add is None:
            click.echo(printable(f"{job_id}: {said}"), err=not self._asked_for)
        else:
            self._add({"id": job_id, **facts})

    def failed(self, error: EmbedctlError, job_id: str = "") -> None:
        """Nothing was done with a job, or with any more jobs."""
        self.status = self.status or error.exit_code
        click.echo(printable(f"embedctl: {error}", lines=True), err=True)
        if job_id and self._add is not None:
            self._add({"id": job_id, "error": str(error)})


@contextmanager
def _outcomes(ctx: click.Context, *, as_json: bool, asked_for: bool = False) -> Iterator[_Outcomes]:
    """Take outcomes, then exit with the status of the first failure. An error ends the block, and not the JSON."""
    with printed_array() if as_json else nullcontext() as add:
        outcomes = _Outcomes(add, asked_for=asked_for)
        try:
            yield outcomes
        except EmbedctlError as error:
            outcomes.failed(error)
    ctx.exit(outcomes.status)


def _do_to_each(outcomes: _Outcomes, given: Sequence[str], deed: Deed) -> None:
    broker = Broker.shared(load_settings())
    # All ids first: if two jobs end alike, the ending that both have must not name the second once the first is gone.
    found: dict[str, JobNotFound | None] = {}
    for each in given:
        try:
            found[broker.jobs.resolve(each)] = None
        except JobNotFound as error:
            found[each] = error
    for job_id, unknown in found.items():
        if unknown is None:
            _do(outcomes, Job(job_id, broker), deed)
        else:
            outcomes.failed(unknown, job_id)


def _do_to_ended(outcomes: _Outcomes, states: Sequence[str], longer_ago: timedelta, deed: Deed) -> None:
    """Do something with each job that ended so long ago, in any state or in one of these."""
    broker = Broker.shared(load_settings())
    before = datetime.fromtimestamp(broker.connection.now_ms() / 1000, UTC) - longer_ago

    def is_meant(job: JobStatus) -> bool:
        ended = job.ended_at if job.state.ended else None
        return ended is not None and ended <= before and (not states or job.state in states)

    for job in broker.jobs.newest():
        if is_meant(job):
            # Asked again, because a job that was read with many others may have been retried since.
            _do(outcomes, Job(job.id, broker), deed, is_meant)


def _do(outcomes: _Outcomes, job: Job, deed: Deed, is_meant: Callable[[JobStatus], bool] | None = None) -> None:
    """Do something with a job, or with a job that is meant; that one may be gone, a job that was named may not.
    BrokerUnavailable, NotPermitted: no other job would fare better."""
    try:
        if is_meant is None or is_meant(job.status()):
            outcomes.did(job.id, *deed(job))
    except EmbedctlError as error:
        if isinstance(error, JobNotFound) and is_meant is not None:
            return
        if isinstance(error, BrokerUnavailable | NotPermitted) and not isinstance(error, BrokerRefused):
            raise
        outcomes.failed(error, job.id)
