"""Producers: processes that submit, die and are run again with the same idempotency key until the job is there."""

from __future__ import annotations

import json
import random
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.jobs import Plan, Workload
from tests.chaos.stack import Stack

#: Exit statuses after which a user runs the same command again: killed, and Redis can't be reached (or is full).
_TRY_AGAIN = {-9, 69}
#: An end that should not be is tried again this often, to see whether it lasts.
_MOST_PROBLEMS = 5


@dataclass(eq=False)
class Order:
    """A job on its way: its plan, the processes that submit it, and what became of it.

    Attributes:
        submitting: producers that have not ended well yet.
        printed: the ids that producers printed.
        known_id: the id that Redis gives for the key.
        problems: ends of producers that should not be.
        cancelling: it is being cancelled, and no producer is run again.
        retrying: failed records are to be tried again.
        settled: checked, with nothing more to come.
    """

    plan: Plan
    corpus: Path
    submitting: int = 0
    runs: int = 0
    kills: int = 0
    running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    printed: set[str] = field(default_factory=set)
    known_id: str | None = None
    problems: list[str] = field(default_factory=list)
    cancelling: bool = False
    cancelled: bool = False
    retrying: bool = False
    ended: bool = False
    settled: bool = False

    @property
    def job_id(self) -> str | None:
        return next(iter(self.printed), self.known_id)


class Producers:
    """Submits the jobs of a workload, some at a time, as long as not too much waits."""

    def __init__(self, stack: Stack, workload: Workload, count: int, most_waiting_s: float) -> None:
        self.orders: list[Order] = []
        self._stack = stack
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
        """Begin no more jobs; those begun are submitted to their end."""
        self._full.set()

    def abandon(self) -> None:
        """Give up what is not submitted yet."""
        self._full.set()
        self._abandoned.set()
        for thread in list(self._threads):
            while thread.is_alive():
                for process in [process for order in self.orders for process in list(order.running)]:
                    process.kill()
                thread.join(0.2)

    def twins(self) -> Order | None:
        """Submit the next job by two producers at once."""
        order = self._take(copies=2)
        if order is not None:
            self._in_threads(order, 2)
        return order

    def cancellable(self) -> Order:
        """Submit a job that takes long."""
        with self._lock:
            index = self._next
            self._next += 1
        order = self._order(self._workload.cancellable(index), copies=1)
        self._in_threads(order, 1)
        return order

    def waiting_s(self) -> float:
        """About how long one worker would take for what has not ended."""
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
            # One that was killed has to wait for its own lease; the next job is begun meanwhile.
            while thread.is_alive() and not order.kills:
                thread.join(0.1)

    def _in_threads(self, order: Order, copies: int) -> list[threading.Thread]:
        threads = [threading.Thread(target=self._submit, args=(order,), daemon=True) for _ in range(copies)]
        for thread in threads:
            thread.start()
        self._threads += threads
        return threads

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
        """Run the command until it ends well."""
        rng = random.Random(order.plan.key)
        command = _command(order)
        while not self._abandoned.is_set() and not (order.cancelling and order.runs):
            order.runs += 1
            process = self._stack.spawn(
                command,
                log_file=self._stack.folder / "producers.log",
                through_proxy=order.plan.through_proxy,
                stdout=subprocess.PIPE,
            )
            order.running.add(process)
            printed, _ = process.communicate()
            order.running.discard(process)
            job_id = printed.decode().strip()
            # The command says how the job stands if that has ended by now: README.md, "Exit statuses".
            if process.returncode == 0 or (job_id and process.returncode in (1, 3) and order.plan.by == "command"):
                order.printed.add(job_id)
                break
            if process.returncode not in _TRY_AGAIN and not order.cancelling:
                order.problems.append(f"a producer of job {order.plan.index} ended with status {process.returncode}")
                if len(order.problems) >= _MOST_PROBLEMS:
                    break
            time.sleep(rng.uniform(0.3, 1.5))
        with self._lock:
            order.submitting -= 1


def _command(order: Order) -> list[str]:
    return (_as_command if order.plan.by == "command" else _as_program)(order)


def _as_program(order: Order) -> list[str]:
    plan = order.plan
    options = {
        "model": plan.model,
        "hardware": plan.hardware,
        "truncation": plan.truncation,
        "normalize": plan.normalize,
        "prompt": plan.prompt,
        "chunk_size": plan.chunk_size,
        "ttl": plan.ttl_s,
        "idempotency_key": plan.key,
    }
    if plan.ids == "argument":
        options["ids"] = True
    file = order.corpus.with_suffix(".json")
    told = {"corpus": str(order.corpus), "seconds_per_record": plan.seconds_per_record, "options": options}
    file.write_text(json.dumps(told), encoding="utf-8")
    return ["tests.chaos.producer", str(file)]


def _as_command(order: Order) -> list[str]:
    plan = order.plan
    command = ["embedctl", "submit", str(order.corpus), "--quiet", "--idempotency-key", plan.key]
    command += ["--model", plan.model, "--class", plan.hardware, "--ttl", str(plan.ttl_s)]
    command += ["--truncation", plan.truncation]
    command += [] if plan.normalize else ["--no-normalize"]
    command += [] if plan.prompt is None else ["--prompt", plan.prompt]
    command += [] if plan.chunk_size is None else ["--chunk-size", str(plan.chunk_size)]
    return command
