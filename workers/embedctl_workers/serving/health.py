"""Whether this worker is well, and whether it is ready: health checks ask this, and no answer waits for Redis. And what
a worker that is not ready tells people."""

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
from embedctl.store.heartbeats import HUNG_AFTER_S
from embedctl_config import keys
from embedctl_config.errors import EmbedctlError
from embedctl_workers.serving.heartbeat import INTERVAL_S, Heartbeat
from embedctl_workers.serving.in_hand import InHand

#: A heartbeat that has not moved for this long (seconds) does more than wait for Redis. If Redis is silent, the retries
#: and timeouts of one step take more than a minute, and ending the worker for that would help nothing.
STUCK_AFTER_S = 300.0
log = logging.getLogger(__name__)

#: So often it is looked whether the worker does something else (seconds).
_LOOK_EVERY_S = 0.25
#: Characters of an error that people are told at most.
_LONGEST_WORDS = 300


class Health:
    """The health of a worker.

    A worker is *well* while its process can do its job, whatever happens to Redis; a worker that is not well should be
    ended. It is *ready* while it takes chunks.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._life: tuple[Heartbeat, InHand, threading.Event] | None = None
        #: What the worker does before it is ready, in words.
        self.phase = "starting"
        #: When it is ready for the next phase, as long as that took last time, by `now`; None if it is not known.
        self.phase_until: float | None = None
        #: Whether Celery hears the bells of the queues.
        self.consuming = False

    def attend(self, heartbeat: Heartbeat, in_hand: InHand, draining: threading.Event) -> None:
        """Watch a worker that has loaded its models."""
        self._life = heartbeat, in_hand, draining

    def illness(self) -> str:
        """Why the worker is not well, in one line; empty if it is."""
        if self._life is None:
            return ""
        heartbeat, in_hand, _ = self._life
        if not heartbeat.alive:
            return "the heartbeat has ended"
        if (still_s := self._now() - heartbeat.moved_at) > STUCK_AFTER_S:
            return f"the heartbeat has not moved for {still_s:.0f} s"
        if (still_s := self._now() - heartbeat.reaped_at) > STUCK_AFTER_S:
            return f"the reaper has not moved for {still_s:.0f} s"
        quietest = in_hand.quietest()
        if quietest is not None and quietest[1] >= HUNG_AFTER_S:
            held, quiet_s = quietest
            return f"chunk {held.chunk} of job {held.job_id} has finished no batch for {quiet_s:.0f} s"
        return ""

    def hindrance(self) -> str:
        """Why the worker is not ready, in one line; empty if it is."""
        if self._life is None:
            return self.phase
        heartbeat, _, draining = self._life
        if draining.is_set():
            return "draining"
        if illness := self.illness():
            return illness
        if (silent_s := self._now() - heartbeat.reached_at) > keys.HEARTBEAT_TTL_S:
            return f"Redis has not answered for {silent_s:.0f} s"
        return "" if self.consuming else "not connected to the queues"


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
