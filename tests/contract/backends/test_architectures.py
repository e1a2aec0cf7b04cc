"""Every architecture and option of sentence-transformers that we claim, against `SentenceTransformer` itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import pytest

from embedctl_config.hardware import ModelEntry
from embedctl_workers.arrays.tokens import Vectors
from embedctl_workers.backends import load_backend
from embedctl_workers.machine.host import Host
from tests.support.chunks import encode
from tests.support.onnx_models import quick_artifact
from tests.support.references_here import sentence_transformer
from tests.support.stand_in_gpu import StandIn
from tests.support.texts import TEXTS
from tests.support.tiny_models import FAMILIES, Family, MakeModel, Tiny

#: Tracing a graph warns of each test in a model's Python; whether the graph is right is what is tested here.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")]

#: The vectors of the texts, by (model, prompt, normalize).
Reference = Callable[..., Vectors]


class Engine(NamedTuple):
    backend: str
    options: Mapping[str, str]
    tolerance: float


ENGINES = {
    # Which products are the fastest depends on the CPU, and AMX's are not as close: test_tiles.py has their bounds.
    "torch": Engine("torch", {"products": "plain"}, 1e-5),
    "torch padded": Engine("torch", {"engine": "padded"}, 1e-5),
    "onnx": Engine("onnx", {}, 1e-4),
    "torch-gpu on a stand-in": Engine("torch-gpu", {"dtype": "fp32"}, 1e-5),
}

#: What every engine runs: each family once, and each option in one of them. Neither the layers know what comes after
#: them nor what comes after them their family.
EVERYWHERE = [
    Tiny(prompt="passage: ", include_prompt=False, dense=12, normalize=True),
    Tiny("roberta", pooling="cls", truncation="left", act="relu", hidden=24, heads=3),
    Tiny("xlm-roberta", pooling="mean+max", lower=True, hidden=40, heads=5, layers=3),
    Tiny("distilbert", pooling="max", max_seq_length=None),
    Tiny("mpnet", pooling="mean_sqrt_len_tokens", prompt="passage: "),
    Tiny("modernbert", layers=4, max_seq_length=100),
    Tiny("qwen2", pooling="weightedmean", hidden=24, heads=3, padding="right"),
    Tiny("qwen3", pooling="lasttoken", prompt="passage: ", include_prompt=False, normalize=True),
]
#: The packed engine computes what comes before and after the layers itself, with heads of any size.
PACKED = [
    *EVERYWHERE,
    Tiny(),
    Tiny(act="gelu_new"),
    Tiny(hidden=128, heads=2, layers=1, pooling="weightedmean"),
    Tiny(pooling="cls", prompt="passage: ", include_prompt=False),
    Tiny("qwen3", pooling="lasttoken", hidden=64, heads=4, padding="right", normalize=True, dense=20),
]


@pytest.fixture(scope="session")
def reference(tiny_model: MakeModel) -> Reference:
    """Vectors by sentence-transformers, as it would be used without us."""

    @functools.cache
    def encode(tiny: Tiny, prompt: str | None = None, *, normalize: bool = False) -> Vectors:
        model = sentence_transformer(tiny_model(tiny))
        vectors: Vectors = model.encode(TEXTS, batch_size=8, prompt=prompt, normalize_embeddings=normalize)
        return vectors

    return encode


@pytest.mark.parametrize(
    ("name", "tiny"),
    [*(("torch", tiny) for tiny in PACKED), *((name, tiny) for name in [*ENGINES][1:] for tiny in EVERYWHERE)],
    ids=str,
)
def test_vectors_are_those_of_sentence_transformers(
    name: str, tiny: Tiny, tiny_model: MakeModel, reference: Reference, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "onnx":
        monkeypatch.setattr("embedctl_workers.backends.onnx.backend.artifact_for", quick_artifact)
    monkeypatch.setattr("embedctl_workers.backends.gpu.backend.open_gpu", StandIn)
    engine, entry = ENGINES[name], ModelEntry(source=str(tiny_model(tiny)))
    backend = load_backend(engine.backend, "tiny", entry=entry, host=host, options=engine.options)
    for prompt in (None, "query: ", ""):
        found = encode(backend, TEXTS, prompt=prompt, normalize=False).vectors
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, reference(tiny, prompt), rtol=0, atol=engine.tolerance)
    found = encode(backend, TEXTS, normalize=True).vectors
    np.testing.assert_allclose(found, reference(tiny, normalize=True), rtol=0, atol=engine.tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_small_models_tell_texts_and_prompts_apart(family: Family, reference: Reference) -> None:
    """Or what is tested here would show nothing."""
    tiny = Tiny(family, pooling="lasttoken" if family.startswith("qwen") else "mean")
    vectors = reference(tiny, normalize=True)
    apart = np.linalg.norm(vectors[:, np.newaxis] - vectors, axis=-1)
    assert np.sort(apart[np.triu_indices(20, 1)])[5] > 1e-2
    assert np.median(np.linalg.norm(vectors - reference(tiny, "query: ", normalize=True), axis=1)) > 1e-2
