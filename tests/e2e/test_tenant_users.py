"""A tenant's own user of Redis does all that a tenant does, and reads nothing of another tenant's jobs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import redis as redis_py

from embedctl import Job, enqueue_embeddings
from embedctl.queueing.broker import Broker
from embedctl_config import keys, tenants
from embedctl_config.errors import QuotaExceeded
from embedctl_config.settings import Settings
from embedctl_config.tenants import TenantEntry
from tests.support.here import Here
from tests.support.jobs import owners, reference
from tests.support.processes import RunEmbedctl
from tests.support.redis_server import RedisServer, emptied
from tests.support.tls import VERSIONS, restricted_redis
from tests.support.waiting import eventually

TEXTS = [f"text {i} " + "word " * 60 for i in range(20)]
BAD = 7
#: Reads a key of any type, whole.
READS = {
    "string": ("GET", "{}"),
    "hash": ("HGETALL", "{}"),
    "zset": ("ZRANGE", "{}", "0", "-1"),
    "stream": ("XREAD", "STREAMS", "{}", "0"),
}


def content(client: redis_py.Redis, key: bytes) -> Any:
    """What a key of any type holds."""
    kind = client.type(key).decode()  # type: ignore[union-attr]  # redis-py's types are those of both its clients
    command = [part.format(key.decode()) for part in READS[kind]]
    return client.execute_command(*command)  # type: ignore[no-untyped-call]  # redis-py has no types for it


@pytest.fixture(scope="module", params=VERSIONS)
def shared_by_tenants(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A Redis whose list has users for two tenants."""
    with restricted_redis(request.param, ("acme", "globex")) as server:
        yield server


@pytest.fixture
def redis_server(shared_by_tenants: RedisServer) -> Iterator[RedisServer]:
    with emptied(shared_by_tenants):
        yield shared_by_tenants


@pytest.fixture
def become(environment: dict[str, str], redis_server: RedisServer) -> Callable[[str], None]:
    """From then on, the command line is run by this user."""

    def become(user: str) -> None:
        environment["EMBEDCTL_REDIS_URL"] = redis_server.url_of(user)

    return become


@pytest.fixture
def settings_of(settings: Settings, redis_server: RedisServer) -> Callable[[str], Settings]:
    return lambda user: settings.replace(redis_url=redis_server.url_of(user))


@pytest.mark.slow
def test_a_tenant_does_all_of_its_work(
    here: Here, settings_of: Callable[[str], Settings], become: Callable[[str], None]
) -> None:
    """With a worker that dies and a record that fails and is retried; no command is denied (see `emptied`)."""
    texts = [*TEXTS[:BAD], "", *TEXTS[BAD + 1 :]]
    (here.folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    doomed = here.start_worker("slow")
    become("tenant-acme")
    settings = settings_of("tenant-acme")
    submitted = here.embedctl(
        "submit", "corpus.jsonl", "--class", "slow", "--chunk-size", "5", "--resume", "nightly", status=0
    )
    job = Job.get(submitted.stdout.strip(), settings)
    assert job.status().tenant == "acme"
    assert keys.tag_in(job.id) == tenants.tag_of("acme")
    eventually(lambda: owners(here.raw, job) and doomed.row().progressed_ms)
    again = here.embedctl("submit", "corpus.jsonl", "--class", "slow", "--chunk-size", "5", "--resume", "nightly")
    assert again.stdout.strip() == job.id, again.stderr
    doomed.kill()
    become("producer")
    here.start_worker("slow")
    become("tenant-acme")
    assert here.embedctl("wait", job.id).returncode == 3
    assert "1 records queued again" in here.embedctl("retry", job.id[-6:]).stderr
    assert here.embedctl("wait", job.id).returncode == 3
    for verb in (["status", job.id], ["list"], ["errors", job.id], ["doctor"]):
        here.embedctl(*verb, status=0)
    here.embedctl("fetch", job.id, "-o", "out.npy", status=3)
    good = [at for at in range(len(texts)) if at != BAD]
    np.testing.assert_array_equal(np.load(here.folder / "out.npy")[good], reference([texts[at] for at in good]))
    assert here.embedctl("discard", job.id).returncode == 0
    # The killed worker may have stored a result that it did not get to count. That has a time to live of its own.
    uncommitted = re.compile(rb":out:\d+:")
    assert not [name for name in here.raw.scan_iter(f"*{job.id}*") if not uncommitted.search(name)]

    given_up = enqueue_embeddings(TEXTS * 20, hardware="slow", chunk_size=20, settings=settings)
    eventually(lambda: given_up.status().claims)
    assert here.embedctl("cancel", given_up.id).returncode == 0
    eventually(lambda: not list(here.raw.scan_iter(f"embed:job:{given_up.id}:in:*")))


def test_another_tenant_reads_and_changes_nothing_of_a_job(
    here: Here, settings_of: Callable[[str], Settings], become: Callable[[str], None], redis_server: RedisServer
) -> None:
    here.start_worker()
    theirs, others = settings_of("tenant-acme"), settings_of("tenant-globex")
    jobs = [
        enqueue_embeddings(["a", "b", ""], idempotency_key="k", settings=theirs),
        enqueue_embeddings(["a", "b", ""], idempotency_key="k", settings=settings_of("producer")),
    ]
    for job in jobs:
        job.wait(timeout=60)
    waiting = [
        enqueue_embeddings(["a"] * 20, chunk_size=2, model="nobody-serves-it", hardware="dummy", settings=each)
        for each in (theirs, settings_of("producer"))
    ]
    ids = [job.id for job in (*jobs, *waiting)]

    found = [key for key in here.raw.scan_iter("*") if any(job_id in key.decode() for job_id in ids)]
    assert {f"embed:job:{job_id}" for job_id in ids} <= {key.decode() for key in found}
    assert any(b":in:" in key for key in found)
    assert any(b":out:" in key for key in found)
    found += here.raw.keys("embed:idempotency:*")
    client = redis_py.Redis.from_url(redis_server.url_of("tenant-globex"))
    before = {key: content(here.raw, key) for key in found}
    touched = []
    for key in found:
        reads = [[part.format(key.decode()) for part in command] for command in READS.values()]
        for tried in (*reads, ["EXISTS", key], ["UNLINK", key], ["PEXPIRE", key, "1"]):
            try:
                client.execute_command(*tried)  # type: ignore[no-untyped-call]
            except redis_py.exceptions.NoPermissionError:
                continue
            touched.append(tried)
    assert touched == []
    client.close()

    become("tenant-globex")
    for job_id in (ids[0], ids[1][-6:]):
        for verb in ("status", "cancel", "errors", "wait", "discard", "retry"):
            refused = here.embedctl(verb, job_id)
            assert (refused.returncode, "Traceback" in refused.stderr) == (4, False), (verb, refused.stderr)
            assert "job" in refused.stderr
    assert not any(job_id in here.embedctl("list").stdout for job_id in ids)
    assert not any(job_id in here.embedctl("status").stdout for job_id in ids)
    assert {key: content(here.raw, key) for key in found} == before
    # Two tenants may use one key for different jobs.
    own = enqueue_embeddings(["another"], idempotency_key="k", settings=others)
    assert own.id not in ids
    own.wait(timeout=60)
    here.raw.acl_log_reset()  # it was denied on purpose


def test_a_user_makes_jobs_of_its_own_tenant_alone(become: Callable[[str], None], embedctl: RunEmbedctl) -> None:
    become("tenant-acme")
    refused = embedctl("submit", "-", "--class", "dummy", "--tenant", "globex", stdin='{"text": "a"}\n', status=2)
    assert "tenant 'globex': this process is user tenant-acme of Redis" in refused.stderr


@pytest.mark.slow
def test_a_job_has_its_turn_whoever_chooses(
    here: Here, settings_of: Callable[[str], Settings], redis_server: RedisServer
) -> None:
    """Another tenant's job is first; its producer is gone. A tenant's process leaves that choice to the workers."""
    before = enqueue_embeddings(TEXTS * 10, chunk_size=5, hardware="slow", settings=settings_of("tenant-globex"))
    mine = enqueue_embeddings(TEXTS, chunk_size=5, hardware="slow", settings=settings_of("tenant-acme"))
    queue = mine.status().queue
    turns = [keys.lanes(queue), keys.flows(tenants.NORMAL, queue), keys.issued(queue, "large")]
    turns += [keys.flow(tenants.NORMAL, name, queue) for name in ("acme", "globex")]
    there = {key: set(here.raw.zrange(key, 0, -1)) for key in turns}
    here.raw.zadd(keys.flows(tenants.NORMAL, queue), {"globex": -1e15})  # it is its turn
    assert Broker.connect(settings_of("tenant-acme")).jobs.issue(mine.id, queue) == []
    assert {key: set(here.raw.zrange(key, 0, -1)) for key in turns} == there
    here.start_worker("slow")
    mine.wait(timeout=60)
    assert before.status().chunks_done < before.status().chunks  # equal shares, and it has ten times as much
    np.testing.assert_array_equal(mine.vectors(), reference(TEXTS))
    before.cancel()


def test_a_tenant_s_limits_hold_for_its_own_user(settings: Settings, settings_of: Callable[[str], Settings]) -> None:
    Broker.shared(settings).quotas.state("acme", TenantEntry(max_jobs=1), by="w", since_ms=1)
    acme, globex = settings_of("tenant-acme"), settings_of("tenant-globex")
    job = enqueue_embeddings(["text"], settings=acme)
    with pytest.raises(QuotaExceeded, match="tenant acme has 1 of at most 1 jobs"):
        enqueue_embeddings(["text"], settings=acme)
    enqueue_embeddings(["text"], settings=globex)
    assert [(quota.tenant, quota.used["max_jobs"]) for quota in Broker.shared(acme).quotas.all(10)] == [("acme", 1)]
    assert Broker.shared(globex).quotas.all(10) == []
    job.cancel()
    enqueue_embeddings(["text"], settings=acme)
