"""Makes foreign text safe to show: an id, a name or a message must neither control a terminal nor forge a line."""

from __future__ import annotations

import logging


def printable(text: str, *, lines: bool = False) -> str:
    r"""A text with every unprintable character escaped, such as `\x1b`. The result is one line.

    Unprintable are control characters, line ends of every kind, marks that change the direction of reading, and lone
    surrogates. With `lines`, the text may have several: each but the first is indented, so that none passes for a
    message of its own.
    """
    if lines:
        return "\n  ".join(map(printable, text.split("\n")))
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class PrintableFormatter(logging.Formatter):
    """Python's formatter, for logs that people read on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's lines, made printable."""
        return printable(super().format(record), lines=True)
