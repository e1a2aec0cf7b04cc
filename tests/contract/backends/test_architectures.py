"""Every architecture and option of sentence-transformers that we claim, against `SentenceTransformer` itself."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

from embedctl_config.errors import ModelError
from embedctl_config.hardware import ModelEntry
from embedctl_workers.arrays.tokens import Vectors
from embedctl_workers.backends import BACKENDS, load_backend
from embedctl_workers.backends.base import Backend
from embedctl_workers.machine.host import Host
from embedctl_workers.models.files import fingerprint_of

torch = pytest.importorskip("torch")
pytest.importorskip("sentence_transformers")
#: Tracing a graph warns of each test in a model's Python; whether the graph is right is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")

from tests.support.chunks import encode  # noqa: E402
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
    """A way to run a model, how far from sentence-transformers it may be, and what it says that it can't run."""

    backend: str
    options: Mapping[str, str]
    tolerance: float
    refuses: Callable[[Tiny], bool] = lambda tiny: False


ENGINES = {
    # Which products are the fastest depends on the CPU, and AMX's are not as close: test_tiles.py has their bounds.
    "torch": Engine("torch", {"products": "plain"}, 1e-5),
    "torch padded": Engine("torch", {"engine": "padded"}, 1e-5),
    "onnx": Engine("onnx", {}, 1e-4),
    "torch-gpu on a stand-in": Engine("torch-gpu", {"dtype": "fp32"}, 1e-5),
}

ENCODERS: tuple[Family, ...] = ("bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "modernbert")
#: What any encoder family may have; sizes of heads: 16, 8, 8, 32, 16.
IN_ANY_FAMILY = (
    Tiny(),
    Tiny(pooling="cls", normalize=True, hidden=24, heads=3),
    Tiny(pooling="max", hidden=40, heads=5, layers=3),
    Tiny(pooling="lasttoken", hidden=64, heads=2, normalize=True),
    Tiny(prompt="passage: ", include_prompt=False, dense=12, normalize=True),
)
CASES = [
    # What comes after the layers does not know their family: each family has the last of these, and another one.
    *(replace(IN_ANY_FAMILY[-1], family=family) for family in ENCODERS),
    *(replace(IN_ANY_FAMILY[at % 4], family=family) for at, family in enumerate(ENCODERS)),
    Tiny(act="gelu_new"),
    Tiny(act="relu", lower=True),
    Tiny("roberta", act="relu", hidden=128, heads=2),
    Tiny("distilbert", act="relu", max_seq_length=None),
    Tiny("roberta", max_seq_length=None),
    Tiny("xlm-roberta", lower=True, pooling="mean+max"),
    Tiny(hidden=128, heads=2, layers=1, pooling="weightedmean"),
    Tiny("mpnet", pooling="mean_sqrt_len_tokens", prompt="passage: "),
    Tiny("modernbert", layers=4, max_seq_length=100, pooling="mean"),
    Tiny(pooling="cls", prompt="passage: ", include_prompt=False),
    Tiny(pooling="max", prompt="passage: ", include_prompt=False),
    Tiny("roberta", truncation="left"),
    Tiny("qwen2", pooling="lasttoken", normalize=True),
    Tiny("qwen2", pooling="mean", prompt="passage: ", include_prompt=False),
    Tiny("qwen2", pooling="weightedmean", hidden=24, heads=3, padding="right"),
    Tiny("qwen3", pooling="lasttoken", prompt="passage: "),
    Tiny("qwen3", pooling="lasttoken", hidden=64, heads=4, padding="right", normalize=True, dense=20),
    Tiny("qwen3", pooling="mean", prompt="passage: ", include_prompt=False),
]

#: Who cuts is each family's tokenizer, the same on every engine: one family has every limit, the others one.
LIMITED = [
    *(Tiny(positions=512, max_seq_length=limit, layers=1) for limit in (8, 33, 512)),
    *(Tiny(family, positions=512, max_seq_length=33, layers=1) for family in FAMILIES if family != "bert"),
]
UNLIMITED = [Tiny(family, positions=64, max_seq_length=None) for family in FAMILIES]
MATRYOSHKA = [
    Tiny(),
    Tiny(normalize=True),
    Tiny("modernbert", normalize=True, pooling="cls"),
    Tiny("qwen3", pooling="lasttoken", normalize=True),
    Tiny(dense=20),
]
WINDOWED = [
    *(Tiny(family, max_seq_length=16, layers=1) for family in ENCODERS),
    Tiny(pooling="cls", normalize=True, prompt="passage: ", max_seq_length=20),
    Tiny(prompt="passage: ", include_prompt=False, max_seq_length=20),
    Tiny("qwen3", pooling="lasttoken", max_seq_length=20, prompt="query: "),
    Tiny("qwen2", pooling="mean", max_seq_length=20, prompt="query: ", include_prompt=False),
]
#: What the quick suite runs on every engine; the rest of it runs on the packed one alone.
QUICK = {
    *(replace(IN_ANY_FAMILY[-1], family=family) for family in ENCODERS),
    Tiny("qwen3", pooling="lasttoken", prompt="passage: "),
    LIMITED[2],
    MATRYOSHKA[1],
    WINDOWED[-3],
}


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


def on_every_engine(cases: Sequence[Tiny], engines: Sequence[str] = tuple(ENGINES)) -> pytest.MarkDecorator:
    """Runs a test with each of the models on each engine. The quick suite has all models on the first engine alone."""
    params = [
        pytest.param(
            name, tiny, id=f"{name}: {tiny}", marks=[pytest.mark.slow] if name != "torch" and tiny not in QUICK else []
        )
        for name in engines
        for tiny in cases
    ]
    return pytest.mark.parametrize(("engine", "tiny"), params, indirect=["engine"])


@pytest.fixture
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = ENGINES[request.param]
    if engine.backend not in BACKENDS:
        pytest.skip(f"there is no backend {engine.backend} yet")
    if engine.backend == "onnx":
        pytest.importorskip("onnxruntime")
    if engine.backend == "torch-gpu":
        monkeypatch.setattr("embedctl_workers.backends.gpu.backend.open_gpu", StandIn)
    if not set(engine.options) <= set(options_of(engine.backend)):
        pytest.skip(f"backend {engine.backend} has no option {', '.join(engine.options)} yet")
    return engine


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """With one cache for all tests, so that nothing is built twice."""
    return Host(threads=1, cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def build_here() -> Iterator[None]:
    """Makes graphs and their references in this process, which has torch, and not in one of its own for each."""
    from tests.support import onnx_models

    with pytest.MonkeyPatch.context() as patch:
        onnx_models.build_here(patch)
        yield


@pytest.fixture
def load(engine: Engine, tiny_model: MakeModel, host: Host, request: pytest.FixtureRequest) -> Load:
    """Loads a model into an engine; ends the test where the engine says that it can't run it, and should."""

    if engine.backend == "onnx":
        request.getfixturevalue("build_here")

    def load(tiny: Tiny) -> Backend:
        entry = ModelEntry(source=str(tiny_model(tiny)))
        arguments: dict[str, Any] = {"entry": entry, "host": host, "options": engine.options}
        if engine.refuses(tiny):
            with pytest.raises(ModelError):
                load_backend(engine.backend, "tiny", **arguments)
            pytest.skip("it is refused, as it should be")
        return load_backend(engine.backend, "tiny", **arguments)

    return load


def options_of(alias: str) -> tuple[str, ...]:
    module, _, name = BACKENDS[alias][0].partition(":")
    backend: type[Backend] = getattr(importlib.import_module(module), name)
    return backend.OPTIONS


def assert_close(engine: Engine, found: Vectors, expected: Vectors) -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=engine.tolerance)


@on_every_engine(CASES)
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


@on_every_engine(LIMITED, ["torch", "onnx"])
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


@on_every_engine(UNLIMITED, ["torch", "onnx"])
def test_a_model_without_a_limit_of_its_own_takes_what_its_architecture_does(
    tiny: Tiny, load: Load, reference_model: ReferenceModel
) -> None:
    backend, model = load(tiny), reference_model(tiny)
    assert backend.max_tokens == model.max_seq_length == 64
    text = text_of(70, model.tokenizer)
    assert [(cut.used, cut.lost) for cut in encode(backend, [text]).truncations] == [(64, 6)]


@on_every_engine(MATRYOSHKA)
@pytest.mark.parametrize("dim", [1, 7, 16])
def test_fewer_dimensions_are_the_first_ones(
    tiny: Tiny, dim: int, engine: Engine, load: Load, reference: Reference
) -> None:
    backend = load(tiny)
    raw = encode(backend, TEXTS, normalize=False, dimensions=dim).vectors
    assert_close(engine, raw, reference(tiny, dim=dim))
    found = encode(backend, TEXTS, dimensions=dim).vectors
    assert_close(engine, found, reference(tiny, dim=dim, normalize=True))
    assert found.shape == (len(TEXTS), dim)
    np.testing.assert_allclose(np.linalg.norm(found.astype(np.float64), axis=1), 1, rtol=0, atol=1e-6)


@pytest.fixture(scope="session")
def by_hand(reference_model: ReferenceModel) -> Callable[[Tiny], tuple[Vectors, int]]:
    """The means of the texts' windows, and the tokens of all of these; the same for every engine."""

    @functools.cache
    def of_windows(tiny: Tiny) -> tuple[Vectors, int]:
        model, prompt = reference_model(tiny), tiny.prompt or ""
        windows = [window for text in TEXTS for window in windows_by_hand(model, prompt + text)]
        return np.stack([mean_by_hand(model, text, prompt) for text in TEXTS]), sum(map(len, windows))

    return of_windows


@on_every_engine(WINDOWED)
def test_the_mean_of_windows_is_that_of_windows_cut_by_hand(
    tiny: Tiny, engine: Engine, load: Load, by_hand: Callable[[Tiny], tuple[Vectors, int]]
) -> None:
    backend = load(tiny)
    expected, tokens = by_hand(tiny)
    raw = encode(backend, TEXTS, truncation="mean", normalize=False)
    assert_close(engine, raw.vectors, expected)
    assert raw.truncations == []
    assert raw.tokens == tokens
    found = encode(backend, TEXTS, truncation="mean", dimensions=8).vectors.astype(np.float64)
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
