"""What forks change in themselves before their command. It imports nothing, because all forks would pay for it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from runpy import run_path
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
    """Kills the command before or after a step, or sends it another signal."""

    step: Step
    when: str
    number: int = signal.SIGKILL

    def __call__(self) -> None:
        _beside(self.step, **{self.when: lambda: os.kill(os.getpid(), self.number)})


def stop(*_: object, **__: object) -> None:
    """In the place of a function: say so on standard error, and go no further."""
    print("here", file=sys.stderr, flush=True)
    threading.Event().wait()


@dataclass(frozen=True)
class PauseAt:
    """Makes the command wait before a step: as long as a file exists that it makes there."""

    step: Step
    file: Path

    def __call__(self) -> None:
        _beside(self.step, before=self._pause)

    def _pause(self) -> None:
        self.file.touch()
        while self.file.exists():
            time.sleep(0.01)


@dataclass(frozen=True)
class MoveClock:
    """Makes the clock on the wall of this process wrong by some seconds."""

    seconds: int

    def __call__(self) -> None:
        now, now_ns = time.time, time.time_ns
        time.time = lambda: now() + self.seconds
        time.time_ns = lambda: now_ns() + self.seconds * 10**9


@dataclass(frozen=True)
class WaitFor:
    """Makes a function wait until a file exists."""

    where: str
    name: str
    file: Path

    def __call__(self) -> None:
        owner = found(self.where)
        real = getattr(owner, self.name)

        def waits(*given: Any, **named: Any) -> Any:
            while not self.file.exists():
                time.sleep(0.01)
            return real(*given, **named)

        setattr(owner, self.name, waits)


@dataclass(frozen=True)
class InTurn:
    """Does one after the other."""

    steps: Sequence[Callable[[], None]]

    def __call__(self) -> None:
        for step in self.steps:
            step()


@dataclass(frozen=True)
class RunScript:
    """Runs a script in place of the command, as Python would."""

    path: str
    arguments: Sequence[str]

    def __call__(self) -> None:
        sys.argv = [self.path, *self.arguments]
        run_path(self.path, run_name="__main__")
        sys.exit()


def _beside(step: Step, before: Callable[[], object] | None = None, after: Callable[[], object] | None = None) -> None:
    """Do something just before or after a step."""
    where, name, count = step
    owner = found(where)
    real, calls = getattr(owner, name), 0

    def stepped(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if before is not None and calls == count:
            before()
        answer = real(*given, **named)
        if after is not None and calls == count:
            after()
        return answer

    setattr(owner, name, stepped)


def found(where: str) -> Any:
    """A module, or a class of it behind a colon."""
    module, _, name = where.partition(":")
    return getattr(import_module(module), name) if name else import_module(module)
