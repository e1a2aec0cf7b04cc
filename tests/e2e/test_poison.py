"""Records that crash, hang, exhaust or confuse a worker. Each such record fails alone."""

from __future__ import annotations

import numpy as np
import pytest

from embedctl import JobState, enqueue_embeddings
from tests.support.here import Here
from tests.support.jobs import reference
from tests.support.workers import deaths, kept_alive

POISON = {
    37: ("a crash-tokenizer here", "crashed_worker"),
    233: ("a crash-encoder here", "crashed_worker"),
    283: ("it will fail-encoder", "encode_error"),
    325: ("it will fail-tokenizer", "encode_error"),
    377: ("this is out-of-memory alone", "out_of_memory"),
    421: ("this is not-a-number at all", "non_finite"),
    499: ("", "empty"),
}


@pytest.mark.slow
def test_five_hundred_records_with_seven_bad_ones(here: Here) -> None:
    texts = [f"text {i} of many" for i in range(500)]
    for at, (text, _) in POISON.items():
        texts[at] = text
    with kept_alive(here.start_worker, 2) as workers:
        job = enqueue_embeddings(texts, ids=range(500), hardware="poison", chunk_size=25, settings=here.settings)
        status = job.wait(timeout=120)
        assert (status.state, status.done, status.failed) == (JobState.COMPLETED_WITH_ERRORS, 493, 7)
        errors = [(error.position, error.id, error.code) for error in job.errors()]
        assert errors == [(at, at, code) for at, (_, code) in POISON.items()]
        # Two a crasher: one that makes the chunk suspect, one that names the record.
        assert deaths(workers) == [-11] * 4
        good = [at for at in range(500) if at not in POISON]
        np.testing.assert_array_equal(job.vectors()[good], reference([texts[at] for at in good]))


@pytest.mark.parametrize(
    ("word", "ended"), [pytest.param("hang-encoder", 70, marks=pytest.mark.slow), ("lose-device", 71)]
)
def test_a_record_that_ends_the_worker_in_order_is_named_after_two_ends(here: Here, word: str, ended: int) -> None:
    here.environment["EMBEDCTL_HANG_S"] = "1.5"
    texts = [f"text {i}" for i in range(20)]
    texts[14] += f" {word}"
    with kept_alive(here.start_worker, 1) as workers:
        job = enqueue_embeddings(texts, hardware="poison", chunk_size=10, settings=here.settings)
        status = job.wait(timeout=60)
        assert (status.done, status.failed) == (19, 1)
        assert [(error.position, error.code) for error in job.errors()] == [(14, "crashed_worker")]
        assert deaths(workers) == [ended] * 2
