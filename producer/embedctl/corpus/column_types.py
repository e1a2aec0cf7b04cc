"""The types of a corpus's columns, which come out again in parquet.

A kept field travels as JSON. The type of its column, which the job notes, tells what it was before.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any
from uuid import UUID

from embedctl.corpus.streams import needs_pyarrow

#: Types whose values JSON has too.
_OF_JSON = ("null", "boolean", "integer", "floating", "string", "large_string", "string_view")
#: Types whose values are kept as base64, and as text that arrow reads.
_BYTES = ("binary", "large_binary", "fixed_size_binary", "binary_view")
_CAST = ("timestamp", "time", "date", "decimal")
_UUID = "extension<arrow.uuid>"
#: A time is read as one of this day.
_DAY = "1970-01-01T"
#: Units of time → the digits after the point of a second.
_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}


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
    """Whether :func:`restored` makes such columns. It makes none that is nested and holds more than JSON does."""
    types = needs_pyarrow("reading parquet").types
    if types.is_dictionary(kind):
        return is_known(kind.value_type)
    known = any(getattr(types, f"is_{name}")(kind) for name in (*_BYTES, *_CAST, "duration"))
    return known or str(kind) == _UUID or _is_of_json(kind)


def _is_of_json(kind: Any) -> bool:
    types = needs_pyarrow("reading parquet").types
    if types.is_dictionary(kind):
        return _is_of_json(kind.value_type)
    if kind.num_fields:
        return not types.is_map(kind) and all(_is_of_json(kind.field(at).type) for at in range(kind.num_fields))
    return any(getattr(types, f"is_{name}")(kind) for name in _OF_JSON)


def restored(values: Sequence[Any], kind: Any) -> Any:
    """A column of an arrow type of what :func:`kept_fields` made of its values. ArrowException, or an error of Python's
    types: one is of another type."""
    pyarrow = needs_pyarrow("reading parquet")
    types = pyarrow.types
    if any(getattr(types, f"is_{name}")(kind) for name in _BYTES):
        values = [None if each is None else base64.b64decode(each) for each in values]
    elif str(kind) == _UUID:
        values = [None if each is None else UUID(each).bytes for each in values]
    elif types.is_duration(kind):
        digits = _DIGITS[kind.unit]
        values = [None if each is None else int(Decimal(str(each)).scaleb(digits)) for each in values]
    elif types.is_timestamp(kind) or types.is_time(kind):
        day, zone = ("", kind.tz) if types.is_timestamp(kind) else (_DAY, None)
        column = pyarrow.array([None if each is None else day + each for each in values], pyarrow.string())
        return column.cast(pyarrow.timestamp("ns" if kind.unit == "ns" else "us", zone)).cast(kind)
    elif types.is_date(kind) or types.is_decimal(kind):
        return pyarrow.array(values, pyarrow.string()).cast(kind)
    return pyarrow.array(values, kind)


def python_rows(batch: Any) -> Iterable[dict[str, Any]]:
    """The rows of a batch as Python's values."""
    pyarrow = needs_pyarrow("reading parquet")
    read_as = [_readable(kind) for kind in batch.schema.types]
    columns = [column.cast(kind) for column, kind in zip(batch.columns, read_as, strict=True)]
    names, digits = batch.schema.names, [_digits_of(kind) for kind in batch.schema.types]
    try:
        rows: Iterable[dict[str, Any]] = pyarrow.RecordBatch.from_arrays(columns, names=names).to_pylist()
    except (ValueError, OverflowError):  # of one value, and the others are right
        rows = (dict(zip(names, map(_python, row), strict=True)) for row in zip(*columns, strict=True))
    durations = {name: each for name, each in zip(names, digits, strict=True) if each is not None}
    if not durations:
        return rows
    return ({**row, **{name: _seconds(row[name], each) for name, each in durations.items()}} for row in rows)


class OutOfRange:
    """Stands for a date or a time that is not in the years 1 to 9999."""


def _python(value: Any) -> Any:
    """A value. In a string, bytes that are not UTF-8 become lone surrogates, so that only this text is bad. A time that
    Python has no form for fits nothing, so that only its line is bad."""
    try:
        return value.as_py()
    except UnicodeDecodeError:
        pyarrow = needs_pyarrow("reading parquet")
        if pyarrow.types.is_struct(value.type):
            return {field.name: _python(value[field.name]) for field in value.type}
        if pyarrow.types.is_list(value.type) or pyarrow.types.is_large_list(value.type):
            return [_python(each) for each in value.values]
        plain = value.value if pyarrow.types.is_dictionary(value.type) else value
        return plain.cast(pyarrow.large_binary()).as_py().decode("utf-8", "surrogateescape")
    except (OverflowError, ValueError):
        return OutOfRange()


def _readable(kind: Any) -> Any:
    """The type that a column is read as: text or a whole number for what Python's own types don't hold."""
    pyarrow = needs_pyarrow("reading parquet")
    if pyarrow.types.is_duration(kind):
        return pyarrow.int64()
    of_nanoseconds = (pyarrow.types.is_timestamp(kind) or pyarrow.types.is_time(kind)) and kind.unit == "ns"
    return pyarrow.string() if of_nanoseconds else kind


def _digits_of(kind: Any) -> int | None:
    return _DIGITS[kind.unit] if needs_pyarrow("reading parquet").types.is_duration(kind) else None


def _seconds(ticks: int | None, digits: int) -> float | str | None:
    """Seconds; as text, where a number of JSON would lose digits of them."""
    if ticks is None:
        return None
    exact = Decimal(ticks).scaleb(-digits)
    number = float(exact)
    return number if Decimal(str(number)) == exact else str(exact)
