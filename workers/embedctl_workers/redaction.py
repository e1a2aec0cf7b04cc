"""What may be told of an error that may quote a text: its kind and its place, but not its message."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import TracebackType

from embedctl_config.errors import EmbedctlError

_LONGEST = 200
#: Errors that caused one another, of which at most so many are told.
_DEEPEST = 10


class MessageLeftOut(Exception):
    """Stands in a log for an error whose message may quote a text."""


def first_line(error: Exception) -> str:
    """Kind and beginning of an error's message, for whoever may read the record: some quote the text."""
    line = str(error).partition("\n")[0][:_LONGEST]
    return f"{type(error).__name__}: {line}"


def kind_and_place(error: Exception) -> str:
    """What went wrong, for everybody: a message of ours, or the kind of any other error and the line that raised it."""
    if isinstance(error, EmbedctlError):
        return first_line(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" in {frames[-1].name} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{place}"


def without_message(error: BaseException) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """An error as `exc_info` for the log, with the tracebacks and kinds of all that led to it and no message."""
    return type(error), _stand_in(error, _DEEPEST), error.__traceback__


def _stand_in(error: BaseException, depth: int) -> MessageLeftOut:
    stand_in = MessageLeftOut(f"{type(error).__name__}; its message may quote a text")
    stand_in.__traceback__ = error.__traceback__
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and depth:
        stand_in.__cause__ = _stand_in(cause, depth - 1)
    return stand_in
