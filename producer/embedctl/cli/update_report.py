"""What `--sync` of a file and `--cache` say at the end."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from embedctl.cli.json_forms import job_form, plain
from embedctl.cli.results import exit_status
from embedctl.store import JobState
from embedctl.terminal.progress import JobProgress
from embedctl_config.errors import ExitStatus

if TYPE_CHECKING:
    from embedctl.changes.update import Outcome


def report_update(outcome: Outcome, progress: JobProgress, *, as_json: bool) -> ExitStatus:
    """Say what an update did; returns the exit status of the command."""
    if outcome.written:
        progress.say("Wrote " + ", ".join(map(str, outcome.written)))
    progress.say(_sentence(outcome), prose=True)
    if as_json:
        click.echo(json.dumps(_form(outcome), default=plain))
    return exit_status(outcome.status)


def _sentence(outcome: Outcome) -> str:
    status = outcome.status
    line = f"{status.done:,} vectors"
    if status.dim:
        line += f" of {status.dim} dimensions"
    line += f": {outcome.unchanged:,} unchanged, {outcome.cached:,} from the cache, {outcome.encoded:,} texts encoded"
    line += f", of which {status.failed:,} failed" if status.failed else ""
    if status.stopped_by is not None:
        why = (
            "the job was stopped"
            if status.state is JobState.STOPPED
            else "the error budget (--max-errors) ended the job"
        )
        line += f"; {status.records - status.done - status.failed:,} were not encoded, because {why}"
    return line


def _form(outcome: Outcome) -> dict[str, Any]:
    status = outcome.status
    return {
        **job_form(status),
        "id": outcome.job,
        "vectors": status.done,
        "dimensions": status.dim,
        "unchanged": outcome.unchanged,
        "cached": outcome.cached,
        "encoded": outcome.encoded,
        "files": [str(file) for file in outcome.written],
    }
