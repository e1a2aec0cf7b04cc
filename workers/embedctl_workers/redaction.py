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
    """Stands in a log for an error whose message may quote a text."""


def first_line(error: Exception) -> str:
    """Kind and beginning of an error's message. Not redacted: only for those who may read the record itself."""
    line = str(error).partition("\n")[0][:_LONGEST]
    return f"{type(error).__name__}: {line}"


def redacted(error: Exception) -> str:
    """What went wrong, for everyone: a message of embedctl, or an error's kind and the line that raised it."""
    if isinstance(error, EmbedctlError):
        return first_line(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" in {frames[-1].name} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{place}"


def redacted_exc_info(error: BaseException) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """An error as `exc_info` for the log: the kinds and tracebacks of it and of its causes, and no message."""
    return type(error), _stand_in(error, _DEEPEST), error.__traceback__


def _stand_in(error: BaseException, depth: int) -> MessageLeftOut:
    stand_in = MessageLeftOut(f"{type(error).__name__}; its message may quote a text")
    stand_in.__traceback__ = error.__traceback__
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and depth:
        stand_in.__cause__ = _stand_in(cause, depth - 1)
    return stand_in
