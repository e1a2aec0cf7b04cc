"""The texts that systems encode: of real lengths, of an exact number of tokens, and the same every time."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, median

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from embedctl_bench.peers.models import Model
from embedctl_bench.texts import words as module
from embedctl_bench.texts import workloads
from embedctl_bench.texts.words import exact_requests

WORDS = [f"w{number}" for number in range(500)]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """A model whose tokenizer takes words for tokens, and puts one before and one after a text."""
    vocabulary = {word: number for number, word in enumerate(["[UNK]", "[CLS]", "[SEP]", *WORDS, *module._WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.enable_truncation(8)
    folder = tmp_path / "m"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return Model("m", folder, 1e6)


@pytest.fixture
def _passages(monkeypatch: pytest.MonkeyPatch) -> None:
    def passages() -> list[tuple[str, str]]:
        draw = np.random.default_rng(0)
        return [(f"{at}", " ".join(draw.choice(WORDS, size=5 + at % 60))) for at in range(400)]

    monkeypatch.setattr(workloads, "passages", passages)


@pytest.mark.usefixtures("_passages")
def test_w1_has_lengths_as_in_real_corpora_and_w2_long_texts(model: Model, tmp_path: Path) -> None:
    mixed, long = (workloads.make_workload(name, count, model, tmp_path) for name, count in (("W1", 200), ("W2", 24)))
    assert median(mixed.lengths) == pytest.approx(26, abs=1)
    assert max(mixed.lengths) == 256
    assert fmean(mixed.lengths) == pytest.approx(39, abs=2)
    assert set(long.lengths) == {449}
    for workload in (mixed, long):
        count = len(workload.lengths)
        assert len(set(workload.texts)) == count
        assert workloads.make_workload(workload.name, count, model, tmp_path) == workload
    tokenizer = json.loads((model.folder / "tokenizer.json").read_text())
    del tokenizer["model"]["vocab"]["w499"]
    (model.folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    kept = {*(tmp_path / "workloads").iterdir()}
    workloads.make_workload("W1", 200, model, tmp_path)
    assert len({*(tmp_path / "workloads").iterdir()} - kept) == 1, "another tokenizer"


@pytest.mark.parametrize("tokens", [3, 8, 100])
def test_texts_have_exactly_the_tokens_asked_for(model: Model, tokens: int) -> None:
    requests = exact_requests(model, tokens, 2, 3)
    assert [len(request) for request in requests] == [2, 2, 2]
    assert set(model.lengths([text for request in requests for text in request])) == {tokens}
    assert requests == exact_requests(model, tokens, 2, 3), "the same every time"
