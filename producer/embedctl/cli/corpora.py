"""Submitting a corpus."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from embedctl import enqueue, unique
from embedctl.broker import Broker
from embedctl.cli.addresses import refuse_addresses
from embedctl.cli.changes import Asked, to_encode, update
from embedctl.cli.completion import complete_class, complete_job
from embedctl.cli.delivery import SinkChoice, to_options
from embedctl.cli.json_forms import result_json
from embedctl.cli.options import (
    changes_options,
    chosen_numbers,
    corpus_options,
    json_option,
    no_clobber_option,
    numbers_options,
    one_file_option,
    option,
    output_option,
)
from embedctl.cli.results import check_destination, exit_status, may_move, report, save, summary, wait_for
from embedctl.cli.update_report import report_update
from embedctl.corpus import BATCH_FORMAT, KEPT_OF_REQUEST, BatchCorpus, Corpus, is_batch, open_corpus
from embedctl.drain.alongside import Alongside
from embedctl.drain.places import Place
from embedctl.estimate import Estimate, estimate
from embedctl.job import Job
from embedctl.kept import parse_keep
from embedctl.output import Numbers, errors_beside, files_of, guess_format, is_stdout
from embedctl.records import Record
from embedctl.routing import no_worker_for
from embedctl.store import JobStatus
from embedctl.terminal.progress import JobProgress
from embedctl_config.errors import BatchFileError, InputError, JobCancelled, JobFailed, JobStopped, SettingsError
from embedctl_config.loading import load_settings
from embedctl_config.printable import printable
from embedctl_config.settings import Settings


@dataclass(frozen=True, slots=True)
class CorpusChoice:
    """A corpus and the options of its job, from the command line."""

    corpus: Corpus | BatchCorpus
    options: enqueue.JobOptions
    skip_bad_lines: bool = False
    unique_ids: bool = False

    @classmethod
    def of(
        cls,
        settings: Settings,
        *,
        corpus_paths: tuple[str, ...],
        input_files: tuple[str, ...] = (),
        format: str | None,  # noqa: A002  (the flag's name)
        text_field: str,
        id_field: str,
        keep: str | None,
        skip_bad_lines: bool,
        unique_ids: bool | None,
        limit: int | None,
        max_errors: str | None,
        output: Path | Place | None = None,
        drain: bool = False,
        **options: Any,
    ) -> CorpusChoice:
        paths = (*corpus_paths, *input_files)
        if not paths:
            raise click.UsageError("Missing argument 'CORPUS...'.")
        refuse_addresses(paths, click.get_current_context().info_name)
        folder = output if isinstance(output, Place) else None
        fields = parse_keep(keep)
        corpus = open_corpus(
            *paths,
            file_format="jsonl" if format == BATCH_FORMAT else format,
            text_field=text_field,
            id_field=id_field,
            keep=fields,
            max_bytes=settings.max_text_bytes,
            limit=limit,
            written=[path.resolve() for path in (*files_of(output), errors_beside(output))]
            if isinstance(output, Path)
            else [],
        )
        if folder is not None:
            _refuse_corpus_in(folder, corpus)
        most, share = enqueue.parse_budget(max_errors)
        chosen = enqueue.JobOptions(
            **options, max_errors=most, max_errors_share=share, keep=fields, drain=drain or folder is not None
        )
        plain = (text_field, id_field) == ("text", "id")
        if format == BATCH_FORMAT or (format is None and plain and is_batch(corpus.files[0])):
            if not plain or keep is not None or skip_bad_lines:
                raise SettingsError(
                    f"the format {BATCH_FORMAT} has its own fields, and answers every request: leave out --text-field, "
                    "--id-field, --keep and --skip-bad-lines"
                )
            return cls._of_batch(settings, corpus, chosen, unique=unique_ids is not False)
        return cls(corpus, chosen, skip_bad_lines, bool(unique_ids))

    @classmethod
    def _of_batch(
        cls, settings: Settings, corpus: Corpus, options: enqueue.JobOptions, *, unique: bool
    ) -> CorpusChoice:
        if options.drain:
            raise SettingsError("a batch file is answered in a .jsonl: leave out --drain, and name a file with -o")
        requests = BatchCorpus(corpus.files, settings.max_text_bytes, corpus.limit, unique=unique)
        options = replace(options, keep=KEPT_OF_REQUEST, count_tokens=True, batch_file=True)
        if click.get_current_context().get_parameter_source("truncation") is ParameterSource.DEFAULT:
            # As at OpenAI. An answer has no place to say that a text was cut.
            options = replace(options, truncation="error")
        return cls(requests, options)

    @property
    def is_batch(self) -> bool:
        """Whether it is a batch file."""
        return isinstance(self.corpus, BatchCorpus)

    def requests(self, output: Path | Place) -> BatchCorpus | None:
        """The requests that an output answers; None if it does not."""
        answers = isinstance(output, Path) and guess_format(output) == "jsonl"
        return self.corpus if isinstance(self.corpus, BatchCorpus) and answers else None

    @property
    def keep(self) -> Sequence[str]:
        """The fields that the user wants to come out beside the vectors."""
        return () if self.is_batch else self.options.keep

    def keyed(self, key: str | None) -> CorpusChoice:
        """The same choice with this idempotency key."""
        return replace(self, options=replace(self.options, idempotency_key=key))

    def check_one_file(self, one_file: bool, output: Path | Place | None) -> None:
        """Check that `--one-file` has a meaning.

        Raises:
            click.UsageError: it has none.
        """
        if one_file and not (self.is_batch and isinstance(output, Path) and guess_format(output) == "jsonl"):
            raise click.UsageError("--one-file is for the .jsonl output of a batch file: omit it")

    def checked(self, *, as_json: bool = False) -> CorpusChoice:
        """The same choice, after a search for what is wrong with the files, before anything is queued. Of a batch file,
        its model and its dimensions are options now.

        Args:
            as_json: print the mistakes in a batch file as OpenAI's batch service does, too.

        Raises:
            InputError: a line is not a record, there is no record, an id is not unique, or a file can't be read.
        """
        if isinstance(self.corpus, BatchCorpus):
            try:
                model, dimensions = self.corpus.check(self.options.model, self.options.dimensions)
            except BatchFileError as error:
                if as_json:
                    click.echo(json.dumps({"errors": {"object": "list", "data": error.data}}))
                raise
            return replace(self, options=replace(self.options, model=model, dimensions=dimensions))
        if self.skip_bad_lines:
            self.corpus.check_beginnings()
        else:
            self.corpus.check()
        if self.unique_ids and self.corpus.rereadable:
            self.corpus.check_unique()
        return self

    def records(self) -> Iterator[Record]:
        """The records. Lines that are skipped are listed on stderr.

        Raises:
            InputError: a line is not a record, there is no record, or an id of standard input is not unique.
        """
        skipped = _Skipped()
        empty = True
        records = self.corpus.records(skipped if self.skip_bad_lines else None)
        if self.unique_ids and not self.corpus.rereadable:
            records = unique.checked(records)
        for record in records:
            empty = False
            yield record
        skipped.sum_up()
        if empty:
            raise self.corpus.empty()


@click.command()
@corpus_options
@changes_options
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
@to_options
@one_file_option
@numbers_options
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
    to: str | None,
    on_duplicate_id: str | None,
    id: str | None,  # noqa: A002  (the flag's name)
    allow_mixed: bool,
    one_file: bool,
    output_type: str | None,
    ranges: Path | None,
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
    otherwise. An OpenAI batch file is told by its first line. With --output or --to, the vectors are written while
    workers encode. If that is interrupted, `embedctl fetch` continues it.
    """
    settings = load_settings()
    numbers = chosen_numbers(output_type, ranges)
    asked = Asked.taken_from(options, to)
    sink = SinkChoice.of(
        settings,
        output,
        output_type,
        to=to,
        on_duplicate_id=on_duplicate_id,
        id=id,
        allow_mixed=allow_mixed,
        is_update=asked.to is not None,
        delete_missing=asked.delete_missing,
    )
    choice = CorpusChoice.of(settings, ttl=ttl_s, output=output, **options)
    choice.check_one_file(one_file, output)
    asked.check(choice, output)
    if output is not None:
        check_destination(
            output,
            choice.keep,
            clobber=not no_clobber,
            as_json=as_json,
            numbers=numbers,
            batch=choice.is_batch and not one_file,
        )
    choice = choice.checked(as_json=as_json)
    sink = sink and sink.checked(choice.corpus)
    broker = Broker.shared(settings)
    if dry_run:
        records = to_encode(choice, asked, output, numbers, broker)
        estimated = estimate(broker, records, choice.options, at_hand=choice.corpus.rereadable)
        print_estimate(estimated, as_json=as_json)
        return
    if isinstance(output, Path) and asked.applies(choice, output):
        with JobProgress(quiet=quiet, moving=may_move(output)) as progress:
            outcome = update(
                broker,
                choice,
                asked,
                output,
                progress,
                submit_choice,
                numbers=numbers,
                clobber=not no_clobber,
                made=lambda job: progress.say(f"job {job.id}"),
                sink=sink,
            )
        ctx.exit(report_update(outcome, output, progress, as_json=as_json))
    written: Sequence[Path | str] = []
    with JobProgress(quiet=quiet, moving=may_move(output)) as progress:
        job = submit_choice(broker, choice, progress, output, numbers)
        if as_json:
            progress.say(f"job {job.id}")
        else:
            with progress.above():
                click.echo(job.id, err=is_stdout(output))  # the vectors have standard output to themselves
        if output is not None:
            written = save(
                job,
                output,
                progress,
                clobber=not no_clobber,
                one_file=one_file,
                numbers=numbers,
                requests=choice.requests(output),
            )
        elif sink is not None:
            sink.save(job, broker, progress)
        elif wait:
            wait_for(job, progress)
    status = job.status()
    # The choice of a class by `auto` has said so already.
    chosen = choice.options.resume is None and (choice.options.hardware or settings.hardware) == "auto"
    if not status.state.ended and not status.live_workers and not chosen:
        click.echo(printable(no_worker_for(status)), err=True)
    if status.state.ended:
        report(status, progress)
    if as_json:
        click.echo(result_json(status, summary(status, progress.continued_at), written))
    ctx.exit(exit_status(status))


def submit_choice(
    broker: Broker,
    choice: CorpusChoice,
    progress: JobProgress,
    output: Path | Place | None = None,
    numbers: Numbers | None = None,
    *,
    records: Iterator[Record] | None = None,
) -> Job:
    """Queue a corpus. If the output is a folder for parts, the job is drained meanwhile, with these numbers.

    Args:
        records: those to queue; all of the corpus if None.

    A job that is ended meanwhile is returned if there is an output: what is done is to be written there.

    Raises:
        KeyboardInterrupt: says how to continue.
    """
    progress.now_ms = broker.connection.about_now_ms
    begun: list[str] = []
    try:
        with Alongside(broker, output if isinstance(output, Place) else None, numbers) as drained:

            def taking_up(job: JobStatus) -> None:
                begun.append(job.id)
                progress.taken_up(job)
                drained.begin(job.id)

            def submitting(records: int, waiting_for: str) -> None:
                drained.check()
                progress.submitting(records, waiting_for)

            try:
                job = enqueue.submit(
                    broker,
                    choice.records() if records is None else records,
                    choice.options,
                    submitting,
                    taking_up=taking_up,
                    at_hand=choice.corpus.rereadable,
                )
            except (JobFailed, JobStopped, JobCancelled):
                if output is None or not begun:
                    raise
                job = Job(begun[0], broker)
    except KeyboardInterrupt:
        if choice.options.idempotency_key is None and choice.options.resume is None:
            raise KeyboardInterrupt(
                "the half-submitted job is cancelled (with --idempotency-key, the same command would continue it)"
            ) from None
        raise KeyboardInterrupt("the same command continues where it stopped") from None
    progress.submitted()
    return job


def requests_in(settings: Settings, paths: Sequence[str]) -> BatchCorpus:
    """The requests of batch files.

    Raises:
        InputError: a file can't be read.
    """
    files = open_corpus(*paths, file_format="jsonl", max_bytes=settings.max_text_bytes).files
    return BatchCorpus(files, settings.max_text_bytes, None, unique=False)


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
