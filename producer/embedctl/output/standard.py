"""Results on standard output: jsonl, each chunk as soon as it is there."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterable

from embedctl.results import ChunkVectors
from embedctl_config.errors import OutputError


def is_stdout(path: object) -> bool:
    """Whether a path means standard output."""
    return str(path) in ("-", "/dev/stdout")


def check_stdout() -> None:
    """Check beforehand that there is a standard output.

    Raises:
        OutputError: it is closed.
    """
    if sys.stdout is None:
        raise OutputError("standard output is closed: name a file, or open it")


def print_results(chunks: Iterable[ChunkVectors], lines: Callable[[ChunkVectors], Iterable[bytes]]) -> None:
    """Write results to standard output as they arrive.

    Args:
        lines: makes a chunk's lines.

    Raises:
        BrokenPipeError: nobody reads it any more.
        OutputError: it is closed, or can't be written.
    """
    check_stdout()
    sys.stdout.flush()
    for chunk in chunks:
        print_lines(lines(chunk))


def print_lines(lines: Iterable[bytes]) -> None:
    """Write lines to standard output. Raises as :func:`print_results`."""
    try:
        _write(sys.stdout.fileno(), b"".join(line + b"\n" for line in lines))
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"standard output can't be written: {error.strerror}") from error


def _write(to: int, data: bytes) -> None:
    """Write all of it, and nothing that Python holds back and would write once more as it ends."""
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(to, left) :]
        except BlockingIOError:  # the other end has made it non-blocking
            select.select([], [to], [])
