"""What the registry of workers knows of our processes, asked and told in a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections import deque

from embedctl.broker import Broker
from embedctl.machine import process_id
from embedctl.reaper import end_leases
from embedctl.store import WorkerRow
from embedctl_config.errors import EmbedctlError

log = logging.getLogger(__name__)

#: How often the registry is asked while an announcement is awaited (seconds).
_LOOK_S = 0.25
#: Longest pause between two tries while Redis is away (seconds).
_LONGEST_PAUSE_S = 5.0


class Announcements:
    """Learns which processes have announced themselves as workers, and reports how they ended.

    Redis may be away for a while; whoever looks after processes must not wait for it, and what is to be reported waits
    here.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._awaited: set[int] = set()
        self._rows: dict[int, WorkerRow] = {}
        self._ended: deque[tuple[int, str]] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="announcements", daemon=True)
        self._thread.start()

    def expect(self, pid: int) -> None:
        """Begin to look for the announcement of a process that was started."""
        self._awaited.add(pid)
        self._wake.set()

    def of(self, pid: int) -> WorkerRow | None:
        """What a process said of itself first; None before that."""
        return self._rows.get(pid)

    def ended(self, pid: int, how: str) -> None:
        """Report the end of a process, if it had announced itself.

        Args:
            how: how it died, which makes the chunks that it held suspect; empty if its end blames nobody.
        """
        self._awaited.discard(pid)
        self._ended.append((pid, how))
        self._wake.set()

    def close(self, patience_s: float = 5.0) -> None:
        """Report what is left, as far as Redis takes it in this time, and stop."""
        self._closing = True
        self._wake.set()
        self._thread.join(patience_s)
        if self._ended:
            log.warning("Redis was not told how %d workers ended: what they held waits for its lease", len(self._ended))

    def _run(self) -> None:
        pause = _LOOK_S
        while self._ended or not self._closing:
            self._wake.wait(pause if self._awaited or self._ended else None)
            self._wake.clear()
            try:
                self._look()
                self._report()
                pause = _LOOK_S
            except EmbedctlError as error:
                log.warning("the workers here can't be looked up: %s; trying again", error)
                pause = min(_LONGEST_PAUSE_S, 2 * pause)

    def _look(self) -> None:
        awaited = self._awaited.copy()
        if not awaited:
            return
        for row in self._broker.workers.here():
            if row.pid in awaited and row.process == process_id(row.pid):
                self._rows[row.pid] = row
                self._awaited.discard(row.pid)

    def _report(self) -> None:
        while self._ended:
            pid, how = self._ended[0]
            row = self._rows.get(pid) or next((row for row in self._broker.workers.here() if row.pid == pid), None)
            if row is not None:
                self._tell(row, how)
            self._ended.popleft()
            self._rows.pop(pid, None)

    def _tell(self, row: WorkerRow, how: str) -> None:
        held = self._broker.workers.holding([row.instance])  # before its last word is gone
        if how:
            self._broker.workers.report_death(row.instance, how)
        else:
            self._broker.workers.leave(row)
        end_leases(self._broker, {row.instance}, held)
