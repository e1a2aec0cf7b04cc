"""The format `json`: one array of objects or texts, read element by element.

The standard library's parser takes an element at a time from a window of the file.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from embedctl.corpus.fields import PARSER
from embedctl.corpus.records import kind_of
from embedctl.corpus.rows import Line, Rows
from embedctl.corpus.streams import DOS_END, MAX_LINE_BYTES
from embedctl_config.errors import InputError

_NOT_WHITE = re.compile(r"[^ \t\n\r]")
#: Where the window's end cuts an element, the parser points at most this far before it (characters), unless the cut is
#: inside a string.
_LONGEST_TOKEN = len("-Infinity")
#: A number that the window's end cuts may look whole. What is left of it is shorter than this (characters).
_REST_OF_NUMBER = len("e+1")


def array(stream: BinaryIO, name: str, rows: Rows) -> Iterator[Line]:
    """A record for each element, an object or a text; raises as :func:`elements`."""
    for number, element in enumerate(elements(stream, name), start=1):
        where = f"{name}, element {number}"
        if isinstance(element, Mapping):
            yield rows.line(element, where)
        elif isinstance(element, str):
            yield rows.text(element, where)
        else:
            yield InputError(f'{where}: expected an object such as {{"text": …}} or a text, found {kind_of(element)}')


def elements(stream: BinaryIO, name: str, block: int = 256 * 1024) -> Iterator[Any]:
    """The elements of a JSON array; none if the stream is empty. Memory holds some blocks, or the longest element.

    A block is the least that is read at once (bytes). Raises InputError if this is not one JSON array, or if an element
    is longer than `MAX_LINE_BYTES`; the message names the element, counted from 1.
    """
    window = _Window(stream, block)
    if not window.next():
        return
    if not window.skip("["):
        raise InputError(
            f'{name}: expected a JSON array such as [{{"text": …}}, …], found {window.shown()}. For an object on each '
            "line, give --format jsonl"
        )
    number = 0
    closed = window.skip("]")
    while not closed:
        number += 1
        where = f"{name}, element {number}"
        yield window.value(where)
        closed = window.skip("]")
        if not closed and not window.skip(","):
            raise InputError(f"{where}: expected a comma or the array's end after it, found {window.shown()}")
    while window.skip(DOS_END):
        pass
    if window.next():
        raise InputError(f"{name}: expected nothing after the array's end, found {window.shown()}")


class _Window:
    """The part of a JSON text that is in memory, and the place up to which it is read."""

    def __init__(self, stream: BinaryIO, block: int) -> None:
        self._stream = stream
        self._block = block
        # Bytes that are not UTF-8 become lone surrogates, so that only the text is bad, not the whole file.
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self._text = ""
        self._at = 0
        self._over = False

    def next(self) -> str:
        """The next character that is not white space; empty at the end."""
        while True:
            if found := _NOT_WHITE.search(self._text, self._at):
                self._at = found.start()
                return found.group()
            self._at = len(self._text)
            if not self._more():
                return ""

    def skip(self, character: str) -> bool:
        """Step over this character if it is the next one."""
        found = self.next() == character
        self._at += found
        return found

    def value(self, where: str) -> Any:
        """Step over the next value; raises InputError if it is not JSON, or too long."""
        self.next()
        while True:
            try:
                value, end = PARSER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if not self._may_be_cut(error) or not self._more(where):
                    raise InputError(f"{where}: not JSON: {error.msg}, found {self.shown(error.pos)}") from None
            except RecursionError:
                raise InputError(f"{where}: not JSON: nested too deeply") from None
            else:
                if end + _REST_OF_NUMBER <= len(self._text) or not self._more(where):
                    self._at = end
                    return value

    def shown(self, at: int | None = None) -> str:
        start = self._at if at is None else at
        return repr(self._text[start : start + 20]) if start < len(self._text) else "the end of the file"

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        """Whether the value may be right, and its rest is not in memory."""
        return error.msg.startswith("Unterminated string") or len(self._text) - error.pos <= _LONGEST_TOKEN

    def _more(self, where: str = "") -> bool:
        """Read on; false if there was no more. Raises InputError if the value at this place is too long.

        The window doubles while it holds one value, so that a long value is parsed only few times.
        """
        held = self._text[self._at :]
        if len(held) > MAX_LINE_BYTES:
            raise InputError(f"{where}: longer than {MAX_LINE_BYTES // 2**20} MiB")
        while not self._over:
            data = self._stream.read(max(self._block, len(held)))
            self._over = not data
            if text := self._decoder.decode(data, final=self._over):
                self._text = held + text
                self._at = 0
                return True
        return False
