"""Parts of a file that a client asks for (RFC 9110, section 14)."""

from __future__ import annotations

import re
from typing import NamedTuple

_ONE_RANGE = re.compile(r"bytes=[ \t]*([0-9]{0,18})-([0-9]{0,18})[ \t]*", re.IGNORECASE)


class Span(NamedTuple):
    """Bytes from `first` to before `end`."""

    first: int
    end: int


class Unsatisfiable(Exception):
    """Raised when nothing of a file is in the range."""


def span_of(asked: str | None, if_range: str | None, etag: str, size: int) -> Span | None:
    """What a client asks for with the headers `Range` and `If-Range`; None for the whole file, of so many bytes and
    with this ETag, in quotes. A header that is no single range of bytes counts for nothing, and so does one for another
    state of the file. Raises Unsatisfiable if the range begins after the file's end."""
    found = _ONE_RANGE.fullmatch(asked or "")
    if found is None or (if_range is not None and if_range.strip() != etag):
        return None
    first, last = found.groups()
    if not first and not last:
        return None
    if not first:
        if int(last) == 0 or size == 0:
            raise Unsatisfiable
        return Span(max(0, size - int(last)), size)
    if last and int(last) < int(first):
        return None
    if int(first) >= size:
        raise Unsatisfiable
    return Span(int(first), min(size, int(last) + 1) if last else size)
