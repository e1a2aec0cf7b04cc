"""Delivering a job's vectors to a database, for several commands, and the list of databases."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import click

from embedctl.broker import Broker
from embedctl.cli.options import json_option
from embedctl.cli.results import failed_line
from embedctl.corpus import BatchCorpus, Corpus
from embedctl.job import Job
from embedctl.sinks.base import Sink
from embedctl.sinks.deliver import Options, deliver, options_of
from embedctl.sinks.ids import Duplicates, no_id, repeated
from embedctl.sinks.registry import SinkKind, kinds, sink_of
from embedctl.terminal.columns import Column, arrange, plain
from embedctl.terminal.progress import JobProgress
from embedctl.unique import UniqueIds
from embedctl.waiting import Waiter
from embedctl_config.errors import SettingsError
from embedctl_config.settings import Settings

_COLUMNS = (Column("DATABASE", 8), Column("URL", 8), Column("EXTRA", 5), Column("INSTALLED", 3))


@dataclass(frozen=True, slots=True)
class SinkChoice:
    """A database and how to deliver to it, from the command line.

    Attributes:
        url: as it was given; it holds no password.
        is_update: whether an output of `--since` is brought up to date too, and the table takes what is new in it.
        delete_missing: whether records that are gone are deleted then.
    """

    url: str
    sink: Sink
    options: Options
    is_update: bool = False
    delete_missing: bool = False

    @classmethod
    def of(
        cls,
        settings: Settings,
        url: str,
        duplicates: str | None,
        output_type: str | None,
        allow_mixed: bool,
        *,
        is_update: bool,
        delete_missing: bool,
    ) -> SinkChoice:
        """The database of a URL, which can be reached.

        Raises:
            SettingsError, MissingExtra, OutputError: the URL is not one of a database, or the database can't be used
                so.
        """
        options = options_of(duplicates or Duplicates.ERROR, output_type, allow_mixed=allow_mixed)
        if is_update and options.duplicates is not Duplicates.ERROR:
            raise SettingsError(
                "with --since, the table has one record for each id of the corpus, from one night to the next: omit "
                f"--duplicates {options.duplicates}"
            )
        sink = sink_of(url, settings)
        if delete_missing and not sink.deletes:
            raise SettingsError(f"{url}: this kind of database can't delete records: omit --delete-missing")
        sink.check()
        sink.close()
        return cls(url, sink, options, is_update, delete_missing)

    def checked(self, corpus: Corpus | BatchCorpus) -> SinkChoice:
        """The same choice, after a look at the ids of a corpus, before anything is queued. Records can then be
        delivered while the job runs.

        Raises:
            SettingsError: it is a batch file.
            InputError: an id is missing or not unique, and neither may be.
        """
        if isinstance(corpus, BatchCorpus):
            raise SettingsError("a batch file is answered in a .jsonl: omit --to, and name a file with -o")
        if not corpus.rereadable or self.options.duplicates is not Duplicates.ERROR:
            return self
        fix = {"fix": "give each record its own, or omit --to"} if self.is_update else {}
        with UniqueIds() as ids:
            for position, record in enumerate(corpus.good_records()):
                if record.id is None:
                    raise no_id(1, [position], **fix)
                ids.add(record.id, position)
            ids.find()
        if ids.count:
            lines = [f"record {again}: its id is that of record {before}" for again, before in ids.first]
            raise repeated(ids.count, lines, **fix)
        return replace(self, options=replace(self.options, ids_are_unique=True))

    def save(self, job: Job, broker: Broker, progress: JobProgress) -> int:
        """Deliver a job's records as they come, and show the progress of both; returns how many were written.

        Raises:
            KeyboardInterrupt: says how to continue.
        """
        progress.begin_writing()
        try:
            done = deliver(
                Waiter(job.id, broker), self.sink, self.options, progress=progress.running, written=progress.written
            )
            job.wait(progress=progress.running)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"job {job.id} goes on: embedctl fetch {job.id} --to '{self.url}'") from None
        if done.continued_at:
            progress.say(f"{done.continued_at:,} chunks were there already")
        if done.left_out:
            progress.say(f"{done.left_out:,} records were left out, because another record has their id")
        progress.say(f"Wrote {done.records:,} records to {self.url}")
        return done.records


def list_failed(job: Job, progress: JobProgress) -> None:
    """Print the failed records of a job that is freed next: they are in no database."""
    for error in job.iter_errors():
        progress.say(failed_line(error))


@click.command()
@json_option
def sinks(as_json: bool) -> None:
    """List the databases that --to can deliver to.

    Others come as plug-ins: distributions with an entry point in the group embedctl.sinks.
    """
    if as_json:
        click.echo(json.dumps([_facts(kind) for kind in kinds()]))
        return
    rows = [[plain(kind.name), plain(kind.form), plain(kind.extra or "–"), plain(_installed(kind))] for kind in kinds()]
    for line in arrange(_COLUMNS, rows, None):
        click.echo(line.plain.rstrip())


def _facts(kind: SinkKind) -> dict[str, Any]:
    return {
        "name": kind.name,
        "url": kind.form,
        "extra": kind.extra or None,
        "installed": kind.installed,
        "plugin": kind.plugin or None,
    }


def _installed(kind: SinkKind) -> str:
    if kind.plugin:
        return f"yes, from {kind.plugin}"
    return "yes" if kind.installed else f"no: {kind.install}"
