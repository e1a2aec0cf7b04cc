"""Kills of gateways, a worker and Redis while clients upload, create, cancel and download: each answer stays true."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import httpx2
import openai
import pytest

from embedctl import JobState
from embedctl_config import keys
from embedctl_gateway.embedding.embedder import RESULT_TTL_S
from tests.support.batches import client_at, counts, create, ended, lines_of, upload
from tests.support.forked import Forked
from tests.support.gateway import NO_TLS, killed_gateway
from tests.support.here import Here
from tests.support.killed_stack import Child, kill_by_turns, stack, until_all_serve
from tests.support.prepared import Put
from tests.support.redis_server import RedisServer
from tests.support.waiting import eventually

SEED = 2611
#: How often each of the three processes, and Redis, is killed.
KILLS = 2
_CLIENTS = 3
#: A batch has up to this many requests, of which some fail.
_REQUESTS = 60


@dataclass
class Told:
    """What clients were told. An attempt to create a batch is made once; its answer may be lost.

    Attributes:
        made: batches by the file of their requests.
        refused: files for which a create was answered with 5xx.
        cancelled: batches whose cancellation was confirmed.
        sizes: requests by file.
    """

    made: dict[str, str] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    cancelled: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)


def insisting(ask: Callable[[], Any]) -> Any:
    """What a client gets that asks again until it gets something, as after its own retries."""
    got: list[Any] = []

    def answers() -> bool:
        with suppress(openai.APIConnectionError, openai.InternalServerError):
            got.append(ask())
        return bool(got)

    eventually(answers, what="an answer")
    return got[0]


def use(number: int, urls: list[str], told: Told, over: threading.Event) -> None:
    """A client that uploads, creates, now and then cancels, and never gives up, except that it creates once."""
    draw = random.Random(SEED * 100 + number)
    with ExitStack() as opened:
        clients = [opened.enter_context(client_at(url, retries=2).with_options(timeout=60)) for url in urls]
        while not over.is_set():
            one_batch(str(number), clients, draw, told)


def one_batch(who: str, clients: list[openai.OpenAI], draw: random.Random, told: Told) -> None:
    size = draw.randint(1, _REQUESTS)
    # Of equal files, a second try finds the first one; here each has a create of its own.
    name = f"{who} {draw.random()}"
    data = lines_of([f"{name} {number}" if draw.random() < 0.9 else "" for number in range(size)], user=name)
    client = draw.choice(clients)
    file_id = insisting(lambda: upload(client, data))
    told.sizes[file_id] = size
    try:
        batch_id = create(draw.choice(clients).with_options(max_retries=0), file_id).id
    except openai.APIConnectionError:  # its answer is lost
        return
    except openai.InternalServerError:
        told.refused.add(file_id)
        return
    told.made[file_id] = batch_id
    client = draw.choice(clients)
    if draw.random() < 0.3:
        time.sleep(draw.random())  # a random moment of the batch
        with suppress(openai.BadRequestError):  # it has ended before
            insisting(lambda: client.batches.cancel(batch_id))
            told.cancelled.add(batch_id)
    else:
        assert insisting(lambda: client.files.content(file_id).content) == data


def answered(client: httpx2.Client, batch_id: str) -> Counter[str]:
    """How often each custom id is in the files of an ended batch, downloaded in ranges."""
    found: Counter[str] = Counter()
    batch = client.get(f"/v1/batches/{batch_id}").json()
    for name in ("output_file_id", "error_file_id"):
        if batch[name]:
            path = f"/v1/files/{batch[name]}"
            ranges = [f"bytes={at}-{at + 9_999}" for at in range(0, client.get(path).json()["bytes"], 10_000)]
            parts = [client.get(f"{path}/content", headers={"range": each}).content for each in ranges]
            found.update(json.loads(line)["custom_id"] for line in b"".join(parts).splitlines())
    listed = client.get(f"/v1/batches/{batch_id}/results").text
    assert Counter(json.loads(line)["custom_id"] for line in listed.splitlines()) == found
    return found


#: It frees no job of an answered request.
NEVER_FREES = Put({("embedctl_gateway.embedding.embedder", "_FREE_AFTER_S"): 600.0})


def test_what_a_gateway_killed_after_its_answer_leaves_behind_has_an_end(here: Here) -> None:
    here.start_worker()
    environment = {**here.environment, "EMBEDCTL_HARDWARE": "auto"}
    asked = {"input": ["one", "two"], "model": "dummy"}
    with killed_gateway(environment, NEVER_FREES) as (url, _):
        answer = httpx2.post(f"{url}/v1/embeddings", json=asked, timeout=60, verify=NO_TLS)
    assert (answer.status_code, len(answer.json()["data"])) == (200, 2)
    (job,) = here.broker.jobs.newest()
    assert job.state is JobState.COMPLETED
    left = list(here.raw.scan_iter(f"embed:job:{job.id}*"))
    assert keys.job(job.id).encode() in left
    assert all(0 < here.raw.pttl(name) <= 1000 * RESULT_TTL_S * keys.CHUNK_TTL_FACTOR for name in left)


@pytest.mark.parametrize("killed", ["gateway", "batches"])
def test_the_two_processes_of_a_gateway_end_together(here: Here, killed: str) -> None:
    def ended() -> bool:
        state = subprocess.run(["ps", "-o", "stat=", "-p", child], capture_output=True, text=True, check=False).stdout
        return state.strip()[:1] in ("", "Z")

    with Forked(["gateway", "--address", "0"], here.environment, None, DEVNULL) as process:
        assert process.stderr is not None
        process.stderr.readline()
        (child,) = subprocess.run(
            ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
        ).stdout.split()
        assert not ended()
        os.kill(process.pid if killed == "gateway" else int(child), signal.SIGKILL)
        assert process.wait(60) == (-signal.SIGKILL if killed == "gateway" else 1)
        eventually(ended, what="the end of the other process")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_answers_stay_true_under_kills(environment: dict[str, str], own_redis: RedisServer, short_folder: Path) -> None:
    draw, told, over = random.Random(SEED), Told(), threading.Event()
    # While a slow disk syncs, Redis answers writes up to two seconds before it hands them to the system, and a kill
    # loses those. What is lost so has tests of its own.
    own_redis.extra += ["--appendfsync", "always"]
    own_redis.stop()
    own_redis.start()
    environment = {**environment, "EMBEDCTL_REDIS_URL": own_redis.url}
    with stack(environment, short_folder) as (urls, children):
        doomed: list[Child | RedisServer] = [*children.values(), own_redis] * KILLS
        draw.shuffle(doomed)
        with ThreadPoolExecutor() as pool:
            clients = [pool.submit(use, number, urls, told, over) for number in range(_CLIENTS)]
            try:
                kill_by_turns(draw, doomed)
            finally:
                over.set()
        for client in clients:
            client.result()
        until_all_serve(urls)
        with (
            client_at(urls[0], retries=2) as reader,
            httpx2.Client(base_url=urls[1], timeout=60, verify=NO_TLS) as other,
        ):
            # Those that nobody was told of are among them.
            everything = list(reader.batches.list(limit=100))
            files = Counter(each.input_file_id for each in everything)
            assert max(files.values()) == 1, "a batch was made twice"
            assert not told.refused & set(files), "a batch runs whose create was refused"
            assert set(told.made.values()) <= {each.id for each in everything}, "a batch is missing"
            for each in everything:
                batch = ended(reader, each.id)
                allowed = ("completed", "cancelled") if each.id in told.cancelled else ("completed",)
                assert batch.status in allowed or each.id not in told.made.values(), (each.id, batch.status)
                # What was cancelled before its requests were read has none.
                unread = batch.status == "cancelled" and not counts(batch)[0]
                size = 0 if unread else told.sizes[each.input_file_id]
                assert answered(other, each.id) == Counter(f"r{number}" for number in range(size)), each.id
