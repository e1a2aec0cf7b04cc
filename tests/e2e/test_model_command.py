"""What is built of models: by the command, by a worker that starts, and beside another precision."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from embedctl import JobState, enqueue_embeddings
from tests.support.forked import run_forked
from tests.support.here import Here
from tests.support.limits import settings_of
from tests.support.references_here import expected_vectors
from tests.support.tiny_models import MakeModel, Tiny

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def environment(environment: dict[str, str], tiny_model: MakeModel, tmp_path: Path) -> dict[str, str]:
    """With a class for graphs, a small model, and a cache of this test's own."""
    with Path(environment["EMBEDCTL_CONFIG"]).open("a") as config:
        config.write(f'\n[classes.graph]\nbackend = "onnx"\n\n[models.tiny]\nsource = "{tiny_model(Tiny())}"\n')
    return {**environment, "EMBEDCTL_CACHE_DIR": str(tmp_path / "cache")}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_model_is_built_once_listed_shown_and_served(here: Here) -> None:
    unbuilt = ["worker", "--class", "graph", "--model", "tiny", "--no-build"]
    refused = run_forked(unbuilt, here.environment, here.folder, model=True)
    assert refused.returncode == 1
    assert "run `embedctl model build tiny --class CLASS`" in refused.stderr
    assert "embedctl model build tiny" in here.embedctl("model", "show", "tiny").stdout

    built = here.embedctl("model", "build", "tiny", "--class", "graph", model=True, status=0)
    assert "comparing with torch" in built.stderr
    folder = Path(built.stdout.strip())
    again = here.embedctl("model", "build", "tiny", "--class", "graph", "--json", model=True)
    assert "comparing" not in again.stderr
    facts = json.loads(again.stdout)
    assert facts["folder"] == str(folder)
    assert facts["accuracy"]["max_abs_error"] <= 1e-4

    (listed,) = [
        each for each in json.loads(here.embedctl("model", "list", "--json").stdout)["models"] if each["name"] == "tiny"
    ]
    assert listed["built"] == [facts]
    for name in ("tiny", facts["fingerprint"], str(folder)):
        assert json.loads(here.embedctl("model", "show", name, "--json").stdout)["built"] == [facts]
    shown = here.embedctl("model", "show", "tiny").stdout
    for fact in (facts["fingerprint"], facts["engine"], "min_cosine", "operators", "sha256"):
        assert fact in shown

    worker = here.start_worker("graph", model="tiny")
    assert worker.row().models["tiny"].engine == facts["engine"]
    job = enqueue_embeddings(["the text", "a word"], model="tiny", hardware="graph", settings=here.settings)
    assert job.wait(timeout=60).state is JobState.COMPLETED
    expected = expected_vectors(settings_of(here.environment).models["tiny"].source, ["the text", "a word"])
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
def test_what_can_not_be_built_is_said(embedctl: Run, arguments: tuple[str, ...], status: int, message: str) -> None:
    done = embedctl("model", "build", *arguments)
    assert done.returncode == status
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
