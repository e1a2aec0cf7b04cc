"""Backends that stop being able to encode, for tests that start workers with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from embedctl_workers import backends
from embedctl_workers.backends.dummy import DummyBackend, _token
from tests.support.processes import before_all_else

#: What the backend `hungry` takes for a row of a batch: real memory, and ten times that for the word "huge".
MEGABYTES = 60


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


class StickyBackend(DummyBackend):
    """A dummy that one word makes useless."""

    _broken = False

    def forward(self, tokens: Any, rows: Any) -> Any:
        ids = tokens.columns["input_ids"]
        self._broken = self._broken or any(_token("sticky") in ids[row] for row in rows)
        if self._broken:
            raise RuntimeError("could not create a primitive")
        return super().forward(tokens, rows)


class UnluckyBackend(DummyBackend):
    """A dummy that never gets ready."""

    @classmethod
    def load(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no luck today")


class HungryBackend(DummyBackend):
    """A dummy that takes real memory."""

    def forward(self, tokens: Any, rows: Any) -> Any:
        ids = tokens.columns["input_ids"]
        np.ones(MEGABYTES * sum(10 if _token("huge") in ids[row] else 1 for row in rows) << 17)
        return super().forward(tokens, rows)


_BACKENDS = {name.lower(): (f"{__name__}:{name}Backend", "") for name in ("Fading", "Sticky", "Unlucky", "Hungry")}


def register(group: Path | None = None) -> None:
    """Let this process know these backends, by the first words of their names, in a memory cgroup if one is given."""
    if group is not None:
        (group / "cgroup.procs").write_text("0")
    backends.BACKENDS.update(_BACKENDS)


def sick_backends(folder: Path) -> dict[str, str]:
    """The variables that do so in every Python: for workers that another process starts."""
    # Only the names: before a worker is pinned, it may not import NumPy.
    root = Path(__file__).parents[2]
    program = f"import sys; sys.path.append({str(root)!r})\nfrom embedctl_workers import backends\n"
    return before_all_else(folder, "sick", f"{program}backends.BACKENDS.update({_BACKENDS!r})")
