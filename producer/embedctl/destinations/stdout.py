"""Results on standard output: jsonl, each chunk as soon as it is there."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterable
from pathlib import Path

from embedctl.destinations.answers import Answers
from embedctl.destinations.jsonl import lines_of
from embedctl.destinations.writer import Writer
from embedctl.results import ChunkVectors
from embedctl_config.errors import JobError, OutputError


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


class StandardOutput(Writer):
    """Prints lines as chunks come: those of :func:`lines_of`, or the answers to a batch file.

    Raises:
        OutputError: it is closed; in :meth:`write` and :meth:`finish`, it can't be written.
    """

    def __init__(self, answers: Answers | None = None) -> None:
        check_stdout()
        sys.stdout.flush()
        self.paths = []
        self._answers = answers

    def write(self, chunk: ChunkVectors) -> None:
        """Print a chunk. BrokenPipeError: nobody reads any more."""
        _print(lines_of(chunk) if self._answers is None else self._answers.lines(chunk))

    def finish(self) -> list[Path]:
        if self._answers is not None:
            _print(self._answers.last_lines())
        return []

    def close(self) -> None:
        """Nothing is open."""

    def gives_up(self, error: JobError) -> bool:
        return self._answers is not None and self._answers.give_up(error)


def _print(lines: Iterable[bytes]) -> None:
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
