"""The threads beside the task threads: one beats and renews leases, one reaps, one ends a hung process, and one removes
what nobody needs of the chunks outside of Redis."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable

from embedctl.common.notices import Reminder
from embedctl.queueing.broker import Broker
from embedctl.queueing.reaper import Reaper
from embedctl.queueing.sweeper import Sweeper
from embedctl.store import WorkerRow
from embedctl.store.lease import take_turn
from embedctl.store.quotas import Overruled
from embedctl_config import keys
from embedctl_config.errors import BrokerRefused, EmbedctlError, ExitStatus
from embedctl_config.tenants import LIMITS, RATES
from embedctl_workers.serving.in_hand import InHand

_STATED = ("weight", *LIMITS, *RATES)
#: Seconds between two statements.
STATE_EVERY_S = 30.0
log = logging.getLogger(__name__)

#: Longest time between two beats (seconds): a third of the heartbeat's TTL.
INTERVAL_S = 5.0
#: Longest time between two rings (seconds).
_RING_EVERY_S = 2.0
#: How long a worker that stops waits for its reaper (seconds): other workers go on where it stopped.
_LAST_ROUND_S = 10.0
#: Seconds between two sweeps.
_SWEEP_EVERY_S = 60.0


class Limits:
    """States the limits again and again: Redis may lose them, and producers may have other settings.

    Each worker does so at its start. Then those that have the same limits take turns.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._digest = hashlib.sha256(repr(sorted(broker.settings.tenants.items())).encode()).hexdigest()
        self._since_ms = 0
        self._next = 0.0
        self._overruled: dict[str, Overruled] = {}

    def round(self, worker: str) -> None:
        """State the limits if it is time, in the name of this worker; BrokerUnavailable if Redis can't be reached."""
        limits = self._broker.settings.tenants
        if not limits or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + STATE_EVERY_S
        turn = take_turn(self._broker.connection, keys.stating(self._digest), STATE_EVERY_S * 0.9)
        if not turn and self._since_ms:
            return  # another worker with the same limits states them
        self._since_ms = self._since_ms or self._broker.connection.now_ms()
        for tenant, entry in limits.items():
            other = self._broker.quotas.state(tenant, entry, by=worker, since_ms=self._since_ms)
            if other is not None and other != self._overruled.get(tenant):
                log.warning(
                    "tenant %s: the weight and the limits of this worker's settings do not hold, because worker %s, "
                    "which was started later, has others: %s. Give all workers the same settings",
                    tenant,
                    other.by,
                    ", ".join(f"{name} {value:g}" for name, value in zip(_STATED, other.values, strict=True)),
                )
                self._overruled[tenant] = other


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


def start_sweeping(broker: Broker, stop: threading.Event) -> None:
    """Sweep in a thread until the event is set, if these settings keep chunks outside of Redis.

    A thread of its own: a place that does not answer holds up nothing else.
    """
    if not broker.chunk_files.is_outside:
        return
    sweeper = Sweeper(broker)

    def sweep() -> None:
        while not stop.wait(_SWEEP_EVERY_S):
            try:
                sweeper.round()
            except EmbedctlError as error:
                log.warning("sweeper: %s", error)
            except Exception:
                log.exception("sweeper: a round failed")

    threading.Thread(target=sweep, name="sweeper", daemon=True).start()
