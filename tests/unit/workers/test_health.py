"""When a worker is well and when it is ready, and how it says so over HTTP."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from typing import cast

import pytest

from embedctl.operating.monitoring.endpoint import Endpoint
from embedctl.store.heartbeats import HUNG_AFTER_S
from embedctl_config import keys
from embedctl_config.errors import SettingsError
from embedctl_workers.serving.health import STUCK_AFTER_S, Health
from embedctl_workers.serving.heartbeat import Heartbeat
from embedctl_workers.serving.in_hand import Held, InHand


class Pulse:
    alive = True
    moved_at = reached_at = reaped_at = 0.0


class Worker:
    """A worker that consumes, by a clock of its own."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pulse, self.draining = Pulse(), threading.Event()
        self.in_hand = InHand(now=lambda: self.now)
        self.pulse.moved_at = self.pulse.reached_at = self.pulse.reaped_at = self.now
        self.health = Health(now=lambda: self.now)
        self.health.attend(cast(Heartbeat, self.pulse), self.in_hand, self.draining)
        self.health.consuming = True

    def encode(self, quiet_s: float) -> Held:
        """Hold a chunk whose encode has made no progress for some time."""
        held = Held("job", 7, "token", "model", moving_since=self.now - quiet_s)
        self.in_hand.take(held)
        return held

    @property
    def both(self) -> tuple[str, str]:
        return self.health.illness(), self.health.hindrance()


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_a_worker_that_loads_is_well_and_says_what_it_waits_for() -> None:
    health = Health()
    assert (health.illness(), health.hindrance()) == ("", "starting")
    health.phase = "loading all-MiniLM-L6-v2"
    assert (health.illness(), health.hindrance()) == ("", "loading all-MiniLM-L6-v2")


def test_one_whose_queues_are_cut_off_is_not_ready(worker: Worker) -> None:
    worker.health.consuming = False
    assert worker.both == ("", "not connected to the queues")


def test_without_redis_it_is_well_and_not_ready_once_its_heartbeat_does_not_count(worker: Worker) -> None:
    worker.now += keys.HEARTBEAT_TTL_S
    worker.pulse.moved_at = worker.now
    assert worker.both == ("", "")
    worker.now += 1
    assert worker.both == ("", "Redis has not answered for 16 s")
    worker.pulse.reached_at = worker.now
    assert worker.both == ("", "")


def test_a_heartbeat_that_ended_is_an_illness(worker: Worker) -> None:
    worker.pulse.alive = False
    assert worker.both == ("the heartbeat has ended",) * 2


def test_a_heartbeat_that_stands_still_for_longer_than_redis_may_take_is_one(worker: Worker) -> None:
    worker.now += STUCK_AFTER_S
    assert worker.health.illness() == ""
    worker.now += 1
    assert worker.both == ("the heartbeat has not moved for 301 s",) * 2


def test_a_reaper_that_hangs_is_noticed_and_one_that_waits_for_redis_is_no_illness(worker: Worker) -> None:
    worker.now += STUCK_AFTER_S
    worker.pulse.moved_at = worker.pulse.reached_at = worker.now
    assert worker.both == ("", "")
    worker.now += 1
    assert worker.both == ("the reaper has not moved for 301 s",) * 2
    worker.pulse.reaped_at = worker.now
    assert worker.both == ("", "")


def test_an_encode_without_progress_is_an_illness_as_long_as_it_lasts(worker: Worker) -> None:
    held = worker.encode(HUNG_AFTER_S / 2)
    assert worker.both == ("", "")
    held.moving_since = worker.now - 12
    assert worker.both == ("chunk 7 of job job has finished no batch for 12 s",) * 2
    held.moving_since = None  # it waits for its turn, or for Redis
    assert worker.both == ("", "")


def test_progress_on_the_device_counts_for_all_chunks_that_are_there(worker: Worker) -> None:
    waits, other = worker.encode(12), Held("job", 8, "other", "model", moving_since=worker.now, on_device=True)
    worker.in_hand.take(other)
    waits.on_device = True
    worker.in_hand.progressed(other, 1)
    assert worker.both == ("", "")
    waits.on_device = False  # its tokeniser hangs, whatever the device does
    assert worker.both == ("chunk 7 of job job has finished no batch for 12 s",) * 2
    waits.moving_since = None  # it waits for its turn, or for Redis
    assert worker.both == ("", "")


# Over HTTP


@pytest.fixture
def endpoint(worker: Worker, free_port: int) -> Iterator[Endpoint]:
    def metrics(accept: str) -> tuple[str, bytes]:
        return "text/x", f"metrics for {accept}".encode()

    with Endpoint(str(free_port), metrics, worker.health) as endpoint:
        yield endpoint


def ask(endpoint: Endpoint, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(endpoint.url.removeprefix("http://"), timeout=120)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


def test_health_is_a_status_and_a_line(endpoint: Endpoint, worker: Worker) -> None:
    assert ask(endpoint, "/healthz") == ask(endpoint, "/readyz?verbose=1") == (200, "ok\n")
    worker.draining.set()
    assert ask(endpoint, "/healthz") == (200, "ok\n")
    assert ask(endpoint, "/readyz") == (503, "draining\n")
    assert ask(endpoint, "/readyz", "HEAD") == (503, "")
    worker.pulse.alive = False
    assert ask(endpoint, "/healthz") == (503, "the heartbeat has ended\n")


@pytest.mark.parametrize("path", ["/", "/metrics/", "/healthz/x", "/../etc/passwd", "//"])
def test_nothing_else_is_there(endpoint: Endpoint, path: str) -> None:
    status, body = ask(endpoint, path)
    assert status == 404
    assert "/readyz" in body


def test_a_page_that_fails_ends_its_request_alone(worker: Worker, free_port: int) -> None:
    def broken(accept: str) -> tuple[str, bytes]:
        raise RuntimeError("no metrics")

    with Endpoint(str(free_port), broken, worker.health) as endpoint:
        with pytest.raises(http.client.HTTPException):
            ask(endpoint, "/metrics")
        assert ask(endpoint, "/readyz") == (200, "ok\n")


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "a..b", "x" * 300])
def test_an_address_where_it_can_not_listen_is_named(worker: Worker, free_port: int, host: str) -> None:
    with pytest.raises(SettingsError, match=r"metrics_address: can't listen at .*EMBEDCTL_METRICS_ADDRESS"):
        Endpoint(f"{host}:{free_port}", lambda accept: ("", b""), worker.health)
