"""The threads beside the task threads: one beats and renews leases, one reaps, and one ends a hung process."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable

from embedctl.common.notices import Reminder
from embedctl.queueing.broker import Broker
from embedctl.queueing.reaper import Reaper
from embedctl.store import WorkerRow
from embedctl_config.errors import BrokerRefused, EmbedctlError, ExitStatus
from embedctl_workers.serving.in_hand import InHand
from embedctl_workers.serving.limits import Limits

log = logging.getLogger(__name__)

#: Longest time between two beats (seconds): a third of the heartbeat's TTL.
INTERVAL_S = 5.0
#: Longest time between two rings (seconds).
_RING_EVERY_S = 2.0
#: How long a worker that stops waits for its reaper (seconds): other workers go on where it stopped.
_LAST_ROUND_S = 10.0


class Heartbeat:
    """Beats every `min(5 s, lease / 3)` until stopped: `describe` gives the worker's current row in the registry.

    `ring` rings for the worker's queues, so that a lost bell costs two seconds at most. One that does not reap leaves
    that to other workers.
    """

    def __init__(
        self,
        broker: Broker,
        in_hand: InHand,
        describe: Callable[[], WorkerRow],
        ring: Callable[[], None],
        *,
        reaps: bool = True,
    ) -> None:
        self._broker = broker
        self._in_hand = in_hand
        self._describe = describe
        self._ring = ring
        self._interval_s = min(INTERVAL_S, broker.settings.lease_s / 3)
        self._reaper = Reaper(broker)
        self._limits = Limits(broker)
        self._stop = threading.Event()
        self._reminders: dict[Callable[[], None], Reminder] = defaultdict(lambda: Reminder(log.warning))
        #: By the monotonic clock: when its thread last began a step, when it began the last beat that Redis took, and
        #: when the reaper last began a round.
        self.moved_at = self.reached_at = self.reaped_at = 0.0
        self._threads = [
            threading.Thread(target=self._run, name="heartbeat", daemon=True),
            # Separate threads: no beat waits for the reaper, and the watch does not wait for Redis.
            *[threading.Thread(target=self._reap, name="reaper", daemon=True)] * reaps,
            threading.Thread(target=self._watch, name="watch", daemon=True),
        ]

    def start(self) -> None:
        """Announce the worker, then go on in threads; BrokerUnavailable if Redis can't be reached."""
        self._beat()
        self._ring()
        self.moved_at = self.reaped_at = time.monotonic()
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """Whether its threads run, or have ended because they were told to."""
        return self._stop.is_set() or all(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(_LAST_ROUND_S if thread.name == "reaper" else None)
        try:
            self._broker.workers.leave(self._describe())
        except EmbedctlError as error:
            log.warning("could not say good-bye: %s", error)

    def _run(self) -> None:
        beat_at = time.monotonic() + self._interval_s
        while not self._stop.wait(min(_RING_EVERY_S, self._interval_s)):
            is_due = time.monotonic() >= beat_at
            beat_at += self._interval_s * is_due
            for step in (self._beat, self._renew, self._ring) if is_due else (self._ring,):
                self.moved_at = time.monotonic()
                self._do("heartbeat", step)

    def _reap(self) -> None:
        while True:
            for step in (self._state_limits, self._reaper.round):
                self.reaped_at = time.monotonic()
                self._do("reaper", step)
            if self._stop.wait(self._interval_s):
                return

    def _state_limits(self) -> None:
        self._limits.round(self._describe().name)

    def _do(self, name: str, step: Callable[[], None]) -> None:
        """Do a step. Its thread goes on whatever it raises: without the thread, leases lapse, or nothing reaps."""
        remind = self._reminders[step]
        try:
            step()
            if remind.over():
                log.info("%s: goes on", name)
        except BrokerRefused as error:  # this concerns one key; Redis itself is well
            remind(f"{name}: {error}")
        except EmbedctlError as error:
            remind(f"{name}: {error}")
            self._reaper.rest()
        except Exception:
            log.exception("%s: a step failed", name)

    def _beat(self) -> None:
        began = time.monotonic()
        self._broker.workers.beat(self._describe())
        self.reached_at = began

    def _renew(self) -> None:
        for held in self._in_hand.all():
            try:
                answer = self._broker.jobs.renew(held.job_id, held.chunk, held.token)
            except BrokerRefused as error:  # the leases of other chunks must still be renewed
                log.warning("the chunk's lease can't be renewed: %s", error, extra=held.fields)
                continue
            if answer in ("cancelled", "gone", "done"):
                held.unwanted.set()
            elif answer == "not_owner":
                log.warning("the chunk's lease lapsed; its result may still be first", extra=held.fields)

    def _watch(self) -> None:
        longest_s = self._broker.settings.hang_s
        interval_s = min(1.0, longest_s / 4)
        looked = time.monotonic()
        while not self._stop.wait(interval_s):
            now = time.monotonic()
            if now - looked > 3 * interval_s:  # stopped with SIGSTOP, or a machine that was suspended
                self._in_hand.forgive(now - looked)
            looked = now
            quietest = self._in_hand.quietest()
            if quietest is not None and quietest[1] > longest_s:
                held, quiet_s = quietest
                log.critical(
                    "no progress for %.0f s (hang_s is %g): ending this process", quiet_s, longest_s, extra=held.fields
                )
                logging.shutdown()
                os._exit(ExitStatus.HUNG)
