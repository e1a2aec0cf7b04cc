"""What a tenant keeps has a bound: files, batches and bytes, however they go."""

from __future__ import annotations

import re
from typing import cast

import pytest
from redis import Redis

from embedctl.queueing.broker import Broker
from embedctl.store import Added, Holder, PartFacts, quotas
from embedctl.store.batches import BatchStore, Step
from embedctl.store.stored_files import FileStore, KeepsEnough, Once, StoredFile
from embedctl_config import keys, wire
from embedctl_config.errors import QuotaExceeded
from tests.support.store import add, new_job, payload, work

ME, PART = Holder("me", "machine", "1.1", "host"), "part-000000.parquet"
KEPT = keys.ledger("kept")


@pytest.fixture(autouse=True)
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "KEPT_MOST", 3)
    monkeypatch.setattr(quotas, "_PAUSE_S", 0.0)
    monkeypatch.setattr(keys, "KEPT_BYTES", 16 * keys.SMALL_FILE_BYTES)


class Keeping:
    def __init__(self, broker: Broker, raw: Redis) -> None:
        self.files = FileStore(broker.connection, broker.chunk_files)
        self.raw = raw

    def written(self, size: int, tenant: str = "a") -> StoredFile:
        writer = self.files.writer()
        writer.add(bytes(size))
        return writer.finish(tenant=tenant, name="f", purpose="batch", ttl_s=100)

    def keep(self, size: int = 1, tenant: str = "a") -> StoredFile:
        file = self.written(size, tenant)
        self.files.make(file, Once(file.id, "digest", again=False))
        return file

    def look_anew(self) -> None:
        """As if all had been counted some time ago."""
        self.raw.delete(*self.raw.keys(keys.ledger("counted:*")), "none")


@pytest.fixture
def keeping(broker: Broker, raw: Redis) -> Keeping:
    return Keeping(broker, raw)


def test_one_file_more_than_a_tenant_may_keep_is_refused(keeping: Keeping, raw: Redis) -> None:
    kept = [keeping.keep() for _ in range(3)]
    with pytest.raises(KeepsEnough):
        keeping.keep()
    keeping.keep(tenant="b")
    keeping.files.remove(kept[0])
    keeping.keep()
    raw.delete(keys.file(kept[1].id))  # it has expired
    with pytest.raises(KeepsEnough):
        keeping.keep()
    keeping.look_anew()
    keeping.keep()
    assert raw.hget(KEPT, keys.files("a")) == b"3"
    assert all(raw.pttl(name) > 0 for name in raw.keys("embed:*"))


@pytest.mark.parametrize("descending", [False, True])
def test_a_list_comes_in_its_order_some_at_a_time_and_forgets_what_is_gone(
    keeping: Keeping, raw: Redis, monkeypatch: pytest.MonkeyPatch, descending: bool
) -> None:
    monkeypatch.setattr(keys, "KEPT_MOST", 10)
    ids = sorted((keeping.keep().id for _ in range(6)), reverse=descending)
    raw.delete(*(keys.file(each) for each in ids[2:4]))  # all of a slice

    def found(after: str = "") -> list[list[str]]:
        return [[each.id for each in some] for some in keeping.files.newest("a", 2, after, descending=descending)]

    assert found() == [ids[:2], [], ids[4:], []]
    assert found() == [ids[:2], ids[4:], []]
    assert found(ids[1]) == [ids[4:], []]
    assert list(keeping.files.newest("a", 2, descending=descending, purpose="another")) == [[]]  # asked for at once
    assert raw.zcard(keys.files("a")) == 4


def test_the_last_bytes_are_for_small_files(keeping: Keeping, raw: Redis) -> None:
    mib = keys.SMALL_FILE_BYTES
    large = keeping.keep(14 * mib)
    with pytest.raises(KeepsEnough):
        keeping.keep(mib + 1)
    keeping.keep(mib)
    raw.delete(keys.file(large.id))
    keeping.look_anew()
    keeping.keep(12 * mib)
    assert int(raw.hget(KEPT, keys.files("a")) or 0) == 13 * mib
    keeping.look_anew()
    raw.delete(KEPT)
    keeping.keep(mib)
    assert int(raw.hget(KEPT, keys.files("a")) or 0) == 14 * mib


def test_answers_to_a_batch_find_room_and_are_counted(keeping: Keeping, broker: Broker, raw: Redis) -> None:
    batches = BatchStore(broker.connection)
    for number in range(3):
        batches.make(f"batch_{number}", {"tenant": "a"}, Once(str(number), "digest", again=False))
        keeping.keep()
    with pytest.raises(KeepsEnough):
        batches.make("batch_3", {"tenant": "a"}, Once("3", "digest", again=False))
    batch = batches.take("token", 30.0)
    assert batch is not None
    answers = keeping.written(10)
    assert batches.note(batch, "token", Step({"status": "completed"}, after="end", files=[answers])) == "completed"
    assert keeping.files.get(answers.id, "a") == answers
    assert raw.hget(KEPT, keys.files("a")) == b"13"


#: What is expected counts for nothing, so that what is noted is what is stored.
KEEPS = "1000000 0 0 1"


class Jobs:
    """The jobs of a tenant, of a gateway."""

    def __init__(self, broker: Broker, raw: Redis) -> None:
        self.broker, self.raw = broker, raw

    def make(self, chunks: int = 2, *, seal: bool = True, keeps: str = KEEPS, tenant: str = "a") -> str:
        return new_job(self.broker, chunks, seal=seal, keeps=keeps, tenant=tenant)

    def noted(self, job_id: str) -> int:
        """What is noted of a job, beside what is noted of each; the sum is that of all jobs."""
        noted = cast(dict[bytes, bytes], self.raw.hgetall(keys.kept("a")))  # this client decodes nothing
        kept = {name.decode(): int(value) for name, value in noted.items()}
        kept.pop("cursor", None)
        assert kept.pop("sum") == sum(kept.values())
        chunks = int(self.raw.hget(keys.job(job_id), "added") or 0)
        return kept[job_id] - 4096 - 512 * chunks - len(self.raw.hget(keys.job(job_id), "options") or b"")

    def stored(self, job_id: str) -> int:
        """What Redis has of a job."""
        names = [name.decode() for name in cast(list[bytes], self.raw.keys(keys.job(job_id) + ":*"))]
        parts = sum(map(len, self.raw.hvals(keys.parts(job_id))))
        return parts + sum(self.raw.strlen(name) for name in names if re.search(r":(in|out):\d+$", name))

    def check(self, job_id: str) -> None:
        assert self.noted(job_id) == self.stored(job_id)


@pytest.fixture
def jobs(broker: Broker, raw: Redis) -> Jobs:
    return Jobs(broker, raw)


def test_what_is_noted_of_a_job_is_what_redis_has_of_it_at_each_step(jobs: Jobs, broker: Broker, raw: Redis) -> None:
    job_id = jobs.make(4)
    jobs.check(job_id)
    for chunk, failed in ((0, 0), (1, 1), (2, 2), (3, 0)):
        work(broker, job_id, chunk, failed=failed)
        jobs.check(job_id)
    assert broker.jobs.retry(job_id, 1, 4, "p") == 1
    jobs.check(job_id)
    broker.jobs.seal(job_id, 5)
    work(broker, job_id, 4)
    jobs.check(job_id)
    raw.delete(keys.chunk_result(job_id, 0))  # Redis has lost it, and the corpus repairs it
    add(broker, job_id, 0)
    work(broker, job_id, 0)
    lost = jobs.noted(job_id) - jobs.stored(job_id)
    assert 0 < lost < 200, "what Redis has lost counts until the job is gone"
    broker.drains.take(job_id, ME, high_water=10**6, place="/parts")
    facts = PartFacts("ab", 100, 2, 3, 4)
    digests = b"".join(wire.digest_of(payload(chunk)) for chunk in (2, 3))
    # Who drains says how many bytes that frees, and may be wrong: what counts is what is freed.
    assert broker.drains.note(job_id, "me", PART, facts, result_bytes=10**9, digests=digests) == "ok"
    assert jobs.noted(job_id) - jobs.stored(job_id) == lost
    broker.drains.unlink(job_id, [2, 3])
    assert jobs.noted(job_id) - jobs.stored(job_id) == lost


@pytest.mark.parametrize("how", ["stop", "cancel"])
def test_a_job_that_ends_early_counts_until_its_bytes_are_gone(jobs: Jobs, broker: Broker, how: str) -> None:
    job_id = jobs.make(3, seal=False)
    work(broker, job_id, 0)
    getattr(broker.jobs, how)(job_id)
    jobs.check(job_id)
    if how == "stop":
        assert not broker.upkeep.settle_slice(job_id)
        jobs.check(job_id)
        broker.jobs.resume(job_id, "p")
        for chunk in range(3):
            add(broker, job_id, chunk)
        jobs.check(job_id)
    else:
        assert broker.upkeep.free_slice(job_id, 3, results=True)
        broker.quotas.note("a", [job_id])
        assert jobs.raw.hget(keys.kept("a"), "sum") == b"4096"


def test_a_tenant_that_keeps_enough_is_refused_until_something_is_gone_and_others_go_on(
    jobs: Jobs, keeping: Keeping, broker: Broker, raw: Redis
) -> None:
    keeps = "21500 1000 0 1"  # a record gives 1,000 bytes
    job_id = jobs.make(1, keeps=keeps)  # 7 KB
    keeping.keep(5000)
    begun = jobs.make(1, seal=False, keeps=keeps)
    with pytest.raises(
        QuotaExceeded, match=r"tenant a keeps 1\d,\d+ of at most 21,500 bytes in jobs and files"
    ) as raised:
        add(broker, begun, 1)
    assert (raised.value.tenant, raised.value.limit) == ("a", "max_kept_bytes")
    with pytest.raises(QuotaExceeded):
        jobs.make(0, seal=False, keeps=keeps)
    jobs.make(2, keeps=keeps, tenant="b")
    new_job(broker, tenant="a")  # by its own Redis: no gateway bounds it
    work(broker, begun, 0)  # what it has given is less than was expected
    jobs.make(0, seal=False, keeps=keeps)
    raw.delete(keys.job(job_id))  # it has expired, and nothing tells that
    broker.quotas.correct("a")
    assert add(broker, begun, 1)[0] is Added.OK


def test_notes_that_are_wrong_or_lost_are_corrected_where_room_is_short(
    jobs: Jobs, keeping: Keeping, raw: Redis
) -> None:
    gone = [jobs.make(1, keeps="20000 0 0 1") for _ in range(2)]
    for job_id in gone:
        raw.delete(keys.job(job_id))  # they have expired
    raw.hset(keys.kept("a"), mapping={"sum": 10**9, "cursor": 77})
    left = jobs.make(1)
    jobs.check(left)
    raw.hset(keys.kept("a"), "sum", 16 * keys.SMALL_FILE_BYTES)
    keeping.keep()
    jobs.check(left)


#: As much as all chunks of a job will give; and then as much as its tenant may keep beside it, but for the last tenth.
WHOLE, ROOM = 30_000, 60_000


def test_a_job_whose_size_is_known_begins_with_room_for_all_of_it(jobs: Jobs, broker: Broker, raw: Redis) -> None:
    keeps = f"{(WHOLE + ROOM) * 10 // 9} 0 0 1 {WHOLE}"
    first = jobs.make(0, seal=False, keeps=keeps)
    second = jobs.make(0, seal=False, keeps=keeps)
    third = jobs.make(0, seal=False, keeps=keeps)
    for _ in range(2):
        assert int(raw.hget(keys.kept("a"), "sum") or 0) == 3 * WHOLE
        with pytest.raises(QuotaExceeded):
            jobs.make(0, seal=False, keeps=keeps)
        broker.quotas.correct("a")
    filled = [jobs.make(0, seal=False, keeps="100000 0 0 1") for _ in range(2)]  # the last tenth
    with pytest.raises(QuotaExceeded):
        jobs.make(0, seal=False, keeps="100000 0 0 1")
    assert all(add(broker, first, chunk)[0] is Added.OK for chunk in range(3))  # it has its room already
    broker.jobs.seal(first, 3)
    jobs.check(first)  # from now on, it counts as what it is
    broker.jobs.cancel(second)
    broker.jobs.stop(third)
    for job_id in filled:
        broker.jobs.cancel(job_id)
    assert int(raw.hget(keys.kept("a"), "sum") or 0) < WHOLE
    jobs.make(0, seal=False, keeps=keeps)


def test_a_job_that_gives_more_than_was_reckoned_needs_room_for_the_rest(jobs: Jobs, broker: Broker) -> None:
    job_id = jobs.make(0, seal=False, keeps="21000 3000 0 1 8000")
    assert [add(broker, job_id, chunk)[0] for chunk in range(2)] == [Added.OK] * 2
    with pytest.raises(QuotaExceeded) as raised:
        add(broker, job_id, 2)
    assert raised.value.most == 21_000


@pytest.mark.parametrize(("beside", "waits", "is_final"), [(0, False, False), (4000, False, True), (4000, True, False)])
def test_a_job_that_alone_needs_more_than_there_is_is_told_so_once_nothing_else_makes_room(
    jobs: Jobs, broker: Broker, raw: Redis, beside: int, waits: bool, is_final: bool
) -> None:
    job_id = jobs.make(0, seal=False, keeps=f"10000 0 0 1 0 {beside}")
    other = jobs.make(0, seal=False)
    add(broker, job_id, 0)
    if not waits:
        work(broker, job_id, 0)
    with pytest.raises(QuotaExceeded) as raised:
        add(broker, job_id, 1)
    assert raised.value.is_final == is_final
    raw.delete(keys.job(other))
    broker.quotas.correct("a")
    if not beside:
        assert add(broker, job_id, 1)[0] is Added.OK
