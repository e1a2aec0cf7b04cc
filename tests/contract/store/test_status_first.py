"""`embedctl status JOB` says first what keeps a job from its end, and only then its counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from click.testing import CliRunner
from redis import Redis

from embedctl.cli import main
from embedctl.cli.status import _one_job
from embedctl.queueing.broker import Broker
from embedctl.terminal.drawing import job_lines
from embedctl.terminal.job_facts import all_facts
from embedctl_config import keys
from embedctl_config.settings import Settings
from tests.support.limits import DEFAULTS
from tests.support.store import MINE, OTHER, add, claim, lapse, new_job, reaped, row, spec, work

#: What `status` says of a job: the name and the value of each line.
Show = Callable[[str], list[tuple[str, str]]]


@pytest.fixture
def shown(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Show:
    monkeypatch.setenv("EMBEDCTL_REDIS_URL", settings.redis_url)
    monkeypatch.setitem(DEFAULTS, "high_water_bytes", 1024)
    monkeypatch.setattr("embedctl.store.workers.OFFERS_S", 0.0)

    def status(job_id: str) -> list[tuple[str, str]]:
        found = CliRunner().invoke(main, ["status", job_id])
        assert found.exit_code == 0, found.output
        lines = [(line[:10].strip(), line[11:]) for line in found.output.splitlines()]
        for once in ("workers", "mismatch", "lost", "hung", "stalled"):
            assert names(lines).count(once) <= 1, "what comes first is not said again"
        return lines

    return status


def names(facts: list[tuple[str, str]]) -> list[str]:
    return [name for name, _ in facts]


def test_no_live_worker_or_none_of_the_precision_comes_first(broker: Broker, shown: Show) -> None:
    job_id = new_job(broker)
    facts = shown(job_id)
    assert names(facts)[:4] == ["job", "state", "workers", "model"]
    assert facts[2][1] == "0 live; start one: embedctl worker --class dummy --model dummy"
    broker.workers.beat(row(precision="fp16"))
    facts = shown(job_id)
    assert facts[2] == ("workers", "1 live, but they offer fp16, and the job asks for fp32")


def test_a_mismatch_comes_first_while_nobody_serves_the_jobs_weights(broker: Broker, raw: Redis, shown: Show) -> None:
    job_id = new_job(broker)
    claim(broker, job_id, 0)
    raw.hset(keys.job(job_id), "progressed_ms", broker.connection.now_ms() - 60_000)
    broker.workers.beat(row(models={"dummy": dataclasses.replace(row().models["dummy"], fingerprint=OTHER)}))
    facts = shown(job_id)
    assert names(facts)[2] == "mismatch"
    assert MINE in facts[2][1]
    broker.workers.beat(row("other"))
    assert names(shown(job_id))[2] == "model"


def test_a_stuck_chunk_comes_first_with_its_history(broker: Broker, raw: Redis, shown: Show) -> None:
    broker.workers.beat(row("bystander"))
    job_id = new_job(broker)
    for instance in ("w0", "w1", "w2", "w3", "w4"):
        broker.workers.beat(row(instance))
        claim(broker, job_id, 0, instance, instance=instance)
        broker.workers.report_death(instance, "killed")
        lapse(raw, job_id, 0)
        reaped(broker, job_id)
        raw.zadd(keys.ready(job_id), {"0": 1})  # its pause is over
    facts = shown(job_id)
    assert names(facts)[2:8] == ["stuck", "", "", "", "", ""]
    assert sum("died" in said for _, said in facts) == 5


def test_a_stalled_producer_comes_first_with_the_way_to_go_on(broker: Broker, raw: Redis, shown: Show) -> None:
    broker.workers.beat(row())
    job_id = new_job(broker, seal=False)
    raw.unlink(keys.producer(job_id))
    facts = shown(job_id)
    assert names(facts)[2] == "stalled"
    assert f"--resume {job_id}" in facts[2][1]


def test_lost_chunks_come_first_of_all(broker: Broker, raw: Redis, shown: Show) -> None:
    job_id = new_job(broker)
    raw.hset(keys.job(job_id), mapping={"lost_first": 0, "lost_last": 1})
    facts = shown(job_id)
    assert names(facts)[2:4] == ["lost", "workers"]
    assert facts[2][1].startswith("Redis lost chunks 0 to 1; ")


def test_a_producer_that_waits_for_room_says_so(broker: Broker, shown: Show) -> None:
    broker.workers.beat(row())
    job_id, _ = broker.jobs.create(spec())
    assert broker.jobs.hold(job_id, "p")
    for index in range(20):
        add(broker, job_id, index)
    facts = shown(job_id)
    assert names(facts)[2] == "waits"
    assert "workers to make room" in facts[2][1]


def test_hung_workers_come_first_where_no_other_works(broker: Broker, shown: Show) -> None:
    job_id = new_job(broker)
    broker.workers.beat(row(quiet_s=99.0, holding=((job_id, 0),)))
    assert shown(job_id)[2] == ("hung", "w@host: no batch finished for 99 s")
    broker.workers.beat(row("other"))
    assert names(shown(job_id))[2] == "model"


def test_trouble_comes_first_until_the_job_has_ended(broker: Broker, raw: Redis, shown: Show) -> None:
    broker.workers.beat(row())
    job_id = new_job(broker)
    assert names(shown(job_id))[:5] == ["job", "state", "model", "class", "workers"]
    raw.hset(keys.job(job_id), "trouble", "no space left on device")
    assert shown(job_id)[2] == ("trouble", "no space left on device")
    work(broker, job_id, 0, 1)
    raw.hset(keys.job(job_id), mapping={"trouble": "once", "pinned_by": "w"})
    assert names(shown(job_id))[2] == "model"


def test_so_it_is_while_one_watches(broker: Broker) -> None:
    seen = _one_job(broker, new_job(broker)).look()
    lines = [line.plain.partition(" ")[0] for line in job_lines(seen.pace, all_facts(seen), 200, 50)]
    assert lines[:5] == ["job", "state", "workers", "progress", "model"]
