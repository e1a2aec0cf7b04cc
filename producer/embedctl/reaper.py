"""The reaper: brings back what was lost on the way. Any worker runs it, and so does a producer that waits."""

from __future__ import annotations

import logging
import time

from embedctl.broker import Broker
from embedctl.store import JobState, JobStatus
from embedctl.store.upkeep import AUDIT_AFTER_S
from embedctl_config import keys, wire
from embedctl_config.errors import BrokerUnavailable, JobNotFound

log = logging.getLogger(__name__)


def _now() -> float:
    """Seconds by a clock that goes on while the machine is suspended, where there is one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Reaper:
    """Looks after every active job, at most once in an interval among all processes on one Redis.

    Args:
        interval_s: seconds between two rounds; 5, or a third of the lease if that is less, where None.
        audit_after_s: a sealed job without progress for this long is audited.
    """

    def __init__(
        self, broker: Broker, *, interval_s: float | None = None, audit_after_s: float = AUDIT_AFTER_S
    ) -> None:
        self._broker = broker
        self._interval_s = min(5.0, broker.settings.lease_s / 3) if interval_s is None else interval_s
        self._audit_after_s = audit_after_s
        self._next = self._rests_until = 0.0
        self._asked: float | None = None

    def rest(self) -> None:
        """Redis was away, or full: leave every owner the time of two leases to come back before any is judged."""
        self._rests_until = _now() + 2 * self._broker.settings.lease_s

    def round(self) -> None:
        """Do a round if one is due and no other process has done it.

        Raises:
            BrokerUnavailable: Redis can't be reached; the next round goes on.
        """
        now = _now()
        if self._asked is not None and now - self._asked > self._interval_s + self._broker.settings.lease_s:
            # It was this process that stood still, or was cut off: others may have been too, and be slower to return.
            self.rest()
        self._asked = now
        if now < max(self._next, self._rests_until):
            return
        self._next = now + self._interval_s
        try:
            self._round()
        except BrokerUnavailable:
            self.rest()
            raise

    def _round(self) -> None:
        self.end_leases_of_the_dead()
        if not self._broker.upkeep.take_turn(self._interval_s):
            return
        now_ms = self._broker.connection.now_ms()
        for job_id in list(self._broker.upkeep.active_jobs()):
            try:
                self._look_after(self._broker.jobs.status(job_id), now_ms)
            except BrokerUnavailable:
                raise
            except JobNotFound:
                self._broker.upkeep.forget(job_id)
            except Exception:
                # One job that can't be read, such as a newer version's, must not cost all others their reaper.
                log.exception("job %s: can't be looked after", job_id)

    def end_leases_of_the_dead(self) -> None:
        """Act on the deaths that this machine witnesses. For everybody: whoever has the turn may be elsewhere."""
        dead = self._broker.workers.witness()
        if not dead:
            return
        log.warning("workers that died here: %s; the chunks that they held are suspect", ", ".join(sorted(dead)))
        for job_id in list(self._broker.upkeep.active_jobs()):
            self._broker.jobs.end_leases(job_id, dead)

    def _look_after(self, job: JobStatus, now_ms: int) -> None:
        if job.version > wire.VERSION:
            return  # its own version looks after it
        upkeep = self._broker.upkeep
        if job.state is JobState.CANCELLED:
            if upkeep.free_slice(job.id, job.chunks):
                upkeep.expire(job.id, int(job.ttl_s * 1000))
                upkeep.forget(job.id)
            return
        if job.state.ended and job.ttl_s < keys.UNENDED_TTL_S:
            upkeep.settle_slice(job.id)
            return
        if job.stopped_by is not None:
            # Its results stay, to say what went wrong; the text that nobody will encode does not.
            if upkeep.free_slice(job.id, job.chunks, results=False):
                upkeep.forget(job.id)
            return
        if job.original_chunks is not None and job.stalled:
            self._close_retry(job.id)
        again = upkeep.reap(job.id, job.queue)
        if again:
            log.info("job %s: tickets sent again for chunks %s", job.id, again)
            self._broker.tickets.send(job.queue, job.id, again, version=job.version)
        # A window that grew with new workers, or whose last sender died.
        self._broker.send_issued(job)
        if job.sealed and now_ms - job.progressed_at.timestamp() * 1000 > self._audit_after_s * 1000:
            lost = upkeep.audit(job.id)
            if lost:
                log.error("job %s: Redis lost %d of its chunks", job.id, lost)
        upkeep.extend(job.id, job.chunks, int(job.lifetime_s * 1000), now_ms, self._interval_s)

    def _close_retry(self, job_id: str) -> None:
        if self._broker.jobs.close_retry(job_id):
            log.warning("job %s: the process that retried its failed records died; it goes on with those done", job_id)
