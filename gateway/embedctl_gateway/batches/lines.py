"""The lines of files: of requests, which are bounded, because anybody may have written them, and of answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from embedctl_gateway.http.bodies import SMALL_BYTES, check_values
from embedctl_gateway.http.refusals import Refusal

#: Inputs of a request that is no text: many short ones, with what is around each of them.
_LEAST_BYTES = 4 * 1024 * 1024


class BadLine(Exception):
    """Raised for a line that is too large to be looked at, with its number and a code."""

    def __init__(self, message: str, code: str, line: int) -> None:
        super().__init__(message)
        self.code = code
        self.line = line


def requests_of(parts: Iterable[bytes], longest: int) -> Iterator[bytes]:
    """The lines of a file of requests with texts up to the `longest` (bytes). Raises BadLine if one of them has more
    bytes than that may take, or more values than a request: to parse it would hold up all else."""
    most = max(6 * longest, _LEAST_BYTES) + SMALL_BYTES  # of six bytes, an escape makes one byte at least
    for number, line in enumerate(lines_of(parts, most), start=1):
        if len(line) > most:
            raise BadLine(f"the line has more than {most:,} bytes", "request_too_large", number)
        if len(line) > SMALL_BYTES:
            try:
                check_values(line)
            except Refusal as refusal:
                raise BadLine(refusal.message, refusal.code or "invalid_value", number) from None
        yield line


def lines_of(parts: Iterable[bytes], most: int = 0) -> Iterator[bytes]:
    """The lines of a file, each with its end. Memory holds a part and a line. If `most` is given, reading ends in
    a line of more bytes."""
    begun = bytearray()
    for part in parts:
        begin = 0
        while (end := part.find(b"\n", begin) + 1) > 0:  # not at a carriage return, which is white space in JSON
            yield bytes(begun) + part[begin:end]
            begun.clear()
            begin = end
        begun += part[begin:]
        if 0 < most < len(begun):
            break
    if begun:
        yield bytes(begun)


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


def _custom_id(line: bytes) -> object:
    return json.loads(line)["custom_id"]
