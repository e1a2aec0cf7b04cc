"""Kept fields as columns of a parquet file, whose types follow the values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from embedctl.destinations.arrow import pa

#: The whole numbers between this and its negative are exact as float64.
_EXACT = 2**53
_INT64 = 2**63


class KeptColumns:
    """The columns of these kept fields: one of bool, int64, float64 or string, the narrowest that holds all values
    seen. In a string column, a text is itself, and any other value is its JSON."""

    def __init__(self, names: Sequence[str]) -> None:
        self._seen: dict[str, set[str]] = {name: set() for name in names}
        self._types = self._types_of_all()

    def widened_by(self, rows: Iterable[Mapping[str, Any]]) -> bool:
        """Take note of these records' values; whether a column has another type now."""
        if not self._seen:
            return False
        before = self._types
        for row in rows:
            for name, seen in self._seen.items():
                seen.add(_kind(row.get(name)))
        self._types = self._types_of_all()
        return self._types != before

    def fields(self) -> list[tuple[str, pa.DataType]]:
        return list(self._types.items())

    def arrays(self, rows: Sequence[Mapping[str, Any]]) -> list[pa.Array]:
        return [pa.array([_value(row.get(name), dtype) for row in rows], dtype) for name, dtype in self._types.items()]

    def _types_of_all(self) -> dict[str, pa.DataType]:
        return {name: _type_of(seen - {"null"}) for name, seen in self._seen.items()}


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "small" if -_EXACT <= value <= _EXACT else "int" if -_INT64 <= value < _INT64 else "huge"
    return "float" if isinstance(value, float) else "other"


def _type_of(kinds: set[str]) -> pa.DataType:
    if not kinds:
        return pa.string()
    if kinds == {"bool"}:
        return pa.bool_()
    if kinds <= {"small", "int"}:
        return pa.int64()
    # No number may lose a digit.
    return pa.float64() if kinds <= {"small", "float"} else pa.string()


def _value(value: object, dtype: pa.DataType) -> object:
    if value is None or isinstance(value, str) or not pa.types.is_string(dtype):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
