"""Files in the making: a temporary name beside the final one, a lock, and a note of how far they have come."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from embedctl_config.errors import OutputError

#: What JSON leaves as it is within a string: DEL, the controls of ISO 6429, and Unicode's ends of lines.
_LINE_ENDS = re.compile("[\x7f-\x9f\u2028\u2029]")


def part_of(path: Path) -> Path:
    """The temporary name of a file in the making."""
    return path.with_name(f".{path.name}.part")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Be the only process that makes this file.

    Raises:
        OutputError: another process does.
    """
    lock = path.with_name(f".{path.name}.lock")
    with ExitStack() as stack:
        while True:
            stream = stack.enter_context(os.fdopen(_open_own(lock), "r+b"))
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Its last holder may have removed the file between our opening and our locking it.
                if lock.stat().st_ino == os.fstat(stream.fileno()).st_ino:
                    break
            except BlockingIOError:
                raise OutputError(f"another fetch is writing {path}: wait for it, or choose another file") from None
            except FileNotFoundError:
                pass
        stack.callback(lock.unlink)
        yield


def _open_own(path: Path) -> int:
    """Open a file for writing as it is, or make it; a link that somebody put in its place is an OSError."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def json_line(value: object) -> str:
    """JSON in one line for every reader: no character is left that some take for the end of a line or for an order."""
    text = json.dumps(value, ensure_ascii=False)
    return _LINE_ENDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def publish(path: Path) -> None:
    """Put a finished part on the disk and give it its final name."""
    with part_of(path).open("rb") as stream:
        os.fsync(stream.fileno())
    part_of(path).replace(path)


class Progress:
    """How far a file in the making has come, kept beside it, so that a fetch that died goes on."""

    def __init__(self, path: Path, of: Mapping[str, object]) -> None:
        self._path = path.with_name(f".{path.name}.progress")
        self._of = dict(of)

    def load(self) -> Mapping[str, int] | None:
        """What :meth:`save` noted of the same thing, or None."""
        try:
            noted = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(noted, dict) or noted.get("of") != self._of:
            return None
        facts: Mapping[str, int] = noted["facts"]
        return facts

    def save(self, facts: Mapping[str, int]) -> None:
        """Note how far the file has come; what it says must be in the file already."""
        fresh = self._path.with_suffix(".new")
        fresh.unlink(missing_ok=True)  # it might be a link that leads elsewhere
        fresh.write_text(json.dumps({"of": self._of, "facts": dict(facts)}), encoding="utf-8")
        fresh.replace(self._path)

    def clear(self) -> None:
        """Forget it."""
        self._path.unlink(missing_ok=True)


class LineFile:
    """A file of JSON lines in the making, which can be cut back to what a progress note says."""

    def __init__(self, path: Path, size: int = 0) -> None:
        """Go on from `size` bytes.

        Raises:
            ValueError: there are not that many.
        """
        self.path = path
        part = part_of(path)
        self._stream: IO[bytes] = os.fdopen(_open_own(part), "r+b")
        if os.fstat(self._stream.fileno()).st_size < size:
            self._stream.close()
            raise ValueError(f"{part} is shorter than was noted")
        self._stream.truncate(size)
        self._stream.seek(size)

    def write(self, line: str) -> None:
        """Add a line."""
        self._stream.write(line.encode("utf-8", "surrogateescape") + b"\n")

    def flush(self) -> int:
        """Put everything on the disk; the file's size."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return self._stream.tell()

    def close(self) -> None:
        """Close it."""
        self._stream.close()
