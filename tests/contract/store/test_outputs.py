"""Sparse and multi-vectors from the encoder to the bytes of a result in Redis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from embedctl.queueing.broker import Broker
from embedctl_config import wire
from embedctl_config.outputs import Output
from embedctl_config.settings import Settings
from embedctl_config.wire import ChunkResult, ErrorCode
from embedctl_workers.backends.dummy import DummyBackend
from embedctl_workers.encoding.careful import CarefulUse, encode_carefully
from embedctl_workers.encoding.encoder import ChunkEncoder
from tests.support.chunks import chunk_of
from tests.support.jobs import reference
from tests.support.rig import Rig
from tests.support.store import OPTIONS, new_job, some

#: The last record is the first one again, and the second one has no text.
TEXTS = ("red green", "", "blue blue", "red green")
ALL = ["dense", "sparse", "multi"]


def result_of(broker: Broker, settings: Settings, outputs: str = ",".join(ALL), **options: Any) -> ChunkResult:
    rig = Rig(broker, settings, DummyBackend(dim=16, outputs=outputs))
    job_id, data = new_job(broker, 0, seal=False, options={**OPTIONS, **options}), wire.encode_input(chunk_of(*TEXTS))
    broker.jobs.add(job_id, 0, data, digest=wire.digest_of(data), rows=len(TEXTS), token="p")
    broker.jobs.seal(job_id, 1)
    assert rig.run() == f"job {job_id}, chunk 0"
    return wire.decode_result(some(broker.jobs.result(job_id, 0)))


def test_one_pass_gives_all_outputs_that_a_job_asks_for(broker: Broker, settings: Settings) -> None:
    found = result_of(broker, settings, vectors=ALL)
    dense = np.frombuffer(found.vectors, "<f4").reshape(4, 16)
    np.testing.assert_array_equal(dense[[0, 2, 3]], reference(["red green", "blue blue", "red green"]))
    sparse, multi = some(found.sparse), some(found.multi)
    assert (sparse.width, list(sparse.counts), multi.width, list(multi.counts)) == (
        30_522,
        [2, 0, 1, 2],
        16,
        [2, 0, 2, 2],
    )
    indices, weights = np.frombuffer(sparse.indices, "<u4"), np.frombuffer(sparse.weights, "<f4")
    assert indices[0] < indices[1]
    assert indices.tolist()[:2] == indices.tolist()[3:]
    np.testing.assert_allclose(weights, np.log([2, 2, 3, 2, 2]), rtol=1e-6)
    tokens = np.frombuffer(multi.vectors, "<f4").reshape(6, 16)
    np.testing.assert_array_equal(tokens, reference(["red", "green", "blue", "blue", "red", "green"]))


def test_what_is_not_asked_for_takes_no_room(broker: Broker, settings: Settings) -> None:
    found = result_of(broker, settings, vectors=["multi"])
    assert (found.dim, len(found.vectors), found.sparse, some(found.multi).width) == (0, 0, None, 16)
    assert [error.code for error in found.errors] == [ErrorCode.EMPTY]


def test_a_model_that_lacks_an_output_says_which_it_has(broker: Broker, settings: Settings) -> None:
    found = result_of(broker, settings, outputs="dense", vectors=["dense", "sparse"])
    assert len(found.errors) == 4
    assert found.errors[0].message.endswith("gives no sparse vectors, but dense: ask for them with --vectors dense")
    plain = result_of(broker, settings, outputs="sparse")
    assert "gives no dense vectors, but sparse: ask for them with --vectors sparse" in plain.errors[0].message


@pytest.mark.parametrize("option", [{"dimensions": 4}, {"long": "mean"}])
def test_what_only_dense_vectors_have_is_refused(broker: Broker, settings: Settings, option: dict[str, Any]) -> None:
    found = result_of(broker, settings, vectors=["dense", "multi"], **option)
    assert found.errors[0].message == "dimensions and long mean are for dense vectors alone"


def test_a_bad_row_fails_alone_and_careful_encoding_gives_the_same() -> None:
    encoder = ChunkEncoder(DummyBackend(dim=4, poison=True), 8)
    chunk, options = chunk_of("one two", "a not-a-number", "three", "fail-encoder"), {"vectors": ALL}
    at_once = encoder.encode(encoder.prepare(chunk, options))
    one_by_one = encode_carefully(encoder, chunk, options, CarefulUse())
    for found in (at_once, one_by_one):
        assert [error.row for error in found.errors] == [1, 3]
        assert [cell is None for cell in found.vectors[:, 1]] == [False, True, False, True]
    for one, other in zip(at_once.vectors[[0, 2]].flat, one_by_one.vectors[[0, 2]].flat, strict=True):
        np.testing.assert_array_equal(one, other)


def test_chunks_of_several_jobs_share_batches_only_for_equal_outputs() -> None:
    encoder = ChunkEncoder(DummyBackend(dim=4), 64)
    dense, some_ = encoder.prepare(chunk_of("a b"), {}), encoder.prepare(chunk_of("a b"), {"vectors": ["sparse"]})
    assert dense.key != some_.key
    (first, second) = encoder.encode_together([some_, encoder.prepare(chunk_of("c"), {"vectors": ["sparse"]})])
    assert len(first[0, 0]) == 2
    assert len(second[0, 0]) == 1
    assert encoder.backend.widths[Output.SPARSE] == 30_522
