"""The types of a corpus's columns, which come out again in parquet.

A kept field travels as JSON. The type of its column, which the job notes, tells what it was before.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from embedctl.corpus.streams import needs_pyarrow

#: What JSON gave → a value that arrow takes; None if they are the same.
Restore = Callable[[Any], Any] | None
#: Kinds of lists.
_LISTS = ("list", "large_list", "fixed_size_list", "list_view", "large_list_view")
#: Units of time → the digits after the point of a second.
_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
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


def _cast(batch: Any) -> Any:
    pyarrow = needs_pyarrow("reading parquet")
    wanted = [_readable(field.type) for field in batch.schema]
    if wanted == batch.schema.types:
        return batch
    columns = [column.cast(kind) for column, kind in zip(batch.columns, wanted, strict=True)]
    return pyarrow.RecordBatch.from_arrays(columns, names=batch.schema.names)


def python_rows(batch: Any) -> Iterable[dict[str, Any]]:
    """The rows of a batch as Python's values."""
    plain = _cast(batch)
    try:
        rows: Iterable[dict[str, Any]] = plain.to_pylist()
    except (ValueError, OverflowError):  # of one value, and the others are right
        names = plain.schema.names
        rows = (
            {name: _python(value) for name, value in zip(names, row, strict=True)}
            for row in zip(*plain.columns, strict=True)
        )
    shown = {each.name: show for each in batch.schema if (show := _shown_of(each.type)) is not None}
    return ({**row, **{name: show(row[name]) for name, show in shown.items()}} for row in rows) if shown else rows


class OutOfRange:
    """Stands for a date or a time that is not in the years 1 to 9999."""


def _python(value: Any) -> Any:
    """A value. In a string, bytes that are not UTF-8 become lone surrogates, so that only this text is bad. A time that
    Python has no form for fits nothing, so that only its line is bad."""
    try:
        return value.as_py()
    except OverflowError:
        return OutOfRange()
    except UnicodeDecodeError:
        pyarrow = needs_pyarrow("reading parquet")
        if pyarrow.types.is_struct(value.type):
            return {field.name: _python(value[field.name]) for field in value.type}
        if pyarrow.types.is_list(value.type) or pyarrow.types.is_large_list(value.type):
            return [_python(each) for each in value.values]
        plain = value.value if pyarrow.types.is_dictionary(value.type) else value
        return plain.cast(pyarrow.large_binary()).as_py().decode("utf-8", "surrogateescape")


def restore_of(kind: Any) -> Restore:
    """What makes values of an arrow type of those that :func:`kept_fields` made of them; TypeError if nothing does."""
    return _within(kind, _restored)


def _shown_of(kind: Any) -> Restore:
    """What makes values of an arrow type of those that a column holds which is read as :func:`_readable` says."""
    return _within(kind, _shown)


def _within(kind: Any, of_leaf: Callable[[Any], Restore]) -> Restore:
    """What does that to each value inside of one that is nested."""
    types = needs_pyarrow("reading parquet").types
    if types.is_dictionary(kind):
        return _within(kind.value_type, of_leaf)
    if types.is_struct(kind):
        return _of_struct({field.name: _within(field.type, of_leaf) for field in kind})
    if types.is_map(kind):
        return _of_map(_within(kind.key_type, of_leaf), _within(kind.item_type, of_leaf))
    if any(getattr(types, f"is_{name}")(kind) for name in _LISTS):
        inner = _within(kind.value_type, of_leaf)
        return None if inner is None else _of_list(inner)
    return of_leaf(kind)


def _restored(kind: Any) -> Restore:
    types = needs_pyarrow("reading parquet").types
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


def _of_struct(found: Mapping[str, Restore]) -> Restore:
    inner = {name: each for name, each in found.items() if each is not None}
    if not inner:
        return None
    return _or_null(lambda value: {name: inner[name](each) if name in inner else each for name, each in value.items()})


def _of_map(key: Restore, value: Restore) -> Restore:
    if key is None and value is None:
        return None

    def pair(each: Any) -> tuple[Any, Any]:
        return key(each[0]) if key else each[0], value(each[1]) if value else each[1]

    return _or_null(lambda pairs: [pair(each) for each in pairs])


def _of_time(kind: Any) -> Restore:
    types = needs_pyarrow("reading parquet").types
    if types.is_duration(kind):
        digits = _DIGITS[kind.unit]
        return _or_null(lambda seconds: int(Decimal(str(seconds)).scaleb(digits)))
    if kind.unit == "ns":
        return _or_null(_nanoseconds)
    return _or_null(time.fromisoformat if types.is_time(kind) else datetime.fromisoformat)


def _readable(kind: Any) -> Any:
    """The type that a column is read as: that of the column, but text for what Python's own types don't hold."""
    pyarrow = needs_pyarrow("reading parquet")
    types = pyarrow.types
    if types.is_struct(kind):
        return pyarrow.struct([pyarrow.field(each.name, _readable(each.type)) for each in kind])
    if types.is_list(kind):
        return pyarrow.list_(_readable(kind.value_type))
    if types.is_large_list(kind):
        return pyarrow.large_list(_readable(kind.value_type))
    if types.is_fixed_size_list(kind):
        return pyarrow.list_(_readable(kind.value_type), kind.list_size)
    if types.is_map(kind):
        return pyarrow.map_(_readable(kind.key_type), _readable(kind.item_type))
    if types.is_duration(kind):
        return pyarrow.int64()
    return pyarrow.string() if _is_of_nanoseconds(kind) else kind


def _shown(kind: Any) -> Restore:
    """Seconds; as text, where a number of JSON would lose digits of them."""
    if not needs_pyarrow("reading parquet").types.is_duration(kind):
        return None
    digits = _DIGITS[kind.unit]

    def seconds(ticks: int) -> float | str:
        exact = Decimal(ticks).scaleb(-digits)
        number = float(exact)
        return number if Decimal(str(number)) == exact else str(exact)

    return _or_null(seconds)


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
