"""A backend that stops being able to encode, for tests that start workers with it."""

from __future__ import annotations

from typing import Any

from embedctl_workers import backends
from embedctl_workers.backends.dummy import DummyBackend


class FadingBackend(DummyBackend):
    """The dummy on a host where another process takes the memory after some batches."""

    OPTIONS = (*DummyBackend.OPTIONS, "batches")

    def __init__(self, *, batches: int, **options: Any) -> None:
        super().__init__(**options)
        self._left = batches

    def forward(self, tokens: Any, rows: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise MemoryError("the host has no memory left")
        return super().forward(tokens, rows)


def register() -> None:
    """Let this process know the backend `fading`."""
    backends.BACKENDS["fading"] = (f"{__name__}:FadingBackend", "")
