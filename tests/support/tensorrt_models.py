"""Makes plans in this process, on the stand-ins for TensorRT and a GPU."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest

from embedctl_workers.arrays.tokens import Vectors
from embedctl_workers.backends.onnx.inputs import GRAPH, MODEL, TOKENIZER
from embedctl_workers.backends.tensorrt import graphs, recipe, runtime
from embedctl_workers.backends.tensorrt.recipe import PlanOptions, build_plan
from embedctl_workers.backends.tensorrt.runtime import Runtime
from embedctl_workers.machine.host import Host
from embedctl_workers.models.artifacts import Artifact
from embedctl_workers.models.files import ModelFiles
from tests.support import references_here
from tests.support.builds_here import build_here
from tests.support.fakes import tensorrt
from tests.support.fakes.cuda import FakeDevice
from tests.support.onnx_models import quick_artifact
from tests.support.tiny_models import Tiny

#: Three buckets: up to 32, 64 and 100 tokens.
TINY = Tiny(max_seq_length=100, normalize=True)
TEXTS = ["the text", "word", "a model of query and passage that is text for it", "", "x " * 40, "THE Query", "to " * 90]
#: The promise of 16-bit precision, with room for the different rounding of a real GPU.
LEAST_COSINE = 0.9995


def stand_in(version: str, device: FakeDevice, patch: pytest.MonkeyPatch) -> Runtime:
    """Give this process a version of TensorRT and a GPU, and make it build here."""
    trt = tensorrt.load(version, device)
    made = Runtime(trt, device, runtime.make_log(trt))
    patch.setattr(runtime, "open_runtime", lambda: made)
    build_here(patch)
    return made


def quick_plan(files: ModelFiles, made: Runtime, host: Host, options: PlanOptions, **_: Any) -> Artifact:
    """Stands in for `embedctl_workers.backends.tensorrt.recipe.artifact_for`: neither measured nor checked."""
    plain = quick_artifact(files, "onnx", host).folder
    folder = host.cache / "quick" / f"{files.fingerprint}-{options.dtype}-{options.batch_tokens}-{made.version}"
    folder.mkdir(parents=True, exist_ok=True)
    graphs.convert(plain / GRAPH, folder / GRAPH, options.dtype)
    (folder / recipe.PLAN).write_bytes(build_plan(made, folder / GRAPH, recipe.profiles_of(plain, options)))
    for name in (MODEL, TOKENIZER):
        shutil.copy(plain / name, folder / name)
    return Artifact(folder, {"graph": {"name": options.dtype}})


def by_torch(files: ModelFiles, texts: list[str], **options: Any) -> Vectors:
    return references_here.by_torch(files.folder, texts, normalize_embeddings=True, **options)


def assert_close(found: Vectors, expected: Vectors, least: float = LEAST_COSINE) -> None:
    assert np.isfinite(found).all()
    assert (found * expected).sum(axis=1).min() >= least
