"""How workers have fared in one place, one after the other, and whether there is another."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from embedctl_config.errors import ExitStatus

#: Statuses of a worker that will not start however often it is tried: a wrong setting, no such model, wrong vectors, a
#: user that Redis does not let.
HOPELESS = frozenset({ExitStatus.USAGE, ExitStatus.NOT_FOUND, ExitStatus.INACCURATE, ExitStatus.NOT_PERMITTED})


@dataclass(frozen=True, slots=True)
class Pace:
    """How patient a supervisor is.

    Attributes:
        first_s, longest_s: the pause before a worker is started again, which doubles from death to death.
        lived_s: a worker that was ready for so long has shown that it can live: the pause begins anew.
        starts: deaths at start, in a row, after which a worker is given up.
        drain_s: the time in which workers finish the chunk that they encode before they are killed.
    """

    first_s: float = 1.0
    longest_s: float = 60.0
    lived_s: float = 30.0
    starts: int = 5
    drain_s: float = 600.0


class Lives:
    """The lives in one place. Times are seconds by one clock.

    Attributes:
        next_at: when the next life may begin.
        ready_at: since when the present one is ready; None before that.
        failed_starts: deaths in a row before a worker was ready, less those for which only Redis was to blame.
        given_up: the status with which the last one ended, if there is to be no other.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._deaths = 0
        self.next_at = 0.0
        self.ready_at: float | None = None
        self.failed_starts = 0
        self.given_up: int | None = None

    def began(self) -> None:
        """A worker was started."""
        self.ready_at = None

    def ready(self, now: float) -> None:
        """It can take work."""
        self.ready_at = now
        self.failed_starts = 0

    def ended(self, status: int, now: float) -> float:
        """It has ended, though not because we told it to; the pause before the next, unless it is given up now."""
        if self.ready_at is None:
            # A Redis that is away says nothing of the worker: it is tried for good.
            self.failed_starts += status != ExitStatus.UNAVAILABLE
            if status in HOPELESS or self.failed_starts >= self._pace.starts:
                self.given_up = status
        elif now - self.ready_at >= self._pace.lived_s:
            self._deaths = 0
        pause = min(self._pace.longest_s, self._pace.first_s * 2.0 ** min(self._deaths, 30))
        self._deaths += 1
        self.next_at = now + pause
        return pause


def how_it_ended(status: int) -> str:
    """The end of a worker process in words, by its status as :mod:`subprocess` gives it."""
    if status < 0:
        known = {int(each): each.name for each in signal.Signals}
        return f"killed by {known.get(-status, f'signal {-status}')}"
    if status == ExitStatus.HUNG:
        return f"ended itself with status {status}: an encode hung"
    if status == ExitStatus.CANNOT_ENCODE:
        return f"ended itself with status {status}: it can encode nothing any more"
    return f"ended with status {status}"


def guilt(status: int) -> bool | None:
    """Whether an end makes what the worker held suspect; None where the process itself has said what is to be said.

    It was killed by a signal other than SIGTERM, or ended itself because an encode hung or its device was lost. A
    process that ends with another status has left as it should; if it has not, its neighbours witness that.
    """
    if status == -signal.SIGTERM:
        return False
    return True if status < 0 or status in (ExitStatus.HUNG, ExitStatus.CANNOT_ENCODE) else None
