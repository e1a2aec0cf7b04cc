"""Kills of two gateways and a worker while callers without Redis submit, fetch, retry and drain: nothing is lost."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from embedctl import ChunkVectors, JobNotFound, enqueue_embeddings
from embedctl.queueing.broker import Broker
from embedctl_config.errors import ExitStatus, GatewayUnavailable
from embedctl_config.settings import Settings
from tests.support.drained_parts import manifest_of, rows_of
from tests.support.forked import Forked
from tests.support.jobs import reference
from tests.support.killed_stack import Child, kill_by_turns, stack, until_all_serve
from tests.support.redis_server import RedisServer
from tests.support.waiting import eventually

T = TypeVar("T")

SEED = 2711
#: How often each of the three processes is killed; a job's most records; the share of them that have no text.
KILLS, _RECORDS, _EMPTY = 2, 150, 1 / 7


def texts_of(draw: random.Random, name: str) -> list[str]:
    return ["" if draw.random() < _EMPTY else f"{name} {at}" for at in range(draw.randint(1, _RECORDS))]


def check(texts: Sequence[str], vectors: Sequence[tuple[int, object]]) -> None:
    """Each position is there once, with its vector, or with None if it has no text."""
    assert Counter(position for position, _ in vectors) == Counter(range(len(texts)))
    assert {position for position, vector in vectors if vector is None} == {
        at for at, text in enumerate(texts) if not text
    }
    done = [(position, vector) for position, vector in vectors if vector is not None]
    if done:
        expected = reference([texts[position] for position, _ in done])
        np.testing.assert_allclose(np.array([vector for _, vector in done], np.float32), expected, atol=1e-6)


def insisting(ask: Callable[[], T], gone: T) -> T:
    """What a call returns that is made until a gateway answers: only what waits does that by itself. An answer may be
    lost, so a job that is `gone` may be so by this call."""
    answers: list[T] = []

    def answered() -> bool:
        try:
            answers.append(ask())
        except JobNotFound:
            answers.append(gone)
        except GatewayUnavailable:
            return False
        return True

    eventually(answered, what="an answer")
    return answers[0]


def rows_in(chunks: list[ChunkVectors]) -> list[tuple[int, object]]:
    failed = {error.position for chunk in chunks for error in chunk.errors}
    return [
        (int(at), None if int(at) in failed else vector)
        for chunk in chunks
        for at, vector in zip(chunk.positions, chunk.vectors, strict=True)
    ]


def use_library(number: int, settings: Settings, over: threading.Event) -> int:
    draw, count = random.Random(SEED * 10 + number), 0
    while not over.is_set():
        name = f"library {number} {count}"
        texts = texts_of(draw, name)
        begin = partial(enqueue_embeddings, texts, chunk_size=10, idempotency_key=name, settings=settings)
        job = insisting(begin, None)
        assert job is not None
        check(texts, rows_in(list(job.iter_results(timeout=120))))
        if insisting(job.retry_failed, 0):
            assert job.wait(timeout=120).failed == texts.count("")
            check(texts, rows_in(list(job.iter_results(timeout=120))))
        insisting(job.discard, None)
        count += 1
    return count


class Commands:
    """A caller who uses commands. One dies at a random moment now and then, and is made again until it succeeds."""

    def __init__(self, number: int, folder: Path, variables: dict[str, str]) -> None:
        self._draw = random.Random(SEED * 100 + number)
        self._name, self._variables = f"commands-{number}", variables
        self._folder = folder / self._name
        self._folder.mkdir()

    def use(self, over: threading.Event) -> int:
        count = 0
        while not over.is_set():
            texts = texts_of(self._draw, f"{self._name} {count}")
            lines = (json.dumps({"id": at, "text": text}) + "\n" for at, text in enumerate(texts))
            (self._folder / f"{count}.jsonl").write_text("".join(lines))
            submit = ["submit", f"{count}.jsonl", "--resume", f"{self._name} {count}", "--quiet"]
            drains = count % 2 == 1
            job_id = self._insist(*submit, *["--drain"] * drains)
            if drains:
                self._insist("fetch", job_id, "-o", f"{count}/", "--quiet")
                rows = list(rows_of(self._folder / f"{count}").values())
                assert manifest_of(self._folder / f"{count}")["records"] == len(rows)
            else:
                self._insist("fetch", job_id, "-o", f"{count}.out.jsonl", "--quiet")
                rows = [json.loads(line) for line in (self._folder / f"{count}.out.jsonl").read_text().splitlines()]
            check(texts, [(row["position"], row.get("embedding")) for row in rows])
            self._insist("discard", job_id)
            count += 1
        return count

    def _insist(self, *command: str) -> str:
        """What it prints. A command that begins while its gateway is away ends at once."""
        log, said = self._folder / "log", list[str]()

        def succeeds() -> bool:
            with Forked(command, self._variables, self._folder, err=log) as process:
                assert process.stdout is not None
                if self._draw.random() < 0.3:
                    time.sleep(self._draw.random())  # a random moment of the command
                    process.kill()
                said.append(process.stdout.read().strip())
                status = process.wait()
            gone = command[0] == "discard" and status == ExitStatus.NOT_FOUND
            return gone or status in (ExitStatus.SUCCESS, ExitStatus.SOME_FAILED)

        eventually(succeeds, what=" ".join(command), show=lambda: log.read_text()[-2000:])
        return said[-1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_callers_lose_and_double_nothing_while_gateways_are_killed(
    environment: dict[str, str], own_redis: RedisServer, short_folder: Path, settings: Settings
) -> None:
    draw, over = random.Random(SEED), threading.Event()
    environment = {**environment, "EMBEDCTL_REDIS_URL": own_redis.url}
    with stack(environment, short_folder) as (urls, children), ThreadPoolExecutor() as pool:
        doomed: list[Child | RedisServer] = [*children.values()] * KILLS
        draw.shuffle(doomed)
        users = []
        for number, url in enumerate(urls):
            outside = {"EMBEDCTL_REDIS_URL": "", "EMBEDCTL_CHUNK_FILES": "", "EMBEDCTL_URL": url}
            users.append(pool.submit(Commands(number, short_folder, {**environment, **outside}).use, over))
            of_library = settings.replace(redis_url="", chunk_files="", url=url)
            users.append(pool.submit(use_library, number, of_library, over))
        try:
            kill_by_turns(draw, doomed)
        finally:
            over.set()
        assert min(user.result() for user in users) > 0
        until_all_serve(urls)
    broker = Broker.connect(settings.replace(redis_url=own_redis.url))
    assert not list(broker.jobs.newest()), "a job was made twice"
    broker.close()
