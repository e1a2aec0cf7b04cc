"""Who may be in this process at the same time: any chunks, or one suspect chunk by itself."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self


class Room:
    """Holds several chunks at once, unless one of them has it alone: what it does to the process it does to no other.

    Enter it as a context.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._loner: int | None = None

    def __enter__(self) -> Self:
        with self._changed:
            self._changed.wait_for(lambda: self._loner is None)
            self._inside += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._inside -= 1
            if self._loner == threading.get_ident():
                self._loner = None
            self._changed.notify_all()

    def clear(self) -> bool:
        """Wait until everybody else has left, and keep the room until leaving it; False if another has begun to."""
        with self._changed:
            if self._loner is not None:
                return False
            self._loner = threading.get_ident()
            self._changed.wait_for(lambda: self._inside == 1)
        return True
