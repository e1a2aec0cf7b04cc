"""`embedctl up`: workers that are planned, started, killed, started again and drained."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx2
import numpy as np
import pytest

from embedctl import Job, enqueue_embeddings
from embedctl.operating.acl import ADMIN
from embedctl.queueing.broker import Broker
from embedctl.store import WorkerRow
from embedctl_config import keys
from embedctl_config.settings import Settings
from embedctl_workers.machine.devices import format_cpus
from embedctl_workers.machine.discovery import find_cpu_sets
from embedctl_workers.models.cache import locked
from tests.support.forked import Forked, can_be_forked
from tests.support.gateway import NO_TLS
from tests.support.here import Here
from tests.support.jobs import assert_encoded, owners, reference
from tests.support.limits import settings_of
from tests.support.processes import children, free_ports, is_running
from tests.support.redis_server import as_user
from tests.support.store import leases, members, score
from tests.support.waiting import PATIENCE_S, eventually
from tests.support.workers import deaths, kept_alive

#: A word of every record, to be looked for where it must not be.
WORD = "zanzibar"
TEXTS = [f"text {i} " + f"{WORD} " * 60 for i in range(30)]

#: Two CPUs on different cores of one node.
NEAR = max(find_cpu_sets(frozenset(os.sched_getaffinity(0))), key=lambda each: len(each.cores))
CPUS = [min(core) for core in NEAR.cores[:2]]

pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="the workers here need two physical cores")


@dataclass
class Up:
    """An `embedctl up` that a test started, and its standard error."""

    process: subprocess.Popen[str] | Forked
    broker: Broker
    log_file: Path

    def said(self) -> str:
        return self.log_file.read_text(errors="replace")

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.said().splitlines()]

    def workers(self) -> dict[str, WorkerRow]:
        """The live ones by class, of those that this process has started and not lost."""
        mine = children(self.process.pid)
        return {row.hardware: row for row in self.broker.workers.here() if row.pid in mine and not row.quarantine}

    def wait_ready(self, *classes: str) -> dict[str, WorkerRow]:
        def ready() -> bool:
            assert self.process.poll() is None, self.said()
            return set(self.workers()) == set(classes) and " running" in self.said().replace('"', " ")

        eventually(ready)
        return self.workers()

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        """Its exit status, once it has ended."""
        eventually(lambda: self.process.poll() is not None, what="its end", show=self.said)
        return self.process.wait()


StartUp = Callable[..., Up]


@pytest.fixture
def start_up(environment: dict[str, str], broker: Broker, short_folder: Path) -> Iterator[StartUp]:
    """Starts `embedctl up`; what a test leaves is stopped, with its workers."""
    started: list[Up] = []

    def start(*arguments: str) -> Up:
        command = ["up", "--cpus", format_cpus(set(CPUS)), "--model", "dummy", *arguments]
        log_file = short_folder / f"up-{len(started)}.log"
        user = ADMIN if "--gateway" in arguments else "worker"
        own = as_user(environment, user)
        process: subprocess.Popen[str] | Forked
        if can_be_forked(own):
            process = Forked(command, own, short_folder, err=log_file)
        else:
            fresh = [sys.executable, "-m", "embedctl", *command]
            with log_file.open("wb") as log:
                process = subprocess.Popen(
                    fresh, env=own, cwd=short_folder, stdout=subprocess.PIPE, stderr=log, text=True
                )
        up = Up(process, broker, log_file)
        started.append(up)
        return up

    yield start
    for up in started:
        if up.process.poll() is None:
            up.process.terminate()
            try:
                up.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                up.process.kill()  # its workers are told by the kernel
                up.process.wait()
        if up.process.stdout:
            up.process.stdout.close()


def submit(settings: Settings, records: int) -> Job:
    """A job of the class that takes a tenth of a second for each record."""
    return enqueue_embeddings(TEXTS[:records], hardware="slow", chunk_size=5, settings=settings)


def test_the_plan_is_printed_and_nothing_is_started(here: Here) -> None:
    here.environment["EMBEDCTL_REDIS_URL"] = "redis://127.0.0.1:1"  # nobody is asked
    cpus = ",".join(map(str, CPUS))
    addresses = {"EMBEDCTL_METRICS_ADDRESS": "9100", "EMBEDCTL_GATEWAY_ADDRESS": "9000"}
    done = here.embedctl(
        "up",
        "--dry-run",
        "--class",
        "slow",
        "--class",
        "dummy",
        "--cpus",
        cpus,
        "--gateway",
        "--pooling",
        "cls",
        **addresses,
        status=0,
    )
    rows = [re.split(r" {2,}", line) for line in done.stdout.splitlines()[1:]]
    command = "EMBEDCTL_METRICS_ADDRESS=127.0.0.1:{} embedctl worker --class {} --cpus {} --model dummy --pooling cls"
    assert rows[:2] == [
        [hardware, f"cpu {cpu}", str(cpu), "1", "dummy", command.format(9100 + at, hardware, cpu)]
        for at, (hardware, cpu) in enumerate(zip(("slow", "dummy"), CPUS, strict=True))
    ]
    assert (rows[2][:2], rows[2][-1].endswith(" embedctl gateway")) == (["gateway", "127.0.0.1:9000"], True)
    refused = here.embedctl("up", "--dry-run", "--gateway", EMBEDCTL_REDIS_URL="redis://worker:secret@127.0.0.1:1")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "run `embedctl gateway` as the user producer" in refused.stderr


def test_sigterm_ends_workers_after_their_chunks_and_loses_nothing(here: Here, start_up: StartUp) -> None:
    up = start_up("--class", "slow")
    worker = up.wait_ready("slow")["slow"]
    job = submit(settings_of(here.environment), records=30)
    eventually(lambda: owners(here.raw, job) and up.workers()["slow"].progressed_ms)
    assert up.stop() == 0
    assert not is_running(worker.pid)
    assert owners(here.raw, job) == {}
    status = job.status()
    assert 5 <= status.done < 30
    assert (status.deaths, status.lapsed) == (0, 0)
    here.start_worker("slow")
    assert_encoded(job, TEXTS)
    assert job.status().deaths == 0


@pytest.mark.slow
def test_a_worker_that_is_killed_is_reported_at_once_and_started_again(here: Here, start_up: StartUp) -> None:
    here.environment["EMBEDCTL_LEASE_S"] = "6"
    up = start_up("--class", "slow", "--class", "dummy")
    before = up.wait_ready("slow", "dummy")
    assert {row.hardware: row.device for row in before.values()} == {
        "slow": f"cpu {CPUS[0]}",
        "dummy": f"cpu {CPUS[1]}",
    }
    assert all(os.sched_getaffinity(row.pid) == {int(row.cpus)} for row in before.values())

    # The others keep the worker busy until it has told of its progress, which it does every two seconds.
    *_, job = [submit(settings_of(here.environment), records=30) for _ in range(4)]
    eventually(lambda: owners(here.raw, job) and up.workers()["slow"].progressed_ms)
    os.kill(before["slow"].pid, signal.SIGSTOP)  # it claims and renews no more
    lapse = leases(here.raw, job.id)
    os.kill(before["slow"].pid, signal.SIGKILL)
    held = set(owners(here.raw, job))
    assert held
    eventually(lambda: [gone.how for gone in here.broker.workers.gone()] == ["killed by SIGKILL"])

    eventually(lambda: {suspect.chunk for suspect in job.suspects()} == held)
    # And not when the lease is over.
    assert all(each.deaths[0].at.timestamp() * 1000 < lapse[each.chunk] for each in job.suspects())
    after = up.wait_ready("slow", "dummy")
    assert after["dummy"].pid == before["dummy"].pid
    assert after["slow"].pid != before["slow"].pid
    assert_encoded(job, TEXTS)
    assert job.status().deaths == len(held)

    assert up.stop() == 0
    assert not any(is_running(row.pid) for row in after.values())
    assert WORD not in up.said()
    (death,) = [line for line in up.lines() if line["level"] == "ERROR"]
    assert death["worker"] == before["slow"].name
    said = r"killed by SIGKILL with [1-9] chunks in hand; starting it again at once"
    assert re.fullmatch(said, str(death["message"]))


@pytest.mark.slow
def test_texts_that_kill_are_found_in_quarantine_while_another_tenant_is_served(here: Here, start_up: StartUp) -> None:
    bad = {1: "crash-encoder", 4: "crash-encoder", 6: "eat-memory"}
    texts = [f"text {i} {bad.get(i, '')}" for i in range(8)]
    (port,) = free_ports(1)
    here.environment["EMBEDCTL_METRICS_ADDRESS"] = f"127.0.0.1:{port}"  # it is for one worker
    up = start_up("--class", "poison")
    up.wait_ready("poison")
    started = set(children(up.process.pid))
    job = enqueue_embeddings(texts, tenant="a", hardware="poison", chunk_size=1, settings=here.settings)
    ranks = set()
    while not job.status().state.ended:
        single = enqueue_embeddings(["harmless"], tenant="b", hardware="poison", settings=here.settings)
        assert_encoded(single, ["harmless"])
        started.update(children(up.process.pid))
        for worker in here.broker.workers.alive():
            with suppress(ProcessLookupError, FileNotFoundError):  # it was killed meanwhile
                rank = os.getpriority(os.PRIO_PROCESS, worker.pid)
                ranks.add((worker.quarantine, rank, Path(f"/proc/{worker.pid}/oom_score_adj").read_text().strip()))
    assert {each for each in ranks if each[0]} == {(True, 19, "1000")}
    assert all(rank < 19 for quarantine, rank, _ in ranks if not quarantine)
    # In quarantine, memory has a bound.
    codes = {"crash-encoder": "crashed_worker", "eat-memory": "out_of_memory"}
    assert [(error.position, error.code) for error in job.errors()] == [(at, codes[word]) for at, word in bad.items()]
    good = [at for at in range(len(texts)) if at not in bad]
    np.testing.assert_array_equal(job.vectors()[good], reference([texts[at] for at in good]))

    died = [line for line in up.lines() if line["level"] == "ERROR"]
    assert all(" in hand; starting it again at once" in str(line["message"]) for line in died)
    apart = [line for line in died if ":quarantine" in str(line["worker"])]
    # A text kills an ordinary worker once at most; from then on its job is distrusted, or the chunk suspect.
    assert len(apart) == 2
    assert 1 <= len(died) - len(apart) <= len(bad)
    assert up.stop() == 0
    assert not any(map(is_running, started))


@pytest.mark.slow
def test_when_up_is_killed_others_take_what_may_kill_and_lose_nothing(here: Here, start_up: StartUp) -> None:
    texts = [f"text {i} {'crash-encoder' if i in (1, 4) else ''}" for i in range(8)]
    up = start_up("--class", "poison")
    up.wait_ready("poison")
    job = enqueue_embeddings(texts, tenant="a", hardware="poison", chunk_size=2, settings=here.settings)
    awaited = keys.queue_quarantine(keys.queue("poison", "dummy"))
    eventually(lambda: job.status().deaths and here.raw.zcard(awaited), what="a death, and a promise of a quarantine")
    up.process.kill()  # its workers are told by the kernel
    up.process.wait()
    until_ms = max(score(here.raw, awaited, each) for each in members(here.raw, awaited))
    assert until_ms - here.broker.connection.now_ms() <= 1000 * keys.HEARTBEAT_TTL_S
    with kept_alive(here.start_worker, 1) as workers:
        while not job.status().state.ended:
            single = enqueue_embeddings(["harmless"], tenant="b", hardware="poison", settings=here.settings)
            assert single.wait(timeout=60).done == 1
        assert {*deaths(workers)} == {-signal.SIGSEGV}
    assert all(score(here.raw, awaited, each) <= until_ms for each in members(here.raw, awaited))
    assert [(error.position, error.code) for error in job.errors()] == [(at, "crashed_worker") for at in (1, 4)]
    good = [at for at in range(len(texts)) if at not in (1, 4)]
    np.testing.assert_array_equal(job.vectors()[good], reference([texts[at] for at in good]))


@pytest.mark.slow
def test_ctrl_c_twice_kills_and_blames_nobody(here: Here, start_up: StartUp) -> None:
    up = start_up("--class", "hung")
    worker = up.wait_ready("hung")["hung"]
    enqueue_embeddings(["hang-encoder"], hardware="hung", settings=here.settings)
    eventually(lambda: up.workers()["hung"].quiet_s > 0.5)  # a chunk whose encode has not begun is given back
    up.process.send_signal(signal.SIGINT)
    eventually(lambda: "stopping" in up.said())
    assert is_running(worker.pid)
    assert up.stop(signal.SIGINT) == 0
    assert not is_running(worker.pid)
    assert "killed, for it had not ended by itself" in up.said()
    assert list(here.broker.workers.gone()) == []
    assert here.raw.get(keys.died(worker.instance)) == keys.LEFT.encode()


@pytest.mark.slow
def test_the_end_of_the_supervisor_is_the_end_of_its_children(environment: dict[str, str], start_up: StartUp) -> None:
    environment.update(EMBEDCTL_REDIS_URL="", EMBEDCTL_GATEWAY_ADDRESS="0")
    up = start_up("--class", "dummy", "--gateway")
    assert up.process.stdout
    assert up.process.stdout.readline().startswith("export EMBEDCTL_REDIS_URL=unix://")
    started = children(up.process.pid)
    assert len(started) == 3
    up.process.kill()
    eventually(lambda: not any(map(is_running, started)))


def test_a_private_redis_that_dies_ends_all_and_its_data_stays(environment: dict[str, str], start_up: StartUp) -> None:
    environment["EMBEDCTL_REDIS_URL"] = ""
    up = start_up("--class", "dummy")
    assert up.process.stdout
    folder = Path(up.process.stdout.readline().strip().partition("unix://")[2]).parent
    started = children(up.process.pid)
    [redis] = [pid for pid in started if b"redis-server" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(redis, signal.SIGKILL)
    assert up.ended() == 1
    assert "embedctl up: the private Redis ended with status -9" in up.said()
    assert not any(map(is_running, started))
    assert list(folder.glob("appendonly*"))


@pytest.mark.parametrize(
    ("name", "value", "arguments", "status", "said"),
    [
        ("REDIS_URL", "redis://127.0.0.1:1", (), 69, "Redis at redis://127.0.0.1:1 can't be reached"),
        ("GATEWAY_ADDRESS", "", ("--gateway",), 2, "the gateway can't start: embedctl gateway: gateway_address: can't"),
    ],
    ids=["Redis", "gateway"],
)
def test_what_can_not_be_had_is_said_before_any_worker_starts(
    here: Here, name: str, value: str, arguments: tuple[str, ...], status: int, said: str, start_up: StartUp
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        here.environment[f"EMBEDCTL_{name}"] = value or str(taken.getsockname()[1])
        up = start_up("--class", "dummy", *arguments)
        assert up.ended() == status
    assert f"embedctl up: {said}" in up.said()
    assert "starting" not in up.said()


@pytest.mark.slow
def test_a_gateway_beside_the_workers_answers_is_started_again_and_ends_with_them(
    environment: dict[str, str], start_up: StartUp, free_port: int
) -> None:
    environment.update(EMBEDCTL_GATEWAY_ADDRESS=str(free_port), EMBEDCTL_HARDWARE="auto", EMBEDCTL_CHUNK_SIZE="5")
    url = f"http://127.0.0.1:{free_port}/v1"
    up = start_up("--class", "slow", "--gateway")
    [worker] = up.wait_ready("slow").values()
    assert f"the gateway is at {url} for everyone on this machine alone, as it has no keys" in [
        line["message"] for line in up.lines()
    ]

    def gateway() -> int:
        [found] = set(children(up.process.pid)) - {worker.pid}
        return found

    def ask(texts: list[str]) -> bool:
        answer = httpx2.post(f"{url}/embeddings", json={"input": texts, "model": "dummy"}, timeout=60, verify=NO_TLS)
        rows = [each["embedding"] for each in answer.json()["data"]]
        np.testing.assert_allclose(rows, reference(texts), atol=1e-6)
        return True

    def is_answered() -> bool:
        with suppress(httpx2.TransportError):
            return ask(TEXTS[:2])
        return False

    assert is_answered()
    os.kill(first := gateway(), signal.SIGKILL)
    eventually(is_answered, what="the next gateway's answer", show=up.said)
    assert gateway() != first
    assert is_running(worker.pid)
    started = children(up.process.pid)
    with ThreadPoolExecutor() as pool:
        in_flight = pool.submit(ask, TEXTS)  # several chunks, and a worker that stops finishes one
        metrics = f"http://127.0.0.1:{free_port}/metrics"
        eventually(
            lambda: (
                in_flight.done()
                or "embedctl_gateway_in_flight 1.0" in httpx2.get(metrics, timeout=60, verify=NO_TLS).text
            )
        )
        assert up.stop() == 0
    assert in_flight.result()
    assert not any(map(is_running, started))
    messages = [str(line["message"]) for line in up.lines()]
    assert [message for message in messages if message.startswith("gateway: ")] == [
        "gateway: killed by SIGKILL; starting it again in 1 s",
        "gateway: ended with status 0",
    ]
    assert WORD not in up.said()


def test_workers_that_start_together_choose_their_names_in_turn(here: Here, cache_folder: Path) -> None:
    with locked(cache_folder / "names"):
        second = here.start_worker("dummy", wait=False)
        eventually(lambda: "another process chooses its name: waiting for it" in second.log_file.read_text())
        assert not any(here.broker.workers.here())
    eventually(lambda: any(here.broker.workers.here()))
