"""Producers: processes that submit a job, die, and are run again with the same idempotency key until the job is
complete."""

from __future__ import annotations

import json
import random
import re
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.jobs import Plan, Workload
from tests.chaos.stack import FAR, Stack

_JOB_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{10}")
#: Words in the message of a producer whose job ended meanwhile, by its error budget or because somebody cancelled it.
_STOPPED, _CANCELLED = "error budget", "cancelled"
#: Words in a retry's message about a job that has not ended.
_UNFINISHED = "has not ended"
#: Exit statuses after which a user runs the same command again: killed, and Redis can't be reached (or is full).
_TRY_AGAIN = {-9, 69}
#: Also to be tried again if Redis came back without its last writes: the job or some of its chunks are gone.
_LOST = 4
#: A retry is tried again for this long (seconds). One that died keeps the right to add to the job for half a minute;
#: until then the next one is refused.
_RETRYING_S = 120.0
#: A producer that ends in an unexpected way is run again this often, to see whether the problem lasts.
_MOST_PROBLEMS = 5


@dataclass(eq=False)
class Order:
    """A job on its way: its plan, the processes that submit it, and its outcome.

    Attributes:
        submitting: number of producers that have not ended well yet.
        ids: ids of the jobs that its key made, as Redis and producers name them; the newest is last.
        checked: the ids whose jobs have ended and been checked.
        problems: unexpected ends of producers.
        cancelling: the job is being cancelled, and no producer is run again.
        retrying: failed records are to be retried.
        rewound: Redis came back without its last writes while the job was under way or had just ended.
        lingered_s: how long a producer ran on although its job was over.
        settled_at: the time of the final check, after which nothing more is to come; None before.
    """

    plan: Plan
    corpus: Path
    submitting: int = 0
    runs: int = 0
    kills: int = 0
    running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    ids: list[str] = field(default_factory=list)
    checked: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    cancelling: bool = False
    cancelled: bool = False
    retrying: bool = False
    rewound: bool = False
    lingered_s: float = 0.0
    ended: bool = False
    settled_at: float | None = None

    @property
    def job_id(self) -> str | None:
        """The id of the job to look at next; usually there is only one."""
        return next((job_id for job_id in self.ids if job_id not in self.checked), self.ids[-1] if self.ids else None)

    @property
    def settled(self) -> bool:
        return self.settled_at is not None

    def settle(self) -> None:
        self.ended, self.settled_at = True, time.monotonic()

    def reopen(self) -> None:
        """Mark the job as open again: somebody is about to change it."""
        self.ended, self.settled_at = False, None
        self.checked.clear()

    def made(self, job_id: str) -> None:
        if job_id not in self.ids:
            self.ids.append(job_id)


class Producers:
    """Submits the jobs of a workload, a few at a time, while the backlog is small enough."""

    def __init__(self, stack: Stack, workload: Workload, count: int, most_waiting_s: float) -> None:
        self.orders: list[Order] = []
        self._stack = stack
        self._log_file = stack.folder / "producers.log"
        self._workload = workload
        self._most_waiting_s = most_waiting_s
        self._next = 0
        self._lock = threading.Lock()
        self._full = threading.Event()
        self._abandoned = threading.Event()
        self._threads = [threading.Thread(target=self._serve, name=f"producer-{n}", daemon=True) for n in range(count)]

    def start(self) -> None:
        for thread in list(self._threads):
            thread.start()

    @property
    def exhausted(self) -> bool:
        """Whether the workload has no more jobs and all are submitted."""
        return not any(thread.is_alive() for thread in self._threads)

    def stop_taking(self) -> None:
        """Begin no more jobs. Submissions that have begun go on to their end."""
        self._full.set()

    def abandon(self) -> None:
        """Give up all unfinished submissions."""
        self._full.set()
        self._abandoned.set()
        for thread in list(self._threads):
            while thread.is_alive():
                for process in [process for order in self.orders for process in list(order.running)]:
                    process.kill()
                thread.join(0.2)

    def twins(self) -> Order | None:
        """Submit the next job from two producers at once."""
        order = self._take(copies=2)
        if order is not None:
            self._in_threads(order, 2)
        return order

    def special(self, kind: str) -> Order | None:
        """Submit a job of a kind that a fault needs; None where the workload has no such kind."""
        with self._lock:
            plan = self._workload.special(kind, self._next)
            self._next += plan is not None
        if plan is None:
            return None
        order = self._order(plan, copies=1)
        self._in_threads(order, 1)
        return order

    def submit_again(self, order: Order) -> None:
        """Run the order's producer once more, with the same records and the same key."""
        order.reopen()
        self.hold(order)
        self._in_threads(order, 1)

    def retry(self, order: Order) -> subprocess.Popen[bytes]:
        """Run `embedctl retry` for a job over the far link. The caller must then call :meth:`retry_again` or
        :meth:`release`."""
        order.reopen()
        self.hold(order)
        return self._retry(order)

    def retry_again(self, order: Order) -> None:
        """Run a killed retry again until it ends well."""
        self.in_thread(lambda: self._retry_to_the_end(order))

    def hold(self, order: Order) -> None:
        """Note that a submission or another change of an order is under way: nobody may judge its job yet."""
        with self._lock:
            order.submitting += 1

    def release(self, order: Order) -> None:
        """The opposite of :meth:`hold`."""
        with self._lock:
            order.submitting -= 1

    def in_thread(self, work: Callable[[], None]) -> threading.Thread:
        """Do work in a thread. The end of the run waits for it."""
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self._threads.append(thread)
        return thread

    @property
    def abandoned(self) -> bool:
        """Whether all unfinished submissions are given up."""
        return self._abandoned.is_set()

    def waiting_s(self) -> float:
        """About how long one worker would take for all jobs that have not ended (seconds)."""
        return sum(order.plan.cost_s for order in self.orders if not order.ended)

    def _serve(self) -> None:
        while not self._full.is_set():
            if self.waiting_s() > self._most_waiting_s:
                self._full.wait(0.2)
                continue
            order = self._take(copies=1)
            if order is None:
                return
            [thread] = self._in_threads(order, 1)
            # A producer that was killed has to wait for its own lease. The next job begins meanwhile.
            while thread.is_alive() and not order.kills:
                thread.join(0.1)

    def _in_threads(self, order: Order, copies: int) -> list[threading.Thread]:
        return [self.in_thread(lambda: self._submit(order)) for _ in range(copies)]

    def _take(self, copies: int) -> Order | None:
        with self._lock:
            plan = self._workload.plan(self._next)
            self._next += plan is not None
        return None if plan is None else self._order(plan, copies)

    def _order(self, plan: Plan, copies: int) -> Order:
        corpus = self._stack.folder / f"job-{plan.index}.jsonl"
        lines = (json.dumps(item) for item in self._workload.items(plan))
        corpus.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        order = Order(plan, corpus, submitting=copies)
        self.orders.append(order)
        return order

    def _submit(self, order: Order) -> None:
        """Run the producer's command until it ends well."""
        rng = random.Random(order.plan.key)
        command = (_as_command if order.plan.by == "command" else _as_program)(order)
        while not self._abandoned.is_set() and not (order.cancelling and order.runs):
            order.runs += 1
            variables = {} if order.plan.high_water is None else {"LIMIT_HIGH_WATER_BYTES": str(order.plan.high_water)}
            process = self._stack.spawn(
                command,
                log_file=self._log_file,
                link=order.plan.link,
                variables=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            status, printed, said = self._end_of(order, process)
            for job_id in own_ids(printed, said):
                order.made(job_id)
            if is_good_end(order, status, printed, said):
                break
            if status not in _TRY_AGAIN and not (status == _LOST and order.rewound):
                order.problems.append(f"a producer of job {order.plan.index} ended with status {status}")
                if len(order.problems) >= _MOST_PROBLEMS:
                    break
            time.sleep(rng.uniform(0.3, 1.5))
        self.release(order)

    def _end_of(self, order: Order, process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
        """Wait for a process. Return its exit status, standard output and standard error."""
        order.running.add(process)
        printed, said = process.communicate()
        order.running.discard(process)
        with self._log_file.open("ab") as log:
            log.write(said or b"")
        return process.returncode, (printed or b"").decode(), (said or b"").decode()

    def _retry(self, order: Order) -> subprocess.Popen[bytes]:
        order.runs += 1
        command = ["embedctl", "retry", str(order.job_id)]
        return self._stack.spawn(command, log_file=self._log_file, link=FAR, stderr=subprocess.PIPE)

    def _retry_to_the_end(self, order: Order) -> None:
        deadline = time.monotonic() + _RETRYING_S
        while not self._abandoned.is_set():
            status, _, said = self._end_of(order, self._retry(order))
            # "Has not ended" means that another retry was complete and its records are under way.
            if status == 0 or (status == 1 and _UNFINISHED in said):
                break
            if status == _LOST and order.rewound:
                break
            if time.monotonic() > deadline:
                order.problems.append(f"a retry of job {order.plan.index} ended with status {status} again and again")
                break
            time.sleep(1.0)
        self.release(order)


def own_ids(printed: str, said: str) -> list[str]:
    """The job ids that a producer reports as its own. On standard error, its reaper also reports other jobs."""
    lines = said.splitlines()
    own = [line for line in lines if ": its submission " in line or not line.startswith("job ")]
    return _JOB_ID.findall("\n".join([printed, *own]))


def is_good_end(order: Order, status: int, printed: str, said: str) -> bool:
    """Whether a producer ended as expected, so that it need not be run again."""
    # If the job has already ended, the command's exit status reflects its outcome: README.md, "Exit statuses".
    if status == 0 or (printed and status in (1, 3) and order.plan.by == "command"):
        return True
    if order.cancelling:
        return status == 1 and _CANCELLED in said
    return status == 1 and order.plan.max_errors is not None and _STOPPED in said


def _as_program(order: Order) -> list[str]:
    plan = order.plan
    options = {
        "model": plan.model,
        "hardware": plan.hardware,
        "long": plan.long,
        "normalize": plan.normalize,
        "prompt": plan.prompt,
        "chunk_size": plan.chunk_size,
        "ttl": plan.ttl_s,
        "idempotency_key": plan.key,
        "max_errors": plan.max_errors,
        "tenant": plan.tenant,
        "lane": plan.lane,
    }
    if plan.keep:
        options["keep"] = plan.keep
    if plan.counts:
        options["count_tokens"] = True
    if plan.ids == "argument":
        options["ids"] = True
    file = order.corpus.with_suffix(".json")
    told = {"corpus": str(order.corpus), "seconds_per_record": plan.seconds_per_record, "options": options}
    file.write_text(json.dumps(told), encoding="utf-8")
    return ["tests.chaos.producer", str(file)]


def _as_command(order: Order) -> list[str]:
    plan = order.plan
    command = ["embedctl", "submit", str(order.corpus), "--quiet", "--resume", plan.key]
    command += ["--model", plan.model, "--class", plan.hardware, "--ttl", str(plan.ttl_s)]
    command += ["--long", plan.long, "--tenant", plan.tenant, "--lane", plan.lane]
    command += [] if plan.normalize else ["--no-normalize"]
    command += [] if plan.prompt is None else ["--prompt", plan.prompt]
    command += [] if plan.chunk_size is None else ["--chunk-size", str(plan.chunk_size)]
    command += ["--keep", ",".join(plan.keep)] if plan.keep else []
    command += [] if plan.max_errors is None else ["--max-errors", str(plan.max_errors)]
    return command
