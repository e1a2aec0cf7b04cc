"""A program on a pseudo-terminal, and what stands on its screen by a terminal emulator."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import termios
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyte

from tests.support.forked import Forked
from tests.support.waiting import eventually

COLUMNS, ROWS = 80, 24


class Terminal:
    """The command line on a pseudo-terminal.

    Args:
        prepare: what it runs first; it is pickled.

    Attributes:
        text: all that it has printed, with escape sequences.
    """

    def __init__(
        self,
        arguments: list[str],
        environment: Mapping[str, str],
        folder: Path | None,
        columns: int,
        prepare: Callable[[], None] | None,
    ) -> None:
        self._main, self._side = pty.openpty()
        self._emulator = pyte.Screen(columns, ROWS)
        self._stream = pyte.ByteStream(self._emulator)
        self.resize(columns)
        self.modes = termios.tcgetattr(self._side)
        self.text = ""
        variables = {**environment, "TERM": "xterm-256color"}
        self.process = Forked(arguments, variables, folder, self._side, self._side, stdin=self._side, prepare=prepare)

    @property
    def side(self) -> int:
        """The file descriptor of the program's end."""
        return self._side

    @property
    def screen(self) -> list[str]:
        """The lines that stand on the screen, down to the last one that is not empty."""
        return "\n".join(line.rstrip() for line in self._emulator.display).rstrip().split("\n")

    @property
    def cursor_column(self) -> int:
        return self._emulator.cursor.x

    def resize(self, columns: int) -> None:
        """Make it as wide as this. The emulator cuts longer lines, as xterm does."""
        fcntl.ioctl(self._side, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
        self._emulator.resize(ROWS, columns)

    def read(self, seconds: float) -> None:
        """Take what it prints in that time, or until it prints."""
        ready, _, _ = select.select([self._main], [], [], seconds)
        if ready:
            data = os.read(self._main, 1 << 16)
            self._stream.feed(data)
            self.text += data.decode(errors="replace")

    def type(self, keys: str) -> None:
        os.write(self._main, keys.encode())

    def until(self, condition: Callable[[], object]) -> None:
        def met() -> bool:
            self.read(0.1)
            return bool(condition())

        eventually(met, show=lambda: self.text[-3000:])

    def ended(self) -> int:
        """Its exit status, once it has ended and all that it printed is read."""
        self.until(lambda: self.process.poll() is not None)
        self.read(0.1)
        return self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._main)
        os.close(self._side)


@contextmanager
def terminal(
    arguments: list[str],
    environment: Mapping[str, str],
    folder: Path | None = None,
    *,
    columns: int = COLUMNS,
    prepare: Callable[[], None] | None = None,
) -> Iterator[Terminal]:
    """Runs the command line on a terminal of this width; kills it at the end of the block."""
    opened = Terminal(arguments, environment, folder, columns, prepare)
    try:
        yield opened
    finally:
        opened.close()
