"""The faults. Each is a small function that breaks something now and says how to mend it later."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from functools import partial, reduce

from embedctl.store.scripts import BELL
from embedctl_config import keys
from tests.chaos.chunk_files import leave_place, sweep_place
from tests.chaos.damage import damage_job
from tests.chaos.deliveries import kill_delivery
from tests.chaos.failover import freeze_master, kill_master, kill_master_whose_replica_is_behind
from tests.chaos.fault import Chaos, Fault, Struck, a_worker, killed_later
from tests.chaos.faults_of_jobs import cancel_full_job, cancel_job, kill_drainer, kill_retry, submit_special
from tests.chaos.foreign import start_foreigner
from tests.chaos.guarded import (
    kill_quarantine_that_loads,
    kill_quarantine_with_chunks,
    kill_supervisor_with_suspects,
    kill_worker_with_chunks,
    submit_killers,
)
from tests.chaos.rewinding import rewind_redis
from tests.chaos.sickness import exhaust_files, exhaust_memory, start_sick_worker

_SLOW_BYTES_PER_S, _SLOW_DELAY_S = 1e6, 0.05
#: How long a link stays slow (seconds).
_SLOW_S = (10.0, 40.0)


def _signal_worker(chaos: Chaos, number: signal.Signals, *, busy: bool = True) -> Struck | None:
    target = a_worker(chaos, busy=busy)
    return Struck(f"worker {target.number}") if target is not None and target.signal(number) else None


def _twice(chaos: Chaos, first: signal.Signals, after_s: float, then: signal.Signals) -> Struck | None:
    """Send a worker two signals, the second one only if its process is still the same."""
    worker = a_worker(chaos, busy=first is not signal.SIGINT)
    if worker is None or not worker.signal(first):
        return None
    pid = worker.pid

    def again() -> None:
        if worker.pid == pid:
            worker.signal(then)

    return Struck(f"worker {worker.number}", after_s, again)


def stop_then_kill_worker(chaos: Chaos) -> Struck | None:
    return _twice(chaos, signal.SIGSTOP, chaos.short(), signal.SIGKILL)


def freeze_worker_past_its_lease(chaos: Chaos) -> Struck | None:
    if any(worker.frozen for worker in chaos.stack.workers):
        return None
    return _twice(chaos, signal.SIGSTOP, chaos.lease * chaos.rng.uniform(1.05, 1.3) + 0.5, signal.SIGCONT)


def _a_queue(chaos: Chaos) -> str:
    return keys.queue(chaos.rng.choice(chaos.stack.classes), chaos.stack.options.model)


def delete_bells(chaos: Chaos) -> Struck | None:
    queue = _a_queue(chaos)
    waiting = chaos.stack.raw.llen(queue)
    return Struck(f"{waiting} of {queue}") if waiting and chaos.stack.raw.delete(queue) else None


def double_bell(chaos: Chaos) -> Struck | None:
    queue = _a_queue(chaos)
    bell = chaos.stack.raw.lindex(queue, -1)
    if bell is None:
        return None
    chaos.stack.raw.rpush(queue, bell)
    return Struck(queue)


def forge_bells(chaos: Chaos, most: int = 50) -> Struck:
    """Ring although there may be nothing to do."""
    queue, count = _a_queue(chaos), chaos.rng.randint(1, most)
    _ring(chaos, queue, count)
    return Struck(f"{count} in {queue}")


def _ring(chaos: Chaos, queue: str, count: int = 1) -> None:
    facts = (("$id", f"forged-{chaos.rng.random()}"), ("$queue", queue))
    bell = reduce(lambda text, fact: text.replace(*fact), facts, BELL)
    chaos.stack.raw.lpush(queue, *[bell] * count)


def kill_worker_at_a_bell(chaos: Chaos) -> Struck | None:
    """Kill a worker about when it has heard a bell, and has claimed nothing yet."""
    worker = a_worker(chaos, busy=False)
    if worker is None:
        return None
    _ring(chaos, keys.queue(worker.hardware, worker.model), 8)
    # Not an event: the kill is to fall anywhere between the bell and the claim.
    time.sleep(chaos.rng.uniform(0.0, 0.005))
    return Struck(f"worker {worker.number}") if worker.signal(signal.SIGKILL) else None


def lose_turns(chaos: Chaos) -> Struck | None:
    """Lose one kind of the lists that say whose turn it is. They follow from the jobs."""
    kind = chaos.rng.choice(("lanes", "kinds", "flows", "served", "levels", "left", "wait"))
    names = list(chaos.stack.raw.scan_iter(match=keys.turns(f"{kind}:*"), count=1000))
    return Struck(f"{len(names)} of {kind}") if names and chaos.stack.raw.unlink(*names) else None


def kill_repair(chaos: Chaos) -> Struck:
    """Make the lists again from the jobs' records, and kill that."""
    repair = chaos.stack.spawn(["embedctl", "repair"], log_file=chaos.stack.folder / "repair.log")
    return killed_later(repair, "", chaos.rng.uniform(1.0, 8.0))


def kill_gateway(chaos: Chaos) -> Struck | None:
    """Kill the gateway that some producers submit through."""
    gateway = chaos.stack.gateway
    if gateway is None or gateway.poll() is not None:
        return None
    gateway.kill()
    gateway.wait()
    return Struck("", chaos.short(), chaos.stack.start_gateway)


def kill_all_connections(chaos: Chaos) -> Struck | None:
    killed = chaos.stack.raw.client_kill_filter(_type="normal", skipme=True)
    if chaos.rng.random() < 0.5:
        killed += chaos.stack.raw.client_kill_filter(_type="pubsub", skipme=True)
    return Struck(f"{killed} connections")


def freeze_proxy(chaos: Chaos) -> Struck | None:
    """Make connections through the proxy half open: silent, but not closed. Some never wake again."""
    if chaos.stack.proxy.frozen:
        return None
    resume = chaos.rng.random() < 0.5
    seconds = chaos.rng.uniform(2.0, 14.0)
    chaos.stack.proxy.freeze()
    return Struck(
        f"for {seconds:.1f} s, then {'go on' if resume else 'stay silent'}",
        seconds,
        lambda: chaos.stack.proxy.thaw(resume=resume),
    )


def cut_proxy(chaos: Chaos) -> Struck | None:
    return Struck(f"{chaos.stack.proxy.cut()} connections")


def slow_proxy(chaos: Chaos) -> Struck | None:
    """Slow down all traffic through the proxy for a while: everything arrives, but late."""
    proxy = chaos.stack.proxy
    if proxy.rate is not None:
        return None
    proxy.rate, proxy.delay_s = _SLOW_BYTES_PER_S, _SLOW_DELAY_S
    seconds = chaos.rng.uniform(*_SLOW_S)

    def quick_again() -> None:
        proxy.rate, proxy.delay_s = None, 0.0

    return Struck(f"1 MB/s and 50 ms for {seconds:.0f} s", seconds, quick_again)


def _stop_redis(chaos: Chaos, *, kill: bool) -> Struck | None:
    if not chaos.redis_well or chaos.stack.site is not None:
        return None
    delayed = chaos.stack.raw.info("persistence").get("aof_delayed_fsync", 0)
    if kill and delayed:
        # Only with delayed fsyncs had Redis answered before it wrote. Another test covers such losses.
        chaos.notes.append(f"Redis was killed after {delayed} delayed fsyncs")
    chaos.stack.stop_redis(kill=kill)
    seconds = chaos.short()
    return Struck(f"for {seconds:.1f} s", seconds, chaos.stack.start_redis)


def fill_redis(chaos: Chaos) -> Struck | None:
    if not chaos.redis_well:
        return None
    raw = chaos.stack.raw
    raw.config_set("maxmemory", max(1, int(raw.info("memory")["used_memory"]) // 2))
    chaos.stack.redis_full = True

    def empty() -> float | None:
        if chaos.stack.redis_up:
            raw.config_set("maxmemory", 0)
        chaos.stack.redis_full = False
        return None

    return Struck("", chaos.short(), empty)


def kill_producer(chaos: Chaos) -> Struck | None:
    running = [
        (order, process)
        for order in chaos.producers.orders
        if not order.plan.frees_key
        for process in list(order.running)
        if process.poll() is None
    ]
    if not running:
        return None
    order, process = chaos.rng.choice(running)
    process.kill()
    order.kills += 1
    return Struck(f"of job {order.plan.index}")


def start_twin_producers(chaos: Chaos) -> Struck | None:
    order = chaos.producers.twins()
    return None if order is None else Struck(f"for job {order.plan.index}")


def faults_named(names: Sequence[str]) -> tuple[Fault, ...]:
    """The faults of these names, or whose names begin so where none is called that; all where no name is given.

    Raises:
        ValueError: no fault's name is that or begins so.
    """
    found: list[Fault] = []
    for name in names:
        exact = [fault for fault in FAULTS if fault.name == name]
        meant = exact or [fault for fault in FAULTS if fault.name.startswith(name)]
        if not meant:
            raise ValueError(f"no fault begins with {name!r}: {', '.join(fault.name for fault in FAULTS)}")
        found += [fault for fault in meant if fault not in found]
    return tuple(found) if names else FAULTS


FAULTS = (
    Fault("worker: SIGKILL", 10, partial(_signal_worker, number=signal.SIGKILL)),
    Fault("worker: SIGSEGV", 5, partial(_signal_worker, number=signal.SIGSEGV)),
    Fault("worker: SIGSTOP, then SIGKILL", 3, stop_then_kill_worker),
    Fault("worker: SIGSTOP past the lease, then SIGCONT", 4, freeze_worker_past_its_lease),
    Fault("worker: SIGTERM", 3, partial(_signal_worker, number=signal.SIGTERM, busy=False)),
    Fault("worker: SIGINT twice", 3, partial(_twice, first=signal.SIGINT, after_s=0.3, then=signal.SIGINT)),
    Fault("worker: SIGKILL at a bell", 4, kill_worker_at_a_bell),
    Fault("up: SIGKILL of a worker with chunks in hand", 3, kill_worker_with_chunks),
    Fault("up: SIGKILL of quarantine while it loads", 3, kill_quarantine_that_loads),
    Fault("up: SIGKILL of quarantine with a chunk in hand", 3, kill_quarantine_with_chunks),
    Fault("up: SIGKILL of itself while suspects wait", 3, kill_supervisor_with_suspects),
    Fault("bells: deleted", 4, delete_bells),
    Fault("bells: doubled", 3, double_bell),
    Fault("bells: forged", 3, forge_bells),
    Fault("turns: lists lost", 4, lose_turns),
    Fault("repair: SIGKILL", 2, kill_repair),
    Fault("gateway: SIGKILL, then started again", 4, kill_gateway),
    Fault("up: jobs of one tenant that kill", 2, submit_killers),
    Fault("another application of Celery, then SIGKILL", 2, start_foreigner),
    Fault("job: damaged", 4, damage_job),
    Fault("connections: all killed by Redis", 3, kill_all_connections),
    Fault("connections: half open", 4, freeze_proxy),
    Fault("connections: closed by the proxy", 3, cut_proxy),
    # Nobody reaps in the first two leases after Redis started: more often, and nothing would ever be taken up.
    Fault("Redis: SIGTERM, then started again", 3, partial(_stop_redis, kill=False), 6, "Redis"),
    Fault("Redis: SIGKILL, then started again", 3, partial(_stop_redis, kill=True), 6, "Redis"),
    Fault("Redis: full", 3, fill_redis, 3, "Redis"),
    Fault("producer: SIGKILL, then run again", 4, kill_producer),
    Fault("producer: two with one key", 3, start_twin_producers),
    Fault("job: cancelled", 3, cancel_job),
    Fault("job: cancelled while its producer waits for room", 3, cancel_full_job),
    Fault("job: error budget, spent on the way or not at all", 4, partial(submit_special, kind="budget")),
    Fault("job: error budget, spent by the last chunk", 4, partial(submit_special, kind="budget-last")),
    Fault("job: error budget, spent while its producer waits for room", 3, partial(submit_special, kind="budget-full")),
    Fault("job: SIGKILL in the middle of its retry", 3, kill_retry),
    Fault("job: SIGKILL of its drainer", 4, kill_drainer),
    Fault("job: SIGKILL of its delivery into a database", 4, kill_delivery),
    Fault("Redis: SIGKILL, then back at an earlier moment", 3, rewind_redis, 6, "Redis"),
    Fault("Redis: master killed, and a replica takes over", 3, kill_master, 6, "Redis"),
    Fault(
        "Redis: master killed, and a replica without its last writes takes over",
        4,
        kill_master_whose_replica_is_behind,
        6,
        "Redis",
    ),
    Fault("Redis: master frozen, and a replica takes over", 4, freeze_master, 6, "Redis"),
    Fault("worker: sick, every batch fails", 2, start_sick_worker, 2, "worker: sick"),
    Fault("worker: out of file descriptors", 2, exhaust_files),
    Fault("worker: out of memory", 2, exhaust_memory),
    Fault("link: slow", 3, slow_proxy),
    Fault("chunk files: the place is away", 4, leave_place),
    Fault("chunk files: swept", 4, sweep_place),
)
