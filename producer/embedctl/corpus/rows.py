"""How the rows of a corpus become records, and what a program gives in their place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from embedctl.corpus.fields import MISSING, field_of, no_field, refuse_twice
from embedctl.corpus.kept import kept_fields
from embedctl.corpus.mistakes import check_many, is_missing, is_stray, python_value, wrong_item
from embedctl.corpus.records import Record, RecordLike, check_id, kind_of, make_record
from embedctl.corpus.template import FLAG, Template, Text
from embedctl_config.errors import InputError
from embedctl_config.record_ids import IdType, RecordId

#: The field of an id unless another is named. No row needs it.
ID_FIELD = "id"

#: Marks the end of the ids; None stands for a record without an id.
_END = object()
#: A record, or the error of a line that holds no record.
Line = Record | InputError


@dataclass(slots=True)
class OneType:
    """The type that the ids of a corpus have, once the first one was seen, and where that stands. `beside` is a field
    of the first row that is called nearly as the id's field, which that row lacks."""

    found: IdType | None = None
    where: str = ""
    beside: str | None = None

    def check(self, label: RecordId | None, where: str) -> RecordId | None:
        """The same id; raises InputError if it has another type than the first one."""
        if label is None:
            return None
        kind = IdType.of(label)
        if self.found is None:
            self.found, self.where = kind, where
        elif kind != self.found:
            raise InputError(
                f"{where}: the id is {kind.words}, and that of {self.where} is {self.found.words}: ids of one job have "
                "one type, so write all of them as text"
            )
        return label


@dataclass(frozen=True, slots=True)
class Rows:
    """The longest text (bytes), where a row has its text and its id, and the fields that travel with the record. Fields
    are names, or paths such as `body.input` into nested objects. With a template, a text is made of several."""

    max_bytes: int
    text_field: str = "text"
    id_field: str = ID_FIELD
    keep: Sequence[str] = ()
    template: Template | None = None
    id_type: OneType = field(default_factory=OneType, init=False, compare=False)

    @property
    def text_fields(self) -> Sequence[str]:
        """The fields that a text is made of."""
        return [self.text_field] if self.template is None else self.template.fields

    @property
    def fields(self) -> list[str]:
        """All fields that are used, each once."""
        return list(dict.fromkeys((*self.text_fields, self.id_field, *self.keep)))

    def line(self, row: Mapping[str, Any], where: str, *, absent: Any = MISSING) -> Line:
        """A row's record, or its error. Without `absent` to stand for it, a missing text field is one."""
        try:
            text, label = self.text_of(row, where, absent), field_of(row, self.id_field)
            if label is None and self.id_type.beside is None:
                self._look_beside(row)
            refuse_twice({self.id_field: label}, where)
            kept = kept_fields(row, self.keep, where)
            return self.record(text, self.id_type.check(check_id(label, where), where), kept)
        except InputError as error:
            return error

    def _look_beside(self, names: Iterable[str]) -> None:
        """Note what a row has in place of an id, such as `ID` or `id `; an empty name if it has nothing."""
        like = [name for name in names if name.strip().casefold() == self.id_field.casefold()]
        self.id_type.beside = "" if self.id_field in like or not like else like[0]

    def text_of(self, row: Mapping[str, Any], where: str, absent: Any = MISSING) -> Text:
        """A row's text. InputError: it lacks a field of it; only the text field may be `absent`."""
        if self.template is not None:
            return self.template.text(row, self.text_field, where)
        text = field_of(row, self.text_field, absent)
        if text is MISSING:
            raise no_field(self.text_field, row, where)
        refuse_twice({self.text_field: text}, where)
        return Text(text)

    def record(self, text: Text, label: RecordId | None, kept: bytes | None) -> Record:
        record = make_record(text.value, label, self.max_bytes, kept)
        return record if text.own is None else record._replace(own=text.own)

    def text(self, text: object, where: str) -> Line:
        """The record of a row that is only a text, or its error. Of such a row, only the text can be kept."""
        if isinstance(text, bytes) and (self.template is not None or self.keep):
            text = text.decode("utf-8", "surrogateescape")
        row = {self.text_field: text}
        try:
            return self.record(self.text_of(row, where), None, kept_fields(row, self.keep, where))
        except InputError as error:
            return error

    def check_columns(self, columns: Mapping[str, Any] | Iterable[str], where: str) -> None:
        """Raise InputError if a table lacks the text's column, or one that was named for the id or to be kept.

        The columns are names, with the fields inside each if they may be nested.
        """
        self.check_text(columns, where)
        self._look_beside(columns)
        if self.id_field != ID_FIELD and not _has(columns, self.id_field):
            raise no_field(self.id_field, columns, where, "--id-field")
        self.check_kept(columns, where)

    def check_once(self, names: Sequence[str], where: str) -> None:
        """Raise InputError if a column that is used stands twice: it is not known which one is meant."""
        for name in self.fields:
            if names.count(name) > 1:
                raise InputError(f"{where}: the column {name!r} stands twice: rename one of the two")

    def check_text(self, columns: Mapping[str, Any] | Iterable[str], where: str) -> None:
        """Check that a table has the columns of the text; see :meth:`check_columns`."""
        for name in self.text_fields:
            if not _has(columns, name):
                raise no_field(name, columns, where, "--text-field" if self.template is None else FLAG)

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


def records_of(
    texts: Iterable[RecordLike], rows: Rows, ids: Iterable[RecordId | None] | None = None
) -> Iterator[Record]:
    """Records of strings, or of mappings, which are rows with a text and an optional id. The iterables are read lazily.

    An item of another kind is the mistake of a program, so it is refused. What data may hold becomes a record, which
    alone will fail: a missing value (None, NaN), and a number or a date after the first text. So does whatever a
    mapping's text field holds.

    Raises InputError if `texts` or `ids` is a single string, a mapping, a table or nothing to iterate over; and while
    reading, if an item, an id or a kept field is not usable, fields are to be kept of an item that is no mapping, or
    `ids` is shorter or longer than `texts`.
    """
    check_many("texts", texts, rows.text_field)
    if ids is not None:
        check_many("ids", ids, rows.id_field)
    return _records(texts, rows, ids)


def _records(texts: Iterable[RecordLike], rows: Rows, ids: Iterable[RecordId | None] | None) -> Iterator[Record]:
    labels = None if ids is None else iter(ids)
    checked = _Checked(rows.text_field)
    position = -1
    for position, item in enumerate(texts):
        where = f"record {position}"
        label: object = None
        kept: bytes | None = None
        if isinstance(item, Mapping):
            text, label = _text_of(item, rows, where), field_of(item, rows.id_field)
            kept = kept_fields(item, rows.keep, where)
        else:
            value = item if isinstance(item, str) else checked(item, position)
            text = Text(value) if rows.template is None else rows.text_of({rows.text_field: value}, where)
            kept = _nothing_kept(value, rows, where) if rows.keep else None
        if labels is not None:
            label = next(labels, _END)
            if label is _END:
                raise InputError(f"ids has {position} entries, and texts has more: give one id for each text")
        label = rows.id_type.check(_check_label(label, where), where)
        yield rows.record(text, label, kept)
    if labels is not None and next(labels, _END) is not _END:
        raise InputError(f"texts has {position + 1} entries, and ids has more: give one id for each text")


def _nothing_kept(item: object, rows: Rows, where: str) -> bytes | None:
    """The kept fields of an item that is no mapping: null, if the item is missing in the data; raises InputError if it
    is not missing."""
    if is_missing(item):
        return kept_fields({}, rows.keep, where)
    raise InputError(
        f"{where} is {kind_of(item)}, and keep names fields of mappings: give mappings such as "
        f'{{"{rows.text_field}": …, "{rows.keep[0]}": …}}'
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


def _check_label(label: object, where: str) -> RecordId | None:
    """An id of a caller in Python; None also for a missing value of pandas, and the value of an Arrow scalar."""
    value = python_value(label)
    if is_missing(value):
        return None
    if isinstance(value, float):
        raise InputError(f'{where}: an id can\'t be of type float: give ids=df["id"].astype("Int64")')
    return check_id(value, where)


def _text_of(item: Mapping[str, Any], rows: Rows, where: str) -> Text:
    """The text of a mapping, whose fields may be nested: see :func:`field_of`. Raises InputError, which lists the
    fields that exist, if one of it is missing."""
    text = rows.text_of(item, where)
    return text if isinstance(text.value, str) else Text(python_value(text.value))
