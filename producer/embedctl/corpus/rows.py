"""How the rows of a corpus become records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from embedctl.corpus.fields import MISSING, field_of, no_field
from embedctl.corpus.kept import kept_fields
from embedctl.corpus.records import Record, check_id, make_record
from embedctl_config.errors import InputError

#: The field of an id unless another is named. No row needs it.
ID_FIELD = "id"

#: A record, or the error of a line that holds no record.
Line = Record | InputError


@dataclass(frozen=True, slots=True)
class Rows:
    """Where a row has its text and its id, the longest text (bytes), and the fields that travel with the record."""

    text_field: str
    id_field: str
    max_bytes: int
    keep: Sequence[str] = ()

    def line(self, row: Mapping[str, Any], where: str, *, absent: Any = MISSING) -> Line:
        """A row's record, or its error. Without `absent` to stand for it, a missing text field is one."""
        text = field_of(row, self.text_field, absent)
        if text is MISSING:
            return no_field(self.text_field, row, where)
        try:
            kept = kept_fields(row, self.keep, where)
            return make_record(text, check_id(field_of(row, self.id_field), where), self.max_bytes, kept)
        except InputError as error:
            return error

    def text(self, text: object, where: str) -> Line:
        """The record of a row that is only a text, or its error. Of such a row, only the text can be kept."""
        try:
            return make_record(text, None, self.max_bytes, kept_fields({self.text_field: text}, self.keep, where))
        except InputError as error:
            return error

    def check_columns(self, columns: Mapping[str, Any] | Iterable[str], where: str) -> None:
        """Raise InputError if a table lacks the text's column, or one that was named for the id or to be kept.

        The columns are names, with the fields inside each if they may be nested.
        """
        if not _has(columns, self.text_field):
            raise no_field(self.text_field, columns, where)
        if self.id_field != ID_FIELD and not _has(columns, self.id_field):
            raise no_field(self.id_field, columns, where, "--id-field")
        self.check_kept(columns, where)

    def check_kept(self, columns: Mapping[str, Any] | Iterable[str], where: str) -> None:
        """Check that a table has the columns to keep; see :meth:`check_columns`."""
        for name in self.keep:
            if not _has(columns, name):
                raise no_field(name, columns, where, "--keep")


class Places(Rows):
    """Makes records whose text is the place of their row, such as `c.jsonl, line 3`."""

    __slots__ = ()

    def line(self, row: Mapping[str, Any], where: str, *, absent: Any = MISSING) -> Line:
        return _placed(super().line(row, where, absent=absent), where)

    def text(self, text: object, where: str) -> Line:
        return _placed(super().text(text, where), where)


def _placed(line: Line, where: str) -> Line:
    return line._replace(text=where.encode("utf-8", "replace")) if isinstance(line, Record) else line


def _has(columns: Mapping[str, Any] | Iterable[str], path: str) -> bool:
    if isinstance(columns, Mapping):
        return field_of(columns, path, MISSING) is not MISSING
    return path in columns
