"""What a worker tells its supervisor without a word: numbers in a file that both have open, which survive its death."""

from __future__ import annotations

import mmap
import os
import struct
from typing import IO

#: Chunks in hand, and chunks completed.
_FORMAT = struct.Struct("<II")


def make_file() -> IO[bytes]:
    """A file for one worker, whose process inherits its descriptor. It is in memory, because on a full disk, the worker
    would be killed as it writes."""
    file = os.fdopen(os.memfd_create("tally"), "r+b", buffering=0)
    file.write(bytes(_FORMAT.size))
    return file


def read(file: IO[bytes]) -> tuple[int, int]:
    """How many chunks the worker of a file has in hand, and how many it has completed."""
    file.seek(0)
    held, completed = _FORMAT.unpack(file.read(_FORMAT.size))
    return held, completed


class Tally:
    """The worker's side of the file with this descriptor. It costs no system call."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, _FORMAT.size)
        self._completed = 0

    def hold(self, held: int) -> None:
        _FORMAT.pack_into(self._memory, 0, held, self._completed)

    def completed(self) -> None:
        self._completed += 1
