"""Delivering a job's vectors to a database, for several commands, and the list of databases."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass, replace

import click

from embedctl.cli.options import json_option
from embedctl.cli.results import failed_line
from embedctl.corpus.batch import BatchCorpus
from embedctl.corpus.reading import Corpus
from embedctl.destinations.ids import ONE_OF_EACH, Duplicates, no_id
from embedctl.destinations.interface import Contract, Destination
from embedctl.destinations.registry import KINDS, destination_of
from embedctl.destinations.rows import Options
from embedctl.jobs.enqueue import job_spec
from embedctl.jobs.job import Job
from embedctl.jobs.options import SubmitOptions
from embedctl.queueing.broker import Broker
from embedctl.queueing.routing import model_files
from embedctl.store import JobSpec
from embedctl.terminal.columns import Column, arrange, plain
from embedctl.terminal.progress import JobProgress
from embedctl_config.errors import SettingsError
from embedctl_config.settings import Settings

_COLUMNS = (Column("DATABASE", 8), Column("URL", 8), Column("EXTRA", 5), Column("INSTALLED", 3))


@dataclass(frozen=True, slots=True)
class DatabaseChoice:
    """A table of a database and how to deliver to it, from the command line. `url` is as it was given; it holds no
    password."""

    url: str
    table: Destination
    options: Options

    @classmethod
    def of(cls, settings: Settings, url: str, duplicates: str | None, dtype: str | None) -> DatabaseChoice:
        """The table of a URL, whose database can be reached. SettingsError, MissingExtra, OutputError: it can't be used
        so."""
        options = Options.of(duplicates or Duplicates.ERROR, dtype)
        table = destination_of(url, settings)
        table.refuse_dtype(options.stored_as)
        table.open(None)
        table.close()
        return cls(url, table, options)

    def contract(self, broker: Broker, options: SubmitOptions) -> Contract | None:
        """The contract of a job with these options; None as :func:`told_contract`."""
        return told_contract(broker, job_spec(broker, options), self.options.stored_as)

    def check_contract(self, broker: Broker, options: SubmitOptions) -> None:
        """Raise OtherContract if the table is bound to other vectors than those of a job with these options, as far as
        the settings or live workers tell its model's files."""
        if (contract := self.contract(broker, options)) is not None:
            with closing(self.table):
                self.table.open(contract)

    def checked(self, corpus: Corpus | BatchCorpus) -> DatabaseChoice:
        """The same choice, after a look at the ids of a corpus, before anything is queued. Records can then be
        delivered while the job runs. SettingsError: it is a batch file. InputError: an id is missing or not unique, and
        neither may be."""
        if isinstance(corpus, BatchCorpus):
            raise SettingsError("a batch file is answered in a .jsonl: name that with -o, in place of a database")
        if not corpus.rereadable or self.options.duplicates is not Duplicates.ERROR:
            return self
        corpus.check_unique(ONE_OF_EACH, lambda position: no_id(1, [position]))
        return replace(self, options=replace(self.options, ids_are_unique=True))


def told_contract(broker: Broker, spec: JobSpec, dtype: str = "float32") -> Contract | None:
    """The contract of a job that is to be made; None unless the settings, or live workers that agree, tell its model's
    files."""
    models = model_files(broker.settings, broker.workers, spec)
    return Contract.of(spec, 0, dtype, model=next(iter(models))) if len(models) == 1 else None


def list_failed(job: Job, progress: JobProgress) -> None:
    """Print the failed records of a job that is freed next: they are in no database."""
    for error in job.iter_errors():
        progress.say(failed_line(error))


@click.command()
@json_option
def destinations(as_json: bool) -> None:
    """List the databases that -o can deliver to."""
    if as_json:
        facts = [
            {"name": kind.name, "url": kind.form, "extra": kind.extra, "installed": kind.installed} for kind in KINDS
        ]
        click.echo(json.dumps(facts))
        return
    rows = [
        [plain(each) for each in (kind.name, kind.form, kind.extra, "yes" if kind.installed else f"no: {kind.install}")]
        for kind in KINDS
    ]
    for line in arrange(_COLUMNS, rows, None):
        click.echo(line.plain.rstrip())
