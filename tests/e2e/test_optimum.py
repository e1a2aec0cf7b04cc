"""optimum's exporter, in an environment of its own: its graph gives the vectors of the model with our packages."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

from embedctl_workers.machine.host import Host
from embedctl_workers.models.artifacts import read_artifact
from embedctl_workers.models.files import resolve_model
from tests.support.alone import packages_of
from tests.support.forked import status_of_fork
from tests.support.packages import new_environment
from tests.support.references_here import expected_vectors
from tests.support.tiny_models import MakeModel, Tiny

pytest.importorskip("onnxruntime")

ROOT = Path(__file__).parents[2]
#: Those that work together: optimum-onnx needs transformers below 4.58.
VERSIONS = [
    "sentence-transformers==5.7.0",
    "transformers==4.57.6",
    "optimum==2.1.0",
    "optimum-onnx==0.1.0",
    "tokenizers==0.22.2",
    "huggingface_hub==0.36.2",
    "onnx==1.23.2",
    "onnxruntime==1.31.1",
]
#: What the environment shares with this one, with all that they bring.
SHARED = ("embedctl", "torch", "onnx", "onnxruntime", "scikit-learn", "pillow")
TEXTS = [
    "the word 3 is a query of the model",
    "word",
    "many " * 300,
    "日本語の文章をベクトルにする。",
    "numbers 1 2 3 3.14159",
]


def encode(model: str, artefact: Path, cache: Path, out: Path) -> None:
    """Save the vectors of a graph; for a fork that has the libraries of models."""
    from embedctl_workers.backends.onnx.backend import OnnxBackend

    backend = OnnxBackend(resolve_model(model), read_artifact(artefact), Host(1, cache))
    forward = backend.forward(backend.tokenize(TEXTS, None), np.arange(len(TEXTS)))
    np.save(out, backend.finish(forward, normalize=True))


@pytest.fixture(scope="module")
def optimum(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment. It has what it can of this one: to unpack that again would cost more."""
    shared = set[str]().union(*(packages_of(Requirement(each)) for each in SHARED)) - {"embedctl"}
    python = new_environment(tmp_path_factory.mktemp("optimum"), *shared)
    wanted = ["install", "--quiet", f"torch=={version('torch')}", f"{ROOT}[optimum]", *VERSIONS]
    uv = [sys.executable, "-m", "uv", "pip", *wanted, "--python", str(python)]
    # uv does not read pip's settings: where those name an index, pip installs.
    if subprocess.run(uv, timeout=1200, check=False).returncode:
        subprocess.run([str(python), "-m", "pip", *wanted, "--no-compile"], check=True, timeout=1200)
    return python


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_graph_of_optimum_gives_the_vectors_of_the_model(
    optimum: Path, environment: dict[str, str], tmp_path: Path, tiny_model: MakeModel
) -> None:
    tiny = str(tiny_model(Tiny()))
    with Path(environment["EMBEDCTL_CONFIG"]).open("a") as config:
        config.write('\n[classes.graph]\nbackend = "onnx"\n')
    environment["EMBEDCTL_CACHE_DIR"] = str(tmp_path)

    done = subprocess.run(
        [str(optimum), "-m", "embedctl", "model", "build", tiny, "--class", "graph", "--exporter", "optimum"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    folder = done.stdout.strip()
    manifest = json.loads(Path(folder, "manifest.json").read_text())
    assert (manifest["recipe"]["exporter"], manifest["versions"]["optimum-onnx"]) == ("optimum", "0.1.0")

    assert manifest["fingerprint"] == resolve_model(tiny).fingerprint
    out = tmp_path / "vectors.npy"
    assert status_of_fork(encode, tiny, Path(folder), tmp_path, out, model=True) == 0
    np.testing.assert_allclose(np.load(out), expected_vectors(tiny, TEXTS), rtol=0, atol=1e-5)
