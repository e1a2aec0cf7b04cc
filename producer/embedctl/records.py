"""Records: one per input row, from any source."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from embedctl.kept import kept_fields
from embedctl_config.errors import InputError
from embedctl_config.wire import RecordKind

#: The longest id of a record (bytes): the id travels with the record, and comes back with its vector.
MAX_ID_BYTES = 1024

#: Marks the end of the ids; None stands for a record without an id.
_END = object()

#: A record as callers may pass it: text, or a mapping with text and an optional id.
RecordLike = str | Mapping[str, Any]


class Record(NamedTuple):
    """One input row. `text` is UTF-8 if `kind` is TEXT; see RecordKind for the other kinds.

    `kept` is a JSON object in UTF-8; None if the job keeps no fields.
    """

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
        return RecordKind.NOT_TEXT, _kind_name(text).encode()
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
    """Records of strings, or of mappings with a text and an optional id. The iterables are read lazily.

    Args:
        keep: the fields of a mapping that travel with its record.

    Raises:
        InputError: `texts` or `ids` is a single string, a mapping or a table. While reading: a mapping has no text
            field, an id or a kept field is not usable, fields are to be kept of an item that is no mapping, or `ids` is
            shorter or longer than `texts`.
    """
    _check_many("texts", texts)
    _check_many("ids", ids)
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
    position = -1
    for position, item in enumerate(texts):
        where = f"record {position}"
        label: object = None
        text: object = item
        kept: bytes | None = None
        if isinstance(item, Mapping):
            text, label = text_and_id(item, text_field, id_field, where)
            kept = kept_fields(item, keep, where)
        elif keep:
            raise InputError(
                f"{where} is {kind_of(item)}, and keep names fields of mappings: give mappings such as "
                f'{{"{text_field}": …, "{keep[0]}": …}}'
            )
        if labels is not None:
            label = next(labels, _END)
            if label is _END:
                raise InputError(f"ids has {position} entries, and texts has more: give one id for each text")
        yield make_record(text, check_id(label, where), max_bytes, kept)
    if labels is not None and next(labels, _END) is not _END:
        raise InputError(f"texts has {position + 1} entries, and ids has more: give one id for each text")


def _check_many(name: str, values: object) -> None:
    """Refuse iterables whose items are not what a caller expects."""
    if isinstance(values, str | bytes | Mapping):
        raise InputError(f"{name} is {kind_of(values)}, not several: give an iterable of {name}, such as a list")
    if hasattr(values, "columns"):
        raise InputError(
            f"{name} is a table, and iterating over it gives columns, not rows: give the column with the {name}, "
            'such as texts=df["text"] and ids=df["id"]'
        )


def text_and_id(item: Mapping[str, Any], text_field: str, id_field: str, where: str) -> tuple[object, object]:
    """The text and the id of a mapping.

    Raises:
        InputError: the text field is missing; the message lists the fields that exist.
    """
    try:
        return item[text_field], item.get(id_field)
    except KeyError:
        raise no_field(text_field, item, where) from None


def no_field(text_field: str, seen: Iterable[object], where: str) -> InputError:
    """The error for a record without the text field."""
    names = ", ".join(sorted(map(str, seen))) or "none"
    return InputError(
        f"{where}: no field {text_field!r}; fields seen: {names}. Name the right one with --text-field "
        "(text_field= in Python)"
    )


def check_id(label: object, where: str) -> str | None:
    """An id as text; None stays None.

    Raises:
        InputError: the id is neither text nor a whole number, can't be written as UTF-8, or is too long.
    """
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
    return kind_in_words(_kind_name(value))


def kind_in_words(name: str) -> str:
    """The type of a text field's value in the words of JSON, from the name that :func:`make_record` stored.

    Chunks hold Python's type names, because all releases have stored these. With other names, a job begun by an older
    producer would look as if its corpus had changed.
    """
    return _WORDS.get(name.rstrip("_0123456789"), "something that is no text")


def _kind_name(value: object) -> str:
    return type(value).__name__


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
