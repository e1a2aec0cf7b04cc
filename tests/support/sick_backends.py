"""Backends that stop being able to encode, for tests that start workers with them."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes import before_all_else

#: The dummy on a host where another process takes the memory after some batches, and a dummy that one word makes
#: useless.
_BACKENDS = """
from embedctl_workers.backends.dummy import DummyBackend, _token

class FadingBackend(DummyBackend):
    OPTIONS = (*DummyBackend.OPTIONS, "batches")

    def __init__(self, *, batches, **options):
        super().__init__(**options)
        self._left = batches

    def forward(self, tokens, rows):
        self._left -= 1
        if self._left < 0:
            raise MemoryError("the host has no memory left")
        return super().forward(tokens, rows)

BAD = _token("sticky")

class StickyBackend(DummyBackend):
    broken = False

    def forward(self, tokens, rows):
        ids = tokens.columns["input_ids"]
        self.broken = self.broken or any(BAD in ids[row] for row in rows)
        if self.broken:
            raise RuntimeError("could not create a primitive")
        return super().forward(tokens, rows)
"""
_REGISTERED = """
from embedctl_workers import backends
backends.BACKENDS["fading"] = ("sick:FadingBackend", "")
backends.BACKENDS["sticky"] = ("sick:StickyBackend", "")
"""


def sick_backends(folder: Path) -> dict[str, str]:
    """The variables that give a worker the backends `fading` and `sticky`."""
    return before_all_else(folder, "sick", _REGISTERED, {"sick": _BACKENDS})
