"""A worker whose vectors differ from the model's takes no work and says why. A good worker does its work."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import redis as redis_py

from embedctl import Job, JobState, enqueue_embeddings
from embedctl_config import keys
from embedctl_config.settings import Settings
from embedctl_workers.models.files import resolve_model
from tests.support.limits import settings_of
from tests.support.prepared import Put
from tests.support.processes import RunEmbedctl
from tests.support.references_here import expected_vectors, keep_references
from tests.support.workers import StartWorker

pytest.importorskip("sentence_transformers")

TEXTS = [f"the word {at} is a query of the model" for at in range(20)]
CLASS = """
[models.tiny]
source = "{folder}"

[classes.tiny]
backend = "torch"
max_abs_error = {bound}
"""

#: Each measurement of the speed takes this long (seconds): enough to have been made.
QUICK_SPEED = Put(
    {
        ("embedctl_workers.measuring.short_benchmark", name): 0.02
        for name in ("_ENCODING_S", "_TOKENISING_S", "_MATRIX_S")
    }
)

WriteClass = Callable[[float], Settings]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.tiny_models import Tiny, make_model

    return make_model(tmp_path_factory.mktemp("tiny"), Tiny())


@pytest.fixture
def write_class(environment: dict[str, str], model: Path) -> WriteClass:
    """Gives the class its bound; 0 is that of fp32."""
    config = Path(environment["EMBEDCTL_CONFIG"])
    before = config.read_text()

    def write(bound: float) -> Settings:
        config.write_text(before + CLASS.format(folder=model, bound=bound))
        return settings_of(environment)

    return write


def submit(settings: Settings) -> Job:
    return enqueue_embeddings(TEXTS, model="tiny", hardware="tiny", settings=settings)


@pytest.mark.slow
def test_a_worker_that_fails_the_gate_takes_nothing_and_a_good_one_does_its_work(
    write_class: WriteClass, raw: redis_py.Redis, start_worker: StartWorker, model: Path
) -> None:
    settings = write_class(1e-12)  # float32 itself is coarser
    job = submit(settings)
    queue = keys.queue("tiny", "tiny")
    tickets = raw.llen(queue)
    assert tickets == 1

    failing = start_worker("tiny", model="tiny", wait=False)
    assert failing.process.wait(120) == 65
    table = [
        line.strip()
        for line in failing.log().partition("the accuracy gate failed: model tiny, backend torch")[2].splitlines()
    ]
    assert table[1].split()[:3] == ["check", "texts", "max"]
    assert any(line.startswith("in batches") and line.endswith("FAILED") for line in table)
    assert "bounds set by the class: max_abs_error 1e-12" in table
    status = job.status()
    assert (status.state, status.claims, status.live_workers) == (JobState.QUEUED, 0, 0)
    assert raw.llen(queue) == tickets
    assert list(failing.broker.workers.alive()) == []

    write_class(0)
    good = start_worker("tiny", model="tiny")
    assert job.wait(timeout=60).state is JobState.COMPLETED
    row = good.row()
    assert row.bounds == ""
    assert row.models["tiny"].accuracy.startswith("max abs ")
    assert {(chunk.precision, chunk.bounds) for chunk in job.iter_results()} == {("fp32", "")}

    np.testing.assert_allclose(job.vectors(), expected_vectors(model, TEXTS, batch_size=1), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_bounds_of_a_class_s_own_stand_in_every_result_and_in_the_status(
    write_class: WriteClass, start_worker: StartWorker, embedctl: RunEmbedctl
) -> None:
    settings = write_class(0.001)
    worker = start_worker("tiny", model="tiny")
    job = submit(settings)
    job.wait(timeout=60)
    assert {(chunk.precision, chunk.bounds) for chunk in job.iter_results()} == {("fp32", "max_abs_error 0.001")}
    assert worker.row().bounds == "max_abs_error 0.001"
    assert "class tiny is held to bounds of its own: max_abs_error 0.001" in worker.log()
    shown = embedctl("status", job.id).stdout
    assert f"{worker.row().name} is held to max_abs_error 0.001 in place of fp32's own" in shown


@pytest.mark.slow
def test_verify_says_what_a_worker_would_and_how_fast_it_is(
    write_class: WriteClass, environment: dict[str, str], embedctl: RunEmbedctl, tmp_path: Path
) -> None:
    environment["EMBEDCTL_CACHE_DIR"] = str(tmp_path / "cache")
    write_class(0)
    cpu = min(os.sched_getaffinity(0))

    def verify(*arguments: str) -> subprocess.CompletedProcess[str]:
        return embedctl("model", "verify", *arguments, prepare=QUICK_SPEED, model=True)

    passed = verify("tiny", "--class", "tiny", "--cpus", str(cpu))
    assert passed.returncode == 0, passed.stderr
    assert "\nmodel tiny, backend torch" in passed.stdout
    assert "FAILED" not in passed.stdout
    kept = tmp_path / "cache" / "reports" / "verify-tiny-tiny.json"
    assert passed.stderr.splitlines()[-1] == f"saved: {kept}"
    report = json.loads(kept.read_text())
    assert report["passed"] is True
    assert report["place"]["cpus"] == f"{cpu}, 1 compute threads"
    assert report["versions"]["torch"] == metadata.version("torch")
    speed = report["speed"]
    assert speed["notes"] == []
    assert [rate["name"] for rate in speed["rates"]] == ["mixed lengths", "long texts"]
    for rate in speed["rates"]:
        assert f"{rate['tokens_per_s']['median']:,.0f} (" in passed.stdout
        # In a round of a busy machine, nothing may end.
        assert 0 <= rate["tokens_per_s"]["least"] <= rate["tokens_per_s"]["median"] <= rate["tokens_per_s"]["most"]
        assert rate["tokens_per_s"]["most"] > 0
        # A model of a few thousand weights spends most of its work outside matrix products.
        assert 0 < rate["share_of_matrix_rate"]["median"] < 1

    write_class(1e-12)
    own = tmp_path / "own.json"
    failed = verify("tiny", "--class", "tiny", "--json", "--report", str(own))
    assert failed.returncode == 65, failed.stderr
    report = json.loads(failed.stdout)
    assert report == json.loads(own.read_text())
    assert (report["passed"], report["speed"]) == (False, None)
    accuracy = report["accuracy"]
    assert accuracy["overrides"] == "max_abs_error 1e-12"
    assert accuracy["checks"][0]["name"] == "in batches"
    assert 0 < accuracy["checks"][0]["max_abs_error"] < 1e-5


def test_verify_of_what_runs_no_model_says_so(embedctl: RunEmbedctl) -> None:
    done = embedctl("model", "verify", "dummy", "--class", "dummy")
    assert done.returncode == 1
    assert "the backend 'dummy' of class dummy runs no model" in done.stderr


@pytest.mark.parametrize(("hardware", "device"), [("gpu", "GPU"), ("neuron", "Neuron core")])
def test_verify_refuses_what_a_worker_refuses(embedctl: RunEmbedctl, hardware: str, device: str) -> None:
    # Without the vendors' tools.
    done = embedctl("model", "verify", "tiny", "--class", hardware, PATH="/nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"class {hardware} needs a {device}, and none is found here" in done.stderr
    wrong = embedctl("model", "verify", "dummy", "--class", "dummy", "--gpu", "0")
    assert wrong.returncode == 2
    assert "--gpu 0: class dummy runs on a CPU: leave --gpu out" in wrong.stderr


@pytest.mark.slow
def test_references_that_are_not_the_models_stop_a_worker(
    write_class: WriteClass, environment: dict[str, str], start_worker: StartWorker, model: Path, tmp_path: Path
) -> None:
    """What a worker sees whose own vectors are wrong: these and those of torch differ."""
    from embedctl_workers.machine.host import Host
    from embedctl_workers.models.references import references_path
    from tests.support.tiny_models import Tiny, make_model

    environment["EMBEDCTL_CACHE_DIR"] = str(tmp_path)
    host = Host(threads=1, cache=tmp_path)
    other = resolve_model(str(make_model(tmp_path / "other", Tiny(seed=1))))
    keep_references(other.folder, tmp_path)
    references_path(other, host).rename(references_path(resolve_model(str(model)), host))
    write_class(0)
    worker = start_worker("tiny", model="tiny", wait=False)
    assert worker.process.wait(120) == 65
    assert "FAILED" in worker.log()
