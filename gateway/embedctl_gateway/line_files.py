"""Reading files of lines that are kept in parts."""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice

from embedctl.store.stored_files import FileStore, StoredFile

#: The end of an answer's id: the position of its request's first input.
_POSITION = re.compile(rb'\{"id":"[^"]*_(\d+)"')


def lines_of(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a file, each with its end. Memory holds a part and a line."""
    begun = bytearray()
    for part in parts:
        begin = 0
        while (end := part.find(b"\n", begin) + 1) > 0:  # not at a carriage return, which is white space in JSON
            yield bytes(begun) + part[begin:end]
            begun.clear()
            begin = end
        begun += part[begin:]
    if begun:
        yield bytes(begun)


def in_order(store: FileStore, files: Iterable[StoredFile], after: int) -> Iterator[bytes]:
    """The answers of a batch, which are in several files, in the order of its requests.

    Args:
        after: how many to leave out.

    Raises:
        FileGone: a file has been deleted, or has expired.
    """
    merged = heapq.merge(*(_numbered(lines_of(store.read(file))) for file in files))
    return (line for _, line in islice(merged, after, None))


def only(requests: Iterable[bytes], answers: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of the requests that some answers are to, with the requests and the answers in the same order."""
    wanted = (_custom_id(answer) for answer in answers)
    next_one = next(wanted, None)
    for line in requests:
        if next_one is None:
            return
        if line.strip() and _custom_id(line) == next_one:
            yield line if line.endswith(b"\n") else line + b"\n"
            next_one = next(wanted, None)


def _numbered(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    for line in lines:
        found = _POSITION.match(line)
        assert found, "every answer begins with its id"
        yield int(found[1]), line


def _custom_id(line: bytes) -> object:
    return json.loads(line)["custom_id"]
