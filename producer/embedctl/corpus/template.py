"""Templates: a text made of several fields of its row, as `title: {title} | text: {text}`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from string import Formatter
from typing import Any, NamedTuple

from embedctl.corpus.fields import MISSING, field_of, no_field, refuse_twice
from embedctl.corpus.mistakes import is_missing, python_value
from embedctl.corpus.records import Span, kind_of
from embedctl_config.errors import InputError, SettingsError

FLAG = "--template"


class Text(NamedTuple):
    """A text, or what stands in its place in the data, and which part of it is the text field's own; None: all."""

    value: object
    own: Span | None = None


@dataclass(frozen=True, slots=True)
class Template:
    """Each field's name with what stands before it, and what stands after the last one."""

    parts: tuple[tuple[str, str], ...]
    end: str

    @property
    def fields(self) -> list[str]:
        return [name for _, name in self.parts]

    def text(self, row: Mapping[str, Any], text_field: str, where: str) -> Text:
        """The text of a row. InputError: it lacks a field, or has one there that is neither text nor a number.

        If the text field itself is missing in the data, or blank, that is the record's text, so that it fails as it
        would without a template."""
        made, own = "", None
        for before, name in self.parts:
            value = field_of(row, name, MISSING)
            if value is MISSING:
                raise no_field(name, row, where, FLAG)
            refuse_twice({name: value}, where)
            value = python_value(value)
            made += before
            if name == text_field:
                if not isinstance(value, str) or not value.strip():
                    return Text(value)
                own = (len(made), len(made) + len(value))
            made += _word(value, name, where)
        return Text(made + self.end, own)


def parse_template(words: str | None) -> Template | None:
    """The template of a format string: `{name}` is a field, or a path such as `{body.title}`; `{{` is a brace.
    SettingsError: it is none, or names no field."""
    if words is None:
        return None
    parts: list[tuple[str, str]] = []
    before = ""
    try:
        for literal, name, form, conversion in Formatter().parse(words):
            before += literal
            if name is None:
                continue
            if not name or form or conversion:
                raise SettingsError(f"{FLAG} {words!r}: a field is its name in braces, such as {{title}}")
            parts.append((before, name))
            before = ""
    except ValueError as error:
        raise SettingsError(f"{FLAG} {words!r}: {error}. A brace that is text is written twice") from None
    if not parts:
        raise SettingsError(f"{FLAG} {words!r} names no field, such as {{text}}")
    return Template(tuple(parts), before)


def _word(value: object, name: str, where: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool) and not is_missing(value):
        return str(value)
    found = "null" if is_missing(value) else kind_of(value)
    raise InputError(f"{where}: the field {name!r} holds {found}, and {FLAG} takes text and numbers")
