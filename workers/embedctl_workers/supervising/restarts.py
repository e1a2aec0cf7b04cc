"""When a worker that died is restarted, when it is given up, and whether its death makes what it held suspect."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from embedctl_config.errors import ExitStatus
from embedctl_config.retry import Policy

#: Exit statuses of a worker that another start would not help: a wrong setting, a missing model, wrong vectors, or a
#: Redis user without the permissions.
HOPELESS = frozenset({ExitStatus.USAGE, ExitStatus.NOT_FOUND, ExitStatus.INACCURATE, ExitStatus.NOT_PERMITTED})


#: Why a worker ends itself with a status.
_WHY: Mapping[int, str] = {
    ExitStatus.USAGE: "it is not configured as it must be",
    ExitStatus.NOT_FOUND: "its model is not on this machine",
    ExitStatus.UNAVAILABLE: "Redis is away",
    ExitStatus.INACCURATE: "the accuracy gate refused its vectors",
    ExitStatus.NOT_PERMITTED: "Redis refused its user",
    ExitStatus.HUNG: "an encode hung",
    ExitStatus.CANNOT_ENCODE: "it can encode nothing any more",
}


@dataclass(frozen=True, slots=True)
class Pace:
    """How a supervisor restarts and stops workers."""

    #: the pause before a restart (seconds); it doubles from death to death
    first_s: float = 1.0
    longest_s: float = 60.0
    #: a worker that was ready for this long is stable (seconds): the next pause is the first again
    stable_s: float = 30.0
    starts: int = 5  #: how many deaths before the worker was ready, in a row, make the supervisor give it up
    #: So many deaths in a row with chunks in hand, of which none was completed before, look like a broken installation:
    #: from then on, each has its pause.
    fruitless: int = 5
    drain_s: float = 600.0  #: how long workers may take to finish their chunk before they are killed (seconds)


class Restarts:
    """The restarts of one place, in seconds of one clock; unless it `gives_up`, it is restarted after any death."""

    def __init__(self, pace: Pace, *, gives_up: bool = True) -> None:
        self._pace = pace
        self._gives_up = gives_up
        self._deaths = self._fruitless = 0
        self.next_at = 0.0  #: when the next process may start
        self.ready_at: float | None = None  #: when the current process became ready; None before that
        #: deaths in a row before the worker was ready, without those that only Redis was to blame for
        self.failed_starts = 0
        #: the exit status of the last process, if the worker is not restarted; else None
        self.given_up: int | None = None

    def on_start(self) -> None:
        self.ready_at = None

    def on_ready(self, now: float) -> None:
        self.ready_at = now
        self.failed_starts = 0

    def on_exit(self, status: int, now: float, *, held: int = 0, completed: int = 0) -> float:
        """The process ended untold; the pause before the restart, in seconds, meaningless if it is now given up.

        If it `held` chunks, one of them may have killed it, which others must not wait for.
        """
        if held and self.ready_at is None:
            self.on_ready(now)  # it was, and died before anybody saw that
        self._fruitless = 0 if completed or not held else self._fruitless + 1
        if held and self._fruitless < self._pace.fruitless:
            self.next_at = now
            return 0.0
        if self.ready_at is None:
            # A Redis that is away says nothing about the worker: it is restarted without limit.
            self.failed_starts += status != ExitStatus.UNAVAILABLE
            if self._gives_up and (status in HOPELESS or self.failed_starts >= self._pace.starts):
                self.given_up = status
        elif now - self.ready_at >= self._pace.stable_s:
            self._deaths = 0
        self._deaths += 1
        pause = Policy(self._pace.first_s, self._pace.longest_s).pause_s(self._deaths)
        self.next_at = now + pause
        return pause


def how_it_ended(status: int, *, memory_ran_out: bool = False) -> str:
    """How a worker process ended, in words, from its status as :mod:`subprocess` gives it.

    If `memory_ran_out`, the kernel has just killed a process here for that.
    """
    if status < 0:
        known = {int(each): each.name for each in signal.Signals}
        name = known.get(-status, f"signal {-status}")
        return f"killed by {name}" + (" (out of memory)" if memory_ran_out and status == -signal.SIGKILL else "")
    why = _WHY.get(status)
    return f"ended with status {status}" + (f" ({why})" if why else "")


def makes_suspect(status: int) -> bool | None:
    """Whether a death makes the chunks that the worker held suspect; None if the worker itself has reported its end.

    They become suspect if a signal other than SIGTERM killed the worker, or if it ended itself because an encode hung
    or its device was lost. A worker that ends with another status has left the registry; if it has not, its neighbours
    witness that.
    """
    if status == -signal.SIGTERM:
        return False
    return True if status < 0 or status in (ExitStatus.HUNG, ExitStatus.CANNOT_ENCODE) else None
