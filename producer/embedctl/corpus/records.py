"""Records: one per input row, from any source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from embedctl_config.errors import InputError
from embedctl_config.record_ids import RecordId, usable
from embedctl_config.wire import ErrorCode, RecordKind

#: A record as callers may pass it: text, or a mapping with text and an optional id.
RecordLike = str | Mapping[str, Any]
#: A part of a text: where it begins and ends (characters).
Span = tuple[int, int]


class Record(NamedTuple):
    """One input row. `text` is UTF-8 if `kind` is TEXT; see RecordKind for the other kinds. `kept` is a JSON object in
    UTF-8; None if the job keeps no fields. `own` is the part that is the text field's, if a template added others."""

    kind: RecordKind
    text: bytes
    id: RecordId | None = None
    kept: bytes | None = None
    own: Span | None = None


def make_record(text: object, label: RecordId | None, max_bytes: int, kept: bytes | None = None) -> Record:
    """A record of a text field's value. A value that is not text becomes a record too, and only that record fails."""
    kind, data = _kind_and_bytes(text, max_bytes)
    return Record(kind, data, label, kept)


def _kind_and_bytes(text: object, max_bytes: int) -> tuple[RecordKind, bytes]:
    if isinstance(text, str):
        try:
            data = text.encode()
        except UnicodeEncodeError:
            return RecordKind.INVALID_UTF8, _invalid_bytes(text)[:max_bytes]
    elif isinstance(text, bytes):
        data = text
        try:
            text.decode()
        except UnicodeDecodeError:
            return RecordKind.INVALID_UTF8, text[:max_bytes]
    else:
        return RecordKind.NOT_TEXT, type(text).__name__.encode()
    if len(data) > max_bytes:
        return RecordKind.OVERSIZE, str(len(data)).encode()
    return RecordKind.TEXT, data


def _invalid_bytes(text: str) -> bytes:
    """The bytes of a text that can't be UTF-8; if it was read with surrogateescape, the file's original bytes."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def check_id(label: object, where: str) -> RecordId | None:
    """An id in its own type; None stays None. Raises InputError if an id has no such type, can't be written as UTF-8,
    or is too long."""
    if label is None:
        return None
    try:
        found = usable(label)
    except ValueError as error:
        raise InputError(f"{where}: the id {error}") from None
    if found is None:
        said = kind_of(label)
        raise InputError(
            f"{where}: an id must be text, a whole number, a UUID, a decimal, bytes or a date, not "
            f"{str(label)[:40] if said == _NUMBER else said}"
        )
    return found


def kind_of(value: object) -> str:
    """The type of a value, in the words of JSON."""
    return kind_in_words(type(value).__name__)


def kind_in_words(name: str) -> str:
    """The type of a text field's value in the words of JSON, from the name that :func:`make_record` stored."""
    return _WORDS.get(name.rstrip("_0123456789"), NO_TEXT)


def problem_of(kind: int, text: bytes) -> tuple[ErrorCode, str] | None:
    """Why a record can't be encoded, whatever the model: a code and a sentence; None if its text can be tried."""
    said = text.decode(errors="replace")
    if kind == RecordKind.NOT_TEXT:
        return ErrorCode.NOT_TEXT, f"the text field holds {kind_in_words(said)}, not text"
    if kind == RecordKind.INVALID_UTF8:
        return ErrorCode.INVALID_UTF8, "the text is not valid UTF-8"
    if kind == RecordKind.OVERSIZE:
        return ErrorCode.TOO_LONG, f"{said} bytes, more than max_text_bytes allows"
    return None if text.strip() else (ErrorCode.EMPTY, "the text is empty")


NO_TEXT = "something that is no text"
_NUMBER = "a number"
#: Names of types of Python, numpy and pandas, without their bits → words of JSON.
_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("NoneType", "NAType", "NaTType"), "null"),
    "bool": "true or false",
    **dict.fromkeys(("int", "uint", "float", "longdouble", "complex", "Decimal", "Fraction"), _NUMBER),
    **dict.fromkeys(("list", "tuple", "set", "frozenset", "deque", "ndarray", "Series"), "a list"),
    **dict.fromkeys(("dict", "OrderedDict", "defaultdict"), "an object"),
    "str": "a string",
    **dict.fromkeys(("bytes", "bytearray", "memoryview"), "bytes"),
    **dict.fromkeys(("datetime", "Timestamp"), "a date and a time"),
    "OutOfRange": "a date beyond the years 1 to 9999",
    **dict.fromkeys(("date", "time", "timedelta", "Timedelta"), "a date or a time"),
}
