"""Unfinished files: a temporary name in the same folder, and a lock."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from embedctl_config import durable
from embedctl_config.errors import OutputError, UnusableOutput

#: Characters that JSON does not escape in strings, in UTF-8: DEL, the controls of ISO 6429, and Unicode's line ends and
#: direction marks. A line may be printed on a terminal.
_UNSAFE = re.compile(
    rb"\x7f|\xc2[\x80-\x9f]|\xd8\x9c|\xe2(?:\x80[\x8e\x8f\xa8-\xae]|\x81[\xa6-\xa9])"  # U+061C, U+200E … U+2069
)

#: A line may have 20 kB.
_BUFFER_BYTES = 1024 * 1024


def check_folder(folder: Path, what: object) -> None:
    """Raise UnusableOutput unless files of a destination, which is called `what`, can be made in a folder; OutputError
    if its disk is full."""
    if not folder.is_dir():
        raise UnusableOutput(f"{what} can't be written: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        owner, me = folder.stat().st_uid, os.getuid()
        ours = f", which belongs to user {owner}: run as that user, or chown {me} {shlex.quote(str(folder))}"
        raise UnusableOutput(f"{what} can't be written: permission denied in {folder}{ours if owner != me else ''}")
    room = os.statvfs(folder)
    if room.f_blocks and not room.f_bavail:  # some file systems tell neither
        raise OutputError(f"{what} can't be written: the disk of {folder} is full")


def part_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def locked(path: Path) -> AbstractContextManager[None]:
    """Keep other processes from writing this file; OutputError if one is writing it."""
    taken = OutputError(f"another fetch is writing {path}: wait for it, or choose another file")
    return durable.locked(lock_of(path), vanishes=True, taken=taken)


def is_begun(path: Path) -> bool:
    """Whether a file is being written, or was when its writer was killed: its lock is still there."""
    return lock_of(path).exists()


def lock_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def json_line(value: object) -> bytes:
    """JSON on one line, in UTF-8: every character that some readers or terminals take for a line end or a control is
    escaped."""
    return json_lines([value])


def json_lines(values: Iterable[object]) -> bytes:
    """The same of each value, with a line feed between two."""
    lines = b"\n".join(map(_dumped, values))
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0].decode()):04x}".encode(), lines)


def _dumped(value: object) -> bytes:
    import orjson  # here, because most commands write no line

    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:  # a lone surrogate, a number of more than 64 bits, or deep nesting
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogateescape")


def publish(path: Path) -> None:
    """Give a finished part its final name, on the disk: the vectors in Redis may be removed after this."""
    durable.publish(part_of(path), path)


def digest_of(path: Path) -> tuple[str, int]:
    """The sha256 of a file in hexadecimal, and its size in bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest(), os.fstat(stream.fileno()).st_size


class LineFile:
    """An unfinished file of JSON lines, or of other values of bytes, with `end` after each. OSError: it can't be
    made."""

    def __init__(self, path: Path, end: bytes = b"\n") -> None:
        self.path, self._end = path, end
        part_of(path).unlink(missing_ok=True)  # it might be a link to another file
        self._stream = part_of(path).open("xb", _BUFFER_BYTES)

    def write(self, lines: Iterable[bytes]) -> None:
        self._stream.writelines(line + self._end for line in lines)

    def close(self) -> None:
        """Close the file, which is not synced."""
        self._stream.close()

    def publish(self, *, kept: bool = True) -> list[Path]:
        """Give the closed file its final name, and return that; or else, remove it, and what has that name."""
        if kept:
            publish(self.path)
            return [self.path]
        part_of(self.path).unlink()
        self.path.unlink(missing_ok=True)
        return []
