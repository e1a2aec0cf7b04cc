"""Tenants, lanes and several models, from the command line to the vectors: no job is stuck behind a large one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from embedctl.jobs.job import Job
from embedctl.queueing.broker import Broker
from tests.support.here import Here
from tests.support.waiting import eventually


def test_jobs_of_all_tenants_and_lanes_end_and_say_what_they_are(here: Here) -> None:
    corpus = here.folder / "corpus.jsonl"
    corpus.write_text("".join(f'{{"text": "text {number}"}}\n' for number in range(30)))
    arguments = ("submit", str(corpus), "--chunk-size", "5", "--json")
    jobs = [
        json.loads(here.embedctl(*arguments, "--tenant", "team/a", "--lane", lane).stdout)
        for lane in ("interactive", "normal", "background")
    ]
    jobs.append(json.loads(here.embedctl(*arguments, EMBEDCTL_TENANT="team/b").stdout))
    jobs.append(json.loads(here.embedctl(*arguments).stdout))
    assert [(job["tenant"], job["lane"]) for job in jobs] == [
        ("team/a", "interactive"),
        ("team/a", "normal"),
        ("team/a", "background"),
        ("team/b", "normal"),
        ("default", "normal"),
    ]
    here.start_worker()
    for job in jobs:
        assert Job(job["id"], Broker.shared(here.settings)).wait(timeout=60).done == 30
    shown = here.embedctl("status", jobs[0]["id"]).stdout
    assert "team/a" in shown
    assert "interactive" in shown
    listed = json.loads(here.embedctl("list", "--tenant", "team/b", "--json").stdout)
    assert [job["id"] for job in listed] == [jobs[3]["id"]]


def test_a_tenant_at_its_limit_is_refused_until_a_job_ends_and_others_go_on(here: Here) -> None:
    """The worker's settings hold for a producer that has none."""
    config = Path(here.environment["EMBEDCTL_CONFIG"])
    plain = config.read_text()
    config.write_text(f'{plain}\n[tenants."team/a"]\nmax_jobs = 1\nmax_waiting_records = 100\n')
    worker = here.start_worker()
    broker = Broker.shared(here.settings)
    eventually(lambda: [quota.tenant for quota in broker.quotas.all(10)] == ["team/a"])
    assert "0 of 1 (max_jobs), 0 of 100 (max_waiting_records), of worker" in here.embedctl("doctor").stdout
    worker.kill()  # the limits hold while no worker runs
    config.write_text(plain)
    corpus = here.folder / "corpus.jsonl"
    corpus.write_text('{"text": "a text"}\n')

    def submit(tenant: str) -> Any:
        return here.embedctl("submit", str(corpus), "--json", "--tenant", tenant)

    first = submit("team/a")
    refused = submit("team/a")
    assert (first.returncode, refused.returncode, refused.stdout) == (0, 75, "")
    assert "tenant team/a has 1 of at most 1 jobs that have not ended (max_jobs): " in refused.stderr
    assert submit("team/b").returncode == 0
    here.start_worker()
    Job(json.loads(first.stdout)["id"], broker).wait(timeout=60)
    again = submit("team/a")
    assert again.returncode == 0
    assert Job(json.loads(again.stdout)["id"], broker).wait(timeout=60).done == 1
