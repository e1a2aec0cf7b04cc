"""What commands report: which workers are gone, hung, busy or idle, and which jobs and chunks wait for a worker."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time

import pytest
import redis as redis_py
from celery.signals import worker_shutting_down

from embedctl import enqueue_embeddings
from embedctl.operating.doctor import Finding, Level, examine
from embedctl.queueing.broker import Broker
from embedctl.store.heartbeats import HUNG_AFTER_S
from embedctl_config import keys
from embedctl_config.settings import Settings
from embedctl_workers.serving.heartbeat import INTERVAL_S
from tests.support.here import Here
from tests.support.limits import settings_of
from tests.support.processes import before_all_else, changed
from tests.support.store import row
from tests.support.waiting import PATIENCE_S, eventually
from tests.support.workers import WorkerProcess

#: The time that the documentation promises.
KNOWN_WITHIN_S = 20.0

#: A library that is in no hurry at the end of its process.
SLOW_END = "import atexit, time; atexit.register(time.sleep, 1000)"


def findings(settings: Settings, subject: str) -> list[Finding]:
    return [finding for finding in examine(settings) if finding.subject == subject]


def lines(shown: str, name: str) -> list[str]:
    """What `embedctl status` shows under a name."""
    return [line[11:] for line in shown.splitlines() if line[:11].strip() == name]


def busy(worker: WorkerProcess) -> bool:
    return bool(worker.row().holding)


def kill_while_its_heartbeat_counts(worker: WorkerProcess, raw: redis_py.Redis) -> None:
    """Kill a worker whose last heartbeat counts for longer than a test: it is not this that tells of the death."""
    instance = worker.row().instance
    worker.process.send_signal(signal.SIGSTOP)  # it beats no more
    raw.zadd(keys.WORKERS, {instance: worker.broker.connection.now_ms() + 3_600_000})
    worker.kill()


def test_a_worker_that_loads_says_how_much_longer_by_the_last_time(here: Here) -> None:
    config = here.folder / "embedctl.toml"
    config.write_text(
        f'{config.read_text()}\n[classes.late]\nbackend = "dummy"\noptions = {{dim = 16, seconds_to_load = 1.0}}\n'
    )
    not_ready = here.broker.workers.not_ready

    def start() -> str:
        seen: list[str] = []

        def is_loading() -> bool:
            now_ms = here.broker.connection.about_now_ms()
            seen.extend(each.words(now_ms) for each in not_ready.all() if each.doing.startswith("loading"))
            return bool(seen)

        worker = here.start_worker("late", wait=False)
        eventually(is_loading)
        worker.wait_ready()
        return seen[0]

    start()
    assert re.fullmatch(r"loading dummy, (about \d+ s left|longer than last time)", start())


class Interrupted:
    """A lock of an event of Celery's: whoever has it gets another SIGTERM at that moment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            os.kill(os.getpid(), signal.SIGTERM)

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def interrupt_events() -> None:
    worker_shutting_down.lock = Interrupted()  # type: ignore[attr-defined]  # Celery's types do not name it


def test_a_signal_that_comes_while_one_is_handled_does_not_hang_a_worker(here: Here) -> None:
    """The kernel sends a SIGTERM for each thread of a parent that ends."""
    worker = here.start_worker("slow", prepare=interrupt_events)
    texts = [f"text {row} " + "word " * 60 for row in range(20)]  # a batch of 0.1 s for each
    job = enqueue_embeddings(texts, hardware="slow", chunk_size=len(texts), settings=settings_of(here.environment))
    eventually(lambda: busy(worker))
    for _ in range(3):
        worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(PATIENCE_S) == 0
    assert job.status().done == len(texts)


def test_what_tells_of_a_worker_takes_less_than_the_time_that_is_promised() -> None:
    """The test below waits for longer, because a machine may be busy."""
    assert keys.HEARTBEAT_TTL_S < KNOWN_WITHIN_S
    assert HUNG_AFTER_S + INTERVAL_S < KNOWN_WITHIN_S


@pytest.mark.slow
def test_a_worker_that_is_stopped_or_hung_is_known_within_twenty_seconds(here: Here) -> None:
    here.environment["EMBEDCTL_HANG_S"] = "600"
    hung, stopped, idle = here.start_worker("hung"), here.start_worker(), here.start_worker()
    name = stopped.row().name
    began = time.monotonic()
    waiting = enqueue_embeddings(["hang-encoder"], hardware="hung", settings=here.settings)
    eventually(lambda: busy(hung))
    stopped.process.send_signal(signal.SIGSTOP)
    served = enqueue_embeddings(["text"], settings=here.settings)

    eventually(lambda: hung.row().activity == "hung")
    assert time.monotonic() - began >= 9.5  # not every slow batch is hung
    shown = here.embedctl("status", waiting.id).stdout
    assert lines(shown, "workers") == ["1 live: 1 hung"]
    (line,) = lines(shown, "hung")
    assert re.match(rf"{re.escape(hung.row().name)}: no batch finished for \d+ s", line)
    (found,) = findings(here.settings, "hung worker")
    assert found.level is Level.WARN
    assert hung.row().name in found.found
    assert "it ends itself after hang_s (600 s)" in here.embedctl("doctor").stdout
    ready = here.embedctl("worker", "--ready")
    assert (ready.returncode, ready.stdout) == (1, "")
    assert f"{hung.row().name} has finished no batch for " in ready.stderr
    here.embedctl("worker", "--ready", "--class", "hung", status=1)
    here.embedctl("worker", "--ready", "--class", "dummy", status=0)

    def gone() -> list[str]:
        return [each.worker.name for each in served.gone_workers()]

    eventually(lambda: gone() == [name])
    assert [worker.pid for worker in served.workers()] == [idle.pid]
    (found,) = findings(here.settings, "worker gone")
    assert (found.level, found.found.startswith(f"{name} has been gone for ")) == (Level.WARN, True)
    assert found.found.endswith(": no word from it")
    assert f"{name} has been gone for " in here.embedctl("doctor").stdout
    if not served.status().state.ended:  # the stopped one may have the bell
        (line,) = lines(here.embedctl("status", served.id).stdout, "gone")
        assert line.startswith(name)
    stopped.process.send_signal(signal.SIGCONT)
    eventually(lambda: gone() == [])
    assert served.wait(timeout=60).done == 1
    hung.kill()  # a hung worker ignores milder signals


def test_busy_and_idle_workers_are_told_apart_and_both_make_a_machine_ready(here: Here) -> None:
    one, other = here.start_worker("slow"), here.start_worker("slow")
    # One chunk, too little text to be divided, that takes longer than the commands: it is cancelled once they are done.
    job = enqueue_embeddings([f"a b c d e {i}" for i in range(500)], hardware="slow", settings=here.settings)
    eventually(lambda: busy(one) or busy(other))
    assert lines(here.embedctl("status", job.id).stdout, "workers") == ["2 live: 1 busy, 1 idle"]
    workers = json.loads(here.embedctl("status", job.id, "--json").stdout)["workers"]
    assert sorted(bool(worker["holding"]) for worker in workers) == [False, True]
    ready = here.embedctl("worker", "--ready")
    assert (ready.returncode, ready.stderr) == (0, "")
    names = ready.stdout.removeprefix("ready: ").strip().split(", ")
    assert set(names) == {one.row().name, other.row().name}
    job.cancel()
    eventually(lambda: not busy(one) and not busy(other))
    assert lines(here.embedctl("status", job.id).stdout, "workers") == ["2 live: 2 idle"]
    kill_while_its_heartbeat_counts(one, here.raw)
    eventually(lambda: here.embedctl("worker", "--ready").stdout == f"ready: {other.row().name}\n")


def test_a_machine_without_a_worker_is_not_ready(here: Here, worker_broker: Broker) -> None:
    worker_broker.workers.beat(row("far", machine="another machine"))
    none = here.embedctl("worker", "--ready")
    assert (none.returncode, none.stdout) == (1, "")
    assert none.stderr == "embedctl worker: no live worker on this machine\n"
    away = here.embedctl("worker", "--ready", EMBEDCTL_REDIS_URL=f"unix://{here.folder}/nothing.sock")
    assert (away.returncode, away.stdout) == (69, "")
    assert "can't be reached" in away.stderr


def test_a_job_without_a_live_worker_says_so_and_names_the_command_that_starts_one(here: Here) -> None:
    command = "embedctl worker --class dummy --model dummy"
    (here.folder / "corpus.txt").write_text("one\ntwo\n")
    submitted = here.embedctl("submit", "corpus.txt", status=0)
    assert submitted.stderr.splitlines()[0] == f"No live worker serves dummy on dummy. Start one: {command}"
    job_id = submitted.stdout.strip()
    assert lines(here.embedctl("status", job_id).stdout, "workers") == [f"0 live; start one: {command}"]
    waited = here.embedctl("wait", job_id, "--timeout", "0.5", status=124)
    assert f"Start one: {command}" in waited.stderr
    assert any(finding.level is Level.WARN and "none is alive" in finding.found for finding in examine(here.settings))


@pytest.mark.slow
def test_nothing_that_libraries_do_at_the_end_delays_a_worker_that_has_said_good_bye(here: Here) -> None:
    slow_end = before_all_else(here.folder, "end", SLOW_END)
    with changed(here.environment, slow_end):
        worker = here.start_worker()
    eventually(lambda: worker.logged(" ready."))
    worker.process.terminate()
    assert worker.process.wait(PATIENCE_S) == 0
    assert "worker: stops after the chunk" in worker.log()
