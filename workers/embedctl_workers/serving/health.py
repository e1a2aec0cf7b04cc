"""Whether this worker is well, and whether it is ready: health checks ask this, and no answer waits for Redis."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from embedctl.store.heartbeats import HUNG_AFTER_S
from embedctl_config import keys
from embedctl_workers.serving.heartbeat import Heartbeat
from embedctl_workers.serving.in_hand import InHand

#: A heartbeat that has not moved for this long (seconds) does more than wait for Redis. If Redis is silent, the retries
#: and timeouts of one step take more than a minute, and ending the worker for that would help nothing.
STUCK_AFTER_S = 300.0


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
