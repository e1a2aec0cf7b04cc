"""Prompts by name and the side of truncation: vectors as by sentence-transformers, and what is refused."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

for _needed in ("torch", "sentence_transformers"):
    pytest.importorskip(_needed)

from embedctl import enqueue_embeddings  # noqa: E402
from embedctl.broker import Broker  # noqa: E402
from embedctl_config.settings import Settings  # noqa: E402
from tests.support.references_here import expected_vectors  # noqa: E402
from tests.support.tiny_models import Tiny, make_model  # noqa: E402
from tests.support.workers import StartWorker  # noqa: E402

PROMPTS = {"query": "a query of the model: ", "document": ""}
TEXTS = ["the text", "a word", "the word of the text that is in the text " * 10]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with two prompts; pooling leaves out their tokens."""
    folder = make_model(tmp_path_factory.mktemp("prompts"), Tiny(include_prompt=False))
    path = folder / "config_sentence_transformers.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "prompts": PROMPTS}))
    return folder


@pytest.fixture
def environment(environment: dict[str, str], model: Path) -> dict[str, str]:
    with Path(environment["EMBEDCTL_CONFIG"]).open("a") as config:
        config.write(f'\n[models.named]\nsource = "{model}"\n')
    return environment


@pytest.mark.slow
def test_a_job_names_a_prompt_of_the_model(
    model: Path, start_worker: StartWorker, settings: Settings, embedctl: Run, short_folder: Path, broker: Broker
) -> None:
    before = enqueue_embeddings(["a"], model="named", hardware="cpu", prompt_name="nobody's", settings=settings)
    worker = start_worker("cpu", model="named")
    assert sorted(worker.row().models["named"].prompts or ()) == ["document", "query"]
    before.wait(timeout=60)
    assert [error.message for error in before.errors()] == [
        'no prompt "nobody\'s": model named has the prompts document, query'
    ]

    for name in PROMPTS:
        job = enqueue_embeddings(TEXTS, model="named", hardware="cpu", prompt_name=name, settings=settings)
        job.wait(timeout=60)
        expected = expected_vectors(model, TEXTS, prompt_name=name)
        np.testing.assert_allclose(job.vectors(), expected, rtol=0, atol=1e-5)

    job = enqueue_embeddings(TEXTS, model="named", hardware="cpu", truncation_side="left", settings=settings)
    job.wait(timeout=60)
    expected = expected_vectors(model, TEXTS, truncation_side="left")
    np.testing.assert_allclose(job.vectors(), expected, rtol=0, atol=1e-5)

    (short_folder / "c.txt").write_text("the text\n")
    common = ("submit", "c.txt", "--model", "named", "--class", "cpu")
    refused = embedctl(*common, "--prompt", "@passage")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "embedctl: prompt_name 'passage': model named has the prompts document, query\n"
    embedctl(*common, "--prompt", "@query", "--long", "truncate-left", "--wait", status=0)
    dry = [embedctl(*common, "--dry-run", "--json", *more) for more in ((), ("--prompt", "@query"))]
    tokens = [json.loads(each.stdout)["tokens"] for each in dry]
    assert tokens[1] > tokens[0]
    shown = embedctl("model", "show", "named")
    assert "document, query" in shown.stdout
