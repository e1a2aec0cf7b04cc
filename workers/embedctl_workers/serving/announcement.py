"""What a worker says of itself before it is ready."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from embedctl.common.notices import Reminder
from embedctl.queueing.broker import Broker
from embedctl.store import Starting
from embedctl_config import keys
from embedctl_config.errors import EmbedctlError
from embedctl_workers.serving.health import Health
from embedctl_workers.serving.heartbeat import INTERVAL_S

log = logging.getLogger(__name__)

#: So often it is looked whether the worker does something else (seconds).
_LOOK_EVERY_S = 0.25
#: Characters of an error that people are told at most.
_LONGEST_WORDS = 300


class Announcement:
    """Tells people in a thread what a worker does that is not ready, until it is closed."""

    def __init__(self, broker: Broker, health: Health, name: str, hardware: str, models: Sequence[str]) -> None:
        self._told, self._now_ms = broker.workers.not_ready, broker.connection.about_now_ms
        self._remind = Reminder(log.info)
        self._health = health
        self._instance, self._ended = f"{name}/{os.getpid()}", f"{name}/ended"
        self._row = Starting(name, hardware, tuple(models), "", self._now_ms())
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="announcement", daemon=True)
        self._thread.start()

    @contextmanager
    def telling_why_not(self) -> Iterator[None]:
        """If an error ends the worker, its words stay as long as those of one that is gone, or until the next one
        starts."""
        try:
            yield
        except EmbedctlError as error:
            self.close()
            why, _, _ = str(error).partition("\n")
            last = replace(self._row, doing=f"did not start: {why[:_LONGEST_WORDS]}", began_ms=self._now_ms())
            self._say(partial(self._told.tell, self._ended, last, keys.GONE_TTL_S))
            raise

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()

    def _run(self) -> None:
        self._say(partial(self._told.end, self._ended))
        while not self._closed.is_set():
            doing = self._health.phase
            self._say(partial(self._told.tell, self._instance, self._now(doing)))
            self._wait_while(doing)
        self._say(partial(self._told.end, self._instance))

    def _now(self, doing: str) -> Starting:
        ends = self._health.phase_until
        until = None if ends is None else self._now_ms() + int(1000 * (ends - time.monotonic()))
        return replace(self._row, doing=doing, until_ms=until)

    def _say(self, say: Callable[[], None]) -> None:
        try:
            say()
        except EmbedctlError as error:  # it is for people only; the heartbeat will say the same
            self._remind(f"nobody is told what this worker does before it is ready: {error}")

    def _wait_while(self, doing: str) -> None:
        """Wait until the worker does something else, it is to be said again, or nothing is to be said any more."""
        again_at = time.monotonic() + INTERVAL_S
        while time.monotonic() < again_at and self._health.phase == doing and not self._closed.wait(_LOOK_EVERY_S):
            pass
