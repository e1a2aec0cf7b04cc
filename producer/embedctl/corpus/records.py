"""Records: one per input row, from any source."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from embedctl.corpus.fields import MISSING, field_of, no_field
from embedctl.corpus.kept import kept_fields
from embedctl.corpus.mistakes import check_many, is_missing, is_stray, python_value, wrong_item
from embedctl_config.errors import InputError
from embedctl_config.wire import RecordKind

#: The longest id of a record (bytes): the id travels with the record, and comes back with its vector.
MAX_ID_BYTES = 1024

#: Marks the end of the ids; None stands for a record without an id.
_END = object()

#: A record as callers may pass it: text, or a mapping with text and an optional id.
RecordLike = str | Mapping[str, Any]


class Record(NamedTuple):
    """One input row. `text` is UTF-8 if `kind` is TEXT; see RecordKind for the other kinds. `kept` is a JSON object in
    UTF-8; None if the job keeps no fields."""

    kind: RecordKind
    text: bytes
    id: str | None = None
    kept: bytes | None = None


def make_record(text: object, label: str | None, max_bytes: int, kept: bytes | None = None) -> Record:
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


def records_of(
    texts: Iterable[RecordLike],
    *,
    ids: Iterable[str | int | None] | None = None,
    text_field: str = "text",
    id_field: str = "id",
    keep: Sequence[str] = (),
    max_bytes: int,
) -> Iterator[Record]:
    """Records of strings, or of mappings with a text and an optional id; `keep` names fields that travel with them. The
    iterables are read lazily.

    An item of another kind is the mistake of a program, so it is refused. What data may hold becomes a record, which
    alone will fail: a missing value (None, NaN), and a number or a date after the first text. So does whatever a
    mapping's text field holds.

    Raises InputError if `texts` or `ids` is a single string, a mapping, a table or nothing to iterate over; and while
    reading, if an item, an id or a kept field is not usable, fields are to be kept of an item that is no mapping, or
    `ids` is shorter or longer than `texts`.
    """
    check_many("texts", texts, text_field)
    if ids is not None:
        check_many("ids", ids, id_field)
    return _records(texts, ids, text_field, id_field, keep, max_bytes)


def _records(
    texts: Iterable[RecordLike],
    ids: Iterable[str | int | None] | None,
    text_field: str,
    id_field: str,
    keep: Sequence[str],
    max_bytes: int,
) -> Iterator[Record]:
    labels = None if ids is None else iter(ids)
    checked = _Checked(text_field)
    position = -1
    for position, item in enumerate(texts):
        where = f"record {position}"
        label: object = None
        text: object = item
        kept: bytes | None = None
        if isinstance(item, Mapping):
            text, label = text_and_id(item, text_field, id_field, where)
            text = text if isinstance(text, str) else python_value(text)
            kept = kept_fields(item, keep, where)
        else:
            text = item if isinstance(item, str) else checked(item, position)
            kept = _nothing_kept(text, keep, where, text_field) if keep else None
        if labels is not None:
            label = next(labels, _END)
            if label is _END:
                raise InputError(f"ids has {position} entries, and texts has more: give one id for each text")
        yield make_record(text, None if label is None else _check_label(label, where), max_bytes, kept)
    if labels is not None and next(labels, _END) is not _END:
        raise InputError(f"texts has {position + 1} entries, and ids has more: give one id for each text")


def _nothing_kept(item: object, keep: Sequence[str], where: str, text_field: str) -> bytes | None:
    """The kept fields of an item that is no mapping: null, if the item is missing in the data; raises InputError if it
    is not missing."""
    if is_missing(item):
        return kept_fields({}, keep, where)
    raise InputError(
        f"{where} is {kind_of(item)}, and keep names fields of mappings: give mappings such as "
        f'{{"{text_field}": …, "{keep[0]}": …}}'
    )


class _Checked:
    """Takes the items that are neither strings nor mappings, and refuses those that are a program's mistake."""

    def __init__(self, text_field: str) -> None:
        self._text_field = text_field
        self._missing = 0

    def __call__(self, item: object, position: int) -> object:
        """The text of an item, or what stands in its place in the data."""
        value = python_value(item)
        if is_missing(value):
            self._missing += 1
        elif isinstance(value, bytes) or (is_stray(value) and position > self._missing):
            pass  # if anything came before that was not missing, it was a text, and the stray value is a slip
        elif not isinstance(value, str):
            raise wrong_item(value, f"record {position}", self._text_field)
        return value


#: Types of ids that need no conversion. A tuple, because Python would build a union again for each record.
_PLAIN_IDS = (str, int)


def _check_label(label: object, where: str) -> str | None:
    """An id of a caller in Python; None also for a missing value of pandas, and the value of an Arrow scalar."""
    if isinstance(label, _PLAIN_IDS):
        return check_id(label, where)
    value = python_value(label)
    if is_missing(value):
        return None
    if not isinstance(value, str) and not hasattr(value, "__index__"):
        instead = 'ids=df["id"].astype("Int64")' if isinstance(value, float) else "ids=map(str, ids)"
        raise InputError(
            f"{where}: an id must be text or a whole number, not of type {type(value).__name__}: give {instead}"
        )
    return check_id(value, where)


def text_and_id(item: Mapping[str, Any], text_field: str, id_field: str, where: str) -> tuple[object, object]:
    """The text and the id of a mapping, whose fields may be nested: see :func:`field_of`. Raises InputError, which
    lists the fields that exist, if the text field is missing."""
    text = field_of(item, text_field, MISSING)
    if text is MISSING:
        raise no_field(text_field, item, where)
    return text, field_of(item, id_field)


def check_id(label: object, where: str) -> str | None:
    """An id as text; None stays None. Raises InputError if the id is neither text nor a whole number, can't be written
    as UTF-8, or is too long."""
    if label is None:
        return None
    if hasattr(label, "__index__") and not isinstance(label, bool):
        number = operator.index(label)
        if number.bit_length() > 8 * MAX_ID_BYTES:  # Python refuses to convert a much longer number
            raise _long_id(where)
        label = str(number)
    if not isinstance(label, str):
        raise InputError(f"{where}: an id must be text or a whole number, not {kind_of(label)}")
    try:
        size = len(label.encode())
    except UnicodeEncodeError:
        raise InputError(f"{where}: the id {label!r} is not valid UTF-8") from None
    if size > MAX_ID_BYTES:
        raise _long_id(where)
    return label


def _long_id(where: str) -> InputError:
    return InputError(
        f"{where}: the id is longer than {MAX_ID_BYTES:,} bytes. Name the field of a shorter one with --id-field (in "
        "Python, give ids=), or leave ids out"
    )


def kind_of(value: object) -> str:
    """The type of a value, in the words of JSON."""
    return kind_in_words(type(value).__name__)


def kind_in_words(name: str) -> str:
    """The type of a text field's value in the words of JSON, from the name that :func:`make_record` stored."""
    return _WORDS.get(name.rstrip("_0123456789"), "something that is no text")


#: Names of types of Python, numpy and pandas, without their bits → words of JSON.
_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("NoneType", "NAType", "NaTType"), "null"),
    "bool": "true or false",
    **dict.fromkeys(("int", "uint", "float", "longdouble", "complex", "Decimal", "Fraction"), "a number"),
    **dict.fromkeys(("list", "tuple", "set", "frozenset", "deque", "ndarray", "Series"), "a list"),
    **dict.fromkeys(("dict", "OrderedDict", "defaultdict"), "an object"),
    "str": "a string",
    **dict.fromkeys(("bytes", "bytearray", "memoryview"), "bytes"),
    **dict.fromkeys(("date", "datetime", "time", "timedelta", "Timestamp", "Timedelta"), "a date or a time"),
}
