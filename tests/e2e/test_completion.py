"""What the shell offers after Tab: jobs, classes and models; never an error, and never late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from socket import socket

import pytest

from embedctl.queueing.broker import Broker
from tests.support.forked import run_forked
from tests.support.prepared import Put
from tests.support.redis_server import as_user
from tests.support.store import new_job, row
from tests.support.waiting import PATIENCE_S

Complete = Callable[..., list[str]]


@pytest.fixture
def complete(environment: dict[str, str], short_folder: Path) -> Complete:
    """Completes the last word of a command line as the shell does; asserts that nothing but the offers is printed.

    It waits for Redis for as long as a busy machine needs, unless it is prepared otherwise.
    """
    patient = Put({("embedctl.cli.options", "_PATIENCE_S"): PATIENCE_S})

    def ask(line: str, *, shell: str = "bash", prepare: Put = patient, **variables: str) -> list[str]:
        last = line.split(" ")[-1]
        asked = {"_EMBEDCTL_COMPLETE": f"{shell}_complete", "COMP_WORDS": line}
        asked["COMP_CWORD"] = last if shell == "fish" else str(len(line.split(" ")) - 1)
        own = {**as_user(environment, "producer"), **asked, **variables}
        told = run_forked(["ignored"], own, short_folder, prepare=prepare)
        assert (told.returncode, told.stderr) == (0, "")
        return [each for each in told.stdout.split("\n") if each]

    return ask


@pytest.fixture
def mute() -> Iterator[str]:
    """The URL of a server that accepts connections and never answers."""
    with socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"redis://127.0.0.1:{listening.getsockname()[1]}/0"


def test_jobs_are_offered_by_their_beginnings_and_endings(complete: Complete, broker: Broker) -> None:
    ids = [new_job(broker) for _ in range(2)]
    assert {f"plain,{job_id}" for job_id in ids} == set(complete("embedctl status "))
    assert complete(f"embedctl submit c.txt --resume {ids[0][-7:]}") == [f"plain,{ids[0]}"]
    assert complete(f"embedctl wait {ids[1][:-2]}") == [f"plain,{ids[1]}"]
    assert complete(f"embedctl discard {ids[0]} ") == [f"plain,{ids[1]}"]
    assert complete(f"embedctl cancel {ids[1][-7:]}", shell="fish") == [f"plain,{ids[1]}\tqueued, 4 records, dummy"]
    assert complete("embedctl status nothing") == []


def test_classes_and_models_are_those_of_settings_and_live_workers(complete: Complete, worker_broker: Broker) -> None:
    worker_broker.workers.beat(row("w", "elsewhere/model", hardware="far"))
    for line in ("submit c.txt --class ", "worker --class "):
        assert {"plain,dummy", "plain,cpu-int8", "plain,far"} <= set(complete(f"embedctl {line}"))
    assert complete("embedctl run c.txt --model dum") == ["plain,dummy"]
    assert complete("embedctl up --model else") == ["plain,elsewhere/model"]


def test_a_prompt_shows_no_error_and_waits_for_no_redis(complete: Complete, mute: str, short_folder: object) -> None:
    for url in (f"unix://{short_folder}/nothing.sock", "nonsense", ""):
        assert complete("embedctl status ", EMBEDCTL_REDIS_URL=url) == []
    assert complete("embedctl submit c.txt --class c", EMBEDCTL_MODLE="misspelt") == []
    # A wait for an answer would take longer than this test may.
    endless = Put({("embedctl.store.connection", "_SOCKET_TIMEOUT_S"): 3600})
    assert "plain,cpu" in complete("embedctl submit c.txt --class c", prepare=endless, EMBEDCTL_REDIS_URL=mute)
    tls = mute.replace("redis:", "rediss:")
    assert complete("embedctl --insecure status ", prepare=endless, EMBEDCTL_REDIS_URL=tls) == []
