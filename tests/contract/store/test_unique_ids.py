"""A job whose ids must be unique."""

from __future__ import annotations

import asyncio

import pytest

from embedctl import JobState, aenqueue_embeddings, enqueue_embeddings
from embedctl.broker import Broker
from embedctl_config.errors import InputError
from embedctl_config.settings import Settings

TEXTS = ["a", "b", "c", "d"]


def test_a_job_with_an_id_twice_is_cancelled(broker: Broker, settings: Settings) -> None:
    with pytest.raises(InputError, match="record 3: its id is that of record 1"):
        enqueue_embeddings(iter(TEXTS), ids=["0", "1", None, 1], duplicates="error", chunk_size=1, settings=settings)
    with pytest.raises(InputError, match="2 ids are not unique"):
        asyncio.run(aenqueue_embeddings(iter(TEXTS), ids=["0", "0", "1", "1"], duplicates="error", settings=settings))
    states = [broker.jobs.status(job_id).state for job_id in broker.jobs.newest_ids(5)]
    assert states == [JobState.CANCELLED] * 2


@pytest.mark.in_redis
def test_a_job_with_unique_ids_is_like_any_other(settings: Settings) -> None:
    job = enqueue_embeddings(TEXTS, ids=[None, None, 1, 2], duplicates="error", settings=settings)
    assert job.status().records == 4
