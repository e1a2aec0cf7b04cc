"""The digests next to an array, and the file that says what the array holds."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from embedctl.destinations.about import ABOUT, About
from embedctl.destinations.unfinished import part_of, publish
from embedctl.digests import DIGEST_BYTES, Digests
from embedctl_config import durable

#: The entry of the file that says what an array holds: the sha256 of each file, by name.
FILES = "files"


class DigestRows:
    """An unfinished file of 32 bytes for each row of an array: zeros where there is no digest.

    Args:
        path: its final name.
        rows: of the array.

    Raises:
        OSError: it can't be written.
    """

    def __init__(self, path: Path, rows: int) -> None:
        self.path = path
        part, size = part_of(path), rows * DIGEST_BYTES
        part.unlink(missing_ok=True)  # it might be a link to another file
        with part.open("xb") as stream:
            if size:  # writing to a mapped page on a full disk would kill the process
                os.posix_fallocate(stream.fileno(), 0, size)
        shape = rows, DIGEST_BYTES
        self._rows: npt.NDArray[np.uint8] = (
            np.memmap(part, np.uint8, "r+", shape=shape) if size else np.empty(shape, np.uint8)
        )

    def write(self, positions: npt.NDArray[np.int64], digests: Digests | None) -> None:
        """Put the digests of these rows into their places."""
        if digests is not None:
            self._rows[positions] = digests

    def flush(self) -> None:
        """Sync everything to the disk."""
        if isinstance(self._rows, np.memmap):
            self._rows.flush()


def vouch(path: Path, about: About, files: Sequence[Path]) -> None:
    """Say what an array and the files next to it hold. The file comes last, so it vouches for no mixture of two arrays.

    Args:
        path: of the file that says it.
        files: which it is true of; each has its final name.
    """
    facts = {ABOUT: about.text, FILES: {file.name: digest_of(file)[0] for file in files}}
    part_of(path).unlink(missing_ok=True)  # it might be a link to another file
    part_of(path).write_text(json.dumps(facts), encoding="utf-8")
    publish(path)


def no_longer(path: Path) -> None:
    """Remove the file that says what an array holds, before the array is replaced."""
    durable.remove(path)


def digest_of(path: Path) -> tuple[str, int]:
    """The sha256 of a file in hexadecimal, and its size in bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest(), os.fstat(stream.fileno()).st_size
