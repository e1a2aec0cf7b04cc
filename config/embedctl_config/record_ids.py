"""The types that the ids of records may have, and the forms of such ids: on the wire, in JSON, in a table's column.

The ids of one job have one type. It is that of the corpus, and comes out at every destination that can hold it.
"""

from __future__ import annotations

import base64
import operator
import re
from datetime import date, datetime
from decimal import Decimal
from enum import IntEnum
from typing import NamedTuple
from uuid import UUID

#: What an id is in Python.
RecordId = str | int | UUID | Decimal | bytes | date

#: The longest id on the wire (bytes): it travels with the record, and comes back with its vector.
MAX_ID_BYTES = 1024
#: The most digits of a decimal, as tables hold them.
MAX_DIGITS = 38


class Kind(IntEnum):
    """The numbers stand on the wire."""

    TEXT = 0
    WHOLE = 1
    UUID = 2
    DECIMAL = 3
    BYTES = 4
    DATE = 5


_KINDS = {str: Kind.TEXT, int: Kind.WHOLE, UUID: Kind.UUID, Decimal: Kind.DECIMAL, bytes: Kind.BYTES, date: Kind.DATE}
_NAMES = ("text", "int64", "uuid", "decimal", "bytes", "date")
_WORDS = ("text", "a whole number", "a UUID", "a decimal", "bytes", "a date")
_SQL = ("text", "bigint", "uuid", "numeric", "bytea", "date")
_NAME = re.compile(r"([a-z0-9]+)(?:\((\d+)\))?")


class IdType(NamedTuple):
    """The type of a column of ids; a decimal has so many digits after its point (`scale`)."""

    kind: Kind
    scale: int = 0

    @classmethod
    def of(cls, label: RecordId) -> IdType:
        if isinstance(label, Decimal):
            return cls(Kind.DECIMAL, -int(label.as_tuple().exponent))
        return _PLAIN[type(label)]

    @classmethod
    def named(cls, name: str) -> IdType:
        """What :func:`str` gave; text for any other name."""
        found = _NAME.fullmatch(name)
        if found is None or found[1] not in _NAMES:
            return TEXT
        return cls(Kind(_NAMES.index(found[1])), int(found[2] or 0))

    def __str__(self) -> str:
        return f"decimal({self.scale})" if self.kind is Kind.DECIMAL else _NAMES[self.kind]

    @property
    def words(self) -> str:
        digits = f" with {self.scale} digits after the point" if self.kind is Kind.DECIMAL else ""
        return _WORDS[self.kind] + digits

    @property
    def sql(self) -> str:
        """The type of a column of PostgreSQL."""
        return _SQL[self.kind]


_PLAIN = {python: IdType(kind) for python, kind in _KINDS.items()}
TEXT = IdType(Kind.TEXT)


def of_sql(column: str, wanted: IdType) -> IdType | None:
    """The type of the ids in a column of PostgreSQL; None if no id has such a type. A column `numeric` holds decimals
    of any number of digits, so `wanted` tells it."""
    name, _, digits = column.rstrip(")").partition("(")
    if name not in _SQL:
        return None
    kind = Kind(_SQL.index(name))
    if kind is not Kind.DECIMAL:
        return IdType(kind)
    scale = digits.rpartition(",")[2] if digits else str(wanted.scale)
    return IdType(kind, int(scale) if "," in digits or not digits else 0)


def usable(value: object) -> RecordId | None:
    """A value as an id; None if it is of no type that an id may have. Raises ValueError if it can't be written, or is
    too long; what it says follows "the id"."""
    label = _typed(value)
    if label is None:
        return None
    if isinstance(label, int):
        label = _bounded(label)
    if isinstance(label, Decimal):
        label = _plain_decimal(label)
    try:
        size = len(to_wire(label))
    except UnicodeEncodeError:
        raise ValueError(f"{value!r} is not valid UTF-8") from None
    if size > MAX_ID_BYTES:
        raise ValueError(
            f"is longer than {MAX_ID_BYTES:,} bytes. Name the field of a shorter one with --id-field (in Python, give "
            "ids=), or leave ids out"
        )
    return label


def _typed(value: object) -> RecordId | None:
    if type(value) in _KINDS:
        return value  # type: ignore[return-value]  # it is one of these types
    if isinstance(value, bool) or type(value).__name__.startswith("bool"):
        return None
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, date) and not isinstance(value, datetime):
        return date(value.year, value.month, value.day)
    # An array of one dimension has an index, too, and none without one.
    return operator.index(value) if hasattr(value, "__index__") and not getattr(value, "ndim", 0) else None


def _bounded(label: int) -> int:
    if not -(2**63) <= label < 2**63:
        raise ValueError("is a whole number beyond 64 bits with a sign: write it as text")
    return label


def _plain_decimal(label: Decimal) -> Decimal:
    if not label.is_finite():
        raise ValueError("is a decimal that is no number")
    exponent = int(label.as_tuple().exponent)
    if len(label.as_tuple().digits) + max(0, exponent) > MAX_DIGITS or -exponent > MAX_DIGITS:
        raise ValueError(f"has more than {MAX_DIGITS} digits: write it as text")
    return Decimal(format(label if label else abs(label), "f"))  # without an exponent, and with one zero


def to_wire(label: RecordId) -> bytes:
    if isinstance(label, bytes):
        return label
    return (label if isinstance(label, str) else str(label)).encode()


def from_wire(kind: int, data: bytes) -> RecordId:
    """Raises ValueError if these are not the bytes of an id of this kind."""
    if kind == Kind.BYTES:
        return data
    text = data.decode()
    if kind == Kind.TEXT:
        return text
    if kind == Kind.WHOLE:
        return _bounded(int(text))
    if kind == Kind.UUID:
        return UUID(text)
    if kind == Kind.DATE:
        return date.fromisoformat(text)
    if kind != Kind.DECIMAL:
        raise ValueError(f"{kind} is no type of ids")
    try:
        return _plain_decimal(Decimal(text))
    except ArithmeticError:
        raise ValueError("is no decimal") from None


def to_json(label: RecordId | None) -> str | int | None:
    """A whole number as such, bytes in base64, and any other id as its text."""
    if label is None or isinstance(label, str | int):
        return label
    return base64.b64encode(label).decode() if isinstance(label, bytes) else str(label)


def from_json(kind: int, value: object) -> RecordId:
    """What :func:`to_json` gave of an id of this kind. Raises ValueError if it can't have been that."""
    return from_wire(kind, base64.b64decode(str(value), validate=True) if kind == Kind.BYTES else str(value).encode())


def tagged(label: RecordId | None) -> object:
    """For JSON that only embedctl reads: an id whose type is kept, too."""
    return label if label is None or isinstance(label, str) else [IdType.of(label).kind, to_json(label)]


def untagged(value: object) -> RecordId | None:
    """What :func:`tagged` gave; raises ValueError if it can't have been that."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{value!r} is no id")
    return from_json(*value)


def as_text(label: RecordId) -> str:
    """An id for people, and for a column that can hold only text."""
    return str(to_json(label))
