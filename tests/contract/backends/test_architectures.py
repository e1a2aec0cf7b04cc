"""Every architecture and option of sentence-transformers that we claim, against `SentenceTransformer` itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

from embedctl_config.hardware import ModelEntry
from embedctl_workers.arrays.tokens import Vectors
from embedctl_workers.backends import load_backend
from embedctl_workers.backends.base import Backend
from embedctl_workers.machine.host import Host
from embedctl_workers.models.files import fingerprint_of

torch = pytest.importorskip("torch")
pytest.importorskip("sentence_transformers")
#: Tracing a graph warns of each test in a model's Python; whether the graph is right is what is tested here.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")]

from tests.support.chunks import encode  # noqa: E402
from tests.support.onnx_models import quick_artifact  # noqa: E402
from tests.support.stand_in_gpu import StandIn  # noqa: E402  (it needs torch)
from tests.support.texts import TEXTS, text_of  # noqa: E402
from tests.support.tiny_models import FAMILIES, Family, Tiny  # noqa: E402

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

MakeModel = Callable[[Tiny], Path]
ReferenceModel = Callable[[Tiny], "SentenceTransformer"]
#: The vectors of the texts, by (model, prompt, normalize, dim).
Reference = Callable[..., Vectors]
Load = Callable[[Tiny], Backend]


class Engine(NamedTuple):
    """A way to run a model, and how far from sentence-transformers it may be."""

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
    Tiny(act="relu", lower=True),
    Tiny(hidden=128, heads=2, layers=1, pooling="weightedmean"),
    Tiny(pooling="cls", prompt="passage: ", include_prompt=False),
    Tiny(pooling="max", prompt="passage: ", include_prompt=False),
    Tiny("roberta", max_seq_length=None, hidden=128, heads=2),
    Tiny("xlm-roberta", pooling="lasttoken", hidden=64, heads=2, normalize=True),
    Tiny("distilbert", prompt="passage: ", include_prompt=False, act="relu"),
    Tiny("modernbert", pooling="cls", normalize=True, hidden=24, heads=3),
    Tiny("qwen2", pooling="lasttoken", normalize=True),
    Tiny("qwen2", pooling="mean", prompt="passage: ", include_prompt=False),
    Tiny("qwen3", pooling="lasttoken", hidden=64, heads=4, padding="right", normalize=True, dense=20),
    Tiny("qwen3", pooling="mean", prompt="passage: ", include_prompt=False),
]

#: Who cuts is each family's tokenizer, the same on every engine: one family has every limit, the others one.
LIMITED = [
    *(Tiny(family, positions=512, max_seq_length=33, layers=1) for family in FAMILIES),
    *(Tiny(positions=512, max_seq_length=limit, layers=1) for limit in (8, 512)),
]
UNLIMITED = [Tiny(family, positions=64, max_seq_length=None) for family in FAMILIES]
#: What ChunkEncoder does with windows and dimensions, tests/unit/workers/test_encoder.py tells. Here are whole models.
MATRYOSHKA = [Tiny(normalize=True), Tiny(dense=20), Tiny("modernbert", normalize=True, pooling="cls")]
WINDOWED = [
    Tiny(prompt="passage: ", include_prompt=False, max_seq_length=20),
    Tiny(pooling="cls", normalize=True, prompt="passage: ", max_seq_length=20),
    *(Tiny(family, max_seq_length=16, layers=1) for family in ("roberta", "mpnet", "modernbert")),
    Tiny("qwen3", pooling="lasttoken", max_seq_length=20, prompt="query: "),
]


@pytest.fixture(scope="session")
def reference_model(tiny_model: MakeModel) -> ReferenceModel:
    from sentence_transformers import SentenceTransformer

    return functools.cache(
        lambda tiny: SentenceTransformer(str(tiny_model(tiny)), device="cpu", local_files_only=True).eval()
    )


@pytest.fixture(scope="session")
def reference(reference_model: ReferenceModel) -> Reference:
    """Vectors by sentence-transformers, as it would be used without us."""

    @functools.cache
    def encode(tiny: Tiny, prompt: str | None = None, *, normalize: bool = False, dim: int | None = None) -> Vectors:
        return reference_model(tiny).encode(
            TEXTS, batch_size=8, prompt=prompt, normalize_embeddings=normalize, truncate_dim=dim
        )

    return encode


def on_engines(cases: Sequence[Tiny], elsewhere: Sequence[Tiny], *engines: str) -> pytest.MarkDecorator:
    """Runs a test with all of the models on the first engine, and with those of `elsewhere` on the others."""
    first, *others = engines or ENGINES
    params = [
        *(pytest.param(first, tiny, id=f"{first}: {tiny}") for tiny in cases),
        *(
            pytest.param(name, tiny, id=f"{name}: {tiny}", marks=[pytest.mark.slow] if is_dear(name, tiny) else [])
            for name in others
            for tiny in elsewhere
        ),
    ]
    return pytest.mark.parametrize(("engine", "tiny"), params, indirect=["engine"])


def is_dear(engine: str, tiny: Tiny) -> bool:
    """Whether only the slow suite exports this model, which takes a second."""
    return engine == "onnx" and tiny in EVERYWHERE[1:]


@pytest.fixture
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = ENGINES[request.param]
    if engine.backend == "onnx":
        pytest.importorskip("onnxruntime")
        monkeypatch.setattr("embedctl_workers.backends.onnx.backend.artifact_for", quick_artifact)
    if engine.backend == "torch-gpu":
        monkeypatch.setattr("embedctl_workers.backends.gpu.backend.open_gpu", StandIn)
    return engine


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """With one cache for all tests, so that nothing is built twice."""
    return Host(threads=1, cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture
def load(engine: Engine, tiny_model: MakeModel, host: Host) -> Load:
    """Loads a model into an engine."""
    return lambda tiny: load_backend(
        engine.backend, "tiny", entry=ModelEntry(source=str(tiny_model(tiny))), host=host, options=engine.options
    )


def assert_close(engine: Engine, found: Vectors, expected: Vectors) -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=engine.tolerance)


@on_engines(PACKED, EVERYWHERE)
def test_vectors_are_those_of_sentence_transformers(
    tiny: Tiny, engine: Engine, load: Load, reference: Reference
) -> None:
    backend = load(tiny)
    for prompt in (None, "query: ", ""):
        found = encode(backend, TEXTS, prompt=prompt, normalize=False).vectors
        assert_close(engine, found, reference(tiny, prompt))
    assert_close(engine, encode(backend, TEXTS, normalize=True).vectors, reference(tiny, normalize=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_small_models_tell_texts_and_prompts_apart(family: Family, reference: Reference) -> None:
    """Or what is tested here would show nothing."""
    tiny = Tiny(family, pooling="lasttoken" if family.startswith("qwen") else "mean")
    vectors = reference(tiny, normalize=True)
    apart = np.linalg.norm(vectors[:, np.newaxis] - vectors, axis=-1)
    assert np.sort(apart[np.triu_indices(20, 1)])[5] > 1e-2
    assert np.median(np.linalg.norm(vectors - reference(tiny, "query: ", normalize=True), axis=1)) > 1e-2


def test_the_same_small_model_has_the_same_files(tmp_path: Path) -> None:
    from tests.support.tiny_models import make_model

    prints = [fingerprint_of(make_model(tmp_path / name, Tiny(dense=4))) for name in "ab"]
    assert prints[0] == prints[1]
    assert fingerprint_of(make_model(tmp_path / "c", Tiny(dense=4, seed=1))) != prints[0]


@on_engines(LIMITED, LIMITED[:1], "torch", "onnx")
def test_what_is_cut_off_is_what_the_tokenizer_counts(tiny: Tiny, load: Load, reference_model: ReferenceModel) -> None:
    limit = tiny.max_seq_length or 0
    tokenizer = reference_model(tiny).tokenizer
    texts = [text_of(limit + more, tokenizer) for more in (-1, 0, 1, 2, limit)]
    encoded = encode(load(tiny), texts, budget=2048)
    assert [(cut.row, cut.used, cut.lost) for cut in encoded.truncations] == [
        (2, limit, 1),
        (3, limit, 2),
        (4, limit, limit),
    ]
    assert encoded.tokens == 5 * limit - 1


@on_engines(UNLIMITED, UNLIMITED[1:2], "torch", "onnx")
def test_a_model_without_a_limit_of_its_own_takes_what_its_architecture_does(
    tiny: Tiny, load: Load, reference_model: ReferenceModel
) -> None:
    backend, model = load(tiny), reference_model(tiny)
    assert backend.max_tokens == model.max_seq_length == 64
    text = text_of(70, model.tokenizer)
    assert [(cut.used, cut.lost) for cut in encode(backend, [text]).truncations] == [(64, 6)]


@on_engines(MATRYOSHKA, MATRYOSHKA[:1])
def test_fewer_dimensions_are_the_first_ones(tiny: Tiny, engine: Engine, load: Load, reference: Reference) -> None:
    backend = load(tiny)
    for dim in (1, 7, 16):
        raw = encode(backend, TEXTS, normalize=False, dimensions=dim).vectors
        assert_close(engine, raw, reference(tiny, dim=dim))
        found = encode(backend, TEXTS, dimensions=dim).vectors
        assert_close(engine, found, reference(tiny, dim=dim, normalize=True))
        assert found.shape == (len(TEXTS), dim)
        np.testing.assert_allclose(np.linalg.norm(found.astype(np.float64), axis=1), 1, rtol=0, atol=1e-6)


#: Of all lengths and kinds; each window of each is encoded alone.
IN_WINDOWS = [*TEXTS[:6], *TEXTS[20:]]


@pytest.fixture(scope="session")
def by_hand(reference_model: ReferenceModel) -> Callable[[Tiny], tuple[Vectors, int]]:
    """The means of the texts' windows, and the tokens of all of these; the same for every engine."""

    @functools.cache
    def of_windows(tiny: Tiny) -> tuple[Vectors, int]:
        model, prompt = reference_model(tiny), tiny.prompt or ""
        windows = [window for text in IN_WINDOWS for window in windows_by_hand(model, prompt + text)]
        return np.stack([mean_by_hand(model, text, prompt) for text in IN_WINDOWS]), sum(map(len, windows))

    return of_windows


@on_engines(WINDOWED, WINDOWED[:1])
def test_the_mean_of_windows_is_that_of_windows_cut_by_hand(
    tiny: Tiny, engine: Engine, load: Load, by_hand: Callable[[Tiny], tuple[Vectors, int]]
) -> None:
    backend = load(tiny)
    expected, tokens = by_hand(tiny)
    raw = encode(backend, IN_WINDOWS, truncation="mean", normalize=False)
    assert_close(engine, raw.vectors, expected)
    assert raw.truncations == []
    assert raw.tokens == tokens
    found = encode(backend, IN_WINDOWS, truncation="mean", dimensions=8).vectors.astype(np.float64)
    cut = expected[:, :8]
    np.testing.assert_allclose(
        found, cut / np.linalg.norm(cut, axis=1, keepdims=True), rtol=0, atol=10 * engine.tolerance
    )
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=0, atol=1e-6)


def windows_by_hand(model: SentenceTransformer, text: str) -> list[list[int]]:
    special = model.tokenizer("")["input_ids"]
    ids = model.tokenizer(text, add_special_tokens=False, truncation=False)["input_ids"]
    size = int(model.max_seq_length or 0) - len(special)
    parts = [ids[at : at + size] for at in range(0, max(1, len(ids)), size)]
    return [special[:-1] + part + special[-1:] for part in parts]


def mean_by_hand(model: SentenceTransformer, text: str, prompt: str) -> Vectors:
    special = len(model.tokenizer("")["input_ids"])
    vectors, weights = [], []
    for at, window in enumerate(windows_by_hand(model, prompt + text)):
        features: dict[str, Any] = {"input_ids": torch.tensor([window])}
        features["attention_mask"] = torch.ones_like(features["input_ids"])
        if prompt and at == 0:
            features["prompt_length"] = len(model.tokenizer(prompt)["input_ids"]) - 1
        with torch.inference_mode():
            vectors.append(model({**features, "modality": "text"})["sentence_embedding"][0].numpy())
        weights.append(len(window) - special)
    return np.average(np.stack(vectors).astype(np.float64), axis=0, weights=weights)
