"""A worker whose vectors differ from the model's takes no work and says why. A good worker does its work."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from embedctl import JobState, enqueue_embeddings
from embedctl_config.settings import Settings
from tests.support.here import Here
from tests.support.limits import settings_of
from tests.support.packages import need
from tests.support.prepared import Put
from tests.support.processes import RunEmbedctl
from tests.support.references_here import expected_vectors

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
    {("embedctl_workers.measuring.short_benchmark", name): 0.02 for name in ("_ENCODING_S", "_TOKENISING_S")}
)

WriteClass = Callable[[float], Settings]


@pytest.fixture
def model(tiny_model: Callable[..., Path]) -> Path:
    need("sentence_transformers")
    from tests.support.tiny_models import Tiny

    return tiny_model(Tiny())


@pytest.fixture
def write_class(environment: dict[str, str], model: Path) -> WriteClass:
    """Gives the class its bound; 0 is that of fp32."""
    config = Path(environment["EMBEDCTL_CONFIG"])
    before = config.read_text()

    def write(bound: float) -> Settings:
        config.write_text(before + CLASS.format(folder=model, bound=bound))
        return settings_of(environment)

    return write


@pytest.mark.slow
def test_who_fails_the_gate_takes_nothing_and_others_work(here: Here, write_class: WriteClass, model: Path) -> None:
    settings = write_class(1e-12)  # float32 itself is coarser
    job = enqueue_embeddings(TEXTS, model="tiny", hardware="tiny", settings=settings)

    failing = here.start_worker("tiny", model="tiny", wait=False)
    assert failing.process.wait(120) == 65
    table = failing.log().partition("the accuracy gate failed: model tiny, backend torch")[2].splitlines()
    assert any(line.strip().startswith("in batches") and line.endswith("FAILED") for line in table)
    assert "bounds set by the class: max_abs_error 1e-12" in map(str.strip, table)
    status = job.status()
    assert (status.state, status.claims, status.live_workers) == (JobState.QUEUED, 0, 0)
    assert ": did not start: the accuracy gate failed: model tiny, backend torch" in status.hindrance
    assert list(here.broker.workers.alive()) == []

    write_class(0.001)
    good = here.start_worker("tiny", model="tiny")
    assert job.wait(timeout=60).state is JobState.COMPLETED
    row = good.row()
    assert row.bounds == "max_abs_error 0.001"
    assert row.models["tiny"].accuracy.startswith("max abs ")
    assert {(chunk.precision, chunk.bounds) for chunk in job.iter_results()} == {("fp32", row.bounds)}
    assert "class tiny is held to bounds of its own: max_abs_error 0.001" in good.log()
    shown = here.embedctl("status", job.id).stdout
    assert f"{row.name} is held to max_abs_error 0.001 in place of fp32's own" in shown

    np.testing.assert_allclose(job.vectors(), expected_vectors(model, TEXTS, batch_size=1), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_verify_says_what_workers_would_and_how_fast_it_is(here: Here, write_class: WriteClass) -> None:
    write_class(0)
    cpu = min(os.sched_getaffinity(0))
    verify = partial(here.embedctl, "model", "verify", "tiny", "--class", "tiny", prepare=QUICK_SPEED, model=True)
    report = json.loads(verify("--json", "--cpus", str(cpu), status=0).stdout)
    assert (report["passed"], report["model"], report["backend"]) == (True, "tiny", "torch")
    assert report["place"]["cpus"] == f"{cpu}, 1 compute threads"
    assert report["versions"]["torch"] == metadata.version("torch")
    assert [rate["name"] for rate in report["speed"]["rates"]] == ["mixed lengths", "long texts"]
    for rate in report["speed"]["rates"]:
        assert rate["tokens_per_s"]["most"] > 0

    write_class(1e-12)
    failed = verify(status=65).stdout
    assert "\nmodel tiny, backend torch" in failed
    assert "bounds set by the class: max_abs_error 1e-12" in failed
    assert "FAILED" in failed
    assert failed.endswith("speed: not measured, because these are not the model's vectors\n")


def test_verify_refuses_what_a_worker_refuses(embedctl: RunEmbedctl) -> None:
    # Without the vendor's tools.
    done = embedctl("model", "verify", "tiny", "--class", "neuron", PATH="/nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert "class neuron needs a Neuron core, and none is found here" in done.stderr
    wrong = embedctl("model", "verify", "dummy", "--class", "dummy", "--gpu", "0", status=2)
    assert "--gpu 0: class dummy runs on a CPU: leave --gpu out" in wrong.stderr
