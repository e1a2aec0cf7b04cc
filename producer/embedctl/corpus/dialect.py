"""How a text file is written: its encoding, its line ends and, of a table, its separator, quotes and escapes."""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from embedctl.corpus.rows import Rows
from embedctl_config.errors import InputError, SettingsError

T = TypeVar("T")

_SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
_USUAL = {"csv": ",", "tsv": "\t"}
#: What a name of a column may hold, beside letters and digits, and so can't tell a separator.
_IN_NAMES = frozenset("_-. \"'()[]/\r\n")
_NAMED_SEPARATOR = re.compile(r'"?sep=(.)"?', re.IGNORECASE)
_WITH_DOUBLED = re.compile(r'"(?:[^"]|"")*""(?:[^"]|"")*"')
_QUOTES = {"double": '"', "single": "'", "none": ""}
_ESCAPES = {"backslash": True}
_ENDS = {"lf": False, "cr": True}
_NAMES = ("encoding", "separator", "quote", "escape", "line-end")
_HOW = "such as --dialect encoding=cp1252,separator=semicolon"


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a user says of the files. What is None is told by a file's beginning, or by its format: a `.csv` has
    quotes, and a `.tsv` only if it looks so. A `quote` may be empty; with `escapes`, a backslash makes a separator or
    a quote text; with `carriage`, a carriage return alone ends a line."""

    encoding: str | None = None
    separator: str | None = None
    quote: str | None = None
    escapes: bool = False
    carriage: bool | None = None

    def completed(self, file_format: str, head: str, first_line: str, rows: Rows) -> Dialect:
        """What was said and, of a table, what its first line and its beginning tell of what was not."""
        separator = self.separator or _separator_of(first_line, file_format, rows)
        quote = self.quote
        if quote is None:
            quote = '"' if file_format == "csv" or _looks_quoted(head, separator) else ""
        return replace(self, separator=separator, quote=quote)

    def in_words(self, file_format: str, told: Dialect) -> list[str]:
        """What is special of a table's dialect, and was not said, but told."""
        separator, usual = str(told.separator), _USUAL[file_format]
        said = [] if self.separator or separator == usual else [f"{_name_of(separator)} as the separator"]
        return said + (["fields in quotes"] if self.quote is None and told.quote and file_format == "tsv" else [])


PLAIN = Dialect()


def parse_dialect(words: str | None) -> Dialect:
    """The dialect in `encoding=cp1252,separator=semicolon,quote=none`; raises SettingsError if it is no such thing."""
    given: dict[str, str] = {}
    for word in (words or "").split(","):
        name, equals, value = (part.strip() for part in word.partition("="))
        if word.strip():
            if not equals or name in given:
                raise SettingsError(f"--dialect: {word!r} is not NAME=VALUE, each name once, {_HOW}")
            given[name] = value
    if unknown := [name for name in given if name not in _NAMES]:
        raise SettingsError(f"--dialect: {unknown[0]!r} is none of {', '.join(_NAMES)}, {_HOW}")
    encoding, separator, quote, escape, end = map(given.get, _NAMES)
    is_own = separator is not None and len(separator) == 1 and not separator.isalnum()
    return Dialect(
        _encoding(encoding),
        separator if is_own else _one_of(_SEPARATORS, "separator", separator),
        _one_of(_QUOTES, "quote", quote),
        bool(_one_of(_ESCAPES, "escape", escape)),
        _one_of(_ENDS, "line-end", end),
    )


def names_separator(line: str) -> str | None:
    """The separator that a line such as `sep=;` names, as Excel writes it; None if this is no such line."""
    found = _NAMED_SEPARATOR.fullmatch(line.strip("\r\n"))
    return found and found[1]


def _separator_of(line: str, file_format: str, rows: Rows) -> str:
    """The separator of a table with this first line: the one that gives the columns that rows need; the usual one of
    the format before the others, and those that have a name before any other sign."""
    if named := names_separator(line):
        return named
    signs = (sign for sign in line if not sign.isalnum() and sign not in _IN_NAMES)
    columns = {each: _fields(line, each) for each in (_USUAL[file_format], *_SEPARATORS.values(), *signs)}
    for separator, names in columns.items():
        with suppress(InputError):
            rows.check_once(names, "")
            rows.check_columns(names, "")
            return separator
    return max(_SEPARATORS.values(), key=lambda each: (len(columns[each]), each == _USUAL[file_format]))


def _fields(line: str, separator: str) -> list[str]:
    with suppress(csv.Error):
        return next(csv.reader([line], delimiter=separator), [])
    return []


def _looks_quoted(head: str, separator: str) -> bool:
    """Whether a `.tsv` that begins so was written with quotes: its first line has them, or a field wholly in quotes has
    doubled ones, as programs write a quote within quotes."""
    fields = [field for line in head.splitlines() for field in line.split(separator)]
    return head.startswith('"') or any(_WITH_DOUBLED.fullmatch(field) for field in fields)


def _name_of(separator: str) -> str:
    return next((name for name, each in _SEPARATORS.items() if each == separator), repr(separator))


def _encoding(name: str | None) -> str | None:
    if name is None:
        return None
    try:
        b"a".decode(name, "ignore")  # a codec of bytes, such as base64, is refused too
        return codecs.lookup(name).name
    except LookupError:
        raise SettingsError(f"--dialect: {name!r} is no encoding that Python knows, such as cp1252") from None


def _one_of(known: Mapping[str, T], what: str, name: str | None) -> T | None:
    if name is None or name in known:
        return None if name is None else known[name]
    raise SettingsError(f"--dialect: {what} {name!r} is none of {', '.join(known)}")
