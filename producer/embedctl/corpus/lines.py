"""Formats with a record a line: `txt` and `jsonl`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from embedctl.corpus.fields import PARSER
from embedctl.corpus.records import kind_of
from embedctl.corpus.rows import Line, Rows
from embedctl.corpus.streams import NULS
from embedctl_config.errors import InputError

_ARRAY = "if it is a JSON array, give --format json"


def txt(lines: Iterable[bytes], name: str, rows: Rows, *, carriages: bool) -> Iterator[Line]:
    """A record a line; an empty line is an (empty) record, so that vectors and lines have the same numbers. A carriage
    return within a line makes it a bad one, unless `carriages` are text.

    Raises InputError if a field is to be kept, or a template's, that is not the text.
    """
    rows.check_text([rows.text_field], name)
    rows.check_kept([rows.text_field], name)
    for number, line in enumerate(lines, start=1):
        where, text = f"{name}, line {number}", line.removesuffix(b"\n").removesuffix(b"\r")
        if text[:1] == b"\0" and not text.strip(b"\0"):
            yield InputError(f"{where}: {NULS}")
        elif b"\r" in text and not carriages:
            yield InputError(
                f"{where}: a carriage return stands within the line: nothing tells whether a text ends there"
            )
        else:
            yield rows.text(text, where)


def jsonl(lines: Iterable[bytes], name: str, rows: Rows, *, hint: str = "") -> Iterator[Line]:
    """An object a line. Empty lines are skipped. The hint is added to the error of a first line that is no object."""
    first = True
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            row = json_object(line, where)
        except InputError as error:
            array = _ARRAY if line.lstrip().startswith(b"[") else hint
            advice = array if first else ""
            yield InputError(f"{error}; {advice}") if advice else error
        else:
            yield rows.line(row, where)
        first = False


def json_object(line: bytes, where: str) -> Mapping[str, Any]:
    """A line's object; raises InputError if it is not JSON, or not an object."""
    try:
        # Bytes that are not UTF-8 become lone surrogates, so that only the text is bad, not the whole line.
        value = PARSER.decode(line.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f'{where}: expected an object such as {{"text": …}}, found {kind_of(value)}')
    return value
