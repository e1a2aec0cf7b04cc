"""The supervisor's link to the registry of workers: a thread of its own asks it, and reports to it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from embedctl.common.machine import process_id
from embedctl.common.notices import Reminder
from embedctl.queueing.broker import Broker
from embedctl.queueing.reaper import end_leases
from embedctl.store import Starting, WorkerRow
from embedctl_config import keys
from embedctl_config.errors import EmbedctlError
from embedctl_config.retry import ASIDE

log = logging.getLogger(__name__)

#: How often the registry is polled while a worker is expected in it (seconds).
_POLL_S = 0.25
#: How often it is said again which workers do not run, and that one in quarantine is awaited (seconds). What was said
#: counts three times as long.
_SAY_EVERY_S = keys.HEARTBEAT_TTL_S / 3


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A worker in quarantine that is being started for these queues. `until` is by the monotonic clock."""

    queues: Sequence[str]
    name: str
    until: float


class RegistryLink:
    """Learns which processes are in the registry as workers, and reports to it how they ended.

    Redis may be away for a while. The supervisor's loop does not wait for it; its reports wait here.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._expected: set[int] = set()
        self._rows: dict[int, WorkerRow] = {}
        self._exits: deque[tuple[int, str | None]] = deque()
        self._quarantines: deque[_Awaited] = deque()
        #: By name: of whom it is to be said again, and when, by the monotonic clock.
        self._awaited: dict[str, tuple[_Awaited, float]] = {}
        #: The workers that do not run, by their places, and since when by the monotonic clock.
        self._stopped: dict[str, tuple[Starting, float]] = {}
        #: What was said of them, and when it is to be said again.
        self._said: dict[str, tuple[Starting, float]] = {}
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="registry-link", daemon=True)
        self._thread.start()

    def expect(self, pid: int) -> None:
        """A process was started: look for it in the registry from now on."""
        self._expected.add(pid)
        self._wake.set()

    def row_of(self, pid: int) -> WorkerRow | None:
        """The registry's first row for a process; None before it has one."""
        return self._rows.get(pid)

    def expect_quarantine(self, queues: Sequence[str], name: str, within_s: float) -> None:
        """Say that a worker in quarantine will beat within this time (seconds), before the exits from now on.

        That counts as long as a heartbeat, and is said again meanwhile: so if this process dies, nobody waits longer.
        """
        self._quarantines.append(_Awaited(queues, name, time.monotonic() + within_s))
        self._wake.set()

    def say_why_not(self, place: str, why: str, name: str, hardware: str, models: Sequence[str]) -> None:
        """Let people see why a worker does not run; empty if it does."""
        if why:
            self._stopped[place] = Starting(name, hardware, tuple(models), why, 0), time.monotonic()
        else:
            self._stopped.pop(place, None)
        self._wake.set()

    def report_exit(self, pid: int, how: str | None) -> None:
        """Report that a process has ended, if it was in the registry, and look for it no more.

        `how` it died makes the chunks that it held suspect; empty if its end makes none suspect, None if it has
        reported its end by itself.
        """
        self._expected.discard(pid)
        self._exits.append((pid, how))
        self._wake.set()

    def close(self, timeout_s: float = 5.0) -> None:
        """Send the remaining reports, as far as Redis takes them in this time (seconds), and stop."""
        self._stopped.clear()
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        if self._exits:
            log.warning(
                "the ends of %d workers were not reported: what they held waits for its lease to lapse",
                len(self._exits),
            )

    def _run(self) -> None:
        failures, remind = 0, Reminder(log.warning)
        while self._quarantines or self._exits or self._said or not self._closing:
            pause = ASIDE.pause_s(failures) if failures else _POLL_S
            is_busy = self._expected or self._exits or self._quarantines or self._awaited
            self._wake.wait(pause if is_busy or failures else _SAY_EVERY_S if self._stopped else None)
            self._wake.clear()
            try:
                self._look_up()
                self._report()
                self._say_again()
                self._say_who_does_not_run()
                failures = 0
            except EmbedctlError as error:
                remind(f"the workers here can't be looked up, and are again and again: {error}")
                failures += 1

    def _look_up(self) -> None:
        expected = self._expected.copy()
        if not expected:
            return
        for row in self._broker.workers.here():
            if row.pid in expected and row.process == process_id(row.pid):
                self._rows[row.pid] = row
                self._expected.discard(row.pid)

    def _report(self) -> None:
        while self._quarantines or self._exits:
            if self._quarantines:  # else others would take what it is to take
                self._say(self._quarantines[0])
                self._quarantines.popleft()
                continue
            pid, how = self._exits[0]
            if how is not None:
                here = (row for row in self._broker.workers.here() if row.pid == pid)
                row = self._rows.get(pid) or next(here, None)
                if row is not None:
                    self._end(row, how)
            self._exits.popleft()
            self._rows.pop(pid, None)

    def _say_again(self) -> None:
        for each, again_at in list(self._awaited.values()):
            if time.monotonic() >= again_at:
                self._say(each)

    def _say(self, awaited: _Awaited) -> None:
        now = time.monotonic()
        left_s = max(0.0, awaited.until - now)
        self._broker.workers.expect_quarantine(awaited.queues, awaited.name, min(left_s, keys.HEARTBEAT_TTL_S))
        if left_s > keys.HEARTBEAT_TTL_S:
            self._awaited[awaited.name] = awaited, now + _SAY_EVERY_S
        else:
            self._awaited.pop(awaited.name, None)

    def _say_who_does_not_run(self) -> None:
        stopped, told, now = self._stopped.copy(), self._broker.workers.not_ready, time.monotonic()
        for place, (worker, since) in stopped.items():
            said, again_at = self._said.get(place, (None, 0.0))
            if said is not worker or now >= again_at:
                began_ms = self._broker.connection.about_now_ms() - int(1000 * (now - since))
                told.tell(place, replace(worker, began_ms=began_ms))
                self._said[place] = worker, now + _SAY_EVERY_S
        for place in self._said.keys() - stopped.keys():
            told.end(place)
            del self._said[place]

    def _end(self, row: WorkerRow, how: str) -> None:
        held = self._broker.workers.holding([row.instance])  # before its row is gone
        if how:
            self._broker.workers.report_death(row.instance, how)
        else:
            self._broker.workers.leave(row)
        end_leases(self._broker, {row.instance}, held)
