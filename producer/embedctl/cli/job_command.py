"""The options that `run` and `submit` share, by groups, and what both make of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from embedctl.cli.corpora import OPTIONS, CorpusChoice
from embedctl.cli.delivery import DatabaseChoice
from embedctl.cli.destination import DatabaseUrl, Destination, destination_options
from embedctl.cli.options import (
    complete_class,
    complete_model,
    json_option,
    option,
    quiet_option,
    section,
    together,
    vectors_option,
)
from embedctl.cli.sync_options import SyncChoice, sync_options
from embedctl.corpus.batch import BATCH_FORMAT
from embedctl.corpus.inputs import FORMATS
from embedctl.corpus.kept import parse_keep
from embedctl.corpus.records import Record
from embedctl.destinations.draining import Alongside
from embedctl.destinations.ids import Duplicates
from embedctl.destinations.place import Place
from embedctl.jobs.enqueue import submit
from embedctl.jobs.estimate import Estimate
from embedctl.jobs.job import Job
from embedctl.jobs.options import Long, SubmitOptions
from embedctl.queueing.broker import Broker
from embedctl.store import JobStatus
from embedctl.terminal.progress import JobProgress
from embedctl_config import tenants
from embedctl_config.errors import JobCancelled, JobFailed, JobStopped, SettingsError
from embedctl_config.hardware import PRECISIONS
from embedctl_config.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])

#: Of `--duplicates`: records may have the same id.
_ALL = "all"

_corpus_options = section(
    "Corpus",
    click.argument("corpus_paths", metavar="CORPUS...", type=click.Path(allow_dash=True), nargs=-1),
    # Without a variable, like the argument.
    click.option(
        "--input-file",
        "-i",
        "input_files",
        metavar="CORPUS",
        type=click.Path(allow_dash=True),
        multiple=True,
        help="The same as CORPUS; the flag of `vllm run-batch`.",
    ),
    option(
        "--format",
        type=click.Choice([*FORMATS, BATCH_FORMAT]),
        help="The format of all files. Default: from each file's name; jsonl for standard input. A jsonl file whose "
        "first line has a custom_id and a body is an OpenAI batch file.",
    ),
    option(
        "--dialect",
        metavar="NAME=VALUE,…",
        help="How text files are written, where their beginnings don't tell it: encoding (such as cp1252), separator "
        "(comma, semicolon, tab, pipe or a sign), quote (double, single or none), escape (backslash) and "
        "line-end (lf or cr). Default: UTF-8 or what a file's first bytes say; quotes in .csv, and in .tsv if it looks "
        "so.",
    ),
    option(
        "--text-field",
        default="text",
        show_default=True,
        help="The field that holds a record's text; body.input is the field input of the object body.",
    ),
    option(
        "--id-field", default="id", show_default=True, help="The field that holds a record's id, named in the same way."
    ),
    option(
        "--template",
        metavar="TEXT",
        help="Makes each text of several fields, such as 'title: {title} | text: {text}'. A brace that is text is "
        "written twice. A record that lacks a field, or has null there, is a bad line.",
    ),
    option(
        "--keep",
        metavar="FIELD,…",
        help="Fields of the corpus that come out beside the vectors, in .jsonl and .parquet. A field that a record "
        "lacks is null. At most 32 fields, and 64 KiB in each record.",
    ),
    option("--skip-bad-lines", is_flag=True, help="Skip lines that are not records, and list them on stderr."),
    # Without a variable: one that is set for `embedctl list` must not cut a corpus.
    click.option("--limit", type=click.IntRange(1), metavar="N", help="Take only the first N records. Default: all."),
)
_text_options = section(
    "Text",
    option(
        "--prompt",
        metavar="TEXT|@NAME",
        help="Text to put before the text of every record; or @ and the name of one of the model's own prompts, such "
        "as @query, which `embedctl model show` lists. @@ begins a text with @. Default: the model's default prompt.",
    ),
    option(
        "--long",
        type=click.Choice(get_args(Long)),
        default="cut",
        show_default=True,
        help="What to do with texts that are too long for the model: cut them at the end that the model's "
        "tokenizer says, or at the left or the right end; fail the record; encode the whole text in windows and "
        "average them; or split the text into records of their own, whose columns parent, start and end say where they "
        "stand. The model's tokenizer must be on this machine for that.",
    ),
)
_destination_options = section(
    "Destination",
    destination_options(
        [*Duplicates, _ALL],
        "What to do if records have the same id. error: queue nothing; all: take them. For databases, also first or "
        "last: write that one; position: make each id of the job and the record's position, as JOB:POSITION. Default: "
        "all; error for batch files and databases.",
    ),
    sync_options,
)


def _tenant(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse a wrong name before a model is loaded."""
    if value is not None and (wrong := tenants.check_tenant(value)):
        raise SettingsError(wrong)
    return value


_limits_options = section(
    "Limits",
    option(
        "--chunk-size", type=click.IntRange(1), help="The maximum number of records in a chunk. Default: the setting."
    ),
    option("--max-errors", metavar="N|N%", help="End the job once more records than this have failed."),
    option(
        "--tenant",
        callback=_tenant,
        help="Whom the job belongs to. Tenants that wait for the same workers take turns. Default: the setting.",
    ),
    option(
        "--lane",
        type=click.Choice(tenants.LANES),
        help="interactive: somebody waits for the vectors; background: only while nothing else waits. Default: normal.",
    ),
)


def _vectors_options(hardware: str) -> Callable[[F], F]:
    return section(
        "Vectors",
        option(
            "--model",
            shell_complete=complete_model,
            help="The name under which workers serve the model. Default: the setting.",
        ),
        option("--class", "hardware", shell_complete=complete_class, help=hardware),
        option("--precision", type=click.Choice(PRECISIONS), help="The precision that the vectors must have."),
        option("--normalize/--no-normalize", default=True, show_default=True, help="Scale vectors to unit length."),
        vectors_option,
        option(
            "--dims",
            "dimensions",
            type=click.IntRange(1),
            metavar="N",
            help="Keep the first N components of every vector, for models trained for that (Matryoshka). Default: all.",
        ),
        option("--dims-anyway", is_flag=True, help="Let --dims cut vectors of any model."),
    )


def job_options(*own: Callable[[F], F], hardware: str, dry_run: str) -> Callable[[F], F]:
    """The options of a :class:`JobCommand`, with the help of `--class` and `--dry-run`; `own` are those of one command
    alone."""
    return together(
        _corpus_options,
        _text_options,
        _vectors_options(hardware),
        _destination_options,
        _limits_options,
        *own,
        section("Output", quiet_option, option("--dry-run", is_flag=True, help=dry_run), json_option),
    )


#: The formats of files that --sync brings up to date.
_SYNCED = (".npy", ".parquet")


@dataclass(frozen=True, slots=True)
class JobCommand:
    """What `run` and `submit` are told: a corpus, how to encode it, and where its vectors go. `named` is what decides
    the job, in JSON values, whatever the corpus holds now."""

    choice: CorpusChoice
    destination: Destination
    sync: SyncChoice
    named: dict[str, Any]
    quiet: bool
    dry_run: bool
    as_json: bool

    @classmethod
    def of(
        cls,
        settings: Settings,
        *,
        quiet: bool,
        dry_run: bool,
        as_json: bool,
        resume: str | None = None,
        drain: bool = False,
        **given: Any,
    ) -> JobCommand:
        """Of the values of :func:`job_options`, and of further ones of the job; `resume` is the id of one. It is
        drained in any case if its vectors go into parts. click.UsageError, SettingsError, InputError: an option is
        wrong, or some exclude each other. MissingExtra, OutputError: the database can't be used."""
        sync = SyncChoice.taken_from(given, to_database=isinstance(given["output"], DatabaseUrl))
        unique_ids = _unique_ids_taken_from(given)
        destination = Destination.taken_from(given, settings)
        named = {**given, **sync.named()}
        files = {name: given.pop(name) for name in OPTIONS}
        options = SubmitOptions.of(
            **_prompt(given.pop("prompt")),
            keep=parse_keep(given.pop("keep")),
            digests=True,  # so that any output of the job, also a later one, can be brought up to date
            **given,
        )
        options = replace(options, resume=resume, drain=drain or isinstance(destination.path, Place))
        choice = CorpusChoice.taken_from(files, settings, options, destination.path, unique_ids)
        return cls(choice, destination, sync, named, quiet, dry_run, as_json)

    @property
    def updated(self) -> Path | None:
        """The file that this command brings up to date; None if it writes the vectors of a whole job."""
        path = self.destination.path
        return path if isinstance(path, Path) and self.sync.copies else None

    @property
    def _encodes_again(self) -> bool:
        """Whether there is a file with vectors that are perhaps the same."""
        path = self.destination.path
        return isinstance(path, Path) and path.suffix in _SYNCED and not self.sync.copies and path.exists()

    @property
    def synced(self) -> DatabaseChoice | None:
        """The database that this command makes what the corpus says; None if it writes the vectors of a whole job."""
        return self.destination.database if self.sync.is_asked else None

    def keyed(self, key: str | None) -> JobCommand:
        options = replace(self.choice.options, idempotency_key=key)
        return replace(self, choice=replace(self.choice, options=options))

    def check(self) -> None:
        """Check that the vectors of such a corpus can go to the destination, before the corpus is read; an error says
        why not."""
        choice, destination = self.choice, self.destination
        if choice.options.drain and isinstance(destination.path, Path):
            # A file leaves vectors in Redis, so the job would pause for ever.
            raise click.UsageError(
                "--drain is for vectors that go into a folder or a database: omit it, or name one with -o"
            )
        self.sync.check(choice, destination)
        destination.check(choice.options, as_json=self.as_json, is_batch=choice.is_batch)

    def check_owner(self, broker: Broker) -> None:
        """Check, before anything is queued, what is at the destination; `--sync` of a table does that by itself."""
        if not self.sync.is_asked:
            self.destination.check_owner(broker, self.choice.options)

    def checked(self, *, frees_job: bool = False) -> JobCommand:
        """The same command, after a search for what is wrong with the files, before anything is queued. SettingsError:
        the job is to be drained into a database, and its ids are not known before its end.

        If the command frees its job, whose vectors so have no other way than into the database, it is drained."""
        choice = self.choice.checked(as_json=self.as_json)
        destination = self.destination.checked(choice.corpus)
        if (database := destination.database) is not None:
            drain = choice.options.drain
            if drain and not database.options.knows_ids:
                raise SettingsError(
                    "--drain into a database needs to know all ids beforehand: name files, not standard input, without "
                    "--duplicates first|last; or add --duplicates position"
                )
            drain = drain or ((frees_job or self.sync.is_asked) and database.options.knows_ids)
            choice = replace(choice, options=replace(choice.options, drain=drain))
        return replace(self, choice=choice, destination=destination)

    def progress(self) -> JobProgress:
        return JobProgress(quiet=self.quiet, moving=self.destination.may_move)

    def submit(
        self,
        broker: Broker,
        progress: JobProgress,
        options: SubmitOptions | None = None,
        records: Iterator[Record] | None = None,
        on_job: Callable[[JobStatus], object] = lambda _: None,
    ) -> Job:
        """Queue the corpus. If its vectors are to leave Redis, the job is drained meanwhile. A KeyboardInterrupt says
        how to resume.

        A job that is ended meanwhile is returned if there is an output: what is done is to be written there.

        Args:
            options: in place of this command's.
            records: those to queue; all of the corpus if None.
            on_job: called with the job, which may hold some records already.
        """
        options = self.choice.options if options is None else options
        progress.now_ms = broker.connection.about_now_ms
        if self._encodes_again and options.resume is None:
            progress.say(f"{self.destination.path} exists, and will be replaced; --sync encodes only what differs")
        try:
            job = self._submitted(
                broker, progress, options, self.choice.records() if records is None else records, on_job
            )
        except KeyboardInterrupt:
            if options.idempotency_key is None and options.resume is None:
                raise KeyboardInterrupt(
                    "the half-submitted job is cancelled (with --resume KEY, the same command would resume it)"
                ) from None
            raise KeyboardInterrupt("the same command resumes where it stopped") from None
        progress.submitted()
        return job

    def _submitted(
        self,
        broker: Broker,
        progress: JobProgress,
        options: SubmitOptions,
        records: Iterator[Record],
        on_job: Callable[[JobStatus], object],
    ) -> Job:
        begun: list[str] = []
        drain = self.destination.draining(progress.refused) if options.drain else None
        with Alongside(broker, drain) as drained:

            def job_begun(job: JobStatus) -> None:
                begun.append(job.id)
                on_job(job)
                progress.begun(job)
                drained.begin(job.id)

            def submitting(records: int, waiting_for: str) -> None:
                drained.check()
                progress.submitting(records, waiting_for)

            rereadable = self.choice.corpus.rereadable
            try:
                return submit(broker, records, options, submitting, on_job=job_begun, at_hand=rereadable)
            except (JobFailed, JobStopped, JobCancelled):
                if not (self.destination.is_given and begun):
                    raise
                return Job(begun[0], broker)

    def print_estimate(self, estimated: Estimate) -> None:
        click.echo(json.dumps(asdict(estimated)) if self.as_json else estimated.describe())


def _unique_ids_taken_from(given: dict[str, Any]) -> bool | None:
    """Whether the corpus alone may have no id twice; None if its format decides. A database has rules of its own."""
    duplicates = given["duplicates"]
    if isinstance(given["output"], DatabaseUrl) or duplicates not in (Duplicates.ERROR, _ALL):
        return None
    given["duplicates"] = None
    return bool(duplicates == Duplicates.ERROR)


def _prompt(words: str | None) -> dict[str, Any]:
    if words is None or not words.startswith("@"):
        return {"prompt": words}
    return {"prompt": words[1:]} if words.startswith("@@") else {"prompt_name": words[1:]}
