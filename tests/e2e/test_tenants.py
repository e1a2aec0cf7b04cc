"""Tenants and lanes, from the command line and the library to the vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from embedctl import enqueue_embeddings
from embedctl.broker import Broker
from embedctl.job import Job
from embedctl.reaper import Reaper
from embedctl_config.errors import SettingsError
from embedctl_config.settings import Settings
from tests.support.limits import limited
from tests.support.processes import RunEmbedctl
from tests.support.waiting import eventually
from tests.support.workers import StartWorker


def test_jobs_of_all_tenants_and_lanes_end_and_say_what_they_are(
    settings: Settings, start_worker: StartWorker, embedctl: RunEmbedctl, short_folder: Path
) -> None:
    corpus = short_folder / "corpus.jsonl"
    corpus.write_text("".join(f'{{"text": "text {number}"}}\n' for number in range(30)))
    arguments = ("submit", str(corpus), "--chunk-size", "5", "--json")
    jobs = [
        json.loads(embedctl(*arguments, "--tenant", "team/a", "--lane", lane).stdout)
        for lane in ("interactive", "normal", "background")
    ]
    jobs.append(json.loads(embedctl(*arguments, EMBEDCTL_TENANT="team/b").stdout))
    jobs.append(json.loads(embedctl(*arguments).stdout))
    assert [(job["tenant"], job["lane"]) for job in jobs] == [
        ("team/a", "interactive"),
        ("team/a", "normal"),
        ("team/a", "background"),
        ("team/b", "normal"),
        ("default", "normal"),
    ]
    start_worker()
    for job in jobs:
        assert Job(job["id"], Broker.shared(settings)).wait(timeout=60).done == 30
    shown = embedctl("status", jobs[0]["id"]).stdout
    assert "team/a" in shown
    assert "interactive" in shown
    listed = json.loads(embedctl("list", "--tenant", "team/b", "--json").stdout)
    assert [job["id"] for job in listed] == [jobs[3]["id"]]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"tenant": "a b"}, "tenant 'a b': use 1 to 64 characters, only letters, digits and . _ - / @"),
        ({"tenant": "x" * 65}, "use 1 to 64 characters"),
        ({"tenant": ""}, "use 1 to 64 characters"),
        ({"lane": "fast"}, "lane 'fast' is none of interactive, normal, background"),
    ],
)
def test_a_wrong_name_is_one_clear_error(settings: Settings, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        enqueue_embeddings(["text"], settings=settings, **wrong)


def test_a_weight_is_kept_with_the_job_and_checked(settings: Settings) -> None:
    from embedctl_config.tenants import TenantEntry

    heavy = settings.replace(tenants={"a": TenantEntry(weight=3.0)})
    job = enqueue_embeddings(["text"], tenant="a", settings=heavy)
    with Broker.shared(heavy).connection.client() as client:
        assert client.hget(f"embed:job:{job.id}", "weight") == b"3.0"
    with pytest.raises(SettingsError, match=r"tenants\.a\.weight: 0\.0 is not between 0\.001 and 1000"):
        settings.replace(tenants={"a": TenantEntry(weight=0.0)})


def test_the_reaper_fills_a_queue_that_nobody_filled(settings: Settings) -> None:
    """The job that had all of the window is cancelled, and no worker says so."""
    broker = Broker.connect(limited(settings, window=2))
    texts = [f"text {number} " + "word " * 3000 for number in range(8)]
    first, second = (enqueue_embeddings(texts, chunk_size=1, settings=broker.settings) for _ in range(2))
    assert broker.jobs.issue(second.id, first.status().queue) == []
    first.cancel()
    reaper = Reaper(broker, interval_s=0.01)

    def is_filled() -> bool:
        reaper.round()
        with broker.connection.client() as client:
            return bool(client.zcard(f"embed:job:{second.id}:due"))

    eventually(is_filled)
    broker.close()


def test_a_tenant_at_its_limit_is_refused_until_a_job_ends_and_others_go_on(
    settings: Settings,
    environment: dict[str, str],
    start_worker: StartWorker,
    embedctl: RunEmbedctl,
    short_folder: Path,
) -> None:
    """The worker's settings hold for a producer that has none."""
    config = Path(environment["EMBEDCTL_CONFIG"])
    plain = config.read_text()
    config.write_text(f'{plain}\n[tenants."team/a"]\nmax_jobs = 1\nmax_waiting_records = 100\n')
    worker = start_worker()
    broker = Broker.shared(settings)
    eventually(lambda: [quota.tenant for quota in broker.quotas.all(10)] == ["team/a"])
    shown = embedctl("doctor").stdout
    assert "0 of 1 (max_jobs), 0 of 100 (max_waiting_records), of worker" in shown
    worker.kill()  # the limits hold while no worker runs
    config.write_text(plain)
    corpus = short_folder / "corpus.jsonl"
    corpus.write_text('{"text": "a text"}\n')

    def submit(tenant: str) -> Any:
        return embedctl("submit", str(corpus), "--json", "--tenant", tenant)

    first = submit("team/a")
    refused = submit("team/a")
    assert (first.returncode, refused.returncode, refused.stdout) == (0, 75, "")
    assert "tenant team/a has 1 of at most 1 jobs that have not ended (max_jobs): " in refused.stderr
    assert submit("team/b").returncode == 0
    start_worker()
    Job(json.loads(first.stdout)["id"], broker).wait(timeout=60)
    again = submit("team/a")
    assert again.returncode == 0
    assert Job(json.loads(again.stdout)["id"], broker).wait(timeout=60).done == 1
