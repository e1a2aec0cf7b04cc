"""One contract for every backend: a text's vector is its own, whatever stands beside it."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from embedctl_config.errors import MissingExtra, SettingsError
from embedctl_config.hardware import ModelEntry
from embedctl_workers.arrays.tokens import Side, Vectors
from embedctl_workers.backends import BACKENDS, load_backend
from embedctl_workers.backends.base import Backend
from embedctl_workers.machine.host import Host
from embedctl_workers.models.files import resolve_model
from tests.support.chunks import encode_rows
from tests.support.onnx_models import quick_artifact
from tests.support.references_here import sentence_transformer
from tests.support.tiny_models import MakeModel, Tiny

MODEL = "all-MiniLM-L6-v2"
#: What is promised of any model is tested with a small one. int8's kernels take its sizes.
SMALL = Tiny(hidden=64, heads=2, max_seq_length=64)
TOLERANCE = {
    "dummy": 0.0,
    "int8": 1e-6,
    "neuron": 1e-5,
    "onnx": 1e-5,
    "tensorrt": 1e-5,
    "torch": 1e-5,
    "torch-gpu": 1e-5,
}
#: In 8 or 16 bits, directions are compared, and by the cosine alone. In onnx-int8, a batch shares the range of its
#: activations.
LEAST_COSINE = {"onnx-int8": 0.95, "torch-bf16": 0.9995}

HOST = Host(threads=1, cache=Path(tempfile.gettempdir()) / "embedctl-test-cache")

TEXTS = [
    "A short sentence.",
    "word",
    "Ein Satz mit Umlauten: äöü, ß und Ellipse …",
    "日本語の文章をベクトルにする。",
    "emoji \N{GRINNING FACE}\N{ZERO WIDTH JOINER} and a zero\u200bwidth space",
    "  spaces at both ends \n\t",
    "UPPER and lower CASE",
    "the " * 60,
    "numbers 1 2 3 3.14159 -7e-3",
    "def f(x):\n    return x ** 2  # code\n",
]
LONG = "far more words than any model takes " * 200


def load(alias: str, model: str = MODEL, entry: ModelEntry | None = None) -> Backend:
    if alias == "dummy":
        return load_backend("dummy", "dummy", entry=None, host=HOST, options={"dim": 16, "max_tokens": 64})
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        if alias.startswith("onnx"):
            patch.setattr("embedctl_workers.backends.onnx.backend.artifact_for", quick_artifact)
        options: dict[str, Any] = {}
        if alias == "torch-gpu":
            from tests.support.stand_in_gpu import StandIn

            patch.setattr("embedctl_workers.backends.gpu.backend.open_gpu", StandIn)
            options = {"dtype": "fp32"}
        if alias == "tensorrt":
            from tests.support.fakes.cuda import FakeDevice
            from tests.support.tensorrt_models import quick_plan, stand_in

            stand_in("11.4", FakeDevice(), patch)
            patch.setattr("embedctl_workers.backends.tensorrt.backend.artifact_for", quick_plan)
            options = {"dtype": "fp32", "batch_tokens": 256}
        if alias == "neuron":
            from tests.support.neuron_site import fake_neuron

            fake_neuron(Path(scratch), patch)
            options = {"buckets": "32,64", "batch": 2}
        return load_backend(alias, model, entry=entry, host=HOST, options=options)


#: What some backends need of a CPU. Without VNNI, int8 is onnx-int8.
NEEDS = {"int8": "vnni", "torch-bf16": "bf16"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.needs(NEEDS[name])] if name in NEEDS else []) for name in sorted(BACKENDS)
    ],
)
def alias(request: pytest.FixtureRequest) -> str:
    assert request.param in {**TOLERANCE, **LEAST_COSINE}, "a new backend needs its tolerance here"
    return str(request.param)


@pytest.fixture(scope="module")
def entry(tiny_model: MakeModel) -> ModelEntry:
    return ModelEntry(str(tiny_model(SMALL)))


@pytest.fixture(scope="module")
def backend(alias: str, entry: ModelEntry) -> Backend:
    return load(alias, "small", entry)


@pytest.fixture(scope="module")
def alone(backend: Backend) -> Vectors:
    return np.concatenate([encode_rows(backend, [text]) for text in TEXTS])


def assert_close(alias: str, found: Vectors, expected: Vectors) -> None:
    if alias in LEAST_COSINE:
        lengths = np.linalg.norm(found, axis=-1) * np.linalg.norm(expected, axis=-1)
        assert ((found * expected).sum(axis=-1) >= LEAST_COSINE[alias] * lengths).all()
        return
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE[alias])


def test_a_vector_does_not_depend_on_its_neighbours(alias: str, backend: Backend, alone: Vectors) -> None:
    assert_close(alias, encode_rows(backend, TEXTS), alone)


def test_a_vector_does_not_depend_on_its_place(alias: str, backend: Backend, alone: Vectors) -> None:
    order = np.random.default_rng(0).permutation(len(TEXTS))
    assert_close(alias, encode_rows(backend, [TEXTS[at] for at in order]), alone[order])
    assert_close(alias, encode_rows(backend, TEXTS, rows=order.tolist()), alone[order])
    assert_close(alias, encode_rows(backend, TEXTS, rows=[4, 1, 4]), alone[[4, 1, 4]])


def test_a_vector_does_not_depend_on_padding(alias: str, backend: Backend, alone: Vectors) -> None:
    for at in (1, 3, 7):  # a word, a sentence without spaces, many words
        assert_close(alias, encode_rows(backend, [LONG, TEXTS[at]])[1], alone[at])


def test_vectors_are_float32_of_unit_length_and_the_same_bits_again(backend: Backend) -> None:
    found = encode_rows(backend, TEXTS)
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.float32
    assert found.shape == (len(TEXTS), backend.dim)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(encode_rows(backend, TEXTS), found)


def test_vectors_that_are_not_to_be_normalised_point_the_same_way(alias: str, backend: Backend, alone: Vectors) -> None:
    raw = encode_rows(backend, TEXTS, normalize=False)
    assert raw.dtype == np.float32
    assert_close(alias, raw / np.linalg.norm(raw, axis=1, keepdims=True), alone)
    if alias == "dummy":
        assert not np.allclose(np.linalg.norm(raw, axis=1), 1, atol=1e-2)


def test_a_prompt_stands_before_every_text(alias: str, backend: Backend, alone: Vectors) -> None:
    prompted = encode_rows(backend, TEXTS, prompt="query: ")
    assert not np.isclose(prompted, alone, atol=1e-3).all(axis=1).any()
    assert_close(alias, prompted, encode_rows(backend, ["query: " + text for text in TEXTS], prompt=""))


def test_tokens_used_and_lost_are_told(backend: Backend) -> None:
    tokens = backend.tokenize([*TEXTS, LONG, LONG * 2], None)
    assert tokens.lengths.dtype == tokens.lost.dtype == np.int64
    assert (tokens.lengths[:-2] <= backend.max_tokens).all()
    assert (tokens.lengths >= 1).all()
    assert tokens.lost[:-2].tolist() == [0] * len(TEXTS)
    assert tokens.lengths[-2:].tolist() == [backend.max_tokens] * 2
    lost, twice = tokens.lost[-2:].tolist()
    assert lost > 0
    used = twice - 2 * lost
    assert backend.max_tokens - 2 <= used <= backend.max_tokens
    assert {len(column) for column in tokens.columns.values()} == {len(TEXTS) + 2}


def test_the_windows_of_a_text_are_all_of_it(backend: Backend) -> None:
    texts = ["word", LONG, "two words", LONG * 2]
    tokens = backend.tokenize(texts, None)
    assert tokens.windows is not None
    windows = tokens.windows()
    content = np.bincount(windows.text, windows.content).astype(int)
    special = (windows.tokens.lengths - windows.content)[1]
    assert windows.text[:4].tolist() == [0, 1, 2, 3]
    assert content[1] == tokens.lengths[1] + tokens.lost[1] - special
    assert content[3] == 2 * content[1]
    assert (windows.tokens.lengths <= backend.max_tokens).all()
    assert (windows.content > 0).all()
    assert not windows.tokens.lost.any()
    assert backend.tokenize(["word", "two words"], None).windows is None
    for name, column in tokens.columns.items():
        assert windows.tokens.columns[name].select(np.arange(4)).values.tolist() == column.values.tolist()
        assert len(windows.tokens.columns[name]) == len(windows.text)


def test_the_side_that_a_long_text_loses_may_be_chosen(alias: str, backend: Backend) -> None:
    ends = [f"one begin {LONG}", f"another begin {LONG}", f"{LONG} one end", f"{LONG} another, quite different end"]

    def encoded(side: Side | None, rows: Sequence[int] = range(4)) -> Vectors:
        tokens = backend.tokenize(ends, None, side)
        assert (tokens.lengths == backend.max_tokens).all()
        return backend.finish(backend.forward(tokens, np.array(rows)), normalize=True)

    left, right = encoded("left"), encoded("right")
    assert_close(alias, left[0], left[1])
    assert_close(alias, right[2], right[3])
    assert not np.isclose(left[2], left[3], atol=1e-4).all()
    assert not np.isclose(right[0], right[1], atol=1e-4).all()
    assert_close(alias, encoded(None, [3]), right[[3]])


@pytest.mark.parametrize("text", ["", " ", "\n\t ", "\u3000", "\x00", "\u200b"])
def test_texts_of_no_words_have_finite_vectors(backend: Backend, text: str) -> None:
    found = encode_rows(backend, [text, "word"])
    assert np.isfinite(found).all()


def test_a_batch_has_as_many_positions_as_it_has_tokens_or_more(alias: str, backend: Backend) -> None:
    lengths = np.array([7, 3, 3, 1])
    # Packed on torch; in rows of a multiple of 8 tokens with TensorRT; in runs of 2 × 32 on Neuron.
    packed = dict.fromkeys(("torch", "torch-gpu", "int8", "torch-bf16"), (14, 7))
    expected = {**packed, "tensorrt": (32, 8), "neuron": (128, 64)}.get(alias, (28, 7))
    assert (backend.positions(lengths), backend.positions(lengths[:1])) == expected


def test_warming_up_changes_nothing(backend: Backend, alone: Vectors) -> None:
    backend.warm_up()
    np.testing.assert_array_equal(encode_rows(backend, TEXTS[:1]), alone[:1])


def test_the_fingerprint_is_a_sha256_the_same_for_every_load(alias: str, backend: Backend, entry: ModelEntry) -> None:
    assert backend.fingerprint == backend.fingerprint.lower()
    assert len(bytes.fromhex(backend.fingerprint)) == 32
    again = load("dummy").fingerprint if alias == "dummy" else resolve_model("small", entry).fingerprint
    assert backend.fingerprint == again


VARIED = [
    *TEXTS,
    "x",
    "Hello World",
    " leading",
    "trailing ",
    "\ttabs\tbetween\t",
    "line one\nline two\r\nline three",
    "ﬁ ligature, ½, №, ™",
    "ÀÉÎÕÜ Straße ﷽ العربية עברית हिन्दी ไทย",
    "supercalifragilisticexpialidocious" * 20,
    "a" * 5000,
    "[CLS] [SEP] [PAD] [MASK] ##ing",
    "http://example.com/path?query=1&b=2#fragment",
    "word " * 253,
    "word " * 254,
    "word " * 255,
    LONG,
]


@pytest.fixture(scope="module")
def reference() -> Any:
    return sentence_transformer(resolve_model(MODEL).folder)


@pytest.fixture(scope="module")
def torch_backend() -> Backend:
    return load("torch")


def test_torch_gives_the_vectors_of_sentence_transformers(torch_backend: Backend, reference: Any) -> None:
    expected = reference.encode(VARIED, batch_size=1)
    np.testing.assert_allclose(encode_rows(torch_backend, VARIED), expected, rtol=0, atol=1e-5)


def test_torch_counts_the_tokens_that_the_whole_text_has(torch_backend: Backend, reference: Any) -> None:
    tokens = torch_backend.tokenize(VARIED, None)
    whole = reference.tokenizer(VARIED, truncation=False)["input_ids"]
    assert (tokens.lengths + tokens.lost).tolist() == [len(ids) for ids in whole]
    assert (tokens.lost > 0).tolist() == [len(ids) > 256 for ids in whole]


def test_torch_does_not_keep_every_prompt(torch_backend: Backend) -> None:
    prompts = [f"prompt {at}: " for at in range(100)]
    before = list(map(sys.getrefcount, prompts))
    for prompt in prompts:
        torch_backend.tokenize(["a"], prompt)
    kept = [now > count for now, count in zip(map(sys.getrefcount, prompts), before, strict=True)]
    assert sum(kept) < 20


def test_torch_computes_where_its_team_is(torch_backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    place, held = MagicMock(), []
    engine = torch_backend._engine  # type: ignore[attr-defined]

    def run(*given: Any) -> Any:
        held.append((place.__enter__.called, place.__exit__.called))
        return engine(*given)

    monkeypatch.setattr(torch_backend, "_place", place)
    monkeypatch.setattr(torch_backend, "_engine", run)
    encode_rows(torch_backend, ["a"])
    assert held == [(True, False)]
    assert place.__exit__.called


def test_an_unknown_backend_is_refused_with_a_hint() -> None:
    with pytest.raises(SettingsError, match=f"Did you mean 'torch'.*Known: {', '.join(sorted(BACKENDS))}"):
        load_backend("torhc", MODEL, entry=None, host=HOST, options={})


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        ("dummy", {"dims": 3}, "no option dims; known: dim, max_tokens, .*seed"),
        ("torch", {"products": "amx"}, "products 'amx' of backend torch is neither auto nor plain"),
        ("onnx", {"provider": "rocm"}, "provider 'rocm' of backend onnx is none of cpu, cuda"),
        ("onnx", {"provider": True}, "provider True of backend onnx is none of cpu, cuda"),
        ("tensorrt", {"dtype": "int8"}, "dtype 'int8' of backend tensorrt is none of auto, fp16, bf16, fp32"),
        ("tensorrt", {"batch_tokens": 63}, "batch_tokens 63 of backend tensorrt is not a whole number from 64 to"),
        ("tensorrt", {"batch_tokens": True}, "batch_tokens True"),
        ("neuron", {"buckets": "32;64"}, "option buckets of backend neuron: '32;64' is"),
        ("neuron", {"buckets": "1,32"}, "option buckets of backend neuron: '1,32' is"),
        ("neuron", {"buckets": True}, "option buckets of backend neuron: True is"),
        ("neuron", {"batch": 0}, "option batch of backend neuron: 0 is"),
        ("neuron", {"batch": "16"}, "option batch of backend neuron: '16' is"),
        ("neuron", {"auto_cast": "fp16"}, "option auto_cast of backend neuron: 'fp16' is"),
    ],
)
def test_a_wrong_option_is_named(backend: str, options: dict[str, Any], message: str, entry: ModelEntry) -> None:
    with pytest.raises(SettingsError, match=message):
        load_backend(backend, "small", entry=entry, host=HOST, options=options)


def test_a_backend_whose_extra_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "embedctl_workers.backends.torch.backend", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r"backend 'torch' needs .* pip install 'embedctl\[torch\]'"):
        load_backend("torch", MODEL, entry=None, host=HOST, options={})
