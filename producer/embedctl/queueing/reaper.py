"""The reaper: ends lapsed leases and finds lost chunks. Every worker runs it, and every producer that waits."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Sequence
from typing import Self

from embedctl.queueing.broker import Broker
from embedctl.store import JobState
from embedctl.store.upkeep import AUDIT_AFTER_S, ActiveJob, Looked
from embedctl_config.errors import BrokerFull, BrokerRefused, BrokerUnavailable, NotPermitted
from embedctl_config.retry import Policy

log = logging.getLogger(__name__)

#: A round begins nothing new after this (seconds); the next one, in any process, resumes where it stopped.
BUDGET_S = 1.0
#: Jobs that are looked at together.
_TOGETHER = 100
#: A job that can't be looked after is damaged most of the time: it is tried again seldom.
_DAMAGED = Policy(60.0, 30 * 60.0)
#: The number of such jobs that are remembered.
_MOST_TROUBLES = 10_000
#: Leases of a dead worker are ended at once in at most this many jobs; in others they lapse.
_MOST_RUNNING = 2000


def _now() -> float:
    """Seconds by a clock that runs while the machine is suspended, if there is one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Reaper:
    """Looks after the active jobs that need it, at most once in an interval among all processes on one Redis: every 5 s
    or a third of the lease, whichever is less. A job without progress for `audit_after_s` is audited."""

    def __init__(
        self,
        broker: Broker,
        *,
        interval_s: float | None = None,
        audit_after_s: float = AUDIT_AFTER_S,
    ) -> None:
        self._broker = broker
        self._agenda = broker.upkeep.agenda
        self._interval_s = min(5.0, broker.settings.lease_s / 3) if interval_s is None else interval_s
        self._audit_after_s = audit_after_s
        self._next = self._rests_until = 0.0
        self._rounds: dict[str, float] = {}
        self._asked: float | None = None
        #: Each job that can't be looked after → when it may be tried again, and how often it failed in a row.
        self._troubles: dict[str, tuple[float, int]] = {}

    @classmethod
    def of_many(cls, broker: Broker) -> Self:
        """One of many in this process: it begins no round if another one began its own less than an interval ago."""
        reaper = cls(broker)
        reaper._rounds = broker.rounds
        return reaper

    def rest(self) -> None:
        """Redis was away or full: before any owner is judged, leave all of them two leases to come back."""
        self._rests_until = _now() + 2 * self._broker.settings.lease_s

    def round(self, deadline: float | None = None) -> None:
        """Do a round if one is due and no other process has done it. It takes about :data:`BUDGET_S` at most, and
        begins nothing new after the deadline (`time.monotonic()`). Raises BrokerUnavailable if Redis can't be reached;
        the next round resumes."""
        now = _now()
        if self._asked is not None and now - self._asked > self._interval_s + self._broker.settings.lease_s:
            # This process stood still or was cut off. Others may have been too, and return later.
            self.rest()
        self._asked = now
        last = math.inf if deadline is None else deadline
        if now < max(self._next, self._rests_until, self._rounds.get("next", 0.0)) or time.monotonic() >= last:
            return
        self._next = self._rounds["next"] = now + self._interval_s
        try:
            self._round(last, now)
        except BrokerRefused:  # of one key; it says nothing of the owners
            raise
        except BrokerUnavailable:
            self.rest()
            raise

    def _round(self, last: float, began: float) -> None:
        until = min(last, time.monotonic() + BUDGET_S)
        self.end_leases_of_the_dead()
        held_s = self._interval_s + BUDGET_S
        try:
            turn = self._agenda.take_turn(held_s)
        except BrokerFull:
            self._make_room()
            raise
        if not turn:
            return
        if _now() - began > self._broker.settings.lease_s:
            self.rest()  # Redis stood still meanwhile, so owners are as late as this process
            return
        now_ms = self._broker.connection.now_ms()
        # However slow Redis is, each round looks after some jobs and does a part of the sweeps.
        seen = set(self._look_after_due(now_ms, min(last, time.monotonic() + BUDGET_S)))
        if time.monotonic() < last:
            self._broker.quotas.round(self._agenda.sweep(now_ms))
            self._broker.upkeep.queues.sweep(now_ms, in_use=self._agenda.drop_names())
        while time.monotonic() < until:
            if not self._agenda.keep_turn(turn, held_s):
                return
            jobs = self._look_after_due(now_ms, until)
            if seen.issuperset(jobs):  # none, or only jobs that can't even be put off
                break
            seen.update(jobs)
        self._agenda.keep_turn(turn, self._next - _now())

    def _make_room(self) -> None:
        """Tidy ended jobs while Redis is full, which lets no process take a turn. Several may do this at once."""
        jobs = self._broker.upkeep.read(self._agenda.due(self._broker.connection.now_ms(), _TOGETHER))
        for job in jobs:
            if isinstance(job, ActiveJob) and job.state.ended:
                self._tidied(job)

    def _look_after_due(self, now_ms: int, until: float) -> list[str]:
        jobs = self._agenda.due(now_ms, _TOGETHER)
        self._look_after(jobs, now_ms, until)
        return jobs

    def end_leases_of_the_dead(self) -> None:
        """Act on the deaths that this machine witnesses. Not only in turn: the process that has it may be elsewhere."""
        dead = self._broker.workers.witness()
        if not dead:
            return
        log.warning("workers that died here: %s; the chunks that they held are suspect", ", ".join(sorted(dead)))
        end_leases(self._broker, dead, self._broker.workers.holding(dead))

    def _look_after(self, job_ids: Sequence[str], now_ms: int, until: float) -> None:
        tried = [job_id for job_id in job_ids if not self._is_put_off(job_id, now_ms)]
        live: list[ActiveJob] = []
        ended: list[ActiveJob] = []
        gone: list[str] = []
        for job_id, job in zip(tried, self._broker.upkeep.read(tried), strict=True):
            if job is None:
                gone.append(job_id)
            elif isinstance(job, Exception):
                self._put_off(job_id, now_ms, job)
            elif job.settled and not (job.stopped or job.state is JobState.CANCELLED):
                self._agenda.leave_out([job_id])  # it ended while the sweep put it back
            elif job.state.ended:
                ended.append(job)
            else:
                live.append(job)
        self._agenda.forget(gone)
        if live:
            self._look_at(live, now_ms, until)
        self._tidy(ended, now_ms, until)

    def _tidy(self, jobs: Sequence[ActiveJob], now_ms: int, until: float) -> None:
        """Free what is left of ended jobs, or shorten its lifetimes. When the time is over, the jobs that are
        left are put off, behind live jobs."""
        left = [job.id for job in jobs]
        for job in jobs:
            try:
                while more := time.monotonic() < until and self._tidied(job):
                    pass
            except (BrokerRefused, NotPermitted) as error:
                self._put_off(job.id, now_ms, error)
                left.remove(job.id)
                continue
            if more or time.monotonic() >= until:
                break
            left.remove(job.id)
        self._agenda.look_at(left, self._soonest(now_ms))

    def _tidied(self, job: ActiveJob) -> bool:
        """Tidy a slice of a job; returns whether there is more to do. A job that is done is looked after no longer."""
        upkeep = self._broker.upkeep
        cancelled = job.state is JobState.CANCELLED
        if not cancelled and (not job.settled or job.resumable):
            return upkeep.settle_slice(job.id)  # a script, because what is freed may be added again
        # If its error budget ended the job, the results stay to show what went wrong, and the waiting text is freed.
        return not upkeep.free_slice(job.id, job.chunks, results=cancelled)

    def _look_at(self, jobs: Sequence[ActiveJob], now_ms: int, until: float) -> None:
        for job in [job for job in jobs if job.abandoned]:
            try:
                if self._broker.jobs.close_retry(job.id):
                    died = "the process that retried or resumed it died; the records that it queued go on"
                    log.warning("job %s: %s", job.id, died)
            except (BrokerRefused, NotPermitted) as error:
                self._put_off(job.id, now_ms, error)
                jobs = [each for each in jobs if each is not job]
        rested_ms = self._audit_after_s * 1000
        found = self._broker.upkeep.look(
            jobs,
            # Also while it is submitted: its producer may wait for room that a lost chunk takes up.
            audited=[now_ms - job.progressed_ms > rested_ms for job in jobs],
            interval_ms=int(self._interval_s * 1000),
            audit_after_ms=int(rested_ms),
        )
        for job, each in zip(jobs, found, strict=True):
            if isinstance(each, BrokerRefused):
                self._put_off(job.id, now_ms, each)
            elif each.refused is not None:
                self._put_off(job.id, now_ms, each.refused)
            else:
                self._go_on(job, each, now_ms, until)

    def _go_on(self, job: ActiveJob, found: Looked, now_ms: int, until: float) -> None:
        """Resume the sweeps that go through a job in slices: its audit and its lifetimes."""
        self._troubles.pop(job.id, None)
        if found.again:
            log.info("job %s: the leases of chunks %s lapsed", job.id, found.again)
        if found.lost:
            log.error("job %s: Redis lost %d of its chunks", job.id, found.lost)
        try:
            if found.audit_at != job.audit_at:
                self._broker.upkeep.audited_to(job.id, found.audit_at)
            # If there is no time now, the next look resumes.
            more = time.monotonic() >= until or self._broker.upkeep.extend(job, now_ms, self._interval_s)
            if found.audit_at or more:
                self._agenda.look_at([job.id], self._soonest(now_ms), sooner=True)
        except BrokerRefused as error:
            self._put_off(job.id, now_ms, error)

    def _soonest(self, now_ms: int) -> int:
        return now_ms + int(self._interval_s * 1000)

    def _put_off(self, job_id: str, now_ms: int, error: Exception) -> None:
        """Try a job later that can't be read, or that Redis refuses to touch: it must not keep the others waiting."""
        _, failures = self._troubles.pop(job_id, (0.0, 0))
        wait_s = _DAMAGED.pause_s(failures + 1)
        log.error("job %s can't be looked after, trying again in %.0f s: %s", job_id, wait_s, error)
        self._troubles[job_id] = _now() + wait_s, failures + 1
        if len(self._troubles) > _MOST_TROUBLES:
            del self._troubles[next(iter(self._troubles))]
        self._agenda.look_at([job_id], now_ms + int(wait_s * 1000))

    def _is_put_off(self, job_id: str, now_ms: int) -> bool:
        """Whether it is too early to try a job again; the sweep, or a script, may have brought it forward."""
        left_s = self._troubles.get(job_id, (0.0, 0))[0] - _now()
        if left_s > 0:
            self._agenda.look_at([job_id], now_ms + int(left_s * 1000))
        return left_s > 0


def end_leases(broker: Broker, dead: Collection[str], held: Collection[str]) -> None:
    """End the leases of dead workers now, before they lapse: in the jobs whose chunks they said they `held`, and in
    those that run, because they may have claimed chunks of other jobs since."""
    running = broker.upkeep.agenda.running(broker.connection.now_ms(), _MOST_RUNNING)
    broker.upkeep.judge_dead(broker.jobs.end_leases(list(dict.fromkeys([*held, *running])), dead))
