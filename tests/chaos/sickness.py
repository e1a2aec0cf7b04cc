"""Sick workers: they are alive, but lack something that they need. No record may fail because of that."""

from __future__ import annotations

import resource
import signal
import subprocess
import time
from pathlib import Path

from tests.chaos.fault import Chaos, Struck, a_worker
from tests.chaos.options import DUMMY
from tests.chaos.stack import OUTAGE, Worker, end_of

#: A worker stays short of something for a time in this range (seconds).
_SHORT_S = (5.0, 20.0)
#: A worker that can encode nothing must end within this time after its start (seconds).
_LEAVES_S = 60.0
#: Memory that a worker may still allocate on top of what it has (bytes).
_SOME_MEMORY = 1024 * 1024


def start_sick_worker(chaos: Chaos) -> Struck | None:
    """Start another worker of a served class, without memory for any batch."""
    stack = chaos.stack
    if stack.options.model != DUMMY:
        return None
    hardware = chaos.rng.choice(("slow", "quick"))
    log_file = stack.folder / "sick.log"
    command = ["embedctl_workers", "--class", hardware, "--model", stack.options.model]
    process = stack.spawn(command, log_file=log_file, variables={"EMBEDCTL_CONFIG": str(stack.sick_config)})
    until = time.monotonic() + _LEAVES_S

    def see_off() -> float | None:
        if process.poll() is None and time.monotonic() < until:
            return 1.0
        _see_off(chaos, process)
        return None

    return Struck(f"class {hardware}", 1.0, see_off)


def _see_off(chaos: Chaos, process: subprocess.Popen[bytes]) -> None:
    """Record how the sick worker ended. If it still runs, stop it; if it was also given work, report that."""
    if process.poll() is not None:
        chaos.sick_ends.append(process.returncode)
        return
    try:
        rows = chaos.stack.rows()
    except OUTAGE:
        rows = {}
    if process.pid in rows and rows[process.pid].progressed_ms:
        chaos.monitor.unended.append(f"a worker that can encode nothing was given work and stays ({process.pid})")
    process.send_signal(signal.SIGTERM)
    end_of(process)


def _one_of_several(chaos: Chaos) -> Worker | None:
    """A busy worker whose class has another, healthy worker."""
    found = a_worker(chaos)
    if found is None or found.short:
        return None
    others = [each for each in chaos.stack.workers if each.hardware == found.hardware and each is not found]
    return found if any(each.alive and not each.short and not each.frozen for each in others) else None


def exhaust_files(chaos: Chaos) -> Struck | None:
    """Let a worker open no more files or connections, and close its connections to Redis."""
    worker = _one_of_several(chaos)
    if worker is None:
        return None
    opened = [int(entry.name) for entry in Path(f"/proc/{worker.pid}/fd").iterdir()]
    struck = _limit(chaos, worker, resource.RLIMIT_NOFILE, max(opened) + 1)
    chaos.stack.raw.client_kill_filter(_type="normal", skipme=True)
    return struck


def exhaust_memory(chaos: Chaos) -> Struck | None:
    """Let a worker allocate almost no more memory."""
    worker = _one_of_several(chaos)
    if worker is None:
        return None
    status = Path(f"/proc/{worker.pid}/status").read_text(encoding="utf-8")
    [size] = [line.split()[1] for line in status.splitlines() if line.startswith("VmSize:")]
    return _limit(chaos, worker, resource.RLIMIT_AS, 1024 * int(size) + _SOME_MEMORY)


def _limit(chaos: Chaos, worker: Worker, kind: int, limit: int) -> Struck:
    """Lower a resource limit of a running process for a while. If it dies in that time, the harness is the cause."""
    pid = worker.pid
    soft, hard = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (limit, hard))
    worker.doomed = worker.short = True
    seconds = chaos.rng.uniform(*_SHORT_S)

    def restore() -> None:
        if worker.pid == pid and worker.alive:
            resource.prlimit(pid, kind, (soft, hard))
            worker.doomed = worker.short = False

    return Struck(f"worker {worker.number} for {seconds:.0f} s", seconds, restore)
