"""All jobs of a process share a few connections: kept, by threads, in children, and with other passwords."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from redis import Redis

from embedctl import AsyncJob, Job, enqueue_embeddings
from embedctl.queueing import broker as broker_module
from embedctl.queueing.broker import Broker
from embedctl.store import connection
from embedctl_config.hardware import HardwareClass
from embedctl_config.settings import Settings
from tests.support.redis_server import RedisServer
from tests.support.waiting import PATIENCE_S, eventually


def clients(raw: Redis) -> int:
    """How many connections there are beside the test's own."""
    return len(raw.client_list()) - 1


def submit(settings: Settings, text: str = "text") -> Job:
    return enqueue_embeddings([text], settings=settings)


def test_settings_that_say_the_same_share_a_broker(settings: Settings) -> None:
    again = dataclasses.replace(settings, classes=dict(settings.classes), models=dict(settings.models))
    assert Broker.shared(again) is Broker.shared(settings)
    assert Broker.shared(settings.replace(lease_s=9.0)) is not Broker.shared(settings)
    assert Broker.connect(settings) is not Broker.shared(settings)  # who asks for a broker of its own has one


def test_tables_that_are_changed_later_are_other_settings(settings: Settings) -> None:
    options = {"dim": 16}
    mine = dataclasses.replace(settings, classes={"dummy": HardwareClass(backend="dummy", options=options)})
    before = Broker.shared(mine)
    options["dim"] = 8
    after = Broker.shared(mine)
    assert after is not before
    assert after.settings == mine != before.settings


def test_threads_share_it(settings: Settings, raw: Redis) -> None:
    others, start = clients(raw), threading.Barrier(12)  # earlier tests of this process share some

    def work(number: int) -> list[str]:
        start.wait()
        jobs = [submit(settings, f"{number} {i}") for i in range(3)]
        if number % 4 == 0:
            jobs[0].close()  # in the middle of what the others do
        return [job.status().id for job in jobs]

    with ThreadPoolExecutor(12) as pool:
        ids = [job_id for found in pool.map(work, range(12)) for job_id in found]
    assert len(set(ids)) == 36
    assert clients(raw) - others <= 12 + 1  # one renews the leases of all


def test_parent_and_child_go_on_after_a_fork_whoever_holds_the_lock_of_brokers(settings: Settings) -> None:
    kept = submit(settings)
    held, fork_is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with broker_module._shared._lock:
            held.set()
            fork_is_over.wait()

    threading.Thread(target=hold, daemon=True).start()
    assert held.wait(PATIENCE_S)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(int(PATIENCE_S))  # ends a child that hangs
            assert submit(settings).status().records == kept.status().records == 1
            code = 0
        finally:
            os._exit(code)
    fork_is_over.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert submit(settings).status().records == kept.status().records == 1


@pytest.fixture
def alone(own_redis: RedisServer, own_raw: Redis, settings: Settings) -> tuple[Settings, Redis]:
    return settings.replace(redis_url=own_redis.url), own_raw


def test_a_closed_job_and_all_others_can_still_be_asked(alone: tuple[Settings, Redis]) -> None:
    settings, raw = alone
    with submit(settings) as job:
        other = submit(settings)
        assert clients(raw) >= 1
    eventually(lambda: clients(raw) == 0)
    assert job.status().records == other.status().records == 1
    for _ in range(2):
        job.close()
    eventually(lambda: clients(raw) == 0)


def test_a_password_that_was_changed_is_read_again(
    own_redis: RedisServer, own_raw: Redis, tmp_path: Path, settings: Settings
) -> None:
    admin = own_raw
    file = tmp_path / "password"

    def change(password: str) -> None:
        admin.execute_command("ACL", "SETUSER", "me", "on", "resetpass", f">{password}", "~*", "&*", "+@all")  # type: ignore[no-untyped-call]  # redis-py gives it no types
        file.write_text(password + "\n")
        for each in admin.client_list():
            if each["user"] == "me":
                admin.client_kill_filter(_id=each["id"])

    change("first/@")
    mine = settings.replace(redis_url=own_redis.url.replace("unix://", "unix://me@"), redis_password_file=str(file))
    job = submit(mine)
    change("second:%")
    assert submit(mine).status().records == job.status().records == 1


def test_stale_connections_are_not_trusted(alone: tuple[Settings, Redis], monkeypatch: pytest.MonkeyPatch) -> None:
    settings, raw = alone

    def ids() -> set[str]:
        return {each["id"] for each in raw.client_list()} - {str(raw.client_id())}

    submit(settings)
    before = ids()
    submit(settings)
    assert before & ids()
    monkeypatch.setattr(connection, "STALE_S", -1.0)
    submit(settings)
    eventually(lambda: not before & ids())


def test_jobs_go_on_though_the_connection_was_closed_meanwhile(alone: tuple[Settings, Redis]) -> None:
    settings, raw = alone
    for _ in range(3):
        assert submit(settings).status().records == 1
        raw.client_kill_filter(_type="normal", skipme=True)


@pytest.mark.parametrize("kind", [Job, AsyncJob])
def test_a_job_says_what_to_send_in_its_place(settings: Settings, kind: type) -> None:
    job = submit(settings)
    with pytest.raises(TypeError, match=rf"send its id, and get it there by {kind.__name__}.get\('{job.id}'\)"):
        pickle.dumps(job if kind is Job else AsyncJob(job))
