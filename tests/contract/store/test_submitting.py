"""create, hold, add and seal: every answer that a producer can get."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace

import pytest
from redis import Redis

from embedctl.queueing.broker import Broker
from embedctl.store import Added, JobState
from embedctl.store.connection import Connection
from embedctl.store.stored_files import FileStore
from embedctl_config import keys, wire
from embedctl_config.errors import CorpusChanged, JobCancelled, JobError, JobLost, JobNotFound
from tests.support.store import (
    add,
    audited,
    claim,
    complete,
    keys_of,
    new_job,
    payload,
    some,
    spec,
    take,
    take_all,
    work,
)


def test_create_makes_a_job_that_is_submitting(broker: Broker) -> None:
    job_id, created = broker.jobs.create(spec())
    status = broker.jobs.status(job_id)
    assert created
    assert (status.state, status.sealed, status.chunks, status.records) == (JobState.SUBMITTING, False, 0, 0)
    assert (status.model, status.hardware, status.precision) == ("dummy", "dummy", "fp32")
    assert status.options == spec().options
    assert status.queue == "embed.dummy.dummy"
    assert (status.started_at, status.ended_at, status.dim, status.model_fingerprint) == (None,) * 4
    assert status.created_at == status.progressed_at
    assert job_id.startswith(status.created_at.strftime("%Y%m%d-%H%M%S-"))


@dataclass
class Ids:
    """What new jobs and files draw: the same ids until there are others. What is longer stays random."""

    drawn: list[str] = field(default_factory=lambda: ["0" * 10] * 2)

    def token_hex(self, size: int = 8) -> str:
        return secrets.token_hex(size) if size != 5 or not self.drawn else self.drawn.pop()


def test_an_id_that_another_job_has_is_drawn_again(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedctl.store.jobs.secrets", Ids())
    monkeypatch.setattr(broker.connection, "recent_now_ms", lambda: 1_000)
    first, second = new_job(broker, 2), new_job(broker, 1)
    assert first == "19700101-000001-0000000000" != second
    assert (broker.jobs.status(first).chunks, broker.jobs.status(second).chunks) == (2, 1)


def test_a_create_whose_answer_was_lost_is_not_taken_for_another_job(
    broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Connection.script
    monkeypatch.setattr(Connection, "script", lambda *args: (script(*args), script(*args))[1])
    broker.jobs.create(spec())
    assert raw.zcard(keys.JOBS) == 1


def test_an_inline_job_whose_id_another_one_has_changes_nothing_of_that(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embedctl.store.jobs.secrets", Ids())
    monkeypatch.setattr(broker.connection, "recent_now_ms", lambda: 1_000)
    job_id, _ = broker.jobs.create(spec())
    data = payload(0)
    made = broker.jobs.create_inline(spec(), data, digest=wire.digest_of(data), rows=2, token="p")
    assert (made.job_id, made.sealed_at) == (None, None)
    status = broker.jobs.status(job_id)
    assert (status.chunks, status.sealed) == (0, False)
    assert add(broker, job_id, 0, token="another")[0] is Added.OK


def test_no_file_and_no_job_share_a_name(broker: Broker, raw: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedctl.store.stored_files.secrets", Ids(["0" * 10] * 3))
    monkeypatch.setattr("embedctl.store.jobs.secrets", Ids(["0" * 10] * 2))
    monkeypatch.setattr(broker.connection, "recent_now_ms", lambda: 1_000)
    files = FileStore(broker.connection, broker.chunk_files)
    names = []
    for text in (b"one", b"two"):
        writer = files.writer()
        writer.add(text)
        file = writer.finish(tenant="a", name="f", purpose="batch", ttl_s=100)
        assert b"".join(files.read(file)) == text
        names.append(file.data)
    job_id = new_job(broker, 1)
    assert names[0] == "19700101-000001-0000000000"
    assert len({*names, job_id}) == 3
    raw.flushdb()
    monkeypatch.setattr("embedctl.store.jobs.secrets", Ids())
    assert new_job(broker, 1) == names[0]
    writer = files.writer()
    writer.add(b"three")
    assert writer.finish(tenant="a", name="f", purpose="batch", ttl_s=100).data != names[0]


def test_a_key_gives_the_job_that_it_made_while_there_is_that_and_is_not_stored(broker: Broker, raw: Redis) -> None:
    first, created = broker.jobs.create(spec(idempotency_key="nightly"))
    assert created
    before = set(raw.keys())
    assert broker.jobs.create(spec(idempotency_key="nightly")) == (first, False)
    assert set(raw.keys()) == before
    other, created = broker.jobs.create(spec(idempotency_key="weekly"))
    assert created
    assert other != first
    assert not any(b"nightly" in key for key in raw.scan_iter())
    assert not any(b"nightly" in value for value in raw.hgetall(keys.job(first)).values())
    raw.delete(keys.job(first))
    second, created = broker.jobs.create(spec(idempotency_key="nightly"))
    assert created
    assert broker.jobs.create(spec(idempotency_key="nightly")) == (second, False)


def test_a_producer_whose_lease_lapsed_is_taken_over(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 0, seal=False)
    assert add(broker, job_id, 0, token="dead")[0] is Added.OK
    assert add(broker, job_id, 1, token="heir")[0] is Added.HELD
    raw.delete(keys.producer(job_id))
    assert broker.jobs.status(job_id).stalled
    assert broker.jobs.hold(job_id, "heir")
    assert not broker.jobs.status(job_id).stalled
    assert add(broker, job_id, 0, token="heir")[0] is Added.SKIPPED
    assert add(broker, job_id, 1, token="heir")[0] is Added.OK
    assert add(broker, job_id, 2, token="dead")[0] is Added.HELD


@pytest.mark.parametrize("failed", [None, 0, 1], ids=["it waits", "it is done", "a record failed"])
def test_add_skips_a_chunk_that_is_there_and_refuses_another_in_its_place(broker: Broker, failed: int | None) -> None:
    job_id = new_job(broker, 2, seal=False)
    if failed is not None:
        work(broker, job_id, 0, failed=failed)
    before, kept = broker.jobs.status(job_id), broker.jobs.input(job_id, 0)
    assert add(broker, job_id, 0) == (Added.SKIPPED, before.waiting_bytes)
    assert add(broker, job_id, 0, word="other")[0] is Added.DIFFERS
    assert broker.jobs.input(job_id, 0) == kept
    assert replace(broker.jobs.status(job_id), expires_in=before.expires_in) == before


def test_add_to_a_sealed_job_skips_what_it_has_and_takes_no_more(broker: Broker) -> None:
    job_id = new_job(broker, 2)
    assert add(broker, job_id, 1, token="anybody")[0] is Added.SKIPPED
    assert add(broker, job_id, 1, word="other", token="anybody")[0] is Added.DIFFERS
    assert add(broker, job_id, 2, token="anybody") == (Added.SEALED, 2)
    assert broker.jobs.status(job_id).chunks == 2
    assert broker.jobs.input(job_id, 2) is None


def test_add_refuses_a_gap(broker: Broker) -> None:
    job_id = new_job(broker, 1, seal=False)
    with pytest.raises(JobLost, match=rf"only 1 of its first 2 chunks .* --resume {job_id}"):
        add(broker, job_id, 2)
    assert broker.jobs.input(job_id, 2) is None


def test_add_puts_back_an_input_that_redis_lost(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 3)
    raw.delete(keys.chunk_input(job_id, 1))
    assert take_all(broker) == [0, 2]
    audited(broker, job_id)
    assert broker.jobs.status(job_id).lost_chunks == (1, 1)
    assert add(broker, job_id, 1)[0] is Added.OK
    status = broker.jobs.status(job_id)
    assert (status.lost_chunks, status.records, status.chunks) == (None, 6, 3)
    again = some(take(broker, "again"))
    assert (again.chunk, again.input) == (1, payload(1))


def test_a_chunk_that_nobody_was_given_is_given_once_when_it_is_put_back(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker, 2)
    raw.delete(keys.chunk_input(job_id, 1))
    add(broker, job_id, 1)
    assert take_all(broker) == [0, 1]


@pytest.mark.parametrize(
    ("end", "error", "message"),
    [
        ("cancelled", JobCancelled, ""),
        ("gone", JobNotFound, ""),
        ("of another version", JobError, f"of version {wire.VERSION + 1}"),
    ],
)
def test_producers_are_told_the_end(broker: Broker, raw: Redis, end: str, error: type[JobError], message: str) -> None:
    job_id = new_job(broker, 1, seal=False)
    if end == "cancelled":
        broker.jobs.cancel(job_id)
    elif end == "gone":
        raw.delete(*keys_of(raw, job_id))
    else:
        raw.hset(keys.job(job_id), "version", wire.VERSION + 1)
    before = keys_of(raw, job_id)
    with pytest.raises(error, match=message or job_id):
        add(broker, job_id, 1)
    with pytest.raises(error, match=message or job_id):
        broker.jobs.hold(job_id, "p")
    with pytest.raises(error, match=message or job_id):
        broker.jobs.seal(job_id, 1)
    assert keys_of(raw, job_id) == before


def test_seal_refuses_fewer_chunks_than_were_added_and_more_than_there_are(broker: Broker) -> None:
    job_id = new_job(broker, 2, seal=False)
    with pytest.raises(CorpusChanged, match="holds 2 chunks, and the corpus now makes 1"):
        broker.jobs.seal(job_id, 1)
    with pytest.raises(JobLost, match=rf"only 2 of its first 3 chunks .* --resume {job_id}"):
        broker.jobs.seal(job_id, 3)
    assert not broker.jobs.status(job_id).sealed


@pytest.mark.parametrize("sealed_first", [False, True])
@pytest.mark.parametrize(
    ("failed", "state"),
    [((0, 0), JobState.COMPLETED), ((0, 2), JobState.COMPLETED_WITH_ERRORS), ((2, 2), JobState.FAILED)],
)
def test_a_job_ends_as_its_records_did_in_whichever_order_seal_and_the_last_chunk_come(
    broker: Broker, failed: tuple[int, int], state: JobState, sealed_first: bool
) -> None:
    job_id = new_job(broker, 2, seal=sealed_first)
    work(broker, job_id, 0, failed=failed[0])
    assert not broker.jobs.status(job_id).state.ended
    assert claim(broker, job_id, 1) is not None
    assert complete(broker, job_id, 1, failed=failed[1], truncated=1) == "ok"
    if not sealed_first:
        assert not broker.jobs.status(job_id).state.ended
        broker.jobs.seal(job_id, 2)
    status = broker.jobs.status(job_id)
    assert status.state is state
    assert (status.done, status.failed, status.records) == (4 - sum(failed), sum(failed), 4)
    assert (status.truncated, status.tokens, status.dim, status.waiting_bytes) == (1, 20, 3, 0)
    assert status.ended_at is not None


def test_two_tenants_may_use_one_idempotency_key(broker: Broker) -> None:
    jobs = [broker.jobs.create(spec(tenant=tenant, idempotency_key="k")) for tenant in ("a", "b", "default")]
    assert [created for _, created in jobs] == [True] * 3
    for tenant, (job_id, _) in zip(("a", "b", "default"), jobs, strict=True):
        assert broker.jobs.create(spec(tenant=tenant, idempotency_key="k")) == (job_id, False)
        assert broker.jobs.with_key("k", tenant) == job_id
    # Also where one name begins with the other, and where their hashes begin with the same 40 bits.
    assert keys.idempotency("bk", "a") != keys.idempotency("k", "ab")
    assert keys.idempotency("k", "team-767880") != keys.idempotency("k", "team-969822")


def test_a_job_that_never_was_is_not_found(broker: Broker) -> None:
    broker.jobs.create(spec())
    for job_id in ("99991231-235959-0123456789", "no-such-job", ""):
        with pytest.raises(JobNotFound) as raised:
            broker.jobs.status(job_id)
        assert not isinstance(raised.value, JobLost)
        assert repr(job_id) in str(raised.value) or job_id in str(raised.value)
    # One that is older than the database was lost.
    with pytest.raises(JobLost, match="Submit its corpus again"):
        broker.jobs.status("20200101-000000-0123456789")


def test_a_seal_that_was_refused_half_way_is_taken_up_by_the_next(broker: Broker, raw: Redis) -> None:
    """As where an access list denies a command in the middle of the script."""
    job_id = new_job(broker, 1, seal=False)
    work(broker, job_id, 0)
    raw.hset(keys.job(job_id), "sealed", "1")
    broker.jobs.seal(job_id, 1)
    assert broker.jobs.status(job_id).state is JobState.COMPLETED
