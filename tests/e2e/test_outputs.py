"""Sparse and multi-vectors: from the option to what the library reads and files hold, through a real worker."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from embedctl import AsyncJob, Job, SettingsError, enqueue_embeddings
from embedctl.corpus.rows import Rows, records_of
from embedctl.jobs.estimate import Estimate, estimate
from embedctl.jobs.options import SubmitOptions
from embedctl_config.outputs import Output
from tests.support.here import Here
from tests.support.jobs import reference
from tests.support.waiting import eventually

#: The second record has no text.
TEXTS = ["red green", "", "blue blue", "red green red"]
ALL = list(Output)


def submitted(here: Here, vectors: Any, **options: Any) -> Job:
    job = enqueue_embeddings(TEXTS, ids=list("abcd"), vectors=vectors, settings=here.settings, **options)
    job.wait(timeout=60)
    return job


def sparse_of(job: Job) -> dict[int, dict[int, float]]:
    return {
        each.position: dict(zip(each.indices.tolist(), each.weights.tolist(), strict=True)) for each in job.sparse()
    }


def check_parquet(table: Any, job: Job) -> None:
    rows = table.to_pylist()
    assert [row["error_code"] for row in rows] == [None, "empty", None, None]
    assert [row["sparse"] is None or row["multi"] is None for row in rows] == [False, True, False, False]
    found = {row["position"]: {pair["index"]: pair["value"] for pair in row["sparse"]} for row in rows if row["sparse"]}
    assert found == sparse_of(job)
    for each in job.multi():
        np.testing.assert_array_equal(np.array(rows[each.position]["multi"], np.float32), each.vectors)


def test_outputs_from_the_option_to_the_library_and_to_files(here: Here, tmp_path: Path) -> None:
    here.start_worker()
    check_all_of_one_pass(here, tmp_path)
    check_parts(here, tmp_path)
    check_refusals(here, tmp_path)
    check_estimates(here)


def check_all_of_one_pass(worker: Here, tmp_path: Path) -> None:
    job = submitted(worker, "multi,sparse,dense", chunk_size=2)
    good = [0, 2, 3]
    np.testing.assert_array_equal(job.vectors()[good], reference([TEXTS[at] for at in good]))
    weights = sparse_of(job)
    assert [sorted(np.round(np.expm1(list(weights[at].values())))) for at in good] == [[1, 1], [2], [1, 2]]
    multi = {each.position: each for each in job.multi()}
    assert [(each.id, each.vectors.shape) for each in multi.values()] == [
        ("a", (2, 16)),
        ("c", (2, 16)),
        ("d", (3, 16)),
    ]
    np.testing.assert_array_equal(multi[0].vectors, reference(["red", "green"]))

    async def in_a_loop() -> list[int]:
        twin = await AsyncJob.get(job.id, settings=worker.settings)
        return [each.position async for each in twin.sparse()] + [len(each.vectors) async for each in twin.multi()]

    assert asyncio.run(in_a_loop()) == [0, 2, 3, 2, 2, 3]
    job.deliver(tmp_path / "v.parquet")
    check_parquet(pq.read_table(tmp_path / "v.parquet"), job)
    job.deliver(tmp_path / "v.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    assert dict(zip(*lines[3]["sparse"].values(), strict=True)) == pytest.approx(weights[3])
    np.testing.assert_allclose(lines[3]["multi"], multi[3].vectors)
    assert ("embedding" in lines[0], "sparse" in lines[1]) == (True, False)


def check_parts(worker: Here, tmp_path: Path) -> None:
    job = submitted(worker, ["sparse", "multi"])
    before = sparse_of(job), [each.vectors for each in job.multi()]
    job.deliver(tmp_path / "parts")
    assert sparse_of(job) == before[0]
    for found, expected in zip(job.multi(), before[1], strict=True):
        np.testing.assert_array_equal(found.vectors, expected)
    job.deliver(tmp_path / "v.parquet", dtype="float32")
    table = pq.read_table(tmp_path / "v.parquet")
    assert "embedding" not in table.column_names
    check_parquet(table, job)


def check_estimates(worker: Here) -> None:
    def of(*vectors: str) -> Estimate:
        records = records_of(TEXTS, Rows(100))
        return estimate(worker.broker, records, SubmitOptions(hardware="dummy", model="dummy", vectors=vectors))

    dense, multi, sparse = of("dense"), of("multi"), of("dense", "sparse")
    assert (dense.vector_bytes, multi.vector_bytes) == (4 * 16 * 4, multi.tokens * 16 * 4)
    assert of("dense", "multi").vector_bytes == (4 + multi.tokens) * 16 * 4
    assert (sparse.vector_bytes, "weights of sparse vectors" in sparse.describe()) == (None, True)
    plan = ["plan", "--records", "1000", "--tokens", "100", "--json", "--vectors"]
    eventually(lambda: next(iter(worker.broker.workers.offers().values())).tokens_per_s, what="the rate of the worker")
    planned = [json.loads(worker.embedctl(*plan, each, status=0).stdout) for each in ("dense", "multi")]
    more = 2 * 1000 * (100 - 1) * 16 * 4  # bytes of results, which are sent twice
    assert planned[1]["network_bytes"] - planned[0]["network_bytes"] == pytest.approx(more, rel=0.02)
    assert "only the model can count" in worker.embedctl(*plan, "sparse", status=1).stderr


def check_refusals(worker: Here, tmp_path: Path) -> None:
    job = submitted(worker, "sparse")
    with pytest.raises(SettingsError, match="has no dense vectors"):
        job.vectors()
    with pytest.raises(SettingsError, match="no multi vectors"):
        list(job.multi())
    with pytest.raises(
        SettingsError, match=r"v\.npy can't hold sparse vectors: name the output \.npz or \.jsonl or \.parquet"
    ):
        job.deliver(tmp_path / "v.npy")
    for options, why in (
        ({"dimensions": 4}, "dimensions is for dense vectors alone"),
        ({"long": "mean"}, "long mean is for dense vectors alone"),
        ({"vectors": "sparse,colour"}, "'colour' is none of dense, sparse, multi"),
        ({"vectors": 5}, "vectors is"),
        ({"keep": ["sparse"]}, "what output files call these vectors"),
    ):
        with pytest.raises(SettingsError, match=why):
            submitted(worker, **{"vectors": "sparse", **options})


def test_a_model_without_dense_vectors_is_refused_once_for_a_job_that_names_none(here: Here) -> None:
    """If no worker is alive to tell, its failed records have one reason, which is said once."""
    why = "model dummy gives no dense vectors, but multi: ask for them with --vectors multi"
    corpus, of_class = here.write({"a": "red", "b": "green"}), ("--class", "colbert")
    job_id = here.embedctl("submit", corpus, *of_class).stdout.strip()
    here.start_worker("colbert")
    waited = here.embedctl("wait", job_id, status=1)
    assert f"No record could be encoded. The first: record 0 (a): no_output: {why}\n" in waited.stderr
    assert why in here.embedctl("submit", corpus, *of_class, status=2).stderr
    with pytest.raises(SettingsError, match=why):
        enqueue_embeddings(TEXTS, settings=here.settings, hardware="colbert")
    assert here.broker.jobs.newest_ids(9) == [job_id]
