"""A caller's mistakes in `texts` and `ids`, and what stands for a missing value."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from numbers import Real

from embedctl_config.errors import InputError

#: What is iterated over character by character, byte by byte or key by key.
_ONE = (str, bytes, bytearray, memoryview, Mapping)
#: Types of pandas and NumPy whose one value stands for a missing one.
_MISSING = frozenset(("NAType", "NaTType", "MaskedConstant"))
#: Types, without their bits, whose values a column of texts may hold by accident: a year, say.
_STRAY = frozenset(
    (
        *("bool", "int", "uint", "float", "longdouble", "complex", "Decimal", "Fraction"),
        *("date", "datetime", "time", "timedelta", "Timestamp", "Timedelta"),
    )
)


def check_many(name: str, values: object, field: str) -> None:
    """Refuse an argument that is not many values, or that gives something else when it is iterated over. `field` is the
    column that may hold the right values."""
    is_one = values is None or isinstance(values, _ONE) or hasattr(type(values), "__fspath__")
    is_iterable = hasattr(type(values), "__iter__") or hasattr(type(values), "__getitem__")
    if is_one or hasattr(values, "readline") or not is_iterable or _is_table(values):
        raise InputError(
            f"{name} is of type {type(values).__name__}, which does not give one of the {name} after the other: give a "
            f"list, another iterable, or the column of a table, such as {name}=df[{field!r}]"
        )


def _is_table(values: object) -> bool:
    """Whether it has columns, or several dimensions. The attribute is not evaluated, because that may compute the
    table."""
    found = inspect.getattr_static(values, "columns", None)
    if found is not None and not inspect.isroutine(found):
        return True
    of_several = hasattr(type(values), "__array__") and getattr(values, "ndim", 1) != 1
    return of_several or bool(getattr(getattr(values, "dtype", None), "names", None))


def python_value(item: object) -> object:
    """The value of an Arrow scalar; any other item as it is."""
    convert = getattr(item, "as_py", None)
    return convert() if callable(convert) else item


def is_missing(item: object) -> bool:
    """Whether an item stands for a missing one: None, NaN, or what pandas and NumPy have for it."""
    return item is None or type(item).__name__ in _MISSING or (isinstance(item, Real) and bool(item != item))


def is_stray(item: object) -> bool:
    """Whether an item is one that a column of texts may hold by accident, such as a number or a date."""
    return type(item).__name__.rstrip("_0123456789") in _STRAY


def wrong_item(item: object, where: str, field: str) -> InputError:
    instead = "texts=map(str, texts)" if is_stray(item) else f"strings, or mappings such as {{{field!r}: …}}"
    return InputError(f"{where} is of type {type(item).__name__}, not a text: give {instead}")
