"""Rows of JSON: their parser, which marks a name that stands twice in an object and takes numbers of any length; and a
field of a row, by its name or by its path into nested objects."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from embedctl_config.errors import InputError

#: What :func:`field_of` returns as its default if a caller must tell a missing field from null.
MISSING: Any = object()


def field_of(row: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value of a field; `default` if the row has no such field. A dot leads into an object: `body.input` is the
    field `input` of the object `body`. A field whose own name is `body.input` wins."""
    value = row.get(path, MISSING)
    if value is not MISSING:
        return value
    name, dot, rest = path.partition(".")
    inner = row.get(name) if dot else None
    return field_of(inner, rest, default) if isinstance(inner, Mapping) else default


def no_field(
    path: str, seen: Mapping[str, Any] | Iterable[object], where: str, flag: str = "--text-field"
) -> InputError:
    """The error for a row without a field, at this place of a file. It lists the fields of the innermost object that
    the path leads to. `seen` is the row, or just the names of its fields if these are not nested; `flag` is the option
    that names the field."""
    inside, ends = _innermost(seen, path)
    names = ", ".join(map(_shown, sorted(map(str, inside)))) or "none"
    within = f" in {ends!r}" if ends else ""
    return InputError(
        f"{where}: no field {path!r}; fields seen{within}: {names}. Name the right one with {flag} "
        f"({flag.removeprefix('--').replace('-', '_')}= in Python)"
    )


def _shown(name: str) -> str:
    """A name; in quotes, if one can't see where it begins or ends."""
    return name if name.isprintable() and name == name.strip() else repr(name)


def _innermost(seen: Mapping[str, Any] | Iterable[object], path: str) -> tuple[Iterable[object], str]:
    """The last object on a path that is there, and the path to it; the row itself has an empty one."""
    steps: list[str] = []
    while isinstance(seen, Mapping):
        name, dot, path = path.partition(".")
        inner = seen.get(name)
        if not dot or not isinstance(inner, Mapping):
            break
        steps.append(name)
        seen = inner
    return seen, ".".join(steps)


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
