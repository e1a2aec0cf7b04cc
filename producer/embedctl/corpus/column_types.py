"""The types of a corpus's columns, which come out again in parquet.

A kept field travels as JSON. The type of its column, which the job notes, tells what it was before.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from embedctl.corpus.streams import needs_pyarrow

#: What JSON gave → a value that arrow takes; None if they are the same.
Restore = Callable[[Any], Any] | None
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def type_at(schema: Any, path: str) -> Any:
    """The type of a column of an arrow schema, or of a field inside, as :func:`field_of` finds it; None if there is
    none, or if no value of it comes back as it was."""
    fields = {field.name: field.type for field in schema}
    types = needs_pyarrow("reading parquet").types
    if path in fields:
        found = fields[path]
        found = found.value_type if types.is_dictionary(found) else found
        return found if is_known(found) else None
    name, dot, rest = path.partition(".")
    return type_at(fields[name], rest) if dot and name in fields and types.is_struct(fields[name]) else None


def written(name: str, kind: Any) -> str:
    """A type as text."""
    pyarrow = needs_pyarrow("reading parquet")
    return base64.b64encode(pyarrow.schema([pyarrow.field(name, kind)]).serialize()).decode()


def parsed(texts: Mapping[str, str] | None) -> dict[str, Any]:
    """The types that :func:`written` gave, by name. Those that another program's words name are left out."""
    pyarrow = needs_pyarrow("reading parquet")
    found = {}
    for name, text in (texts or {}).items():
        try:
            kind = pyarrow.ipc.read_schema(pyarrow.py_buffer(base64.b64decode(text))).field(0).type
        except (ValueError, TypeError, IndexError, OSError, pyarrow.ArrowException):
            continue
        if is_known(kind):
            found[name] = kind
    return found


def is_known(kind: Any) -> bool:
    try:
        restore_of(kind)
    except TypeError:
        return False
    return True


def restore_of(kind: Any) -> Restore:
    """What makes values of an arrow type of those that :func:`kept_fields` made of them; TypeError if nothing does."""
    types = needs_pyarrow("reading parquet").types
    if types.is_struct(kind):
        return _of_struct(kind)
    if types.is_map(kind):
        return _of_map(restore_of(kind.key_type), restore_of(kind.item_type))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = restore_of(kind.value_type)
        return None if inner is None else _of_list(inner)
    for check, restore in _LEAVES:
        if getattr(types, f"is_{check}")(kind):
            return None if restore is None else _or_null(restore)
    if str(kind) == "extension<arrow.uuid>":
        return _or_null(lambda text: UUID(text).bytes)
    if types.is_timestamp(kind) or types.is_time(kind) or types.is_duration(kind):
        return _of_time(kind)
    raise TypeError(kind)


def _or_null(restore: Callable[[Any], Any]) -> Restore:
    return lambda value: None if value is None else restore(value)


def _of_list(inner: Callable[[Any], Any]) -> Restore:
    return _or_null(lambda values: [inner(each) for each in values])


def _of_struct(kind: Any) -> Restore:
    inner = {field.name: each for field in kind if (each := restore_of(field.type)) is not None}
    if not inner:
        return None
    return _or_null(lambda value: {name: inner[name](each) if name in inner else each for name, each in value.items()})


def _of_map(key: Restore, value: Restore) -> Restore:
    def pair(each: Any) -> tuple[Any, Any]:
        return key(each[0]) if key else each[0], value(each[1]) if value else each[1]

    return _or_null(lambda pairs: [pair(each) for each in pairs])


def _of_time(kind: Any) -> Restore:
    types = needs_pyarrow("reading parquet").types
    if types.is_duration(kind):
        return _or_null(lambda seconds: timedelta(seconds=seconds))
    if kind.unit == "ns":
        return _or_null(_nanoseconds)
    return _or_null(time.fromisoformat if types.is_time(kind) else datetime.fromisoformat)


def readable(kind: Any) -> Any:
    """The type that a column is read as: that of the column, but text for what Python's own types don't hold."""
    pyarrow = needs_pyarrow("reading parquet")
    types = pyarrow.types
    if types.is_struct(kind):
        return pyarrow.struct([pyarrow.field(each.name, readable(each.type)) for each in kind])
    if types.is_list(kind):
        return pyarrow.list_(readable(kind.value_type))
    if types.is_duration(kind):
        return pyarrow.duration("us") if kind.unit == "ns" else kind
    return pyarrow.string() if _is_of_nanoseconds(kind) else kind


def _is_of_nanoseconds(kind: Any) -> bool:
    types = needs_pyarrow("reading parquet").types
    return bool(types.is_timestamp(kind) or types.is_time(kind)) and kind.unit == "ns"


def _nanoseconds(text: str) -> int:
    """Since 1970 in UTC, or since midnight, of a time as arrow writes it."""
    whole, _, rest = text.partition(".")
    if whole[2:3] == ":":
        whole = f"1970-01-01 {whole}"
    moment = datetime.fromisoformat(whole + rest[9:])
    return (moment.replace(tzinfo=moment.tzinfo or UTC) - _EPOCH) // timedelta(seconds=1) * 10**9 + int(rest[:9])


_LEAVES: tuple[tuple[str, Callable[[Any], Any] | None], ...] = (
    *((name, None) for name in ("null", "boolean", "integer", "floating", "string", "large_string", "string_view")),
    *((name, base64.b64decode) for name in ("binary", "large_binary", "fixed_size_binary", "binary_view")),
    ("decimal", Decimal),
    ("date", date.fromisoformat),
)
