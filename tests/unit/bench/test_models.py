"""Models of published benchmarks by their shape."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from embedctl_bench.peers import models
from embedctl_bench.peers.models import MAX_TOKENS, SHAPES, ModelShape, model_files, slug, write_shape
from embedctl_config.hardware import ModelEntry
from embedctl_config.settings import Settings
from embedctl_workers.models.files import fingerprint_of, resolve_model

SMALL = {
    "bert-tiny": ModelShape("bert", layers=2, hidden=48, heads=4, pooling="cls"),
    "distilbert-tiny": ModelShape("distilbert", layers=2, hidden=48, heads=4, pooling="mean"),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_shape_is_a_model_that_sentence_transformers_loads_and_the_same_each_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sentence_transformers import SentenceTransformer

    monkeypatch.setattr(models, "SHAPES", {**SHAPES, **SMALL})
    files = model_files(name, Settings(cache_dir=str(tmp_path / "cache")))
    model = SentenceTransformer(str(files.folder), device="cpu")
    assert model.max_seq_length == MAX_TOKENS
    texts = ["a text", "another one, of more words than the first", "word " * 1000]
    vectors = model.encode(texts, batch_size=3)
    assert vectors.shape == (3, 48)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)
    assert (vectors @ vectors.T)[~np.eye(3, dtype=bool)].max() < 0.999, "texts differ"
    write_shape(SMALL[name], tmp_path / "again", resolve_model("all-MiniLM-L6-v2").folder)
    assert fingerprint_of(tmp_path / "again") == files.fingerprint
    (files.folder / "mark").write_text("")
    assert (model_files(name, Settings(cache_dir=str(tmp_path / "cache"))).folder / "mark").exists(), "made once"


def test_a_model_is_found_by_its_entry(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    settings = Settings(models={"mine": ModelEntry(source=str(tmp_path))})
    assert model_files("mine", settings).folder == model_files(str(tmp_path), Settings()).folder == tmp_path
    assert slug("intfloat/e5 small") == "intfloat-e5-small"
