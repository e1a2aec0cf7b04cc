"""Records: from files, streams and other people's iterables."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

from embedctl_config.errors import InputError
from embedctl_config.wire import RecordKind

FORMATS = ("jsonl", "txt")

#: What a caller may give as a record: text, or a mapping that holds text and, if it likes, an id.
RecordLike = str | Mapping[str, Any]


class Record(NamedTuple):
    """One input row. `text` is UTF-8 where `kind` is TEXT; see RecordKind for the others."""

    kind: RecordKind
    text: bytes
    id: str | None = None


def make_record(text: object, label: str | None, max_bytes: int) -> Record:
    """A record of whatever stood in the text field; what is no text stays a record, and fails alone."""
    if isinstance(text, str):
        try:
            data = text.encode()
        except UnicodeEncodeError:
            return Record(RecordKind.INVALID_UTF8, text.encode("utf-8", "surrogatepass")[:max_bytes], label)
    elif isinstance(text, bytes):
        data = text
        try:
            text.decode()
        except UnicodeDecodeError:
            return Record(RecordKind.INVALID_UTF8, text[:max_bytes], label)
    else:
        return Record(RecordKind.NOT_TEXT, type(text).__name__.encode(), label)
    if len(data) > max_bytes:
        return Record(RecordKind.OVERSIZE, str(len(data)).encode(), label)
    return Record(RecordKind.TEXT, data, label)


def records_of(
    texts: Iterable[RecordLike],
    *,
    ids: Iterable[str | int] | None = None,
    text_field: str = "text",
    id_field: str = "id",
    max_bytes: int,
) -> Iterator[Record]:
    """Records of strings, or of mappings with a text and perhaps an id; read as they are needed.

    Raises:
        InputError: `texts` is one string, a mapping has no text field, an id is not usable, or `ids` is shorter or
            longer than `texts`.
    """
    if isinstance(texts, str | bytes | Mapping):
        raise InputError(f"texts is one {type(texts).__name__}; give an iterable of texts, such as a list of them")
    labels = None if ids is None else iter(ids)
    position = -1
    for position, item in enumerate(texts):
        where = f"record {position}"
        label: object = None
        text: object = item
        if isinstance(item, Mapping):
            text, label = _fields(item, text_field, id_field, where)
        if labels is not None:
            label = next(labels, None)
            if label is None:
                raise InputError(f"ids has {position} entries, and texts has more: give one id for each text")
        yield make_record(text, _label(label, where), max_bytes)
    if labels is not None and next(labels, None) is not None:
        raise InputError(f"texts has {position + 1} entries, and ids has more: give one id for each text")


def read_corpus(
    path: str,
    *,
    file_format: str | None = None,
    text_field: str = "text",
    id_field: str = "id",
    max_bytes: int,
) -> Iterator[Record]:
    """Records of a file, or of standard input where `path` is `-`.

    `txt` holds a record a line, and an empty line is an (empty) record, so that vectors and lines count alike. `jsonl`
    holds an object a line; empty lines count for nothing.

    Raises:
        InputError: the file can't be read, its format is unknown, or a line is not a record; the message names it.
    """
    chosen = file_format or guess_format(path)
    name = "standard input" if path == "-" else path
    if chosen not in FORMATS:
        raise InputError(f"format {chosen!r} is none of {', '.join(FORMATS)}")
    try:
        if path == "-":
            yield from _parse(sys.stdin.buffer, chosen, name, text_field, id_field, max_bytes)
        else:
            with Path(path).open("rb") as stream:
                yield from _parse(stream, chosen, name, text_field, id_field, max_bytes)
    except OSError as error:
        raise InputError(f"{name} can't be read: {error.strerror or error}") from error


def guess_format(path: str) -> str:
    """The format that a file's name tells; `jsonl` for standard input.

    Raises:
        InputError: the name tells none.
    """
    if path == "-":
        return "jsonl"
    suffix = Path(path).suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        return "jsonl"
    if suffix == ".txt":
        return "txt"
    raise InputError(f"{path}: can't tell the format from {suffix or 'a name without suffix'!r}; give --format")


def _parse(
    stream: IO[bytes],
    file_format: str,
    name: str,
    text_field: str,
    id_field: str,
    max_bytes: int,
) -> Iterator[Record]:
    lines = _without_mark(stream)
    if file_format == "txt":
        for line in lines:
            yield make_record(line.removesuffix(b"\n").removesuffix(b"\r"), None, max_bytes)
        return
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        text, label = _fields(_load(line, where), text_field, id_field, where)
        yield make_record(text, _label(label, where), max_bytes)


def _without_mark(stream: IO[bytes]) -> Iterator[bytes]:
    first = stream.readline()
    return chain([first.removeprefix(b"\xef\xbb\xbf")] if first else [], stream)


def _load(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        # Bytes that are not UTF-8 become lone surrogates: they cost one record, not the line's other fields.
        value = json.loads(line.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f'{where}: expected an object such as {{"text": …}}, found {_json_type(value)}')
    return value


def _fields(item: Mapping[str, Any], text_field: str, id_field: str, where: str) -> tuple[object, object]:
    try:
        return item[text_field], item.get(id_field)
    except KeyError:
        seen = ", ".join(sorted(map(str, item))) or "none"
        raise InputError(
            f"{where}: no field {text_field!r}; fields seen: {seen}. Name the right one with --text-field "
            "(text_field= in Python)"
        ) from None


def _label(label: object, where: str) -> str | None:
    if label is None:
        return None
    if isinstance(label, int) and not isinstance(label, bool):
        return str(label)
    if not isinstance(label, str):
        raise InputError(f"{where}: an id must be text or a whole number, not {_json_type(label)}")
    try:
        label.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where}: the id {label!r} is not valid UTF-8") from None
    return label


def _json_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
