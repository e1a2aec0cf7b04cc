"""A corpus of files, folders and streams as one sequence of records, and its check before anything is queued."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from embedctl.corpus.dialect import PLAIN, Dialect
from embedctl.corpus.file import CorpusFile
from embedctl.corpus.inputs import FORMATS, expanded, guess_format
from embedctl.corpus.kept import names_with_values
from embedctl.corpus.records import Record
from embedctl.corpus.rows import ID_FIELD, Line, Places, Rows
from embedctl.corpus.unique import MUST_BE, UniqueIds, repeated
from embedctl_config.errors import InputError

log = logging.getLogger(__name__)

#: Bad lines that a check names; it counts the others.
_NAMED = 10
#: A check that finds this many bad lines and no record before them ends: there is nothing to count.
_HOPELESS = 1000
_SKIP = "To leave such lines out, give --skip-bad-lines"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Files of records, read one after the other; their records are numbered through, up to the limit.

    Methods that read raise InputError if a file can't be read; the message names the file and the line.
    """

    files: tuple[CorpusFile, ...]
    rows: Rows
    limit: int | None = None

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.files[0].name if len(self.files) == 1 else f"the corpus of {len(self.files):,} files"

    @property
    def rereadable(self) -> bool:
        """Whether it can be read twice: files can, a pipe can't."""
        return all(file.rereadable for file in self.files)

    def records(self, on_bad_line: Callable[[InputError, int], None] | None = None) -> Iterator[Record]:
        """Its records, read lazily.

        Args:
            on_bad_line: called with the error of each line that is not a record, which is then skipped, and with the
                position of the next record; if None, the error is raised.
        """
        records = self._records(on_bad_line)
        return records if self.limit is None else islice(records, self.limit)

    def check(self) -> None:
        """Read the files once, up to the limit, to find bad lines before anything is queued.

        Of a pipe, only the first line is looked at, and stays in the pipe. If no record has a field to keep, that is
        logged, because the name may be misspelt. Raises InputError, which names the first bad lines and counts all, and
        also if there is no record.
        """
        good = 0
        bad: list[InputError] = []
        count = 0
        absent = set(self.rows.keep)
        for line in islice(self._lines(self._checkable()), self.limit):
            if isinstance(line, Record):
                good += 1
                if absent:
                    absent -= names_with_values(line.kept)
                continue
            count += 1
            if len(bad) < _NAMED:
                bad.append(line)
            if count == _HOPELESS and not good:
                break
        if bad:
            raise _bad_lines(bad, count, good=good)
        if not good and self.rereadable:
            raise self.empty()
        if good and absent:
            log.warning("%s: no record has a value in %s: kept as null", self.name, ", ".join(sorted(absent)))
        if good and self.rows.id_field != ID_FIELD and self.rows.id_type.found is None:
            log.warning("%s: no record has a value in %s: all ids are null", self.name, self.rows.id_field)
        for file in self.files:
            file.check_pipe(self.rows)
        self._tell_dialects()

    def check_unique(self, why: str = MUST_BE, without: Callable[[int], InputError] | None = None) -> None:
        """Read the files once, up to the limit, and raise InputError for ids that occur twice, which says `why` they
        may not.

        A record without an id has no twin; or else its position has the error `without`. The error may also be that
        there is no room for temporary files.
        """
        with UniqueIds() as ids:
            for position, record in enumerate(self.good_records()):
                if record.id is not None:
                    ids.add(record.id, position)
                elif without is not None:
                    raise without(position)
            ids.find()
        if ids.count:
            wanted = {position for pair in ids.first for position in pair}
            rows = Places(self.rows.max_bytes, self.rows.text_field, self.rows.id_field, template=self.rows.template)
            places = (record.text.decode() for record in self.good_records(rows))
            at = {position: place for position, place in enumerate(places) if position in wanted}
            raise repeated(
                ids.count, [f"{at[again]}: its id is that of {at[before]}" for again, before in ids.first], why
            )

    def good_records(self, rows: Rows | None = None) -> Iterator[Record]:
        """The records, up to the limit, made of their rows in this way; lines that are none are left out."""
        lines = chain.from_iterable(file.lines(rows or self.rows) for file in self.files)
        return islice((line for line in lines if isinstance(line, Record)), self.limit)

    def check_beginnings(self) -> None:
        """Read the first row of each file: raises InputError for a table without the right columns, too."""
        for file in self._checkable():
            next(file.lines(self.rows), None)
        self._tell_dialects()

    def _tell_dialects(self) -> None:
        found = {file.name: file.found(self.rows) for file in self.files}
        ids = self.rows.id_type
        if ids.found is None and ids.beside:
            log.warning(
                "%s: there is no field %r, so there are no ids; %r is one: name it with --id-field",
                self.name,
                self.rows.id_field,
                ids.beside,
            )
        for how in dict.fromkeys(filter(None, found.values())):
            first, *others = (name for name, each in found.items() if each == how)
            log.warning("%s%s: read with %s", first, f" and {len(others):,} other files" if others else "", how)

    def column_types(self) -> dict[str, str]:
        """The types of the columns of the id and of what is kept, as text, where they are those of all files."""
        first, *others = [file.column_types(self.rows).items() for file in self.files]
        return dict(first if not others else set(first).intersection(*others))

    def empty(self) -> InputError:
        """The error for a corpus without a record."""
        return InputError(f"{self.name} holds no record")

    def _records(self, on_bad_line: Callable[[InputError, int], None] | None) -> Iterator[Record]:
        skipped = 0
        for number, line in enumerate(self._lines(self.files)):
            if isinstance(line, Record):
                yield line
            elif on_bad_line is None:
                raise _bad_lines([line], 1, good=number)
            else:
                on_bad_line(line, number - skipped)
                skipped += 1

    def _lines(self, files: Collection[CorpusFile]) -> Iterator[Line]:
        return chain.from_iterable(file.lines(self.rows) for file in files)

    def _checkable(self) -> list[CorpusFile]:
        return [file for file in self.files if file.rereadable]


def open_corpus(
    *paths: str,
    rows: Rows,
    file_format: str | None = None,
    dialect: Dialect = PLAIN,
    limit: int | None = None,
    written: Collection[Path] = (),
) -> Corpus:
    """The corpus in files, folders and patterns, in this order; nothing is read yet.

    Args:
        file_format: the format of all files; if None, each file's name tells it.
        dialect: what is known of how text files are written.
        limit: the most records.
        written: as for :func:`expanded`, which raises InputError for files that are not there.

    Raises InputError if the format is unknown, or can't be guessed from a name.
    """
    if file_format is not None and file_format not in FORMATS:
        raise InputError(f"format {file_format!r} is none of {', '.join(FORMATS)}")
    files = expanded(paths, written=written)
    guessed = file_format is None
    return Corpus(
        tuple(CorpusFile(path, file_format or guess_format(path), guessed, dialect) for path in files),
        rows,
        limit,
    )


def _bad_lines(first: list[InputError], count: int, *, good: int) -> InputError:
    advice = f" {_SKIP}." if good else ""
    if count == 1:
        return InputError(f"{first[0]}.{advice}" if advice else str(first[0]))
    which = f"the first {count:,}" if count == _HOPELESS and not good else f"{count:,}"
    more = ["…"] if count > len(first) else []
    return InputError(f"{which} lines are bad, and nothing is queued.{advice}", *map(str, first), *more)
