"""The families of models that the field uses, on the CPU classes, against `SentenceTransformer`.

The tables of docs/models.md hold the results. `--junitxml FILE` writes those of a run, each as the property `cell`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedctl_config.errors import ModelError
from embedctl_config.hardware import ModelEntry
from embedctl_config.settings import Settings
from embedctl_workers.accuracy.gate import run_gate
from embedctl_workers.arrays.tokens import Vectors
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.encoding.known_good import load_encoder
from embedctl_workers.machine.host import Host
from tests.support.chunks import BUDGET, chunk_of
from tests.support.model_families import FAMILIES, ModelFamily
from tests.support.onnx_models import quick_artifact
from tests.support.references_here import sentence_transformer
from tests.support.texts import TEXTS, text_of

#: Tracing a graph warns of each test in a model's Python; whether the graph is right is what is tested here.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")]

PAGE = (Path(__file__).parents[3] / "docs" / "models.md").read_text("utf-8")
CLASSES = ("cpu", "cpu-bf16", "cpu-int8")
#: Beside the usual texts: one token, white space of several kinds, a character that many tokenizers drop.
ODD = ["x", "\u00a0", "\u200b", "\u3000a", "e\u0301té", "👩🏽\u200d🚀", "<s> </s> [SEP]", "日本語" * 9]
#: Least cosine that a class must keep here. Random weights are harder than a trained model's.
LEAST = {"cpu": 1 - 1e-9, "cpu-bf16": 0.999, "cpu-int8": 0.95}
PACKED = {"BERT", "DistilBERT", "RoBERTa", "XLM-RoBERTa"}

Made = Callable[[ModelFamily], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return functools.cache(lambda family: family.make(tmp_path_factory.mktemp("family")))


@pytest.fixture(autouse=True)
def quick_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedctl_workers.backends.onnx.backend.artifact_for", quick_artifact)


def texts_for(family: ModelFamily, folder: Path) -> list[str]:
    """Texts of every kind, among them one of the longest length, one that is shorter by a token and one longer."""
    tokenizer = sentence_transformer(folder).tokenizer
    longest = family.longest or 40
    return [*(text_of(longest + more, tokenizer) for more in (-1, 0, 1)), *ODD, *TEXTS]


def load(folder: Path, hardware: str, host: Host) -> ChunkEncoder:
    """As a worker loads it, but on every CPU with the same products."""
    settings = Settings(models={"tiny": ModelEntry(source=str(folder))})
    chosen = settings.hardware_class(hardware)
    if hardware == "cpu":
        # AMX's products, where they are the fastest, are not as close: test_tiles.py has their bounds.
        chosen = replace(chosen, options={**chosen.options, "products": "plain"})
    return load_encoder(settings, chosen, "tiny", host)


def unit(vectors: Vectors) -> Any:
    return vectors / np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)


#: What some classes need of a CPU.
NEEDS = {"cpu-bf16": "bf16", "cpu-int8": "vnni"}


def of_each_class() -> pytest.MarkDecorator:
    cases = [
        pytest.param(
            family,
            hardware,
            id=f"{family}: {hardware}",
            marks=[
                *([pytest.mark.slow] if hardware != "cpu" and family.name != "BERT" and not family.refused else []),
                *([pytest.mark.needs(NEEDS[hardware])] if hardware in NEEDS else []),
            ],
        )
        for family in FAMILIES
        for hardware in CLASSES
    ]
    return pytest.mark.parametrize(("family", "hardware"), cases)


@of_each_class()
def test_a_family_is_encoded_as_sentence_transformers_does_or_refused_in_one_line(
    family: ModelFamily, hardware: str, made: Made, host: Host, record_property: Callable[[str, object], None]
) -> None:
    folder = made(family)
    if family.refused:
        with pytest.raises(ModelError, match=family.refused) as refusal:
            load(folder, hardware, host)
        said = str(refusal.value).replace(f" in {folder}", "").replace(f"{folder}/", "")
        said = said.replace("model 'tiny'", "the model")
        assert f"| {family.name} | {family.models} | {said} |" in PAGE.splitlines()
        return
    encoder = load(folder, hardware, host)
    try:
        texts = texts_for(family, folder)
        expected = unit(sentence_transformer(folder).encode(texts, batch_size=8))
        mixed = ChunkEncoder(encoder.backend, BUDGET).encode(encoder.prepare(chunk_of(*texts), {}))
        assert mixed.errors == []
        cosines = (unit(mixed.vectors) * expected).sum(axis=1)
        engine, of_what = (word.strip() for word in encoder.backend.engine.split(",", 1))
        if family.longest:
            assert encoder.backend.max_tokens == family.longest
            cut = [(each.row, each.used, each.lost) for each in mixed.truncations]
            assert cut[:1] == [(2, family.longest, 1)]
            assert not {0, 1} & {row for row, _, _ in cut}
        assert (engine == "packed") == (family.name in PACKED), of_what
        error = float(np.abs(mixed.vectors - expected).max())
        record_property("cell", f"{engine.split()[0]}, {in_figures(hardware, error, float(cosines.min()))}")
        assert cosines.min() >= LEAST[hardware]
        if hardware == "cpu":
            np.testing.assert_allclose(mixed.vectors, expected, rtol=0, atol=1e-5)
            together = encoder.encode(encoder.prepare(chunk_of(*texts), {"prompt": "query: ", "normalize": False}))
            plain = sentence_transformer(folder).encode(texts, batch_size=len(texts), prompt="query: ")
            np.testing.assert_allclose(together.vectors, plain, rtol=0, atol=1e-5)
            settings = Settings()
            run_gate(encoder, settings.hardware_class(hardware), host)
    finally:
        encoder.backend.close()


def in_figures(hardware: str, error: float, cosine: float) -> str:
    if hardware != "cpu":
        return f"{math.floor(cosine * 1e4) / 1e4:.4f}"
    exponent = math.floor(math.log10(error))
    return f"{math.ceil(error / 10**exponent)}e{exponent}"


def test_the_table_holds_every_family() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    for family in FAMILIES:
        assert [row for row in rows if row.startswith(f"| {family.name} | {family.models} | ")], family.name
