"""A whole run: start everything, break it for some time, wait, check, stop everything, and look for leftovers."""

from __future__ import annotations

import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

from embedctl import Job, enqueue_embeddings
from embedctl.queueing.broker import Broker
from embedctl_config import keys
from tests.chaos.check import keys_without_ttl, left_over, unknown_jobs
from tests.chaos.chunk_files import bytes_left
from tests.chaos.deliveries import miscounted
from tests.chaos.fault import Chaos
from tests.chaos.faults import faults_named
from tests.chaos.jobs import DummyWorkload, Workload
from tests.chaos.monitor import Monitor
from tests.chaos.options import DUMMY, Options
from tests.chaos.producers import Order, Producers
from tests.chaos.pulse import Pulse, unexplained
from tests.chaos.real import RealWorkload
from tests.chaos.report import Outcome, counts
from tests.chaos.stack import GUARDED, OUTAGE, Death, Stack, Worker
from tests.chaos.storm import Storm
from tests.support.store import leases

#: Producers pause while the backlog is about this large (seconds of encoding by one worker).
_MOST_WAITING_S = 30.0
#: Keys whose lifetime is not that of a job expire at most this long after their last use (seconds).
_LONGEST_OTHER_S = keys.UNCOMMITTED_TTL_S + 30.0
#: Connections of processes that have ended are closed within this time (seconds).
_CLIENTS_S = 120.0
#: Processes of `embedctl up` that encode: each may be killed with a record that it has begun.
_GUARDED = 3
#: A worker that takes no work for this long never will: it notices half-open connections sooner (seconds).
_WORKING_S = 60.0


def run(options: Options) -> Outcome:
    """Run a campaign. Its log folder is removed unless the options keep it or the run found a problem."""
    folder = _folder(options)
    workload: Workload = DummyWorkload(options) if options.model == DUMMY else RealWorkload(options)
    stack = Stack(options, folder)
    outcome: Outcome | None = None
    try:
        outcome = _Campaign(options, stack, workload).run()
    finally:
        stack.close()
        survivors = stack.survivors()
        if outcome is not None and survivors:
            outcome.left.append(f"{len(survivors)} processes still run")
        if options.keep is None and outcome is not None and outcome.good:
            shutil.rmtree(folder)
        else:
            print(f"logs and data are in {folder}", flush=True)
    return outcome


def _folder(options: Options) -> Path:
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    # The path must be short: a unix socket's path may have at most 107 bytes.
    return Path(tempfile.mkdtemp(prefix="ec-", dir=options.keep))


class _Campaign:
    def __init__(self, options: Options, stack: Stack, workload: Workload) -> None:
        self._options = options
        self._stack = stack
        waiting_s = _MOST_WAITING_S if options.model == DUMMY else float("inf")
        self._producers = Producers(stack, workload, options.producers, waiting_s)
        self._monitor = Monitor(stack, self._producers, workload)
        self._pulse = Pulse(stack)
        self._chaos = Chaos(stack, self._producers, self._monitor, random.Random(f"{options.seed} dice"))

    def run(self) -> Outcome:
        self._stack.start()
        outcome = Outcome(self._options, facts=[("Redis", self._stack.raw.info("server")["redis_version"])])
        self._monitor.start()
        self._producers.start()
        self._pulse.start()
        faults = faults_named(self._options.only)
        log_file = self._stack.folder / "faults.log"
        storm = Storm(self._chaos, faults, self._options.seed, self._options.pause, log_file)
        try:
            started = time.monotonic()
            until = started + 60 * self._options.minutes
            storm.blow(until, self._options.faults, enough=self._all_done, tell=lambda: self._tell(storm, until))
            storm_s = time.monotonic() - started
            _say(f"{len(storm.events)} faults in {storm_s:.0f} s; now everything has to come to its end")
            settle_s = self._settle(outcome)
            outcome.facts.append(("seconds of faults, then until all jobs ended", f"{storm_s:.0f}, {settle_s:.0f}"))
        finally:
            self._monitor.stop()
            self._pulse.stop()
            self._producers.abandon()
        self._count(outcome, storm)
        self._leave(outcome)
        return outcome

    def _all_done(self) -> bool:
        """Whether nothing is left to break: a real model has only a few jobs."""
        return self._producers.exhausted and not self._monitor.unsettled()

    def _tell(self, storm: Storm, until: float) -> None:
        orders = self._producers.orders
        settled = sum(order.settled for order in orders)
        left_s = max(0.0, until - time.monotonic())
        _say(f"{len(storm.events)} faults, {settled} of {len(orders)} jobs ended and checked, {left_s:.0f} s to go")

    def _settle(self, outcome: Outcome) -> float:
        """Wait until all jobs have ended; returns how long that took (seconds)."""
        started = time.monotonic()
        self._producers.stop_taking()
        hanging = self._monitor.settle(started + self._options.settle)
        settle_s = time.monotonic() - started
        outcome.hung = [self._in_words(order) for order in hanging]
        self._monitor.stop()
        self._monitor.check_again()
        outcome.left += miscounted(self._chaos)
        endless = keys_without_ttl(self._stack.raw)
        outcome.left += [f"{len(endless)} keys have no time to live: {endless[:5]}"] if endless else []
        known = {job_id for order in self._producers.orders for job_id in order.ids}
        unknown = unknown_jobs(self._stack.raw, known)
        outcome.left += [f"{len(unknown)} jobs that nobody ordered: {unknown[:5]}"] if unknown else []
        return settle_s

    def _count(self, outcome: Outcome, storm: Storm) -> None:
        monitor, chaos, orders = self._monitor, self._chaos, self._producers.orders
        outcome.records = sum(order.plan.records for order in orders if not order.cancelled)
        outcome.faults = Counter(event.name for event in storm.events)
        outcome.deaths = Counter(map(_in_words, self._stack.deaths()))
        outcome.hung += monitor.unended
        outcome.verdicts = dict(monitor.verdicts)
        outcome.left += [f"the harness failed at {words}; harness.log says more" for words in monitor.failures]
        outcome.notes = list(chaos.notes)
        chunks, claims = monitor.chunks.total(), monitor.claims.total()
        outcome.facts += [
            ("jobs", counts(Counter(order.plan.kind for order in orders))),
            ("jobs that their error budget ended", len(monitor.stopped)),
            ("records", f"{outcome.records:,}"),
            ("poison among them", counts(Counter(word for order in orders for word in order.plan.poison.values()))),
            ("chunks", f"{chunks:,}"),
            ("executions a chunk: mean, most seen", f"{claims / max(1, chunks):.2f}, {monitor.most_attempts}"),
            (
                "largest difference of a vector's element",
                f"{monitor.difference:.1e}" if monitor.difference else "0, exact",
            ),
            ("records blamed by chance, then retried", counts(monitor.blamed)),
            ("processes of `embedctl up` killed at their moment", chaos.guarded_kills),
            ("times that a tenant of jobs that kill was distrusted", chaos.distrusts),
            ("sick workers that left by themselves, by status", counts(Counter(chaos.sick_ends))),
            ("producer processes", sum(order.runs for order in orders)),
            ("faults, ended worker processes", f"{outcome.faults.total()}, {outcome.deaths.total()}"),
        ]
        broken = sum(death.status == 1 and not death.ours for death in self._stack.deaths())
        outcome.left += [f"{broken} workers ended with status 1, of their own"] if broken else []
        silences = unexplained(self._pulse.silences, storm.events, self._stack.redis_restarts)
        outcome.misjudged = [
            f"worker {each.worker} was alive and silent for {keys.HEARTBEAT_TTL_S + each.seconds:.0f} s"
            for each in silences
        ]
        if monitor.blamed[GUARDED] > _GUARDED * chaos.guarded_kills:
            outcome.misjudged.append(f"{monitor.blamed[GUARDED]} records were blamed, not by chance alone")
        outcome.misjudged += [f"reported as dead while it lived: {words}" for words in sorted(self._pulse.accused)]

    def _leave(self, outcome: Outcome) -> None:
        """Stop as an operator does, and look for what stays behind."""
        stack = self._stack
        try:
            stack.wait_until_ready()
        except AssertionError as error:
            outcome.left.append(str(error))
        outcome.left += [f"worker {worker.number} takes no chunks any more" for worker in self._idle_workers()]
        statuses = stack.stop_workers()
        outcome.left += [f"process {n} ended with status {status}" for n, status in enumerate(statuses) if status]
        if self._options.waits_for_expiry:
            self._wait_for_expiry(outcome)
            if left := bytes_left(stack):
                outcome.left.append(f"{left} folders of chunks' bytes outside of Redis")
        stack.cut_links()  # otherwise a half-open connection stays open at its other end
        outcome.left += [f"a connection to Redis is still open: {words}" for words in self._others_connected()]

    def _idle_workers(self) -> list[Worker]:
        """Workers that report themselves alive but encode nothing, although there is enough work for all."""
        stack, deadline = self._stack, time.monotonic() + _WORKING_S
        begun_ms = time.time_ns() // 1_000_000
        probes: list[Job] = []
        while True:
            rows = stack.rows()
            idle = [
                worker
                for worker in stack.workers
                if max((row.progressed_ms for row in worker.among(rows)), default=0) < begun_ms
            ]
            if not idle or time.monotonic() > deadline:
                for probe in probes:  # a job not encoded when workers stop would be kept for a week
                    probe.discard()
                return idle
            for hardware in {worker.hardware for worker in idle}:
                texts = [f"for everybody {at}" for at in range(100)]
                probe = enqueue_embeddings(
                    texts,
                    model=self._options.model,
                    hardware=hardware,
                    chunk_size=2,
                    ttl=self._options.ttl,
                    settings=stack.settings,
                )
                probes.append(probe)
            time.sleep(2)

    def _discard_abandoned(self) -> int:
        """Discard jobs that a rewind of Redis left half submitted and that nobody resumes. Return their number.
        However short their TTL, Redis would keep them for a week."""
        names = [name.decode() for name in self._stack.raw.zrange(keys.ACTIVE, 0, -1)]
        abandoned = [job for job in self._stack.broker.jobs.find(names) if job.stalled]
        for job in abandoned:
            Job(job.id, self._stack.broker).discard()
        return len(abandoned)

    def _wait_for_expiry(self, outcome: Outcome) -> None:
        if abandoned := self._discard_abandoned():
            _say(f"{abandoned} jobs that Redis forgot half of were discarded")
        wait_s = self._options.ttl * keys.CHUNK_TTL_FACTOR + _LONGEST_OTHER_S
        _say(f"waiting for {wait_s:.0f} s at most until nothing is left in Redis")
        deadline = time.monotonic() + wait_s
        # A key that outlives the rest of the wait is already known to be left over.
        while min((left := left_over(self._stack.raw)).values(), default=wait_s) < deadline - time.monotonic():
            time.sleep(2)
        kinds = Counter(_kind_of_key(name) for name in left)
        outcome.left += [f"{count} keys {kind} outlived their jobs" for kind, count in kinds.items()]

    def _others_connected(self) -> list[str]:
        """Connections to Redis that are not the harness's, a sentinel's or a replica's. Only the harness uses the unix
        socket, once its brokers are closed."""
        self._stack.broker.close()
        Broker.shared(self._stack.settings).close()
        deadline = time.monotonic() + _CLIENTS_S
        while True:
            others = [
                each
                for each in self._stack.raw.client_list()
                if not each["addr"].startswith(str(self._stack.folder))
                and not each["name"].startswith("sentinel-")
                and each["flags"] != "S"
            ]
            if not others or time.monotonic() > deadline:
                return [f"last command {each['cmd']}, {each['age']} s old" for each in others]
            time.sleep(0.1)

    def _in_words(self, order: Order) -> str:
        """Everything that may explain why a job does not end."""
        words = [f"job {order.plan.index} ({order.plan.kind}) did not end"]
        words.append(f"{order.submitting} producers, {order.runs} runs, retrying {order.retrying}")
        words += order.problems[:3]
        try:
            if order.job_id is not None:
                status = self._stack.broker.jobs.status(order.job_id)
                now = self._stack.broker.connection.now_ms()
                raw = self._stack.raw
                given_back = raw.zrange(keys.ready(order.job_id), 0, 9, withscores=True)
                leased, ready = (
                    [(int(chunk), round((at - now) / 1000)) for chunk, at in found]
                    for found in ([*leases(raw, order.job_id).items()][:10], given_back)
                )
                words += [
                    f"{order.job_id} {status.state}, {status.done} + {status.failed} of {status.records} records",
                    f"chunks {status.chunks_done} of {status.chunks}",
                    f"the first that nobody had is {raw.hget(keys.job(order.job_id), 'next')}",
                    f"leases end in s {leased}; ready in s {ready}; of fingerprint {status.model_fingerprint}",
                    f"{raw.llen(status.queue)} bells wait, {self._stack.broker.workers.count(status.queue)} workers",
                ]
        except OUTAGE as error:
            words.append(str(error))
        return "; ".join(words)


def _in_words(death: Death) -> str:
    if death.status < 0:
        name = signal.Signals(-death.status).name
        return f"{name}{'' if death.ours else ', of its own'}"
    return f"status {death.status}{'' if death.ours else ', of its own'}"


def _kind_of_key(name: str) -> str:
    """A key's name without the parts that differ between jobs or workers."""
    parts = name.split(":")
    return ":".join(part for at, part in enumerate(parts) if at != 2 and not part.isdigit())


def _say(words: str) -> None:
    print(words, flush=True)
