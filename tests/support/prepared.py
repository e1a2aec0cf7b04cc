"""What forks change in themselves before their command. It imports nothing, because all forks would pay for it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

#: A module and a class, a function, and which of its calls. A function is named in the module that calls it: there, its
#: name is a reference of its own, which a change of the module that defines it would not reach.
Step = tuple[str, str, int]


@dataclass(frozen=True)
class Put:
    """Gives attributes other values.

    Attributes:
        values: by a module and a class, and the attribute.
    """

    values: Mapping[tuple[str, str], Any]

    def __call__(self) -> None:
        for (where, name), value in self.values.items():
            setattr(found(where), name, value)


@dataclass(frozen=True)
class DieAt:
    """Kills the command before or after a step. It notes how far a file is after each chunk, rather than every two
    seconds."""

    step: Step
    when: str

    def __call__(self) -> None:
        where, name, count = self.step
        owner = found(where)
        real, calls = getattr(owner, name), 0

        def dies(*given: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == count and self.when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            answer = real(*given, **named)
            if calls == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        setattr(owner, name, dies)
        import_module("embedctl.output.fetch")
        sys.modules["embedctl.output.fetch"]._NOTE_EVERY_S = 0.0  # type: ignore[attr-defined]


def stop(*_: object, **__: object) -> None:
    """In the place of a function: say so on standard error, and go no further."""
    print("here", file=sys.stderr, flush=True)
    threading.Event().wait()


def found(where: str) -> Any:
    """A module, or a class of it behind a colon."""
    module, _, name = where.partition(":")
    return getattr(import_module(module), name) if name else import_module(module)
