"""The limits of tenants: what is new is refused, what has begun waits, and what is noted of jobs never stays wrong."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import cycle
from typing import Any

import pytest
from redis import Redis

from embedctl import enqueue_embeddings
from embedctl.queueing.broker import Broker
from embedctl.queueing.reaper import Reaper
from embedctl.store import Added, quotas
from embedctl.store.ledger import Ledger, taken_with_job
from embedctl.store.quotas import Quota
from embedctl_config import keys
from embedctl_config.errors import BrokerFull, JobCancelled, QuotaExceeded, WaitTimeout
from embedctl_config.settings import Settings
from embedctl_config.tenants import TenantEntry
from embedctl_workers.serving import heartbeat
from embedctl_workers.serving.heartbeat import Limits
from tests.support.clocks import MovedClock
from tests.support.store import active_jobs, add, new_job, pass_ms, payload, some, spec, work
from tests.support.waiting import PATIENCE_S, eventually

TENANT = "search"


@pytest.fixture(autouse=True)
def corrected_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "_PAUSE_S", 0.0)


def limit(broker: Broker, *, since_ms: int = 1, by: str = "w", **limits: int) -> None:
    assert broker.quotas.state(TENANT, TenantEntry(**limits), by=by, since_ms=since_ms) is None


def noted(broker: Broker) -> tuple[int, ...]:
    (quota,) = [each for each in broker.quotas.all(100) if each.tenant == TENANT]
    return tuple(quota.used.values())


def create(broker: Broker, **changes: Any) -> str:
    return broker.jobs.create(spec(tenant=TENANT, **changes))[0]


def size(index: int) -> int:
    return len(payload(index))


def test_one_job_more_than_the_limit_is_refused_and_other_tenants_go_on(broker: Broker) -> None:
    limit(broker, max_jobs=2)
    first, _ = create(broker), create(broker)
    with pytest.raises(QuotaExceeded) as raised:
        create(broker)
    assert str(raised.value).startswith("tenant search has 2 of at most 2 jobs that have not ended (max_jobs): ")
    assert "\n" not in str(raised.value)
    assert (raised.value.tenant, raised.value.limit, raised.value.most, raised.value.used) == (TENANT, "max_jobs", 2, 2)
    new_job(broker, tenant="other")
    new_job(broker)
    broker.jobs.cancel(first)
    create(broker)


def test_a_job_that_the_idempotency_key_finds_is_not_new(broker: Broker) -> None:
    limit(broker, max_jobs=1)
    job_id = create(broker, idempotency_key="k")
    assert broker.jobs.create(spec(tenant=TENANT, idempotency_key="k")) == (job_id, False)
    with pytest.raises(QuotaExceeded):
        create(broker, idempotency_key="other")
    broker.jobs.cancel(job_id)
    assert broker.jobs.create(spec(tenant=TENANT, idempotency_key="other"))[1]  # the refusal left no key behind


def test_a_job_that_has_begun_leaves_a_tenth_to_new_jobs(broker: Broker) -> None:
    limit(broker, max_waiting_records=20)
    job_id = new_job(broker, 9, seal=False, tenant=TENANT)
    with pytest.raises(QuotaExceeded, match="has 18 of at most 20 waiting records"):
        add(broker, job_id, 9)
    assert broker.jobs.status(job_id).chunks == 9
    other = new_job(broker, 1, seal=False, tenant=TENANT)
    with pytest.raises(QuotaExceeded):
        add(broker, other, 1)
    with pytest.raises(QuotaExceeded, match="has 20 of at most 20 waiting records"):
        create(broker)
    work(broker, job_id, 0, 1)
    assert add(broker, job_id, 9)[0] is Added.OK


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_waiting_bytes": 2 * size(0)}, f"has {size(0)} of at most {2 * size(0)} bytes of waiting text"),
        ({"max_waiting_records": 1}, "has 2 of at most 1 waiting records"),  # a chunk that is larger goes alone
    ],
)
def test_records_and_bytes_have_limits(broker: Broker, limits: dict[str, Any], message: str) -> None:
    limit(broker, **limits)
    job_id = new_job(broker, 1, seal=False, tenant=TENANT)
    with pytest.raises(QuotaExceeded, match=message):
        add(broker, job_id, 1)
    work(broker, job_id, 0)
    assert add(broker, job_id, 1)[0] is Added.OK


def test_what_lapsed_or_was_lost_does_not_count_for_long(broker: Broker, raw: Redis) -> None:
    limit(broker, max_jobs=2)
    create(broker)
    doomed = create(broker)
    raw.delete(keys.job(doomed))  # its time to live ran out
    create(broker)  # a refusal is checked against the jobs first
    assert noted(broker) == (2, 0, 0)


def test_a_job_whose_producer_is_gone_counts_while_it_waits_and_needs_a_place_to_go_on(
    broker: Broker, raw: Redis
) -> None:
    limit(broker, max_jobs=1)
    job_id = new_job(broker, 1, seal=False, tenant=TENANT)
    raw.delete(keys.producer(job_id))
    with pytest.raises(QuotaExceeded):
        create(broker)  # its text waits
    assert broker.jobs.hold(job_id, "p")
    work(broker, job_id, 0)
    with pytest.raises(QuotaExceeded):
        create(broker)  # its producer lives
    raw.delete(keys.producer(job_id))
    other = new_job(broker, 1, tenant=TENANT)
    assert broker.jobs.hold(job_id, "p")  # it only stood still
    with pytest.raises(QuotaExceeded, match="has 1 of at most 1 jobs that have not ended"):
        add(broker, job_id, 1)
    assert noted(broker) == (1, 2, size(0))
    work(broker, other, 0)
    assert add(broker, job_id, 1)[0] is Added.OK
    assert noted(broker) == (1, 2, size(1))


def test_an_ended_job_that_goes_on_needs_a_place(broker: Broker) -> None:
    limit(broker, max_jobs=1)
    stopped = new_job(broker, 1, tenant=TENANT)
    broker.jobs.stop(stopped)
    failed = new_job(broker, 1, tenant=TENANT)
    work(broker, failed, 0, failed=1)
    create(broker)
    assert broker.jobs.resume(stopped, "p")
    with pytest.raises(QuotaExceeded):
        add(broker, stopped, 0)
    with pytest.raises(QuotaExceeded):
        broker.jobs.retry(failed, 0, 1, "p")
    assert noted(broker) == (1, 0, 0)


def sweep(broker: Broker) -> None:
    broker.quotas.round(broker.upkeep.agenda.sweep(broker.connection.now_ms()))


def test_jobs_from_before_the_limits_are_found(broker: Broker, raw: Any) -> None:
    """The same goes for a quota that Redis lost."""
    old = new_job(broker, 2, tenant=TENANT)
    limit(broker, max_jobs=1)
    assert noted(broker) == (0, 0, 0)
    sweep(broker)
    assert noted(broker) == (1, 4, size(0) + size(1))
    work(broker, old, 0, 1)
    assert noted(broker) == (0, 0, 0)
    raw.delete(keys.quota(TENANT))
    another = new_job(broker, 1, tenant=TENANT)
    limit(broker, max_jobs=1)
    sweep(broker)
    assert noted(broker) == (1, 2, size(0))
    assert [name for name in raw.hkeys(keys.quota(TENANT)) if name.startswith(b"job:")] == [f"job:{another}".encode()]


def test_a_round_corrects_a_slice_of_many_jobs_and_the_next_goes_on(broker: Broker, raw: Redis) -> None:
    limit(broker, max_jobs=10_000)
    gone: dict[Any, Any] = {f"job:20260101-000000-{number:010x}": "1 10" for number in range(3000)}
    raw.hset(keys.quota(TENANT), mapping={**gone, "jobs": 3000, "records": 3000, "bytes": 30_000})
    seen = []
    while noted(broker) != (0, 0, 0):
        broker.quotas.round([])
        seen.append(noted(broker)[0])
    assert 10 < len(seen) < 100
    assert all(0 < before - after < 500 for before, after in zip([3000, *seen], seen[:-1], strict=False))


def test_the_reaper_corrects(old_redis: None, broker: Broker) -> None:
    new_job(broker, 2, tenant=TENANT)
    limit(broker, max_jobs=1)

    def corrected() -> bool:
        Reaper(broker, interval_s=0.001).round()
        return noted(broker)[0] == 1

    eventually(corrected)


def test_the_worker_started_last_decides_while_it_lives(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(broker, by="old", since_ms=1, max_jobs=1)
    limit(broker, by="new", since_ms=2, max_jobs=2)
    other = some(broker.quotas.state(TENANT, TenantEntry(max_jobs=1), by="old", since_ms=1))
    assert (other.by, other.values) == ("new", (1, 2, 0, 0, 0, 0))
    limit(broker, by="old", since_ms=1, max_jobs=2)  # the same is only renewed
    assert [quota.by for quota in broker.quotas.all(10)] == ["new"]
    monkeypatch.setattr("embedctl.store.quotas.SILENT_S", -1.0)  # it has been silent for long
    limit(broker, by="old", since_ms=1, max_jobs=1)
    assert [(quota.by, quota.limits) for quota in broker.quotas.all(10)] == [("old", {"max_jobs": 1})]


def test_a_limit_of_0_takes_a_limit_away_and_keeps_what_is_noted(broker: Broker, raw: Redis) -> None:
    limit(broker)
    assert not raw.exists(keys.quota(TENANT), keys.QUOTAS)
    limit(broker, max_jobs=1)
    create(broker)
    limit(broker, since_ms=2, max_jobs=0)
    create(broker)
    assert broker.quotas.all(10) == [
        Quota(TENANT, "w", {}, {"max_jobs": 2, "max_waiting_records": 0, "max_waiting_bytes": 0})
    ]


def test_no_key_of_quotas_lives_for_ever(broker: Broker, raw: Redis) -> None:
    limit(broker, max_jobs=3)
    job_id = new_job(broker, 2, tenant=TENANT)
    raw.delete(keys.quota(TENANT))
    work(broker, job_id, 0)  # nobody makes half of it again
    assert not raw.exists(keys.quota(TENANT))
    limit(broker, max_jobs=3)
    assert min(raw.ttl(keys.quota(TENANT)), raw.ttl(keys.QUOTAS)) > 6 * 24 * 3600


def test_a_worker_states_its_limits_and_says_once_if_others_hold(
    broker: Broker, settings: Settings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "STATE_EVERY_S", 0.0)
    older, later = (
        Limits(Broker.connect(settings.replace(tenants={TENANT: TenantEntry(max_jobs=most)}))) for most in (1, 2)
    )
    older.round("older")
    eventually(lambda: broker.connection.now_ms() > older._since_ms)

    def said() -> list[str]:
        later.round("later")
        older.round("older")
        return [record.message for record in caplog.records if "tenant search" in record.message]

    eventually(lambda: bool(said()))
    assert [(quota.by, quota.limits) for quota in broker.quotas.all(10)] == [("later", {"max_jobs": 2})]
    pass_ms(broker, 10)  # longer than a turn
    (once,) = said()
    assert "because worker later, which was started later, has others: weight 1, max_jobs 2, " in once


def test_workers_with_the_same_limits_take_turns(
    broker: Broker, settings: Settings, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "STATE_EVERY_S", 1000.0)
    mine = settings.replace(tenants={TENANT: TenantEntry(max_jobs=1)})
    workers = [Limits(Broker.connect(mine)) for _ in range(3)]

    def rounds(name: str) -> None:
        for worker in workers:
            worker._next = 0.0
            worker.round(name)

    rounds("start")
    stated = raw.hget(keys.quota(TENANT), "stated")
    eventually(lambda: str(broker.connection.now_ms()).encode() > stated)
    rounds("again")
    assert raw.hget(keys.quota(TENANT), "stated") == stated
    raw.flushdb()  # Redis lost everything
    rounds("again")
    assert [quota.limits for quota in broker.quotas.all(10)] == [{"max_jobs": 1}]


def test_the_library_raises_and_leaves_no_job_behind(broker: Broker, settings: Settings) -> None:
    limit(broker, max_waiting_records=4)
    mine = settings.replace(tenant=TENANT)
    enqueue_embeddings(["a", "b", "c"], settings=mine)
    with pytest.raises(QuotaExceeded, match="has 3 of at most 4 waiting records"):
        enqueue_embeddings(["d", "e"], settings=mine, idempotency_key="k")
    assert noted(broker)[:2] == (1, 3)
    assert broker.jobs.with_key("k", TENANT) is None
    enqueue_embeddings(["d"], settings=mine, idempotency_key="k")
    with pytest.raises(QuotaExceeded, match="has 4 of at most 4 waiting records"):
        enqueue_embeddings(["e"], settings=mine)
    assert noted(broker)[:2] == (2, 4)


def test_a_job_that_has_begun_waits_for_room(broker: Broker, settings: Settings) -> None:
    """An unbounded corpus flows against the limit: each chunk follows when one is done."""
    limit(broker, max_waiting_records=4)
    mine, told = settings.replace(tenant=TENANT), []
    with ThreadPoolExecutor(1) as pool:
        submitted = pool.submit(
            enqueue_embeddings,
            [f"text {number}" for number in range(6)],
            settings=mine,
            chunk_size=2,
            progress=lambda added, why: told.append((added, why)),
            timeout=PATIENCE_S,
        )
        eventually(lambda: (2, "room within max_waiting_records of tenant search") in told)
        (job_id,) = active_jobs(broker)
        for chunk in range(3):
            eventually(lambda: broker.jobs.status(job_id).chunks > chunk)  # noqa: B023  (it is called in this turn)
            assert noted(broker)[1] <= 4
            work(broker, job_id, chunk)
        assert submitted.result().status().state == "completed"
    assert noted(broker) == (0, 0, 0)


def test_a_wait_for_room_ends_by_timeout_or_job(broker: Broker, settings: Settings, clock: MovedClock) -> None:
    limit(broker, max_waiting_records=2)
    mine = settings.replace(tenant=TENANT)

    def submit(**more: Any) -> Any:
        return enqueue_embeddings(["a", "b", "c", "d"], settings=mine, chunk_size=2, **more)

    with pytest.raises(WaitTimeout, match="waits for room within max_waiting_records of tenant search"):
        submit(timeout=999, progress=lambda _, why: clock.move(1000 * bool(why)))
    assert noted(broker) == (0, 0, 0)  # it was cancelled
    with pytest.raises(JobCancelled):
        submit(progress=lambda _, why: why and [broker.jobs.cancel(job_id) for job_id in active_jobs(broker)])


def test_a_full_redis_makes_no_job_and_lets_jobs_end(broker: Broker, raw: Redis) -> None:
    limit(broker, max_jobs=1)
    job_id = new_job(broker, 1, tenant=TENANT)
    raw.config_set("maxmemory", 1)
    try:
        with pytest.raises(QuotaExceeded):
            create(broker)
        broker.jobs.cancel(job_id)
        assert noted(broker) == (0, 0, 0)
        with pytest.raises(BrokerFull):
            create(broker)
    finally:
        raw.config_set("maxmemory", 0)
    create(broker)


def later(raw: Any, rate: str, ms: int) -> None:
    """Let so much more time have passed since this was begun last."""
    left, at_ms = raw.hget(keys.quota(TENANT), f"left:{rate}").split()
    raw.hset(keys.quota(TENANT), f"left:{rate}", f"{left.decode()} {int(at_ms) - ms}")


def begin_all(*brokers: Broker) -> int:
    """Make jobs through one after the other, until one is refused; returns how many there are."""
    for each in cycle(brokers):
        try:
            create(each)
        except QuotaExceeded as error:
            if error.limit != "max_requests_s" or not 0 < error.after_s <= 0.25:
                raise
            return len(list(brokers[0].jobs.newest()))
    raise AssertionError


def test_two_producers_begin_no_more_in_a_second_than_one(broker: Broker, raw: Redis, settings: Settings) -> None:
    limit(broker, max_requests_s=4)
    with closing(Broker.connect(settings)) as second:
        began_ms = broker.connection.now_ms()
        count = begin_all(broker, second)
        assert 4 <= count <= 4 + (broker.connection.now_ms() - began_ms) / 250
        later(raw, "max_requests_s", 3_600_000)  # nothing is saved up
        began_ms = broker.connection.now_ms()
        more = begin_all(second, broker) - count
        assert 4 <= more <= 4 + (broker.connection.now_ms() - began_ms) / 250
    later(raw, "max_requests_s", -3_600_000)  # the clock was set back
    begin_all(broker)
    later(raw, "max_requests_s", 500)
    create(broker)
    new_job(broker, tenant="other")


def test_texts_wait_for_their_second_and_a_large_chunk_owes_what_it_is_ahead(
    broker: Broker, raw: Redis, settings: Settings
) -> None:
    limit(broker, max_texts_s=1)
    first, second = create(broker), create(broker)
    assert add(broker, first, 0)[0] is Added.OK
    with pytest.raises(QuotaExceeded, match=r"at most 1 texts in a second \(max_texts_s\)") as raised:
        add(broker, second, 0)
    assert 1 < raised.value.after_s <= 2
    place = Ledger(broker.connection).taking(TENANT, {}, 1)
    with taken_with_job(place), pytest.raises(QuotaExceeded):
        create(broker)  # a gateway's request for one text does not begin in vain
    later(raw, "max_texts_s", 2000)
    assert add(broker, first, 0)[0] is Added.SKIPPED  # costs nothing
    assert add(broker, second, 0)[0] is Added.OK
    limit(broker, max_texts_s=1000, since_ms=2)
    enqueue_embeddings([f"text {number}" for number in range(1100)], chunk_size=500, tenant=TENANT, settings=settings)
