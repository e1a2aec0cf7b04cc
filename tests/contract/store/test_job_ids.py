"""What is no job's id is never made part of a key, wherever it comes from; a shortened id finds its one job."""

from __future__ import annotations

import asyncio

import pytest
from redis import Redis

from embedctl.corpus.rows import Rows, records_of
from embedctl.jobs.aio import AsyncJob
from embedctl.jobs.enqueue import job_spec, submit
from embedctl.jobs.job import Job
from embedctl.jobs.options import SubmitOptions
from embedctl.queueing.broker import Broker
from embedctl.store.job_ids import SLICE, newest_first
from embedctl_config import keys
from embedctl_config.errors import JobAmbiguous, JobNotFound
from tests.support.store import new_job

ODD = ["", "*", "../../etc/passwd", "x:in:0", "20260731-235959-012345678g", "20260731-235959-0123456789:in:0", "a\nb"]


@pytest.mark.parametrize("job_id", ODD)
def test_what_has_another_form_is_not_asked_for(job_id: str, broker: Broker, raw: Redis) -> None:
    raw.config_resetstat()
    with pytest.raises(JobNotFound):
        broker.jobs.status(job_id)
    with pytest.raises(JobNotFound):
        Job.get(job_id, broker.settings)
    with pytest.raises(JobNotFound):
        submit(broker, [], SubmitOptions(resume=job_id))
    assert broker.jobs.find([job_id]) == []
    asked = {name.removeprefix("cmdstat_") for name in raw.info("commandstats")}
    assert "get" in asked  # when the database was first used
    assert asked.isdisjoint({"hgetall", "exists", "evalsha", "keys", "scan"})


def listed(raw: Redis, *job_ids: str, at: int | None = None, gone: bool = False) -> None:
    """Put ids on the list of all jobs, each at its time of creation, or all at one."""
    raw.zadd(keys.JOBS, {job_id: keys.created_s(job_id) * 1000 if at is None else at for job_id in job_ids})
    if not gone:
        pipe = raw.pipeline()
        for job_id in job_ids:
            pipe.hset(keys.job(job_id), "version", "9")  # of another version, which only its own embedctl reads
        pipe.execute()


JOBS = (
    "20260731-235959-0123456789",
    "20260731-235959-0123456aaa",
    "20260801-000000-aaaaaa6789",
    "20261231-120000-cbf5e1e553",
)


@pytest.mark.parametrize(
    ("shortened", "job_id"),
    [
        ("20260731-235959-01234567", JOBS[0]),
        ("20260801", JOBS[2]),
        ("20260801-0", JOBS[2]),
        ("202608", JOBS[2]),
        ("202612", JOBS[3]),
        ("cbf5e1e553", JOBS[3]),
        ("e553", JOBS[3]),
        ("56789", JOBS[0]),
        ("-120000-cbf5e1e553", JOBS[3]),
        ("a6789", JOBS[2]),
    ],
)
def test_ids_may_be_shortened_at_either_end(broker: Broker, raw: Redis, shortened: str, job_id: str) -> None:
    listed(raw, *JOBS)
    assert broker.jobs.resolve(shortened) == job_id


@pytest.mark.parametrize("shortened", ["2026", "202607", "20260731-235959-0123456", "6789"])
def test_a_shortened_id_that_fits_several_jobs_names_them(broker: Broker, raw: Redis, shortened: str) -> None:
    listed(raw, *JOBS)
    with pytest.raises(JobAmbiguous, match="type more of the id") as error:
        broker.jobs.resolve(shortened)
    fitting = [job_id for job_id in JOBS if job_id.startswith(shortened) or job_id.endswith(shortened)]
    assert sorted(str(error.value).splitlines()[1:]) == fitting


def test_digits_are_looked_for_at_both_ends(broker: Broker, raw: Redis) -> None:
    listed(raw, "20260731-235959-0123452030", "20300101-000000-0123456789")
    with pytest.raises(JobAmbiguous):
        broker.jobs.resolve("2030")
    listed(raw, "20260731-235959-0123452031")
    assert broker.jobs.resolve("2031") == "20260731-235959-0123452031"


@pytest.mark.parametrize(
    ("shortened", "why"),
    [("cbf", "at least 4 characters"), ("", "at least 4"), ("ffff", "no id begins or ends so"), ("20261340", "no id")],
)
def test_what_fits_no_job_says_why(broker: Broker, raw: Redis, shortened: str, why: str) -> None:
    listed(raw, *JOBS)
    with pytest.raises(JobNotFound, match=why):
        Job.get(shortened, broker.settings)


def test_jobs_that_are_gone_make_nothing_ambiguous(broker: Broker, raw: Redis) -> None:
    raw.set(keys.BIRTH, 1)
    listed(raw, *JOBS[:2])
    listed(raw, "20260731-235959-ffffff6789", "20261231-120000-ffffffffff", gone=True)
    assert broker.jobs.resolve("6789") == JOBS[0]
    with pytest.raises(JobNotFound, match=r"no job 20261231-120000-ffffffffff: .* its time to live ran out"):
        Job.get("ffffffffff", broker.settings)
    assert raw.zcard(keys.JOBS) == 4  # who only looks changes nothing


@pytest.mark.parametrize("at", [None, 7], ids=["over time", "in one millisecond"])
def test_the_walk_meets_each_job_once_whatever_comes_and_goes(broker: Broker, raw: Redis, at: int | None) -> None:
    ids = [f"20260731-{second // 3600:02}{second // 60 % 60:02}{second % 60:02}-0123456789" for second in range(900)]
    listed(raw, *ids, at=at)
    walked = []
    for each in newest_first(broker.connection, size=200):
        walked += each
        if at is None:
            raw.zrem(keys.JOBS, *each[:50])
            listed(raw, f"20260801-000000-{len(walked):010x}")
    assert sorted(walked) == ids


def test_a_job_that_only_a_newer_version_can_read_hides_no_other(broker: Broker, raw: Redis) -> None:
    job_id = new_job(broker)
    listed(raw, *JOBS)
    assert [job.id for job in broker.jobs.newest()] == [job_id]
    assert raw.zcard(keys.JOBS) == 1 + len(JOBS)


def test_the_library_takes_shortened_ids_everywhere(broker: Broker) -> None:
    job_id, _ = broker.jobs.create(job_spec(broker, SubmitOptions()))
    assert Job.get(job_id[-10:], broker.settings).id == job_id
    assert Job.get(job_id[:12], broker.settings).id == job_id
    assert asyncio.run(AsyncJob.get(job_id[-6:], broker.settings)).id == job_id
    assert submit(broker, records_of(["text"], Rows(100)), SubmitOptions(resume=job_id[-10:])).id == job_id


def test_a_full_id_costs_nothing_and_a_shortened_one_few_small_reads(broker: Broker, raw: Redis) -> None:
    others = [f"20260731-{at // 3600:02}{at // 60 % 60:02}{at % 60:02}-{at:010x}" for at in range(0, 86400, 60)]
    listed(raw, *others, "20260801-000000-aaaaaaaaaa")
    raw.config_resetstat()
    assert broker.jobs.resolve("20260801-000000-ffffffffff") == "20260801-000000-ffffffffff"
    assert "cmdstat_zscan" not in raw.info("commandstats")
    assert broker.jobs.resolve("20260801-0") == "20260801-000000-aaaaaaaaaa"
    with pytest.raises(JobAmbiguous, match="and more"):
        broker.jobs.resolve("20260731")
    assert broker.jobs.resolve(others[0][-10:]) == others[0]  # the oldest
    assert raw.info("commandstats")["cmdstat_zscan"]["calls"] <= 3 * (len(others) // SLICE + 2)
