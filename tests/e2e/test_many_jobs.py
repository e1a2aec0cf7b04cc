"""Commands that show, choose and change many jobs, by shortened ids too."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import timedelta

import pytest
import redis as redis_py

from embedctl import JobState
from embedctl.queueing.broker import Broker
from embedctl_config import keys
from tests.support.here import Here
from tests.support.processes import RunEmbedctl
from tests.support.redis_server import RedisServer
from tests.support.store import new_job, pass_ms, work

EndedJob = Callable[..., str]

GONE = "20200101-000000-0000000000"


@pytest.fixture
def ended(broker: Broker, worker_broker: Broker, raw: redis_py.Redis) -> EndedJob:
    """Makes an ended job of two records."""

    def make(*, failed: int = 0, ago: timedelta = timedelta()) -> str:
        job_id = new_job(broker, chunks=1)
        work(worker_broker, job_id, 0, failed=failed)
        if ago:
            at = int(raw.hget(keys.job(job_id), "ended_ms") or 0) - int(ago.total_seconds() * 1000)
            raw.hset(keys.job(job_id), "ended_ms", at)
        pass_ms(broker)  # jobs of one millisecond are listed in any order
        return job_id

    return make


def states(broker: Broker) -> Mapping[str, JobState]:
    return {job.id: job.state for job in broker.jobs.newest()}


def test_each_of_several_jobs_is_tried_and_the_first_failure_is_the_status(here: Here, ended: EndedJob) -> None:
    good, active, other, foreign = ended(failed=1), new_job(here.broker), ended(failed=2), ended()
    here.raw.hset(keys.job(foreign), mapping={"version": 99, "state": "levitating"})
    told = here.embedctl("retry", good, GONE, active, foreign, other, good, status=4)
    assert told.stdout == ""
    lines = told.stderr.splitlines()
    assert lines[0] == f"{good}: 1 records queued again"
    assert lines[1].startswith(f"embedctl: job {GONE} was lost")
    assert active in lines[2]
    assert lines[3].startswith(f"embedctl: job {foreign} is of version 99, and this embedctl handles version 1:")
    assert lines[4] == f"{other}: 2 records queued again"
    assert len(lines) == 5
    cancelled = here.embedctl("cancel", active, other, "--json", status=0)
    assert json.loads(cancelled.stdout) == [{"id": active, "state": "cancelled"}, {"id": other, "state": "cancelled"}]
    partly = here.embedctl("discard", GONE, other, "--json")
    assert (partly.returncode, other in states(here.broker)) == (4, False)
    unknown, discarded = json.loads(partly.stdout)
    assert unknown["id"] == GONE
    assert "was lost" in unknown["error"]
    assert discarded == {"id": other, "discarded": True}


def test_discard_chooses_ended_jobs_by_state_and_age(here: Here, ended: EndedJob) -> None:
    old, week = timedelta(hours=3), timedelta(days=8)
    active, done, old_done = new_job(here.broker), ended(), ended(ago=old)
    old_failed, ancient = ended(failed=2, ago=old), ended(failed=1, ago=week)
    gone = ended(ago=old)
    here.raw.unlink(keys.job(gone))
    everything = {active, done, old_done, old_failed, ancient}

    for wrong in ([], [active, "--state", "failed"], ["--state", "running"], ["--older-than", "soon"]):
        here.embedctl("discard", *wrong, status=2)
    looked = here.embedctl("discard", "--older-than", "1h", "--dry-run")
    assert sorted(looked.stdout.splitlines()) == sorted(
        f"{job}: would be discarded" for job in (old_done, old_failed, ancient)
    )
    assert looked.stderr.strip() == "3 jobs would be discarded"
    assert set(states(here.broker)) == everything

    first = here.embedctl(
        "discard", "--older-than", "2h", "--state", "failed", "--state", "completed_with_errors", status=0
    )
    assert sorted(first.stderr.splitlines()) == sorted(
        [f"{old_failed}: discarded", f"{ancient}: discarded", "2 jobs discarded"]
    )
    assert json.loads(here.embedctl("discard", "--older-than", "7d", "--json").stdout) == []
    assert json.loads(here.embedctl("discard", "--state", "completed", "--json").stdout) == [
        {"id": old_done, "discarded": True},
        {"id": done, "discarded": True},
    ]
    assert states(here.broker) == {active: JobState.QUEUED}
    assert not list(here.raw.scan_iter(f"*{ancient}*"))


def test_list_says_how_far_jobs_are_and_what_it_leaves_out(here: Here, ended: EndedJob, worker_broker: Broker) -> None:
    done = ended()
    half = new_job(here.broker, chunks=2)
    pass_ms(here.broker)  # jobs of one millisecond are listed in any order
    other = new_job(here.broker, chunks=1, model="other", hardware="slow")
    work(worker_broker, half, 0)
    head, *rows = [line.split() for line in here.embedctl("list").stdout.splitlines()]
    assert head == ["JOB", "STATE", "AGE", "CLASS", "DONE", "RECORDS", "FAILED", "MODEL"]
    assert [row[0] for row in rows] == [other, half, done]
    assert rows[1][1:2] + rows[1][3:] == ["running", "s", "dummy", "50%", "4", "0", "dummy"]
    for chosen, option in (
        (done, ["--state", "completed"]),
        (other, ["--model", "other"]),
        (other, ["--class", "slow"]),
    ):
        assert [job["id"] for job in json.loads(here.embedctl("list", *option, "--json").stdout)] == [chosen]
    short = here.embedctl("list", "--limit", "1")
    assert len(short.stdout.splitlines()) == 2
    assert short.stderr == "… and more; --limit 2 shows more\n"
    assert here.embedctl("list", "--limit", "3").stderr == ""
    assert json.loads(here.embedctl("list", "--state", "failed", "--json").stdout) == []


def test_what_redis_interrupts_is_told_up_to_there(embedctl: RunEmbedctl, own_redis: RedisServer) -> None:
    own_redis.stop()
    failed = embedctl("list", "--json", EMBEDCTL_REDIS_URL=own_redis.url)
    assert (failed.returncode, failed.stdout) == (69, "")
    told = embedctl("discard", GONE, GONE[:-1] + "1", "--json", EMBEDCTL_REDIS_URL=own_redis.url, status=69)
    assert told.stderr.count("can't be reached") == 1  # not again for each job
    assert json.loads(told.stdout) == []


def test_commands_print_one_json_value(here: Here, ended: EndedJob) -> None:
    without_errors = ended()  # before a worker is there, which would take its chunk
    here.start_worker()
    (here.folder / "c.txt").write_text("one\n\nthree\n")
    assert json.loads(here.embedctl("submit", "c.txt", "--dry-run", "--json").stdout)["records"] == 3
    assert set(json.loads(here.embedctl("submit", "c.txt", "--json").stdout)) >= {"id"}
    told = here.embedctl("submit", "c.txt", "--json", "-o", "out.npy")
    facts = json.loads(told.stdout)
    assert f"job {facts['id']}" in told.stderr
    assert told.returncode == 3
    assert (facts["state"], facts["records"], facts["vectors"], facts["failed"]) == ("completed_with_errors", 3, 2, 1)
    assert facts["records_per_s"] == pytest.approx(3 / facts["seconds"])  # failed ones too
    assert facts["files"] == ["out.npy", "out.errors.jsonl", "out.digests.bin", "out.about.json"]
    for command, files in (
        (["wait"], []),
        (["fetch", "-o", "again.npy"], [file.replace("out", "again", 1) for file in facts["files"]]),
    ):
        verb, *options = command
        shown = json.loads(here.embedctl(verb, facts["id"], *options, "--json").stdout)
        assert [shown[name] for name in ("vectors", "seconds", "files")] == [facts["vectors"], facts["seconds"], files]
    (error,) = json.loads(here.embedctl("errors", facts["id"], "--json").stdout)
    assert error["position"] == 1
    assert json.loads(here.embedctl("errors", without_errors, "--json").stdout) == []
    unknown = here.embedctl("errors", GONE, "--json")
    assert (unknown.returncode, unknown.stdout) == (4, "")
    assert "was lost" in unknown.stderr


@pytest.mark.parametrize("file", ["v.npy", "v.ids.jsonl", "v.errors.jsonl", "v.jsonl"])
def test_no_clobber_refuses_before_any_work(here: Here, ended: EndedJob, file: str) -> None:
    (here.folder / "c.txt").write_text("one\n")
    (here.folder / file).write_text("precious")
    output = "v.jsonl" if file == "v.jsonl" else "v.npy"
    job_id = ended()
    commands = [["submit", "c.txt"], ["run", "c.txt"], ["fetch", job_id]]
    for command in commands if file == "v.npy" else commands[-1:]:
        refused = here.embedctl(*command, "-o", output, "--no-clobber", status=2)
        assert f"{file} exists" in refused.stderr
    assert list(states(here.broker)) == [job_id]
    assert (here.folder / file).read_text() == "precious"
