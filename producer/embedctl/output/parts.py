"""Unfinished files: a temporary name in the same folder, a lock, and a note of their progress."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

from embedctl_config import durable, locks
from embedctl_config.errors import OutputError

#: Characters that JSON does not escape in strings, in UTF-8: DEL, the controls of ISO 6429, and Unicode's line ends and
#: direction marks. A line may be printed on a terminal.
_UNSAFE = re.compile(
    rb"\x7f|\xc2[\x80-\x9f]|\xd8\x9c|\xe2(?:\x80[\x8e\x8f\xa8-\xae]|\x81[\xa6-\xa9])"  # U+061C, U+200E … U+2069
)

#: A line may have 20 kB.
_BUFFER_BYTES = 1024 * 1024


class BeginAgain(Exception):
    """Raised by a writer that has to be given all chunks once more, the first one included."""


def part_of(path: Path) -> Path:
    """The temporary name of an unfinished file."""
    return path.with_name(f".{path.name}.part")


def locked(path: Path) -> AbstractContextManager[None]:
    """Keep other processes from writing this file.

    Raises:
        OutputError: another process is writing it.
    """
    taken = OutputError(f"another fetch is writing {path}: wait for it, or choose another file")
    return locks.locked(path.with_name(f".{path.name}.lock"), vanishes=True, taken=taken)


def cut_back(path: Path, size: int) -> int:
    """Open an unfinished file, or make it, and cut it back to the size in its progress note; returns the descriptor.

    Raises:
        ValueError: it is shorter.
        OSError: it can't be opened or cut, or is a symbolic link.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    if os.fstat(descriptor).st_size < size:
        os.close(descriptor)
        raise ValueError(f"{path} is shorter than its progress note says")
    os.ftruncate(descriptor, size)
    return descriptor


def json_line(value: object) -> bytes:
    """JSON on one line, in UTF-8: every character that some readers or terminals take for a line end or a control is
    escaped."""
    import orjson  # here, because most commands write no line

    try:
        line = orjson.dumps(value)
    except orjson.JSONEncodeError:  # a lone surrogate, a number of more than 64 bits, or deep nesting
        line = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogateescape")
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0].decode()):04x}".encode(), line)


def publish(path: Path) -> None:
    """Give a finished part its final name, on the disk: the vectors in Redis may be removed after this."""
    durable.publish(part_of(path), path)


class Progress:
    """A note of an unfinished file's progress, in the same folder. The next fetch continues from it."""

    def __init__(self, path: Path, of: Mapping[str, object]) -> None:
        self._path = path.with_name(f".{path.name}.progress")
        self._of = dict(of)

    def load(self) -> Mapping[str, int] | None:
        """The last facts that :meth:`save` noted for the same job and format, or None."""
        noted = self._read()
        if noted.get("of") != self._of:
            return None
        facts: Mapping[str, int] = noted["facts"]
        return facts

    def other(self, name: str) -> object:
        """What an existing note says the file is of, under this name, if it is something else; else None."""
        of = self._read().get("of")
        found = of.get(name) if isinstance(of, dict) else None
        return None if found == self._of[name] else found

    def is_of_other_numbers(self) -> bool:
        """Whether there is a note of the same job and format, but of vectors that are stored otherwise."""
        of = self._read().get("of")
        names = ("job", "format", "retried")
        return isinstance(of, dict) and of != self._of and all(of.get(name) == self._of.get(name) for name in names)

    def save(self, facts: Mapping[str, int]) -> None:
        """Note the file's progress. The file must already contain everything that the facts describe."""
        fresh = self._path.with_suffix(".new")
        fresh.unlink(missing_ok=True)  # it might be a link to another file
        fresh.write_text(json.dumps({"of": self._of, "facts": dict(facts)}), encoding="utf-8")
        durable.publish(fresh, self._path)

    def clear(self) -> None:
        """Remove the note, on the disk: if it came back, it would vouch for what another fetch has written since."""
        durable.remove(self._path)

    def _read(self) -> Mapping[str, Any]:
        try:
            noted = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return noted if isinstance(noted, dict) else {}


class LineFile:
    """An unfinished file of JSON lines, which can be cut back to the size in a progress note."""

    def __init__(self, path: Path, size: int = 0) -> None:
        """Continue after the first `size` bytes.

        Raises:
            ValueError: the file is shorter.
        """
        self.path = path
        self._stream: IO[bytes] = os.fdopen(cut_back(part_of(path), size), "r+b", _BUFFER_BYTES)
        self._stream.seek(size)

    def write(self, line: bytes) -> None:
        """Add a line."""
        self._stream.write(line + b"\n")

    def flush(self) -> int:
        """Sync everything to the disk; returns the file's size in bytes."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return self._stream.tell()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
