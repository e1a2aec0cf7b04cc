"""Redacts errors whose messages may quote a text: their kind and place are shown, their messages are not."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import TracebackType

from embedctl_config.errors import EmbedctlError

_LONGEST = 200
#: How many errors of a chain of causes are shown at most.
_DEEPEST = 10


class MessageLeftOut(Exception):
    """Replaces, in a log, an error whose message may quote a text."""


def first_line(error: Exception) -> str:
    """The kind of an error and the first line of its message, up to 200 characters.

    Some messages quote a text: use this only where the reader may see the record.
    """
    line = str(error).partition("\n")[0][:_LONGEST]
    return f"{type(error).__name__}: {line}"


def redacted(error: Exception) -> str:
    """An error in a form that anyone may read.

    embedctl's own errors keep their message. Any other error becomes its kind and the line that raised it.
    """
    if isinstance(error, EmbedctlError):
        return first_line(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" in {frames[-1].name} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{place}"


def redacted_exc_info(error: BaseException) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """The `exc_info` of an error for the log: tracebacks and kinds of its whole chain of causes, no messages."""
    return type(error), _stand_in(error, _DEEPEST), error.__traceback__


def _stand_in(error: BaseException, depth: int) -> MessageLeftOut:
    stand_in = MessageLeftOut(f"{type(error).__name__}; its message may quote a text")
    stand_in.__traceback__ = error.__traceback__
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and depth:
        stand_in.__cause__ = _stand_in(cause, depth - 1)
    return stand_in
