"""Submitting a corpus."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from embedctl import enqueue
from embedctl.broker import Broker
from embedctl.cli.addresses import refuse_addresses
from embedctl.cli.completion import complete_class, complete_job
from embedctl.cli.json_forms import result_json
from embedctl.cli.options import corpus_options, json_option, no_clobber_option, option, output_option
from embedctl.cli.results import check_destination, exit_status, may_move, report, save, summary, wait_for
from embedctl.corpus import Corpus, open_corpus
from embedctl.drain.alongside import Alongside
from embedctl.drain.places import Place
from embedctl.estimate import Estimate, estimate
from embedctl.job import Job
from embedctl.kept import parse_keep
from embedctl.output import files_of, is_stdout
from embedctl.records import Record
from embedctl.routing import no_worker
from embedctl.store import JobStatus
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
        corpus_paths: tuple[str, ...],
        format: str | None,  # noqa: A002  (the flag's name)
        text_field: str,
        id_field: str,
        keep: str | None,
        skip_bad_lines: bool,
        limit: int | None,
        max_errors: str | None,
        output: Path | Place | None = None,
        drain: bool = False,
        **options: Any,
    ) -> CorpusChoice:
        refuse_addresses(corpus_paths, click.get_current_context().info_name)
        folder = output if isinstance(output, Place) else None
        fields = parse_keep(keep)
        corpus = open_corpus(
            *corpus_paths,
            file_format=format,
            text_field=text_field,
            id_field=id_field,
            keep=fields,
            max_bytes=settings.max_text_bytes,
            limit=limit,
            written=[path.resolve() for path in files_of(output)] if isinstance(output, Path) else [],
        )
        if folder is not None:
            _refuse_corpus_in(folder, corpus)
        most, share = enqueue.parse_budget(max_errors)
        chosen = enqueue.JobOptions(
            **options, max_errors=most, max_errors_share=share, keep=fields, drain=drain or folder is not None
        )
        return cls(corpus, chosen, skip_bad_lines)

    def keyed(self, key: str | None) -> CorpusChoice:
        """The same choice with this idempotency key."""
        return replace(self, options=replace(self.options, idempotency_key=key))

    def check(self) -> None:
        """Find what is wrong with the files before anything is queued.

        Raises:
            InputError: a line is not a record, there is no record, or a file can't be read.
        """
        if self.skip_bad_lines:
            self.corpus.check_beginnings()
        else:
            self.corpus.check()

    def records(self) -> Iterator[Record]:
        """The records. Lines that are skipped are listed on stderr.

        Raises:
            InputError: a line is not a record, or there is no record.
        """
        skipped = _Skipped()
        empty = True
        for record in self.corpus.records(skipped if self.skip_bad_lines else None):
            empty = False
            yield record
        skipped.sum_up()
        if empty:
            raise self.corpus.empty()


@click.command()
@corpus_options
@option(
    "--class",
    "hardware",
    shell_complete=complete_class,
    help="The hardware class; auto: the fastest class with live workers. Default: the setting.",
)
@option("--ttl", "ttl_s", type=float, help="Seconds to keep the job after its end. Default: the setting.")
@option(
    "--idempotency-key",
    help="Your own key for this job: submitting again with the same key finds or continues the job.",
)
@option(
    "--resume",
    metavar="JOB",
    shell_complete=complete_job,
    help="Continue this job, whose submission was interrupted. Needs the same corpus.",
)
@option(
    "--drain",
    is_flag=True,
    help="Make a job that is drained from its start: it pauses while Redis holds too many of its vectors, until "
    "`embedctl fetch JOB -o DIR/ --drain` takes them.",
)
@option("--wait", is_flag=True, help="Wait until the job has ended.")
@output_option()
@no_clobber_option
@option("--dry-run", is_flag=True, help="Queue nothing; print an estimate of the job's size and duration.")
@json_option
@click.pass_context
def submit(
    ctx: click.Context,
    /,
    *,
    wait: bool,
    output: Path | Place | None,
    no_clobber: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    ttl_s: float | None,
    **options: Any,
) -> None:
    """Queue CORPUS and print the job's id.

    CORPUS is one or more of: a .jsonl, .json, .csv, .tsv, .txt or .parquet file, optionally compressed (.gz or .zst);
    a folder of such files; a pattern in quotes; - for standard input, which is read as jsonl unless --format says
    otherwise. With --output, the vectors are written while workers encode. If that is interrupted, `embedctl fetch`
    continues it.
    """
    settings = load_settings()
    choice = CorpusChoice.of(settings, ttl=ttl_s, output=output, **options)
    if output is not None:
        check_destination(output, choice.options.keep, clobber=not no_clobber, as_json=as_json)
    choice.check()
    broker = Broker.shared(settings)
    if dry_run:
        print_estimate(estimate(broker, choice.records(), choice.options), as_json=as_json)
        return
    written: Sequence[Path | str] = []
    with JobProgress(quiet=quiet, moving=may_move(output)) as progress:
        job = submit_choice(broker, choice, progress, output)
        if as_json:
            progress.say(f"job {job.id}")
        else:
            with progress.above():
                click.echo(job.id, err=is_stdout(output))  # the vectors have standard output to themselves
        if output is not None:
            written = save(job, output, progress, clobber=not no_clobber)
        elif wait:
            wait_for(job, progress)
    status = job.status()
    # The choice of a class by `auto` has said so already.
    chosen = choice.options.resume is None and (choice.options.hardware or settings.hardware) == "auto"
    if not status.state.ended and not status.live_workers and not chosen:
        click.echo(printable(no_worker(status.hardware, status.model, status.near_models)), err=True)
    if status.state.ended:
        report(status, progress)
    if as_json:
        click.echo(result_json(status, summary(status, progress.continued_at), written))
    ctx.exit(exit_status(status))


def submit_choice(
    broker: Broker, choice: CorpusChoice, progress: JobProgress, output: Path | Place | None = None
) -> Job:
    """Queue a corpus. If the output is a folder for parts, the job is drained meanwhile.

    Raises:
        KeyboardInterrupt: says how to continue.
    """
    progress.now_ms = broker.connection.about_now_ms
    try:
        with Alongside(broker, output if isinstance(output, Place) else None) as drained:

            def taking_up(job: JobStatus) -> None:
                progress.taken_up(job)
                drained.begin(job.id)

            def submitting(records: int, waiting_for: str) -> None:
                drained.check()
                progress.submitting(records, waiting_for)

            job = enqueue.submit(broker, choice.records(), choice.options, submitting, taking_up=taking_up)
    except KeyboardInterrupt:
        if choice.options.idempotency_key is None and choice.options.resume is None:
            raise KeyboardInterrupt(
                "the half-submitted job is cancelled (with --idempotency-key, the same command would continue it)"
            ) from None
        raise KeyboardInterrupt("the same command continues where it stopped") from None
    progress.submitted()
    return job


def _refuse_corpus_in(folder: Place, corpus: Corpus) -> None:
    """Refuse a folder for parts that holds the corpus: the next run would take the parts for more of it."""
    if "://" in folder.name:
        return
    for file in corpus.files:
        if file.rereadable and Path(file.path).resolve().is_relative_to(Path(folder.name).resolve()):
            raise InputError(f"{file.name} is in {folder.name}, which is to hold the parts: choose another folder")


def print_estimate(estimated: Estimate, *, as_json: bool) -> None:
    """Print what a job would take."""
    click.echo(json.dumps(asdict(estimated)) if as_json else estimated.describe())


class _Skipped:
    """Lists lines that are skipped, each with the position of the record after it, by which positions become lines."""

    def __init__(self) -> None:
        self._lines = 0

    def __call__(self, error: InputError, position: int) -> None:
        self._lines += 1
        click.echo(f"skipped before record {position}: {error}", err=True)

    def sum_up(self) -> None:
        if self._lines:
            lines = "1 bad line" if self._lines == 1 else f"{self._lines:,} bad lines"
            click.echo(f"skipped {lines}; positions count the records that are left", err=True)
