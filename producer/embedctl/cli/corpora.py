"""Submitting a corpus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from embedctl import enqueue
from embedctl.broker import Broker
from embedctl.cli.options import corpus_options, option, output_option
from embedctl.cli.results import bar_beside, exit_status, report, save, wait_for
from embedctl.corpus import Corpus, open_corpus
from embedctl.estimate import estimate
from embedctl.job import Job
from embedctl.kept import parse_keep
from embedctl.output import check_output, is_stdout
from embedctl.records import Record
from embedctl.routing import no_worker
from embedctl.terminal.progress import JobProgress
from embedctl_config.errors import InputError
from embedctl_config.printable import printable
from embedctl_config.settings import Settings, load_settings


@dataclass(frozen=True, slots=True)
class CorpusChoice:
    """A corpus and the options of its job, from the command line."""

    corpus: Corpus
    options: enqueue.JobOptions
    skip_bad_lines: bool

    @classmethod
    def of(
        cls,
        settings: Settings,
        *,
        corpus_path: str,
        format: str | None,  # noqa: A002  (the flag's name)
        text_field: str,
        id_field: str,
        keep: str | None,
        skip_bad_lines: bool,
        max_errors: str | None,
        **options: Any,
    ) -> CorpusChoice:
        fields = parse_keep(keep)
        corpus = open_corpus(
            corpus_path,
            file_format=format,
            text_field=text_field,
            id_field=id_field,
            keep=fields,
            max_bytes=settings.max_text_bytes,
        )
        most, share = enqueue.parse_budget(max_errors)
        chosen = enqueue.JobOptions(**options, max_errors=most, max_errors_share=share, keep=fields)
        return cls(corpus, chosen, skip_bad_lines)

    def check(self) -> None:
        """Find a bad line before anything is queued, if the corpus is a file, which can be read twice.

        Raises:
            InputError: a line is not a record, there is no record, or there is no such file.
        """
        if self.corpus.rereadable and not self.skip_bad_lines:
            self.corpus.check()
        elif self.corpus.path != "-" and not Path(self.corpus.path).exists():
            raise InputError(f"{self.corpus.name} can't be read: no such file")

    def records(self) -> Iterator[Record]:
        """The records.

        Raises:
            InputError: a line is not a record, or there is no record.
        """
        empty = True
        for record in self.corpus.records(_report_skipped if self.skip_bad_lines else None):
            empty = False
            yield record
        if empty:
            raise InputError(f"{self.corpus.name} holds no record")


@click.command()
@corpus_options
@option(
    "--class", "hardware", help="The hardware class; auto: the fastest class with live workers. Default: the setting."
)
@option("--ttl", "ttl_s", type=float, help="Seconds to keep the job after its end. Default: the setting.")
@option(
    "--idempotency-key",
    help="Your own key for this job: submitting again with the same key finds or continues the job.",
)
@option("--resume", metavar="JOB", help="Continue this job, whose submission was interrupted. Needs the same corpus.")
@option("--wait", is_flag=True, help="Wait until the job has ended.")
@output_option()
@option("--dry-run", is_flag=True, help="Queue nothing; print an estimate of the job's size and duration.")
@click.pass_context
def submit(
    ctx: click.Context,
    /,
    *,
    wait: bool,
    output: Path | None,
    dry_run: bool,
    quiet: bool,
    ttl_s: float | None,
    **options: Any,
) -> None:
    """Queue CORPUS and print the job's id.

    CORPUS is a .jsonl, .csv, .tsv, .txt or .parquet file, optionally compressed (.gz or .zst), or - for standard
    input. With --output, the vectors are written while workers encode. If that is interrupted, `embedctl fetch`
    continues it.
    """
    settings = load_settings()
    choice = CorpusChoice.of(settings, ttl=ttl_s, **options)
    if output is not None:
        check_output(output, choice.options.keep)
    choice.check()
    broker = Broker.shared(settings)
    if dry_run:
        click.echo(estimate(broker, choice.records(), choice.options).describe())
        return
    with JobProgress(quiet=quiet, bar=bar_beside(output)) as progress:
        job = submit_choice(broker, choice, progress)
        click.echo(job.id, err=is_stdout(output))  # what is asked for has standard output to itself
        if output is not None:
            save(job, output, progress)
        elif wait:
            wait_for(job, progress)
    status = job.status()
    if not status.state.ended and not status.live_workers:
        click.echo(printable(no_worker(status.hardware, status.model)), err=True)
    if status.state.ended:
        report(status, progress)
    ctx.exit(exit_status(status))


def submit_choice(broker: Broker, choice: CorpusChoice, progress: JobProgress) -> Job:
    """Queue a corpus.

    Raises:
        KeyboardInterrupt: says how to continue.
    """
    try:
        return enqueue.submit(broker, choice.records(), choice.options, progress.submitting)
    except KeyboardInterrupt:
        if choice.options.idempotency_key is None and choice.options.resume is None:
            raise KeyboardInterrupt(
                "the half-submitted job is cancelled (with --idempotency-key, the same command would continue it)"
            ) from None
        raise KeyboardInterrupt("the same command continues where it stopped") from None


def _report_skipped(error: InputError) -> None:
    click.echo(f"skipped {error}", err=True)
