"""Which chunks may be in this process at the same time: any, or one suspect chunk alone."""

from __future__ import annotations

import threading
from typing import Self


class Isolation:
    """A context that several threads may be in, until one of them isolates itself.

    What an isolated chunk does to the process, it does to no other chunk.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._isolated: int | None = None

    def __enter__(self) -> Self:
        with self._changed:
            self._changed.wait_for(lambda: self._isolated is None)
            self._inside += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            if self._isolated == threading.get_ident():
                self._isolated = None
            self._changed.notify_all()

    def has_others(self) -> bool:
        with self._changed:
            return self._inside > 1

    def isolate(self) -> bool:
        """Wait until all others have left, and keep them out; False, at once, if another thread does so already."""
        with self._changed:
            if self._isolated is not None:
                return False
            self._isolated = threading.get_ident()
            self._changed.wait_for(lambda: self._inside == 1)
        return True
