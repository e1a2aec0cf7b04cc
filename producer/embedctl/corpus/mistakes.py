"""A caller's mistakes in `texts` and `ids`: each is refused with the line that mends it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from numbers import Real
from typing import Any

from embedctl_config.errors import InputError

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
    """Refuse an argument that is not many values, or that gives something else when it is iterated over: InputError
    says what it is, and what to give instead. `field` is the column that may hold the right values."""
    mistake = _not_many(values, field) or _table(values, field) or _not_iterable(values, field)
    if mistake:
        what, instead = mistake
        raise InputError(f"{name} is {what}: give {instead.replace('texts=', f'{name}=')}")


def _not_many(values: object, field: str) -> tuple[str, str] | None:
    """What is wrong with one value, and what to give instead."""
    if values is None:
        return "None, not several", "an iterable, such as texts=[text]"
    if isinstance(values, str):
        return "a string, not several", "a list, such as texts=[text]"
    if isinstance(values, bytes | bytearray | memoryview):
        return "bytes, not several", "a list, such as texts=[text]"
    if isinstance(values, Mapping):
        return _mapping(values, field)
    if hasattr(type(values), "__fspath__"):
        return "a path, not what the file holds", "texts=path.read_text().splitlines() if each line is a text"
    if hasattr(values, "readline"):
        return "an open file", 'texts=(line.rstrip("\\r\\n") for line in file) if each line is a text'
    return None


def _mapping(values: Mapping[Any, Any], field: str) -> tuple[str, str]:
    if hasattr(type(next(iter(values.values()), None)), "column_names"):
        return "several tables", 'one of them, such as texts=splits["train"]'
    if not isinstance(values.get(field), str | bytes | None):
        return "a mapping of columns", f'one of them, texts=columns["{field}"]'
    return "one mapping, not several", "texts=[mapping] or, if it maps ids to texts, texts=mapping.values()"


def _table(values: object, field: str) -> tuple[str, str] | None:
    if _is_table(values):
        if hasattr(type(values), "collect"):
            return "a table that was not read yet", f'its column, texts=frame.collect()["{field}"]'
        if hasattr(type(values), "fetchall"):
            return "a table", f'its rows, texts=(text for (text,) in relation.select("{field}").fetchall())'
        return "a table, and iterating over it gives no rows", f'its column, texts=df["{field}"]'
    if getattr(getattr(values, "dtype", None), "names", None):
        return "a table", f'its column, texts=array["{field}"]'
    if hasattr(type(values), "__array__") and (dimensions := getattr(values, "ndim", 1)) != 1:
        return f"an array of {dimensions} dimensions", "one column, texts=array[:, 0]"
    return None


def _is_table(values: object) -> bool:
    """Whether it has columns. The attribute is not evaluated, because that may compute the table."""
    found = inspect.getattr_static(values, "columns", None)
    return found is not None and not inspect.isroutine(found)


def _not_iterable(values: object, field: str) -> tuple[str, str] | None:
    kind = type(values)
    if hasattr(kind, "__iter__") or hasattr(kind, "__getitem__"):
        return None
    if hasattr(kind, "__await__"):
        return "a coroutine", "what it returns, texts=await rows()"
    if hasattr(kind, "__aiter__"):
        return "an async iterable", "texts to aenqueue_embeddings, or a list"
    if callable(values):
        return "a function", "what it returns, texts=rows()"
    if hasattr(kind, "fetchall"):
        return f"of type {kind.__name__}", f"its rows, texts=(text for (text,) in cursor.fetchall()), of SELECT {field}"
    return f"of type {kind.__name__}", "an iterable, such as texts=[text]"


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
    return InputError(f"{where} is of type {type(item).__name__}, not a text: give {_instead(item, field)}")


def _instead(item: object, field: str) -> str:
    if is_stray(item):
        return "texts=map(str, texts)"
    if hasattr(item, field):
        return f"texts=(each.{field} for each in texts)"
    if isinstance(item, tuple | list):
        return _instead_of_row(item)
    if _is_table(item):
        return f'texts=(text for part in texts for text in part["{field}"])'
    if hasattr(item, "keys"):
        return "texts=map(dict, texts)"
    if hasattr(type(item), "__fspath__"):
        return "texts=(path.read_text() for path in texts)"
    if isinstance(item, bytearray | memoryview):
        return "texts=map(bytes, texts)"
    if hasattr(type(item), "__iter__"):
        return "texts=(text for part in texts for text in part) if its items are the texts"
    return f"the text of each, such as texts=(each.{field} for each in texts)"


def _instead_of_row(row: tuple[object, ...] | list[object]) -> str:
    if isinstance(row, list):
        return (
            "texts=(text for part in texts for text in part) if each holds several texts, or texts=(row[0] for row in "
            "texts) if each is a row"
        )
    if len(row) == 2 and isinstance(row[1], str):
        return 'texts=({"id": id, "text": text} for id, text in texts)'
    if row and hasattr(row[-1], "keys"):
        return "texts=(dict(row) for *_, row in texts)"
    column = next((at for at, value in enumerate(row) if isinstance(value, str)), 0)
    return f"texts=(row[{column}] for row in texts)"
