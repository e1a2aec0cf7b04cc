"""What the files of a model may state beside its architecture: modules, types, limits, options; followed or refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules

from embedctl_config.errors import ModelError
from embedctl_config.hardware import ModelEntry
from embedctl_workers.arrays.tokens import Vectors
from embedctl_workers.backends import load_backend
from embedctl_workers.backends.base import Backend
from embedctl_workers.machine.host import Host
from embedctl_workers.models.facts import UNLIMITED, facts_of
from tests.support.chunks import encode
from tests.support.model_families import NORMALIZE, edit, edit_weights, pooling, write_modules
from tests.support.references_here import sentence_transformer
from tests.support.texts import TEXTS, text_of
from tests.support.tiny_models import Family, Tiny, dense, make_model, write_json

pytestmark = pytest.mark.slow

Modules = Sequence[tuple[str, Mapping[str, Any]]]
MODES = ("cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small BERT that a test may change."""
    return make_model(tmp_path / "model", Tiny())


@pytest.fixture
def load(host: Host) -> Load:
    # AMX's products, where they are the fastest, are not as close: test_tiles.py has their bounds.
    options = {"products": "plain"}

    def load(folder: Path, pooling: Any = "") -> Backend:
        entry = ModelEntry(source=str(folder), pooling=pooling)
        return load_backend("torch", "tiny", entry=entry, host=host, options=options)

    return load


Load = Callable[..., Backend]


def vectors_of(folder: Path, texts: Sequence[str] = TEXTS, batch_size: int = 8) -> Vectors:
    found: Vectors = sentence_transformer(folder).encode(list(texts), batch_size=batch_size)
    return found


def assert_same(backend: Backend, expected: Vectors, texts: Sequence[str] = TEXTS) -> None:
    assert backend.dim == expected.shape[1]
    np.testing.assert_allclose(encode(backend, texts, normalize=False).vectors, expected, rtol=1e-6, atol=1e-5)


CHAINS: dict[str, Modules] = {
    "all modes": [pooling(*MODES)],
    "Dense with Tanh": [pooling("mean"), dense(32, 12, "Tanh", bias=True)],
    "Dense with GELU": [pooling("mean"), dense(32, 40, "GELU", bias=True)],
    "two Dense, and Normalize twice": [pooling("mean"), NORMALIZE, dense(32, 48), dense(48, 12, "Tanh"), NORMALIZE],
    "Dense of each token": [
        ("Dense", {**dense(32, 16)[1], "module_input_name": "token_embeddings"}),
        pooling("mean", size=16),
    ],
}


@pytest.mark.parametrize(
    ("family", "chain"),
    # BERT runs packed, Qwen3 padded, and neither knows more of the modules than which tokens there are.
    [*(("bert", chain) for chain in CHAINS), ("qwen3", "all modes"), ("qwen3", "Dense of each token")],
)
def test_modules_are_those_of_sentence_transformers(family: Family, chain: str, tmp_path: Path, load: Load) -> None:
    folder = make_model(tmp_path / "model", Tiny(family))
    write_modules(folder, CHAINS[chain])
    backend = load(folder)
    assert_same(backend, vectors_of(folder))
    assert facts_of(folder).dimensions == backend.dim


@pytest.mark.parametrize(("family", "stored"), [("bert", "float16"), ("gemma", "bfloat16")])
def test_weights_stored_in_16_bits_compute_in_32(stored: str, family: Family, tmp_path: Path, load: Load) -> None:
    folder = make_model(tmp_path / "model", Tiny(family, dense=12))
    edit(folder, dtype=stored)
    edit_weights(folder, lambda weights: {name: each.to(getattr(torch, stored)) for name, each in weights.items()})
    expected = vectors_of(folder)
    assert_same(load(folder), expected)


def test_weights_in_several_files(folder: Path, tmp_path: Path, load: Load) -> None:
    expected = vectors_of(folder)
    apart = tmp_path / "apart"
    shutil.copytree(folder, apart)
    (apart / "model.safetensors").unlink()
    transformer: Any = sentence_transformer(folder)[0]
    transformer.auto_model.save_pretrained(apart, max_shard_size="20KB")
    assert len(list(apart.glob("model-*.safetensors"))) > 1
    assert_same(load(apart), expected)


@pytest.mark.parametrize(
    ("family", "states"),
    [*((family, "as many tokens as it has positions") for family in ("roberta", "mpnet")), ("xlm-roberta", "nothing")],
)
def test_a_model_takes_as_many_tokens_as_positions(family: Family, states: str, tmp_path: Path, load: Load) -> None:
    folder = make_model(tmp_path / "model", Tiny(family, positions=32, max_seq_length=None))
    edit(folder, "tokenizer_config.json", model_max_length=None)
    if states != "nothing":
        edit(folder, "sentence_bert_config.json", max_seq_length=34)
    backend, model = load(folder), sentence_transformer(folder)
    assert backend.max_tokens == facts_of(folder).longest_text == 32
    assert model.max_seq_length == 34  # where it fails with a text of 33
    texts = [text_of(32 + more, model.tokenizer) for more in (-1, 0, 1, 9)]
    with pytest.raises((IndexError, RuntimeError), match="index"):
        model.encode(texts)
    model.max_seq_length = 32
    assert_same(backend, model.encode([*texts, *TEXTS], batch_size=8), [*texts, *TEXTS])
    assert [(cut.row, cut.used, cut.lost) for cut in encode(backend, texts).truncations] == [(2, 32, 1), (3, 32, 9)]


def test_a_model_without_a_limit_takes_texts_of_any_length(tmp_path: Path, load: Load) -> None:
    folder = make_model(tmp_path / "model", Tiny("t5", max_seq_length=None))
    backend, model = load(folder), sentence_transformer(folder)
    assert backend.max_tokens == UNLIMITED
    assert facts_of(folder).longest_text is None
    texts = ["a", *(text_of(count, model.tokenizer) for count in (511, 512, 513, 700))]
    encoded = encode(backend, texts, budget=2048, normalize=False)
    np.testing.assert_allclose(encoded.vectors, model.encode(texts), rtol=0, atol=1e-5)
    assert encoded.truncations == []


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_the_side_that_a_tokenizer_pads_does_not_matter(family: Family, tmp_path: Path, load: Load) -> None:
    """Nor do a text's neighbours, as they do in sentence-transformers where positions count the padding."""
    expected = None
    for side in ("left", "right"):
        folder = make_model(tmp_path / side, Tiny(family, pooling="lasttoken+mean", padding=side))
        expected = vectors_of(folder, batch_size=1) if expected is None else expected
        assert_same(load(folder), expected)


@pytest.mark.parametrize("engine", ["packed", "padded"])
def test_a_model_s_own_number_of_dimensions_is_kept(engine: str, folder: Path, load: Load) -> None:
    if engine == "padded":
        write_modules(folder, [pooling("mean"), ("LayerNorm", {"dimension": 32}), NORMALIZE])
    edit(folder, "config_sentence_transformers.json", truncate_dim=8)
    backend = load(folder)
    assert backend.engine.startswith(engine)
    assert backend.dim == facts_of(folder).dimensions == 8
    assert_same(backend, vectors_of(folder))
    expected = sentence_transformer(folder).encode(TEXTS, normalize_embeddings=True, truncate_dim=5)
    np.testing.assert_allclose(encode(backend, TEXTS, dimensions=5).vectors, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_a_prompt_that_leaves_no_room_for_the_text(family: Family, tmp_path: Path, load: Load) -> None:
    tiny = Tiny(family, pooling="+".join(MODES), prompt="word " * 60, include_prompt=False)
    folder = make_model(tmp_path / "model", tiny)
    assert_same(load(folder), vectors_of(folder))


TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


def test_a_chat_template_counts_only_where_sentence_transformers_applies_it(tmp_path: Path, load: Load) -> None:
    folder = make_model(tmp_path / "model", Tiny("qwen3", pooling="lasttoken"))
    edit(folder, "tokenizer_config.json", chat_template=TEMPLATE)
    assert_same(load(folder), vectors_of(folder))
    (folder / "modules.json").unlink()
    refused(folder, lambda folder: load(folder, "last"), "its tokenizer's chat template")


@pytest.mark.parametrize(("said", "mode"), [("mean", "mean"), ("cls", "cls"), ("last", "lasttoken")])
def test_a_bare_transformer_is_pooled_as_is_said(said: str, mode: str, folder: Path, load: Load) -> None:
    for file in ("sentence_bert_config.json", "config_sentence_transformers.json"):
        (folder / file).unlink()
    write_modules(folder, [pooling(mode)])
    expected = vectors_of(folder)
    (folder / "modules.json").unlink()
    refused(folder, load, "states no pooling")
    assert_same(load(folder, said), expected)


def _word_weights(first: Any) -> modules.WordWeights:
    words = sorted(first.tokenizer.get_vocab().items(), key=lambda each: each[1])
    return modules.WordWeights([word for word, _ in words], {word: 0.1 + at % 7 for word, at in words})


_POOL = modules.Pooling(32, "mean")
#: Each module of sentence-transformers → a model with it, of a transformer; and what it is refused for, if it is.
MODULES: dict[str, tuple[Callable[[modules.Transformer], list[Any]], str]] = {
    "Transformer": (lambda first: [first, _POOL], ""),
    "Pooling": (lambda first: [first, modules.Pooling(32, [*MODES])], ""),
    "Dense": (lambda first: [first, _POOL, modules.Dense(32, 12)], ""),
    "Dropout": (lambda first: [first, _POOL, modules.Dropout(0.5)], ""),
    "LayerNorm": (lambda first: [first, _POOL, modules.LayerNorm(32)], ""),
    "Normalize": (lambda first: [first, _POOL, modules.Normalize()], ""),
    "WordWeights": (lambda first: [first, _word_weights(first), _POOL], ""),
    "WeightedLayerPooling": (
        lambda first: [first, modules.WeightedLayerPooling(32, num_hidden_layers=2, layer_start=1), _POOL],
        "",
    ),
    "CNN": (lambda first: [first, modules.CNN(32, 16, [1, 3]), _POOL], "depend on the other texts"),
    "LSTM": (lambda first: [first, modules.LSTM(32, 16), _POOL], "depend on the other texts"),
    "Router": (lambda first: [modules.Router({"query": [first, _POOL]}, default_route="query")], "is asymmetric"),
    "Asym": (lambda first: [modules.Asym({"query": [first, _POOL]}, allow_empty_key=True)], "is asymmetric"),
    "StaticEmbedding": (lambda first: [modules.StaticEmbedding(first.tokenizer, embedding_dim=8)], "does not run"),
    "WordEmbeddings": (lambda first: [_words(), modules.Pooling(8, "mean")], "does not run"),
    "BoW": (lambda first: [modules.BoW(["a", "b"])], "holds no weights"),
}
#: Bases of others, and the one that has a model in test_families.py.
_NOT_HERE = {"Module", "InputModule", "CLIPModel"}


def _words() -> modules.WordEmbeddings:
    from sentence_transformers.sentence_transformer.modules.tokenizer import WhitespaceTokenizer

    return modules.WordEmbeddings(WhitespaceTokenizer(["a", "b"]), np.ones((2, 8), np.float32))


@pytest.mark.parametrize("name", sorted({*modules.__all__} - _NOT_HERE))
def test_every_module_is_equal_or_refused(name: str, folder: Path, tmp_path: Path, load: Load) -> None:
    """Also one that a later sentence-transformers brings: it has no entry yet."""
    make, why_not = MODULES[name]
    torch.manual_seed(1)
    first = modules.Transformer(str(folder), config_kwargs={"output_hidden_states": True})
    SentenceTransformer(modules=make(first), device="cpu").save(str(tmp_path / "saved"))
    if why_not:
        refused(tmp_path / "saved", load, why_not)
        return
    backend = load(tmp_path / "saved")
    assert_same(backend, vectors_of(tmp_path / "saved"))
    assert facts_of(tmp_path / "saved").dimensions == backend.dim


def test_a_reranker_is_told_by_what_sentence_transformers_saves(folder: Path, tmp_path: Path, load: Load) -> None:
    from sentence_transformers import CrossEncoder

    CrossEncoder(str(folder)).save_pretrained(str(tmp_path / "other"))
    refused(tmp_path / "other", load, "vectors of texts alone")


def refused(folder: Path, load: Load, words: str) -> None:
    with pytest.raises(ModelError, match=words) as refusal:
        load(folder)
    assert "\n" not in str(refusal.value)


GONE = "encoder.layer.1.output.dense.weight"


def cut_short(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def slow_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "ByT5Tokenizer"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(
            lambda folder: edit(
                folder, "sentence_bert_config.json", processing_kwargs={"text": {"add_special_tokens": 0}}
            ),
            "sets text.add_special_tokens in its processing_kwargs",
            id="options that change what a text becomes",
        ),
        pytest.param(
            lambda folder: edit(folder, "tokenizer_config.json", model_input_names=["input_ids", "bbox"]),
            "takes bbox beside the tokens",
            id="inputs that are not made of a text",
        ),
        pytest.param(
            # transformers would fill in random numbers.
            lambda folder: edit_weights(
                folder, lambda weights: {name: each for name, each in weights.items() if name != GONE}
            ),
            f"lacks 1 weights of BertModel, such as {GONE}: its files are incomplete",
            id="missing weights",
        ),
        pytest.param(
            lambda folder: edit(folder, intermediate_size=80),
            "can't be loaded: its weights have other shapes than config.json states",
            id="weights of another shape",
        ),
        pytest.param(cut_short, "can't be loaded: ", id="a file that was not downloaded to its end"),
        pytest.param(
            lambda folder: edit(folder, model_type="new"),
            "can't be loaded: .*model type `new`",
            id="an architecture that transformers does not know",
        ),
        pytest.param(
            slow_tokenizer,
            "a fast tokenizer .tokenizer.json., not ByT5Tokenizer",
            id="a tokenizer without a fast version",
        ),
    ],
)
def test_what_is_not_supported_is_refused(change: Callable[[Path], None], words: str, folder: Path, load: Load) -> None:
    change(folder)
    refused(folder, load, words)


def test_a_pooler_that_is_not_used_may_be_missing(folder: Path, load: Load) -> None:
    expected = vectors_of(folder)
    edit_weights(folder, lambda weights: {name: each for name, each in weights.items() if "pooler" not in name})
    assert_same(load(folder), expected)


def test_a_text_that_looks_like_a_picture_s_address_is_a_text(tmp_path: Path, load: Load) -> None:
    from tests.support.model_families import FAMILIES

    folder = next(family for family in FAMILIES if family.models.startswith("clip")).make(tmp_path)
    address = "https://example.org/cat.png"
    model, found = sentence_transformer(folder), encode(load(folder), [address, "a cat"], normalize=False).vectors
    ids = model.tokenizer([address], return_tensors="pt")
    with torch.inference_mode():
        expected = model({**ids, "modality": "text"})["sentence_embedding"]
    np.testing.assert_allclose(found[:1], expected.numpy(), rtol=0, atol=1e-5)
