"""Vectors of real text and named prompts are those of sentence-transformers: of two workers on two CPU sets, too."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedctl import JobState, enqueue_embeddings
from embedctl_workers.models.files import resolve_model
from tests.support.here import Here
from tests.support.limits import settings_of
from tests.support.packages import need
from tests.support.passages import real_passages
from tests.support.references_here import expected_vectors, keep_references
from tests.support.waiting import eventually
from tests.support.workers import WorkerProcess

MODEL = "all-MiniLM-L6-v2"


def assert_pinned(worker: WorkerProcess, cpu: int) -> None:
    """Every thread of the process may run on its one CPU alone, and one of them computes."""
    for task in Path(f"/proc/{worker.pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread has just ended
            lines = (task / "status").read_text().splitlines()
            status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            assert status["Cpus_allowed_list"] == str(cpu)
    variables = Path(f"/proc/{worker.pid}/environ").read_bytes()
    assert b"OMP_NUM_THREADS" not in variables  # it was the worker that set it, not what started it
    assert (worker.row().cpus, worker.row().threads) == (str(cpu), 1)


def spent_ticks(worker: WorkerProcess) -> int:
    fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.timeout(400)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
@pytest.mark.slow
def test_two_pinned_workers_give_the_vectors_of_sentence_transformers(here: Here) -> None:
    here.environment["EMBEDCTL_LEASE_S"] = "30"  # two busy CPUs may keep a heartbeat waiting for more than a second
    texts = [text for text in real_passages(200) if text]
    assert len(texts) >= 185
    keep_references(resolve_model(MODEL).folder, here.environment["EMBEDCTL_CACHE_DIR"])
    first, second, *_ = sorted(os.sched_getaffinity(0))
    # Not forked: a fork's threads and variables are those that another process began with.
    workers = {
        cpu: here.start_worker("cpu", model=MODEL, cpus=str(cpu), wait=False, forked=False) for cpu in (first, second)
    }
    loading = here.broker.workers.not_ready
    eventually(lambda: [each.doing for each in loading.all()].count(f"loading {MODEL}") == len(workers))
    assert [each.name for each in loading.all()] == [f"cpu:{cpu}@{socket.gethostname()}" for cpu in workers]
    for worker in workers.values():
        assert set(worker.wait_ready().row().models) == {MODEL, f"sentence-transformers/{MODEL}"}, "both spellings"
    eventually(lambda: loading.all() == [])  # its words end a moment after its first heartbeat
    before = [spent_ticks(worker) for worker in workers.values()]

    job = enqueue_embeddings(texts, model=MODEL, hardware="auto", chunk_size=8, settings=here.settings)
    eventually(lambda: all(worker.row().progressed_ms for worker in workers.values()))
    for cpu, worker in workers.items():
        assert_pinned(worker, cpu)
    status = job.wait(timeout=300)

    assert status.state is JobState.COMPLETED
    assert (status.hardware, status.precision) == ("cpu", "fp32")
    assert status.done == len(texts)
    assert status.claims == status.chunks_done == status.chunks
    # Without their starts, which cost more than this job and the same for both.
    share = [spent_ticks(worker) - spent for worker, spent in zip(workers.values(), before, strict=True)]
    assert min(share) > 0.4 * max(share), f"they did not share the work: {share}"

    difference = float(np.abs(job.vectors() - expected_vectors(resolve_model(MODEL).folder, texts)).max())
    print(json.dumps({"passages": len(texts), "tokens": status.tokens, "max_abs_difference": difference}))
    assert difference <= 1e-5
    cut = [cut for chunk in job.iter_results() for cut in chunk.truncations]
    assert len(cut) >= 2
    assert all(each.used == 256 and each.lost > 0 for each in cut)


PROMPTS = {"query": "a query of the model: ", "document": ""}
TEXTS = ["the text", "a word", "the word of the text that is in the text " * 10]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small model with two prompts; pooling leaves out their tokens."""
    need("sentence_transformers")
    from tests.support.tiny_models import Tiny, make_model

    folder = make_model(tmp_path, Tiny(include_prompt=False))
    path = folder / "config_sentence_transformers.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "prompts": PROMPTS}))
    return folder


@pytest.mark.slow
def test_a_job_names_a_prompt_of_the_model(here: Here, model: Path) -> None:
    with Path(here.environment["EMBEDCTL_CONFIG"]).open("a") as config:
        config.write(f'\n[models.named]\nsource = "{model}"\n')
    settings = settings_of(here.environment)
    before = enqueue_embeddings(["a"], model="named", hardware="cpu", prompt_name="nobody's", settings=settings)
    worker = here.start_worker("cpu", model="named")
    assert sorted(worker.row().models["named"].prompts or ()) == ["document", "query"]
    before.wait(timeout=60)
    known = "model named has the prompts document, query"
    assert [error.message for error in before.errors()] == [f'no prompt "nobody\'s": {known}']

    ways: list[dict[str, Any]] = [{"prompt_name": "query"}, {"prompt_name": "document"}, {"long": "cut-left"}]
    for options in ways:
        job = enqueue_embeddings(TEXTS, model="named", hardware="cpu", settings=settings, **options)
        job.wait(timeout=60)
        np.testing.assert_allclose(job.vectors(), expected_vectors(model, TEXTS, **options), rtol=0, atol=1e-5)

    (here.folder / "c.txt").write_text("the text\n")
    common = ("submit", "c.txt", "--model", "named", "--class", "cpu")
    refused = here.embedctl(*common, "--prompt", "@passage", status=2)
    assert (refused.stdout, refused.stderr) == ("", f"embedctl: prompt_name 'passage': {known}\n")
    here.embedctl(*common, "--prompt", "@query", "--long", "cut-left", "--wait", status=0)
    dry = [here.embedctl(*common, "--dry-run", "--json", *more) for more in ((), ("--prompt", "@query"))]
    tokens = [json.loads(each.stdout)["tokens"] for each in dry]
    assert tokens[1] > tokens[0]
    assert "document, query" in here.embedctl("model", "show", "named").stdout


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_bare_model_keeps_the_pooling_that_was_said_once(here: Here, tmp_path: Path) -> None:
    need("sentence_transformers")
    from tests.support.tiny_models import Tiny, make_model

    folder = make_model(tmp_path, Tiny(pooling="cls"))
    for file in ("sentence_bert_config.json", "config_sentence_transformers.json"):
        (folder / file).unlink()
    expected = expected_vectors(folder, TEXTS)
    (folder / "modules.json").unlink()
    with Path(here.environment["EMBEDCTL_CONFIG"]).open("a") as config:
        config.write(f'\n[models.bare]\nsource = "{folder}"\n')
    here.write({"a": TEXTS[0], "b": TEXTS[1]})
    common = ("corpus.jsonl", "--model", "bare", "--class", "cpu", "-o", "v.parquet")
    here.start_worker("cpu", "--pooling", "cls", model="bare")
    assert here.broker.workers.offers()["cpu", "bare", "fp32"].pooling == "cls"
    job = enqueue_embeddings(TEXTS, model="bare", hardware="cpu", settings=settings_of(here.environment))
    job.wait(timeout=120)
    np.testing.assert_allclose(job.vectors(), expected, rtol=0, atol=1e-5)
    here.embedctl("submit", *common, status=0)
    assert "nothing is encoded" in here.embedctl("submit", *common, "--sync", status=0).stderr
