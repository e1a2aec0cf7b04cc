"""What commands show: first what keeps a job from its end, and nothing that steers a terminal or forges a line."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from redis import Redis

from embedctl.cli import main
from embedctl.cli.status import _one_job
from embedctl.queueing.broker import Broker
from embedctl.terminal.drawing import job_lines
from embedctl.terminal.job_facts import all_facts
from embedctl.terminal.progress import JobProgress
from embedctl_config import keys, wire
from embedctl_config.printable import PrintableFormatter, printable
from embedctl_config.settings import Settings
from embedctl_config.wire import ChunkInput
from embedctl_workers.serving import logs
from tests.support.limits import DEFAULTS
from tests.support.store import MINE, OTHER, add, claim, complete, lapse, new_job, reaped, row, spec, take, work

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


def test_an_ended_job_says_why_its_first_failed_records_have_no_vector(broker: Broker, shown: Show) -> None:
    job_id = new_job(broker, 30)
    work(broker, job_id, *range(29), failed=1)
    assert dict(shown(job_id))["failed"] == "29"
    work(broker, job_id, 29)
    assert dict(shown(job_id))["failed"] == "29 (the first 20: empty 20)"
    few = new_job(broker)
    work(broker, few, 0, 1, failed=1)
    assert dict(shown(few))["failed"] == "2 (empty 2)"


def test_so_it_is_while_one_watches(broker: Broker) -> None:
    seen = _one_job(broker, new_job(broker)).look()
    lines = [line.plain.partition(" ")[0] for line in job_lines(seen.pace, all_facts(seen), 200, 50)]
    assert lines[:5] == ["job", "state", "workers", "progress", "model"]


#: Sets a terminal's title, moves to the line's begin, forges a line, and turns the direction of reading.
HOSTILE = "\x1b]0;owned\x07\r\n\x85\u2028forged: line\u202e\x9b2J\x7f"


def assert_harmless(shown: str, *, begins: tuple[str, ...] = ()) -> None:
    wrong = [each for each in shown.replace("\n", "") if not each.isprintable()]
    assert not wrong, (wrong, shown)
    assert not any(line.startswith("forged") for line in shown.split("\n")), shown
    for begin in begins:
        assert begin in shown


def hostile_job(broker: Broker, failed: bool = True) -> str:
    """An ended job with one failed record, and with a hostile id, message and model."""
    model = f"m{HOSTILE}"
    data = wire.encode_input(ChunkInput(0, bytes(2), [b"a", b"b"], ids=[HOSTILE, None]))
    job_id, _ = broker.jobs.create(spec(model=model))
    broker.jobs.add(job_id, 0, data, digest=wire.digest_of(data), rows=2, token="p")
    if not failed:
        return job_id
    broker.jobs.seal(job_id, 1)
    assert take(broker, queue=keys.queue("dummy", model)) is not None
    complete(broker, job_id, 0, failed=[0], message=HOSTILE)
    return job_id


@pytest.fixture
def environment(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBEDCTL_REDIS_URL", settings.redis_url)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> str:
    found = CliRunner().invoke(main, arguments, input="")
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.stdout + found.stderr


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize(
    "command", ["errors JOB", "status JOB", "status", "list", "doctor", "wait JOB", "retry JOB", "fetch JOB -o v.jsonl"]
)
def test_no_command_shows_what_steers_a_terminal(broker: Broker, raw: Redis, command: str, *, as_json: bool) -> None:
    ended, running = hostile_job(broker), hostile_job(broker, failed=False)
    # What a worker says of itself, of a chunk and of its end.
    facts: dict[str, Any] = dict.fromkeys(("name", "host", "cpus", "device", "bounds", "backend"), HOSTILE)
    broker.workers.beat(row("w", f"m{HOSTILE}", **facts, quiet_s=99.0, holding=((f"job-{HOSTILE}", 0),)))
    broker.workers.beat(row("x", f"m{HOSTILE}", name=f"dead{HOSTILE}"))
    broker.workers.report_death("x", HOSTILE)
    for job_id in (ended, running):
        said: dict[Any, Any] = dict.fromkeys(("trouble", "pinned_by"), HOSTILE)
        raw.hset(keys.job(job_id), mapping={**said, "model_fingerprint": MINE})
    for job_id in (ended, running) if command == "status JOB" else (ended,):
        shown = run(*command.replace("JOB", job_id).split(), *(["--json"] if as_json else []))
        assert shown
        assert_harmless(shown)


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("corpus.jsonl", json.dumps({HOSTILE: "x"})),
        ("corpus.jsonl", json.dumps({"text": "x", "id": [HOSTILE]})),
        ("corpus.csv", '"\x1b]0;owned\x07\nforged: line",b\n1,2\n'),
        (f"corpus{HOSTILE}.jsonl".replace("\n", ""), "no json"),
    ],
)
def test_a_corpus_cannot_either(name: str, content: str) -> None:
    Path(name).write_bytes(content.encode())
    for more in ([], ["--skip-bad-lines"]):
        assert_harmless(run("submit", name, *more))


@pytest.mark.usefixtures("environment")
def test_what_is_said_while_a_job_runs_cannot_either(broker: Broker) -> None:
    status = broker.jobs.status(hostile_job(broker, failed=False))
    stream = io.StringIO()
    with JobProgress() as progress:
        progress._console.file = stream
        progress.running(replace(status, mismatch=HOSTILE, pinned_by=HOSTILE))
    assert "No live worker has the files of job" in stream.getvalue()
    assert_harmless(stream.getvalue())


@pytest.mark.parametrize("formatter", [PrintableFormatter(), logs._TextFormatter(logs._LINE)])
def test_a_log_cannot_either(formatter: logging.Formatter) -> None:
    trace = (ValueError, ValueError(HOSTILE), None)
    record = logging.LogRecord("x", logging.ERROR, "x.py", 1, "job %s", (HOSTILE,), trace)
    record.job = record.worker = HOSTILE
    assert_harmless(formatter.format(record), begins=("\\x1b",))


def test_a_found_file_cannot_either(tmp_path: Path, environment: None) -> None:
    (tmp_path / "embedctl.toml").write_text('"\\u001b]0;owned\\u0007\\nforged: line" = 1\n[classes."\\nforged: x"]\n')
    shown = run("list")
    assert "no such setting" in shown
    assert_harmless(shown)


def test_a_command_to_copy_runs_nothing_else(broker: Broker) -> None:
    from embedctl.queueing.routing import start_command

    assert start_command("cpu", "m; rm -rf ~") == "embedctl worker --class cpu --model 'm; rm -rf ~'"
    assert start_command("cpu", "a/b@c-d_e.f") == "embedctl worker --class cpu --model a/b@c-d_e.f"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, 日本語 é", "plain, 日本語 é"),
        ("a\tb\n\x1b[31m", r"a\tb\n\x1b[31m"),
        ("\u2028\u202e\x85\udc80", r"\u2028\u202e\x85\udc80"),
    ],
)
def test_what_is_not_printable_is_shown_as_its_escape(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown
