"""How a text file is written: its encoding and, of a table, the separator and the quotes."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from embedctl_config.errors import SettingsError

T = TypeVar("T")

_SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
_WITH_DOUBLED = re.compile(r'"(?:[^"]|"")*""(?:[^"]|"")*"')
_QUOTES = {"double": True, "none": False}
_HOW = "such as --dialect encoding=cp1252,separator=semicolon"


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a user says of the files. What is None is told by a file's beginning, or by its format: a `.csv` has
    quotes, and a `.tsv` only if it looks so."""

    encoding: str | None = None
    separator: str | None = None
    quoted: bool | None = None


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
    dialect = Dialect(
        _encoding(given.pop("encoding", None)),
        _one_of(_SEPARATORS, "separator", given.pop("separator", None)),
        _one_of(_QUOTES, "quote", given.pop("quote", None)),
    )
    if given:
        raise SettingsError(f"--dialect: {next(iter(given))!r} is none of encoding, separator, quote, {_HOW}")
    return dialect


def looks_quoted(head: str) -> bool:
    """Whether a `.tsv` that begins so was written with quotes: its first line has them, or a field wholly in quotes has
    doubled ones, as programs write a quote within quotes."""
    lines = head.splitlines()
    fields = [field for line in lines for field in line.split("\t")]
    return head.startswith('"') or any(_WITH_DOUBLED.fullmatch(field) for field in fields)


def name_of(separator: str) -> str:
    """A separator in words."""
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
