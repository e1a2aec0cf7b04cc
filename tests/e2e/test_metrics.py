"""What a worker and `embedctl metrics` serve over HTTP: their metrics add up, and their health is the truth."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import pytest

from embedctl import JobState, enqueue_embeddings
from embedctl_config.settings import Settings
from tests.support.monitor import get, samples
from tests.support.redis_server import RedisServer
from tests.support.waiting import eventually
from tests.support.workers import StartWorker


@pytest.fixture
def redis_server(own_redis: RedisServer) -> RedisServer:
    """A Redis of the test's own: one of these stops it."""
    return own_redis


@dataclass
class Page:
    """What a worker serves."""

    port: int

    def get(self, path: str) -> tuple[int, str]:
        return get(f"http://127.0.0.1:{self.port}{path}")

    @property
    def well(self) -> tuple[int, str]:
        return self.get("/healthz")

    @property
    def ready(self) -> tuple[int, str]:
        return self.get("/readyz")

    def metrics(self, hardware: str) -> dict[tuple[str, ...], float]:
        """Every value of ours, by name and what its labels are, but for class and model."""
        found = {}
        for name, labels, value in samples(self.get("/metrics")[1]):
            assert labels.pop("hardware_class") == hardware
            assert labels.pop("model", "dummy") == "dummy"
            found[name, *labels.values()] = value
        return found


@pytest.fixture
def page(environment: dict[str, str], free_port: int) -> Page:
    """Where the workers of this test serve; one at a time."""
    environment["EMBEDCTL_METRICS_ADDRESS"] = str(free_port)
    return Page(free_port)


def distinct_words(texts: list[str]) -> list[int]:
    return [len(text.split()) for text in set(texts) if text]


def test_the_metrics_of_a_finished_job_are_exact(settings: Settings, page: Page, start_worker: StartWorker) -> None:
    worker = start_worker("poison")
    texts = [f"text {i} " + "word " * (i % 7) for i in range(100)]
    texts[13], texts[14], texts[37], texts[55] = "", "it will fail-encoder", "this is not-a-number", "fail-tokenizer"
    texts[72] = texts[71]
    chunks = [texts[at : at + 10] for at in range(0, 100, 10)]
    # What the tokeniser fails on never reaches the device.
    told = [distinct_words([text for text in chunk if text != "fail-tokenizer"]) for chunk in chunks]

    job = enqueue_embeddings(texts, hardware="poison", chunk_size=10, settings=settings)
    status = job.wait(timeout=60)
    assert (status.state, status.done, status.failed) == (JobState.COMPLETED_WITH_ERRORS, 96, 4)
    eventually(lambda: page.metrics("poison")["chunks_in_hand",] == 0)
    found = page.metrics("poison")

    assert (found["records_total", "done"], found["records_total", "failed"]) == (96, 4)
    errors = {key[1]: count for key, count in found.items() if key[0] == "record_errors_total" and count}
    assert errors == {"empty": 1, "encode_error": 2, "non_finite": 1}
    assert found["tokens_total",] == status.tokens == sum(map(sum, told))
    assert found["padding_tokens_total",] == sum(len(words) * max(words) - sum(words) for words in told)
    assert (found["attempts_total", "first"], found["attempts_total", "repeated"]) == (10, 0)
    assert found["results_total", "ok"] == 10
    assert {key[1] for key, count in found.items() if key[0] == "results_total" and count} == {"ok"}
    for stage in ("tokenise", "encode", "store"):
        assert found["stage_seconds_count", stage] == 10
    # Chunks that wait together may share batches; a chunk with a row that fails is run in parts, by itself.
    assert found["batch_seconds_count",] >= 6
    assert found["queue_wait_seconds_count",] == 10
    assert 0 <= found["queue_wait_seconds_sum",] < 60
    assert found["redis_round_trip_seconds_count", "next"] >= 6  # those that wait may be claimed together
    assert found["redis_round_trip_seconds_count", "complete"] >= 10
    assert found["redis_round_trip_seconds_count", "PIPELINE"] > 0
    assert abs(found["last_progress_timestamp_seconds",] - time.time()) < 60
    assert found["chunk_failures_total",] == 0
    assert ("gate_passed",) not in found  # nothing is promised of this backend
    assert job.id not in page.get("/metrics")[1]

    eventually(lambda: worker.row().models["dummy"].rows_per_s > 0)
    row = worker.row()
    assert row.metrics == f"http://127.0.0.1:{page.port}"
    assert row.device.startswith("cpu ")
    assert 0 < row.models["dummy"].padding < 1
    assert worker.logged("halving it", job=job.id, chunk=1, attempt=1, worker=row.name)
    lines = [json.loads(line) for line in worker.log().splitlines()]
    of_celery = [line for line in lines if line["logger"].startswith("celery.")]
    # How many tasks there are depends on how many chunks each of them claims.
    assert {"Connected", "received", "succeeded"} <= {word for line in of_celery for word in line["message"].split()}
    assert {line["worker"] for line in of_celery} == {row.name}
    assert not [line for line in lines if "word" in line["message"]]


def test_a_redis_that_goes_makes_it_unready_and_not_unwell_until_it_comes_back(
    settings: Settings, redis_server: RedisServer, page: Page, start_worker: StartWorker
) -> None:
    worker = start_worker()
    eventually(lambda: page.ready == (200, "ok\n"))
    redis_server.stop()
    eventually(lambda: page.ready[0] == 503)
    eventually(lambda: sum(v for key, v in page.metrics("dummy").items() if key[0] == "redis_unanswered_total") > 0)
    reason = page.ready[1]
    assert reason.startswith(("not connected to the queues", "Redis has not answered for "))
    assert page.well == (200, "ok\n")
    redis_server.start()
    eventually(lambda: page.ready == (200, "ok\n"))
    assert enqueue_embeddings(["text"], settings=settings).wait(timeout=60).done == 1
    assert worker.stop() == 0
    assert page.ready == (0, "")
