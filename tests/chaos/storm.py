"""Draws a fault every few seconds, mends it when its time comes, and records everything."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tests.chaos.fault import Chaos, Fault, Struck, Undo
from tests.chaos.stack import OUTAGE

_TICK_S = 0.05
_MOST_DRAWS = 20
#: All mending must be done within this time (seconds).
_CALM_S = 60.0


@dataclass(eq=False)
class Event:
    """A fault that happened. It lasts until it is mended."""

    name: str
    words: str
    began_at: float
    ended_at: float | None = None


class Storm:
    """Strikes with faults for some time."""

    def __init__(self, chaos: Chaos, faults: Sequence[Fault], seed: int, pause_s: float, log_file: Path) -> None:
        self.events: list[Event] = []
        self._log_file = log_file
        self._chaos = chaos
        self._faults = faults
        self._rng = random.Random(f"{seed} faults")
        self._pause_s = pause_s
        self._undos: list[tuple[float, Undo, Event]] = []

    def blow(self, until: float, least: int, *, enough: Callable[[], bool], tell: Callable[[], None]) -> None:
        """Break things until a given time, and `least` times, or until `enough` is true; then mend everything.

        Args:
            tell: is called every minute.
        """
        tell_at = time.monotonic() + 60
        strike_at = time.monotonic() + self._rng.uniform(0.5, 1.5) * self._pause_s
        while (time.monotonic() < until or len(self.events) < least) and not enough():
            self._mend()
            if time.monotonic() >= strike_at:
                self._strike()
                strike_at = time.monotonic() + self._rng.uniform(0.2, 1.8) * self._pause_s
            if time.monotonic() >= tell_at:
                tell_at += 60
                tell()
            time.sleep(_TICK_S)
        self.calm()

    def calm(self) -> None:
        """Mend everything now."""
        deadline = time.monotonic() + _CALM_S
        while self._undos and time.monotonic() < deadline:
            self._undos = [(min(at, time.monotonic() + 0.5), undo, event) for at, undo, event in self._undos]
            self._mend()
            time.sleep(_TICK_S)
        assert not self._undos, [event.name for _, _, event in self._undos]

    def _strike(self) -> None:
        """Draw faults until one can strike."""
        for _ in range(_MOST_DRAWS):
            [fault] = self._rng.choices(self._faults, [fault.weight for fault in self._faults])
            began_at = time.monotonic()
            struck = None if self._rests(fault) else self._try(fault)
            if struck is not None:
                self._remember(fault, struck, began_at)
                return

    def _try(self, fault: Fault) -> Struck | None:
        try:
            return fault.strike(self._chaos)
        except OUTAGE:
            return None  # the fault needs Redis first, and Redis is away

    def _rests(self, fault: Fault) -> bool:
        """Whether this fault must still wait because another one struck too recently."""
        now, rest_s = time.monotonic(), fault.rest_leases * self._chaos.lease
        return bool(fault.rests_after) and any(
            event.name.startswith(fault.rests_after) and now - (event.ended_at or now) < rest_s for event in self.events
        )

    def _remember(self, fault: Fault, struck: Struck, began_at: float) -> None:
        event = Event(fault.name, struck.words, began_at)
        self.events.append(event)
        self._log(f"{fault.name}: {struck.words}")
        if struck.undo is None:
            event.ended_at = time.monotonic()
        else:
            self._undos.append((time.monotonic() + struck.after_s, struck.undo, event))

    def _log(self, words: str) -> None:
        """Write a line with a timestamp, to read next to the workers' logs."""
        with self._log_file.open("a", encoding="utf-8") as log:
            log.write(f"{datetime.now().isoformat(sep=' ', timespec='milliseconds')} {words}\n")

    def _mend(self) -> None:
        """Run the undos that are due."""
        now = time.monotonic()
        for entry in [entry for entry in self._undos if entry[0] <= now]:
            self._undos.remove(entry)
            _, undo, event = entry
            again_s = undo()
            if again_s is None:
                event.ended_at = time.monotonic()
                self._log(f"mended: {event.name}: {event.words}")
            else:
                self._undos.append((time.monotonic() + again_s, undo, event))
