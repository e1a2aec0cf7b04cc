"""Follows every job from its first trace in Redis to its end and checks it. Retries records that were blamed by
chance."""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field

from embedctl import Job, JobError, JobNotFound, JobState, JobUnfinished
from embedctl_config import keys
from tests.chaos.check import Verdict, check_job, check_stopped, freed
from tests.chaos.jobs import Workload
from tests.chaos.producers import Order, Producers
from tests.chaos.stack import OUTAGE, Stack, Watch

#: Once no more workers are killed, no record is blamed by chance. A record blamed more often than this is a real fault.
_MOST_RETRIES_IN_CALM = 2
#: A producer whose job is over must end within this time, not counting Redis outages (seconds).
PRODUCER_ENDS_S = 60.0
_LAST_JOBS = 100
#: A check takes at most this long (seconds).
_CHECK_S = 20.0


@dataclass
class Monitor(Watch):
    """Checks jobs in a thread while faults go on, and again at the end.

    Attributes:
        verdicts: verdicts on jobs with a problem, by job.
        blamed: number of records that were blamed by chance and retried, by hardware class.
        most_attempts: the most claims seen on any chunk.
        difference: the largest difference between any vector's element and its expected value.
        calm: set when faults are over.
        unended: producers and waiters that did not end in time, in words.
        stopped: jobs that their error budget ended.
    """

    stack: Stack
    producers: Producers
    workload: Workload
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    blamed: Counter[str] = field(default_factory=Counter)
    most_attempts: int = 0
    difference: float = 0.0
    claims: Counter[str] = field(default_factory=Counter)
    chunks: Counter[str] = field(default_factory=Counter)
    calm: threading.Event = field(default_factory=threading.Event)
    failures: list[str] = field(default_factory=list)
    unended: list[str] = field(default_factory=list)
    stopped: set[str] = field(default_factory=set)
    _retries_in_calm: Counter[int] = field(default_factory=Counter)

    def unsettled(self) -> list[Order]:
        """Orders that are not settled yet."""
        return [order for order in self.producers.orders if not order.settled]

    def settle(self, deadline: float) -> list[Order]:
        """Wait until every job has ended and is checked. Return the orders still open at the deadline."""
        self.calm.set()
        while (hanging := self.unsettled()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return hanging

    def check_again(self) -> None:
        """Check every job that Redis still keeps once more: nothing may have changed after a job's end."""
        for order in self.producers.orders:
            if not order.settled or order.cancelled or order.plan.index in self.verdicts:
                continue
            for job_id in order.ids:
                # Otherwise its TTL is over, or nearly: the check at the job's end has to do.
                if self.stack.raw.pttl(keys.job(job_id)) > 1000 * _CHECK_S:
                    self._check(order, job_id, retry=False)

    def look(self) -> None:
        for order in self.unsettled():
            try:
                self._look(order)
            except OUTAGE:
                raise
            except Exception as error:  # noqa: BLE001  (a harness that dies unseen would call the run good)
                self.failures.append(f"job {order.plan.index}: {type(error).__name__}")
                with (self.stack.folder / "harness.log").open("a", encoding="utf-8") as log:
                    log.write(f"job {order.plan.index}:\n{traceback.format_exc()}")
                order.settle()

    def _look(self, order: Order) -> None:
        raw = self.stack.raw
        found = raw.get(keys.idempotency(order.plan.key, order.plan.tenant))
        if found is not None:
            order.made(found.decode())
        elif order.job_id is None and order.plan.frees_key:
            self._look_for(order)
        job_id = order.job_id
        if job_id is None:
            # A cancelled job may be among what Redis forgot.
            if order.cancelled and not order.submitting:
                order.settle()
            elif not order.submitting:
                self._give_up(order, "it was never submitted")
            return
        pipe = raw.pipeline(transaction=False)
        state, attempts = pipe.hget(keys.job(job_id), "state").hgetall(keys.attempts(job_id)).execute()
        # The hash holds each chunk's number of claims, and other facts of the chunk under names with a colon.
        counts = [int(value) for name, value in attempts.items() if b":" not in name]
        self.most_attempts = max([self.most_attempts, *counts])
        order.ended = state is not None and JobState(state.decode()).ended
        stopped = order.ended and (state == b"cancelled" or bool(raw.hexists(keys.job(job_id), "stopped_by")))
        self._watch_producer(order, stopped=stopped)
        if order.submitting or (order.cancelling and not order.cancelled):
            return
        if state is None:
            self._miss(order, job_id)
        elif order.cancelled:
            if state == b"cancelled" and freed(raw, job_id):
                self._done(order, job_id)
        elif order.retrying:
            self._retry(order, Job(job_id, self.stack.broker))
        elif order.ended and (not stopped or freed(raw, job_id, results=False)):
            self._check(order, job_id, retry=True)

    def _look_for(self, order: Order) -> None:
        """Find the job of an order whose key is already free again. The newest jobs are searched: their facts still
        name the key."""
        names = self.stack.raw.zrevrange(keys.JOBS, 0, _LAST_JOBS - 1)
        pipe = self.stack.raw.pipeline(transaction=False)
        for name in names:
            pipe.hget(keys.job(name.decode()), "idempotency_key")
        for name, key in zip(names, pipe.execute(), strict=True):
            if key == keys.idempotency(order.plan.key, order.plan.tenant).encode():
                order.made(name.decode())

    def _watch_producer(self, order: Order, *, stopped: bool) -> None:
        """A producer must neither go on nor wait for room long after its job was cancelled or stopped."""
        if not (stopped and order.running and self.stack.redis_up and not self.stack.redis_full):
            return
        order.lingered_s += self.poll_s
        if order.lingered_s < PRODUCER_ENDS_S:
            return
        self.unended.append(
            f"a producer of job {order.plan.index} ({order.plan.kind}) runs {PRODUCER_ENDS_S:g} s after the job's end"
        )
        order.lingered_s = 0.0
        for process in list(order.running):
            process.kill()

    def _miss(self, order: Order, job_id: str) -> None:
        """Judge a job that Redis no longer knows."""
        if order.cancelled and order.rewound:
            self._done(order, job_id)
        elif order.rewound and job_id != order.ids[-1]:
            self._done(order, job_id)  # it was lost, and its producer made a new one
        else:
            self._give_up(order, f"job {job_id} is gone before its end was seen")

    def _done(self, order: Order, job_id: str) -> None:
        order.checked.add(job_id)
        if order.checked.issuperset(order.ids):
            order.settle()

    def _check(self, order: Order, job_id: str, *, retry: bool) -> None:
        job = Job(job_id, self.stack.broker)
        try:
            status = job.status()
            check = check_stopped if status.stopped_by is not None else check_job
            verdict = check(job, self.stack.broker, self.stack.raw, order.plan, self.workload.expected(order.plan))
        except JobNotFound as error:
            self._give_up(order, str(error))
            return
        self._check_submission(order, verdict)
        self.difference = max(self.difference, verdict.difference)
        if check is check_stopped:
            self.stopped.add(job_id)
        elif verdict.fine and verdict.blamed and retry and self._may_retry(order):
            self.blamed[order.plan.hardware] += len(verdict.blamed)
            order.retrying = True
            self._retry(order, job)
            return
        elif verdict.blamed:
            verdict.wrong_errors += len(verdict.blamed)
            verdict.say(f"records {verdict.blamed[:5]} are blamed again and again")
        if not verdict.fine:
            self.verdicts[order.plan.index] = verdict
        self.claims[job_id], self.chunks[job_id] = status.claims, status.chunks
        self._done(order, job_id)

    def _may_retry(self, order: Order) -> bool:
        if self.calm.is_set():
            self._retries_in_calm[order.plan.index] += 1
        return self._retries_in_calm[order.plan.index] <= _MOST_RETRIES_IN_CALM

    def _retry(self, order: Order, job: Job) -> None:
        """Retry as a user would, and again if Redis went away half-way. Records that are meant to fail, fail again."""
        try:
            job.retry_failed()
        except JobUnfinished:
            pass  # the last attempt succeeded, but its answer was lost
        except JobError:
            return  # the last attempt was cut off and still has its lease
        order.retrying = False

    def _check_submission(self, order: Order, verdict: Verdict) -> None:
        """Every producer with the same key must have been given the same job."""
        ids = order.ids
        if order.rewound:  # jobs that Redis forgot do not count
            ids = [job_id for job_id in ids if self.stack.raw.exists(keys.job(job_id))]
        if len(ids) > 1 and not order.plan.frees_key:
            verdict.doubled += order.plan.records
            verdict.say(f"one idempotency key made {len(ids)} jobs: {sorted(ids)}")
        for problem in order.problems:
            verdict.other += 1
            verdict.say(problem)

    def _give_up(self, order: Order, words: str) -> None:
        verdict = Verdict(lost=max(1, order.plan.records), words=[words])
        for problem in order.problems:
            verdict.say(problem)
        self.verdicts[order.plan.index] = verdict
        order.settle()
