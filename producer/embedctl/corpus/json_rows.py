"""The parser of JSON for rows: a name that stands twice in an object is marked, and a number may have any length."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from embedctl_config.errors import InputError


class Twice:
    """Stands for the value of a name that an object holds more than once: it is not known which one is meant."""


_TWICE = Twice()


def refuse_twice(fields: Mapping[str, object], where: str) -> None:
    """Raise InputError if one of these values stands for a field that its row holds more than once."""
    for name, value in fields.items():
        if isinstance(value, Twice):
            raise InputError(f"{where}: the field {name!r} stands twice: leave one of the two out")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                row[name] = _TWICE
            seen.add(name)
    return row


def _whole_number(digits: str) -> int | Decimal:
    """An integer; a decimal if it is so long that Python refuses to convert it. No id is that long."""
    try:
        return int(digits)
    except ValueError:
        return Decimal(digits)


PARSER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_whole_number)
