"""The corpora of the command line."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from embedctl.corpus import unique
from embedctl.corpus.batch import BATCH_FORMAT, KEPT_OF_REQUEST, URLS, BatchCorpus, is_batch, url_of
from embedctl.corpus.dialect import parse_dialect
from embedctl.corpus.pieces import check_splitting, pieces_of
from embedctl.corpus.reading import Corpus, open_corpus
from embedctl.corpus.records import Record
from embedctl.corpus.rows import Rows
from embedctl.corpus.template import parse_template
from embedctl.destinations.formats import files_of, guess_format
from embedctl.destinations.jsonl import errors_beside
from embedctl.destinations.place import Place
from embedctl.jobs.options import SubmitOptions
from embedctl_config.errors import BatchFileError, InputError, SettingsError
from embedctl_config.settings import Settings

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
#: Scheme → the command that writes what is there to standard output.
_READERS = {"http": "curl -sSL {}", "https": "curl -sSL {}", "s3": "aws s3 cp {} -", "gs": "gcloud storage cat {}"}
#: The options that name a corpus, in the order in which they are taken.
OPTIONS = (
    "corpus_paths",
    "input_files",
    "format",
    "dialect",
    "text_field",
    "id_field",
    "template",
    "skip_bad_lines",
    "limit",
)


@dataclass(slots=True)
class Tally:
    """What was read of a corpus, once the end was reached (`is_whole`): `records`, those that jobs are `made` of, which
    may be their pieces, and the `lines` that are none and were left out."""

    is_whole: bool = False
    records: int = 0
    made: int = 0
    lines: int = 0

    def skipped(self, error: InputError, position: int) -> None:
        """List a line with the position of the record after it, by which positions become lines."""
        self.lines += 1
        click.echo(f"skipped before record {position}: {error}", err=True)

    def pieces(self, records: int, pieces: int) -> None:
        self.made = pieces
        click.echo(f"{records:,} records make {pieces:,} pieces; positions count pieces", err=True)

    @property
    def bad_lines(self) -> str:
        return "1 bad line" if self.lines == 1 else f"{self.lines:,} bad lines"


@dataclass(frozen=True, slots=True)
class CorpusChoice:
    """A corpus and the options of its job. `tally` tells what the last reading of :meth:`records` found."""

    corpus: Corpus | BatchCorpus
    options: SubmitOptions
    skip_bad_lines: bool = False
    unique_ids: bool = False
    tally: Tally = field(default_factory=Tally, compare=False)

    @classmethod
    def taken_from(
        cls,
        given: Mapping[str, Any],
        settings: Settings,
        options: SubmitOptions,
        output: Path | Place | None,
        unique_ids: bool | None,
    ) -> CorpusChoice:
        """The corpus that options of a command (OPTIONS) name, and the options of its job, which name the fields to
        keep. The `output`, where the vectors go, is no part of it. An id that occurs twice is refused with
        `unique_ids`; None: only in batch files.

        Raises:
            click.UsageError: there is no corpus.
            SettingsError, InputError: it can't be read so, has the form of an address, or options exclude each
                other.
        """
        arguments, input_files, chosen, dialect, text_field, id_field, template, skip_bad_lines, limit = map(
            given.__getitem__, OPTIONS
        )
        paths = (*arguments, *input_files)
        if not paths:
            raise click.UsageError("Missing argument 'CORPUS...'.")
        refuse_addresses(paths, click.get_current_context().info_name)
        corpus = open_corpus(
            *paths,
            file_format="jsonl" if chosen == BATCH_FORMAT else chosen,
            dialect=parse_dialect(dialect),
            rows=Rows(settings.max_text_bytes, text_field, id_field, options.corpus_keep, parse_template(template)),
            limit=limit,
            written=[path.resolve() for path in (*files_of(output), errors_beside(output))]
            if isinstance(output, Path)
            else [],
        )
        if isinstance(output, Place):
            _refuse_corpus_in(output, corpus)
        if options.splits:
            check_splitting(corpus.rows)
            options = replace(options, model=options.model or settings.model)
        plain = (text_field, id_field, template) == ("text", "id", None)
        if chosen != BATCH_FORMAT and not (chosen is None and plain and is_batch(corpus.files[0])):
            return cls(corpus, options, skip_bad_lines, bool(unique_ids))
        if not plain or options.corpus_keep or skip_bad_lines:
            raise SettingsError(
                f"the format {BATCH_FORMAT} has its own fields, and answers every request: leave out --text-field, "
                "--id-field, --template, --keep and --skip-bad-lines"
            )
        return cls._of_batch(settings, corpus, options, unique=unique_ids is not False)

    @classmethod
    def _of_batch(cls, settings: Settings, corpus: Corpus, options: SubmitOptions, *, unique: bool) -> CorpusChoice:
        if options.splits:
            raise SettingsError("each input of a batch file has one vector: omit --long split")
        if options.drain:
            raise SettingsError("a batch file is answered in a .jsonl: leave out --drain, and name a file with -o")
        if options.vectors is not None:
            raise SettingsError("the url of a batch file's requests says which vectors they ask for: omit --vectors")
        url = url_of(corpus.files[0])
        requests = BatchCorpus(corpus.files, settings.max_text_bytes, corpus.limit, unique=unique, url=url)
        vectors = [URLS[url].output]
        options = replace(options, keep=KEPT_OF_REQUEST, count_tokens=True, batch_file=True, vectors=vectors)
        if click.get_current_context().get_parameter_source("long") is ParameterSource.DEFAULT:
            # As at OpenAI. An answer has no place to say that a text was cut.
            options = replace(options, long="error")
        return cls(requests, options)

    @property
    def is_batch(self) -> bool:
        return isinstance(self.corpus, BatchCorpus)

    def requests(self, output: Path | Place | None) -> BatchCorpus | None:
        """The requests that an output answers; None if it does not."""
        answers = isinstance(output, Path) and guess_format(output) == "jsonl"
        return self.corpus if isinstance(self.corpus, BatchCorpus) and answers else None

    @property
    def keep(self) -> Sequence[str]:
        """The fields that the user wants to come out beside the vectors."""
        return () if self.is_batch else self.options.keep

    def pieces(self, records: Iterator[Record], done: Callable[[int, int], object]) -> Iterator[Record]:
        """What a job is made of: the records, or their pieces. `done` is told the numbers of both at the end."""
        options = self.options
        if not options.splits:
            return records
        return pieces_of(records, str(options.model), options.prompt, options.prompt_name, done)

    def checked(self, *, as_json: bool = False) -> CorpusChoice:
        """The same choice, after a search for what is wrong with the files, before anything is queued. Of a batch file,
        its model and its dimensions are options now, and with `as_json` its mistakes are printed as OpenAI's batch
        service does, too. InputError: a line is not a record, there is no record, an id is not unique, or a file can't
        be read."""
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
        types = self.corpus.column_types() or None
        return replace(self, options=replace(self.options, column_types=types))

    def records(self) -> Iterator[Record]:
        """What a job is made of. Lines that are skipped are counted, and listed on stderr. InputError: a line is not a
        record, there is no record, or an id of standard input is not unique."""
        return self.pieces(self._records(), self.tally.pieces)

    def _records(self) -> Iterator[Record]:
        tally = self.tally
        tally.is_whole, tally.records, tally.lines = False, 0, 0
        records = self.corpus.records(tally.skipped if self.skip_bad_lines else None)
        if self.unique_ids and not self.corpus.rereadable:
            records = unique.checked(records)
        for record in records:
            tally.records += 1
            yield record
        tally.is_whole, tally.made = True, tally.records
        if tally.lines:
            click.echo(f"skipped {tally.bad_lines}; positions count the records that are left", err=True)
        if not tally.records:
            raise self.corpus.empty()


def records_again(choice: CorpusChoice) -> Iterator[Record]:
    """What a job is made of once more; lines that were skipped are not listed again."""
    skipped = (lambda *_: None) if choice.skip_bad_lines else None
    return choice.pieces(choice.corpus.records(skipped), lambda *_: None)


def requests_in(settings: Settings, paths: Sequence[str]) -> BatchCorpus:
    files = open_corpus(*paths, file_format="jsonl", rows=Rows(settings.max_text_bytes)).files
    return BatchCorpus(files, settings.max_text_bytes, None, unique=False, url=url_of(files[0]))


def refuse_addresses(paths: Iterable[str], command: str | None) -> None:
    """Raise InputError if a path of this subcommand is an address."""
    for path in paths:
        if found := _SCHEME.match(path):
            reader = _READERS.get(found[1].lower())
            advice = f"Pipe it: {reader.format(shlex.quote(path))} | embedctl {command} - --format …" if reader else ""
            raise InputError(
                f"{path} is not a file, and embedctl downloads nothing. {advice or 'Give the path of a file'}"
            )


def _refuse_corpus_in(folder: Place, corpus: Corpus) -> None:
    """Refuse a folder for parts that holds the corpus: the next run would take the parts for more of it."""
    if "://" in folder.name:
        return
    for file in corpus.files:
        if file.rereadable and Path(file.path).resolve().is_relative_to(Path(folder.name).resolve()):
            raise InputError(f"{file.name} is in {folder.name}, which is to hold the parts: choose another folder")
