"""The users of `embedctl config acl`: what is not their work is denied. `pytest --acl tests/e2e` does their work."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
import redis as redis_py
from redis.backoff import NoBackoff
from redis.retry import Retry

from embedctl import enqueue_embeddings
from embedctl.operating.acl import USERS, access_list, read_passwords
from embedctl_config import keys
from embedctl_config.celery_app import make_celery
from tests.support.dashboard import dashboard
from tests.support.here import Here
from tests.support.jobs import assert_encoded, reference
from tests.support.monitor import running_monitor
from tests.support.redis_server import RedisServer, emptied
from tests.support.tls import VERSIONS, restricted_redis
from tests.support.waiting import PATIENCE_S, eventually

JOB = "20260731-235959-0123456789"
QUEUE = keys.queue("dummy", "dummy")
TEXT, VECTORS = keys.chunk_input(JOB, 0), keys.chunk_result(JOB, 0)
PIDBOX, EVENTS = "/0.celery.pidbox", "/0.celeryev/worker.heartbeat"

#: Commands that only the administrator may run.
NOBODY = [
    ("GET", "another:key"),
    ("SET", "another:key", "x"),
    ("KEYS", "*"),
    ("SCAN", "0"),
    ("FLUSHALL",),
    ("CONFIG", "GET", "*"),
    ("ACL", "LIST"),
    ("CLIENT", "LIST"),
    ("MONITOR",),
    ("EVAL", "return 1", "0"),
    ("SCRIPT", "FLUSH"),
    ("SHUTDOWN", "NOSAVE"),
    ("PUBLISH", "another:channel", "x"),
    ("SUBSCRIBE", "another:channel"),
    ("LRANGE", QUEUE, "0", "-1"),
]
DENIED = {
    "producer": [
        ("BRPOP", QUEUE, "0.1"),
        ("RPOP", QUEUE),
        ("DEL", QUEUE),
        ("RENAMENX", keys.uncommitted_result(JOB, 0, "t"), VECTORS),
        ("HGET", "unacked", "tag"),
        ("SMEMBERS", "_kombu.binding.celery.pidbox"),
        ("PUBLISH", PIDBOX, "x"),
        ("PUBLISH", EVENTS, "x"),
        ("PSUBSCRIBE", "/0.celeryev/*"),
    ],
    "worker": [
        ("RENAME", TEXT, keys.chunk_input(JOB, 1)),
        ("HGETALL", keys.file("file-0")),
        ("HSET", keys.batch("batch_0"), "status", "completed"),
        ("XREAD", "STREAMS", keys.events(JOB), "0"),
        ("ZREVRANGE", keys.JOBS, "0", "-1"),
        ("PSUBSCRIBE", "/0.*"),
        ("PUBLISH", "/1.celery.pidbox", "x"),
    ],
    "monitor": [
        ("GET", TEXT),
        ("GET", VECTORS),
        ("HGETALL", keys.file("file-0")),
        ("HGETALL", keys.batch("batch_0")),
        ("EXISTS", VECTORS),
        ("SET", keys.heartbeat("w"), "x"),
        ("HSET", keys.job(JOB), "state", "completed"),
        ("UNLINK", keys.job(JOB)),
        ("EVALSHA", "0" * 40, "0"),
        ("SCRIPT", "LOAD", "return 1"),
        ("PUBLISH", PIDBOX, "x"),
        ("PSUBSCRIBE", "/0.celeryev/*"),
    ],
    "flower": [
        ("GET", TEXT),
        ("GET", VECTORS),
        ("EXISTS", VECTORS),
        ("UNLINK", keys.job(JOB)),
        ("XREAD", "STREAMS", keys.events(JOB), "0"),
    ],
}
#: What only Redis 7 can deny besides, where it was told who reads only.
DENIED_BY_7 = {
    "flower": [
        ("DEL", keys.job(JOB)),
        ("HSET", keys.job(JOB), "state", "completed"),
        ("ZADD", keys.WORKERS, "1", "w"),
        ("ZREM", keys.JOBS, JOB),
        ("LPUSH", QUEUE, "x"),
        ("BRPOP", QUEUE, "0.1"),
    ]
}


@pytest.fixture(scope="module", params=VERSIONS)
def acl_redis(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    with restricted_redis(request.param) as server:
        yield server


#: For what no newer rule has to do with, and for what reads only where Redis was told so.
OLD = pytest.mark.parametrize("acl_redis", ["6.2"], indirect=True)
NEW = pytest.mark.parametrize("acl_redis", ["7"], indirect=True)


@pytest.fixture
def redis_server(acl_redis: RedisServer) -> Iterator[RedisServer]:
    with emptied(acl_redis):
        yield acl_redis


@pytest.mark.parametrize("user", list(USERS))
def test_what_is_not_its_work_is_denied(user: str, acl_redis: RedisServer) -> None:
    client = redis_py.Redis.from_url(acl_redis.url_of(user))
    wants = [*NOBODY, *DENIED[user]]
    if "%R~" in (acl_redis.folder / "users.acl").read_text():
        wants += DENIED_BY_7.get(user, [])
    assert [command for command in wants if _may(client, command)] == []
    client.close()
    assert not _gets_in(acl_redis, user, "wrong")
    assert not _gets_in(acl_redis, None, None)


def _may(client: redis_py.Redis, command: tuple[str, ...]) -> bool:
    try:
        client.execute_command(*command)  # type: ignore[no-untyped-call]  # redis-py has no types for it
    except redis_py.exceptions.NoPermissionError:
        return False
    except redis_py.exceptions.ResponseError:  # for example a wrong type: the access list let the command through
        return True
    return True


def test_a_restart_of_redis_keeps_all_jobs_and_nobody_is_its_default_user(here: Here, acl_redis: RedisServer) -> None:
    job = enqueue_embeddings(["one", "two"], hardware="dummy", settings=here.settings)
    acl_redis.stop()
    acl_redis.start()
    assert job.status().records == 2
    here.start_worker()
    assert_encoded(job, ["one", "two"])
    with redis_py.Redis(unix_socket_path=f"{acl_redis.folder}/redis.sock", retry=Retry(NoBackoff(), 0)) as nobody:
        with pytest.raises(redis_py.exceptions.AuthenticationError):
            nobody.ping()
        with pytest.raises(redis_py.exceptions.AuthenticationError):
            nobody.execute_command("AUTH", "default", "")


@OLD
def test_a_monitor_sees_jobs_and_workers_and_is_told_what_it_may_not(here: Here, acl_redis: RedisServer) -> None:
    here.start_worker()
    job = enqueue_embeddings(["one", "two", ""], settings=here.settings)
    job.wait(timeout=60)
    here.raw.zadd(keys.JOBS, {JOB: 1})  # a job that is gone; other users would take it off the list
    here.environment["EMBEDCTL_REDIS_URL"] = acl_redis.url_of("monitor")
    assert json.loads(here.embedctl("status", job.id, "--json").stdout)["done"] == 2
    assert job.id in here.embedctl("list").stdout
    looked = here.embedctl("doctor")
    assert (looked.returncode, "1 live for dummy on dummy" in looked.stdout) == (0, True), looked.stdout + looked.stderr
    refused = here.embedctl("discard", job.id)
    assert (refused.returncode, "does not let its user do this" in refused.stderr) == (77, True), refused.stderr
    assert job.status().done == 2
    here.raw.acl_log_reset()  # what status would have said of the record that failed, and this: denied on purpose


@OLD
def test_the_metrics_of_the_backlog_need_no_other_user(here: Here) -> None:
    here.start_worker()
    enqueue_embeddings(["a text"], model="nobody-serves-it", hardware="dummy", settings=here.settings)
    with running_monitor(here.environment, here.folder) as monitor:
        eventually(lambda: monitor.metrics().get(("waiting_chunks", "dummy", "nobody-serves-it", "normal")) == 1)
        eventually(lambda: monitor.metrics().get(("workers_alive", "dummy", "dummy")) == 1)
        assert monitor.stop() == 0


@pytest.mark.slow
@NEW
def test_flower_works_as_its_own_user(here: Here, acl_redis: RedisServer) -> None:
    worker = here.start_worker("slow")
    with dashboard(here.environment, here.folder) as flower:
        job = enqueue_embeddings(
            [f"text {i} " + "word " * 50 for i in range(40)], chunk_size=5, hardware="slow", settings=here.settings
        )
        eventually(lambda: flower.ask("/api/queues/length")["active_queues"][0]["consumers"] == 1)
        job.wait(timeout=60)
        eventually(lambda: {task["state"] for task in flower.tasks(job.id)} == {"SUCCESS"})
        eventually(lambda: "stats" in flower.ask("/api/workers?refresh=1").get(worker.row().name, {}))
        assert flower.stop() == 0

    # The right to query workers would also allow commands to them, but workers accept none.
    remote = make_celery(here.settings.replace(redis_url=acl_redis.url_of("flower"))).control
    refused = remote.pool_shrink(1, reply=True, timeout=PATIENCE_S, limit=1)
    assert refused
    assert [list(answer) for answer in refused[0].values()] == [["error"]]
    remote.shutdown()
    remote.cancel_consumer("embed.slow.dummy")
    assert worker.row().name in (remote.inspect([worker.row().name], timeout=PATIENCE_S).ping() or {})
    enqueue_embeddings(["one more"], hardware="slow", settings=here.settings).wait(timeout=60)
    assert worker.process.poll() is None


@pytest.mark.slow
@OLD
def test_passwords_are_changed_while_a_job_runs(here: Here, acl_redis: RedisServer) -> None:
    texts = [f"text {i} " + "word " * 50 for i in range(200)]
    worker = here.start_worker("slow")
    job = enqueue_embeddings(texts, chunk_size=5, hardware="slow", settings=here.settings)
    folder, users = acl_redis.folder / "passwords", acl_redis.folder / "users.acl"
    before = users.read_text()

    def load_list() -> dict[str, tuple[str, ...]]:
        passwords, _ = read_passwords(folder)
        users.write_text(access_list(passwords, database=0, redis_7=False))
        _load_users(here.raw)
        return passwords

    try:
        eventually(lambda: job.status().chunks_done >= 3)
        (folder / "worker").rename(folder / "worker.old")
        passwords = load_list()["worker"]  # it also ends the connections of all users
        assert [_gets_in(acl_redis, "worker", password) for password in passwords] == [True, True]
        job.wait(timeout=60)
        np.testing.assert_array_equal(job.vectors(), reference(texts))
        assert worker.process.poll() is None

        (folder / "worker.old").unlink()
        load_list()
        assert [_gets_in(acl_redis, "worker", password) for password in passwords] == [True, False]
    finally:
        worker.stop()
        users.write_text(before)
        (folder / "worker").write_text(acl_redis.passwords["worker"])
        _load_users(here.raw)
        here.raw.connection_pool.disconnect()
        here.raw.acl_log_reset()


def _load_users(raw: redis_py.Redis) -> None:
    """Have Redis read its users again. The last time may have ended this client's connection a moment ago."""
    raw.connection_pool.disconnect()
    raw.acl_load()


def _gets_in(server: RedisServer, user: str | None, password: str | None) -> bool:
    client = redis_py.Redis(
        unix_socket_path=f"{server.folder}/redis.sock", username=user, password=password, retry=Retry(NoBackoff(), 0)
    )
    try:
        return bool(client.ping())
    except redis_py.exceptions.AuthenticationError:
        return False
    finally:
        client.close()
