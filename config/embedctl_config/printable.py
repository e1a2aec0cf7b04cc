"""Texts of others, as they may be shown: an id, a name or a message must neither steer a terminal nor forge a line."""

from __future__ import annotations

import logging


def printable(text: str, *, lines: bool = False) -> str:
    r"""A text with every character that is not printable as its escape, such as `\x1b`; so it is one line.

    Those are control characters, line ends of every kind, marks that turn the direction of reading, and halves of
    surrogate pairs.

    Args:
        lines: the text has several lines by right: each but the first is indented, so that none passes for another.
    """
    if lines:
        return "\n  ".join(map(printable, text.split("\n")))
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class PrintableFormatter(logging.Formatter):
    """Python's, for logs that people read on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's lines."""
        return printable(super().format(record), lines=True)
