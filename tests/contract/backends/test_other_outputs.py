"""Sparse vectors and multi-vectors are those of sentence-transformers' own classes, and so are bge-m3's of its authors'
formulas."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder

from embedctl_config.errors import ModelError
from embedctl_config.hardware import SHIPPED_CLASSES, HardwareClass
from embedctl_config.outputs import Output
from embedctl_config.settings import Settings
from embedctl_workers.accuracy.gate import measure_backend, run_gate
from embedctl_workers.accuracy.quality import quality
from embedctl_workers.accuracy.ranking import agreements
from embedctl_workers.arrays.outputs import WEIGHT, largest_weights
from embedctl_workers.arrays.tokens import Found, Ragged
from embedctl_workers.backends import load_backend
from embedctl_workers.backends.base import Backend
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.encoding.joining import Piece
from embedctl_workers.encoding.known_good import KnownGood, load_encoder
from embedctl_workers.encoding.prepared import SOLE_USE
from embedctl_workers.machine.host import Host
from embedctl_workers.models.files import fingerprint_of, resolve_model
from tests.support.chunks import BUDGET, chunk_of
from tests.support.onnx_models import quick_artifact
from tests.support.other_outputs import make_multi, make_sparse, make_three
from tests.support.stand_in_gpu import StandIn
from tests.support.tiny_models import MakeModel, Tiny

ENTRY = HardwareClass(backend="torch")
#: Where the engine is not one of torch's on CPUs.
BACKENDS: dict[str, tuple[str, dict[str, str]]] = {
    "onnxruntime": ("onnx", {}),
    "packed, SDPA": ("torch-gpu", {"dtype": "fp32"}),
    "padded, SDPA": ("torch-gpu", {"dtype": "fp32", "engine": "padded"}),
}
TEXTS = ["w3 w4 w5 , w6 .", "w7", "w8 w9 ! " * 30, "a b c", "w10 w11 w12 w13", "hello, the world."]


@pytest.fixture(autouse=True)
def quick_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedctl_workers.backends.gpu.backend.open_gpu", StandIn)
    monkeypatch.setattr("embedctl_workers.backends.onnx.backend.artifact_for", quick_artifact)


def load(folder: Path, host: Host, engine: str = "packed") -> Backend:
    """Of a backend that has such an engine."""
    alias, options = BACKENDS.get(engine, ("torch", {"engine": engine} if engine == "padded" else {}))
    backend = load_backend(alias, str(folder), entry=None, host=host, options=options)
    assert engine in backend.engine
    return backend


def cells(folder: Path, host: Host, engine: str, output: str, **options: Any) -> list[Any]:
    backend = load(folder, host, engine)
    encoder = ChunkEncoder(backend, BUDGET, prompts={"query": "w1 ", **backend.own_prompts})
    encoded = encoder.encode(encoder.prepare(chunk_of(*TEXTS), {"vectors": [output], **options}))
    assert encoded.errors == []
    return list(encoded.vectors[:, 0])


@pytest.mark.parametrize(
    ("family", "pooling", "engine"),
    [
        ("bert", {}, "packed"),
        ("bert", {"pooling_strategy": "sum"}, "packed"),
        ("distilbert", {"activation_function": "log1p_relu"}, "packed"),
        ("xlm-roberta", {}, "packed"),
        ("mpnet", {}, "padded"),
        ("mpnet", {}, "onnxruntime"),
        ("roberta", {"pooling_strategy": "sum"}, "onnxruntime"),
        ("distilbert", {}, "packed, SDPA"),
        ("roberta", {"pooling_strategy": "sum"}, "packed, SDPA"),
        ("mpnet", {}, "padded, SDPA"),
    ],
)
def test_weights_are_those_of_a_sparse_encoder(
    tmp_path: Path, host: Host, family: Any, pooling: dict[str, str], engine: str
) -> None:
    folder = make_sparse(tmp_path, Tiny(family), **pooling)
    found = cells(folder, host, engine, "sparse", prompt_name="query")
    expected = SparseEncoder(str(folder), device="cpu").encode_query(TEXTS).to_dense().numpy()
    for cell, row in zip(found, expected, strict=True):
        assert set(cell["index"]) >= set(np.flatnonzero(row > 1e-3))
        assert (np.diff(cell["index"].astype(int)) > 0).all()
        weights = np.zeros_like(row)
        weights[cell["index"]] = cell["weight"]
        np.testing.assert_allclose(weights, row, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "how", "engine"),
    [
        ("bert", {}, "packed"),
        ("distilbert", {"attend": True, "document_length": 9}, "packed"),
        ("modernbert", {"strategy": "min", "query_length": 20}, "padded"),
        ("bert", {}, "onnxruntime"),
        ("modernbert", {"attend": True, "document_length": 9}, "onnxruntime"),
        ("bert", {}, "packed, SDPA"),
        ("modernbert", {}, "padded, SDPA"),
    ],
)
def test_vectors_of_tokens_are_those_of_a_multi_vector_encoder(
    tmp_path: Path, host: Host, family: Any, how: dict[str, Any], engine: str
) -> None:
    folder = make_multi(tmp_path, Tiny(family), **how)
    model = MultiVectorEncoder(str(folder), device="cpu")
    documents = cells(folder, host, engine, "multi")
    queries = cells(folder, host, engine, "multi", prompt_name="query")
    for found, expected in ((documents, model.encode_document(TEXTS)), (queries, model.encode_query(TEXTS))):
        for cell, text in zip(found, expected, strict=True):  # as many: the same tokens are kept
            np.testing.assert_allclose(cell, text.numpy(), atol=1e-4)
    assert len(documents[0]) < len(model.tokenizer("w2 " + TEXTS[0])["input_ids"])  # punctuation is left out


@pytest.mark.parametrize("engine", ["packed", "padded", *BACKENDS])
def test_a_model_of_three_heads_gives_all_in_one_pass(
    tiny_model: MakeModel, host: Host, tmp_path: Path, engine: str
) -> None:
    tiny = Tiny("xlm-roberta", pooling="cls", normalize=True)
    folder = make_three(tmp_path / "bge", tiny)
    sparse, multi = torch.nn.Linear(32, 1), torch.nn.Linear(32, 24)
    sparse.load_state_dict(torch.load(folder / "sparse_linear.pt"))
    multi.load_state_dict(torch.load(folder / "colbert_linear.pt"))
    assert fingerprint_of(folder) != fingerprint_of(tiny_model(tiny))
    encoder = ChunkEncoder(load(folder, host, engine), BUDGET)
    found = encoder.encode(encoder.prepare(chunk_of(*TEXTS), {"vectors": ["dense", "sparse", "multi"]})).vectors
    model = SentenceTransformer(str(folder), device="cpu")
    tokenizer: Any = model.tokenizer
    for text, (dense, weights, vectors) in zip(TEXTS, found, strict=True):
        np.testing.assert_allclose(dense, model.encode(text), atol=1e-5)
        states: Any = model.encode(text, output_value="token_embeddings")
        states, ids = states.clone(), model.preprocess([text])["input_ids"][0].tolist()
        largest: dict[int, float] = {}
        for token, weight in zip(ids, torch.relu(sparse(states))[:, 0].tolist(), strict=True):
            if weight > largest.get(token, 0) and token not in tokenizer.all_special_ids:
                largest[token] = weight
        assert dict(weights.tolist()) == pytest.approx(largest, abs=1e-4)
        of_tokens = torch.nn.functional.normalize(multi(states[1:]), dim=-1).detach().numpy()
        np.testing.assert_allclose(vectors, of_tokens, atol=1e-4)
    ranked = agreements(encoder, "int8", host)
    assert [each.output for each in ranked] == ["sparse", "multi"]
    assert all(each.overlap == 1 and each.ndcg == pytest.approx(1) for each in ranked)
    sizes = {Output.DENSE: [32, 8], **{output: [width] for output, width in encoder.backend.widths.items()}}
    rows: list[Any] = list(quality(encoder, host, "fp32", sizes, ("float32", "float16", "binary")))
    stored = {(row["vectors"], row["dims"], row["dtype"]): (row["bytes"], row["overlap@10"]) for row in rows}
    assert stored.keys() == {
        *(("dense", dims, dtype) for dims in (32, 8) for dtype in ("float32", "float16", "binary")),
        ("sparse", encoder.backend.widths[Output.SPARSE], "float32"),
        *(("multi", 24, dtype) for dtype in ("float32", "float16")),
    }
    assert all(overlap == 1 for (_, dims, dtype), (_, overlap) in stored.items() if dims != 8 and dtype == "float32")
    assert stored["dense", 8, "binary"][1] < stored["dense", 32, "binary"][1] < 1
    assert stored["dense", 32, "binary"][0] == 4
    assert stored["multi", 24, "float32"][0] == 2 * stored["multi", 24, "float16"][0]
    (folder / "sparse_linear.pt").write_bytes(b"PK")
    with pytest.raises(ModelError, match=r"sparse_linear\.pt can't be read"):
        load(folder, host, engine)


def test_a_model_that_an_earlier_pylate_saved_is_told_by_its_markers(tmp_path: Path, host: Host) -> None:
    folder = make_multi(tmp_path, Tiny())
    modules = json.loads((folder / "modules.json").read_text())[:2]
    modules[1]["type"] = "pylate.models.Dense.Dense"
    (folder / "modules.json").write_text(json.dumps(modules))
    config = {"query_prefix": "[Q] ", "document_prefix": "w2 ", "query_length": 12, "document_length": 20}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(config))
    model = MultiVectorEncoder(str(folder), device="cpu")
    found = cells(folder, host, "packed", "multi", prompt_name="query")
    assert load(folder, host).own_prompts["document"] == "w2 "
    for cell, text in zip(found, model.encode_query(TEXTS), strict=True):
        np.testing.assert_allclose(cell, text.numpy(), atol=1e-4)


def test_queries_that_need_another_column_are_not_joined_with_documents(tmp_path: Path, host: Host) -> None:
    backend = load(make_multi(tmp_path, Tiny()), host, "packed, SDPA")
    prompts = (None, backend.own_prompts["query"])
    documents, queries = (Piece(backend, backend.tokenize(TEXTS, each), True, BUDGET, SOLE_USE) for each in prompts)
    assert documents.key != queries.key


@pytest.mark.filterwarnings("error")
def test_a_weight_that_is_not_a_number_is_seen() -> None:
    found = largest_weights(np.array([np.nan, 1, 2, 0], np.float32), Ragged.of([[5, 6], [7, 8]]), unused=[6])
    assert np.isnan(found[0]["weight"]).tolist() == [True]
    assert found[1].tolist() == [(7, 2)]


@pytest.mark.parametrize("make", [make_sparse, make_multi])
def test_the_gate_holds_each_number_to_the_reference(
    make: Callable[[Path, Tiny], Path], tmp_path: Path, host: Host
) -> None:
    encoder = load_encoder(Settings(), ENTRY, str(make(tmp_path, Tiny())), host)
    assert run_gate(encoder, ENTRY, host)
    good = KnownGood(encoder.backend, ENTRY.thresholds())
    good.check()
    whole = encoder.backend.finish

    def sabotaged(output: Any, *, normalize: bool) -> Found:
        found = whole(output, normalize=normalize)
        (found[0, 0]["weight"] if make is make_sparse else found[0, 0])[0] += 2e-4
        return found

    encoder.backend.finish = sabotaged  # type: ignore[method-assign]
    report = measure_backend(encoder, ENTRY, host)
    assert report is not None
    assert not report.passed
    assert "off by more than 0.0001" in str(report)


def shaken(cell: Any) -> Any:
    """A cell whose numbers are off by about half of themselves."""
    numbers = cell["weight"] if cell.dtype == WEIGHT else cell
    numbers *= np.random.default_rng(0).normal(1, 0.5, numbers.shape).astype(np.float32)
    return cell


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("cpu-bf16", marks=pytest.mark.needs("bf16")),
        pytest.param("cpu-int8", marks=[pytest.mark.needs("avx2"), pytest.mark.needs("compiler")]),
        "gpu",
    ],
)
@pytest.mark.parametrize("make", [make_sparse, make_multi])
def test_below_fp32_the_gate_holds_rankings_to_those_in_fp32(
    make: Callable[[Path, Tiny], Path], name: str, tmp_path: Path, host: Host
) -> None:
    entry = SHIPPED_CLASSES[name]
    encoder = load_encoder(Settings(), entry, str(make(tmp_path, Tiny())), host)
    assert "packed" in encoder.backend.engine
    report = run_gate(encoder, entry, host)
    assert report is not None
    (ranking,) = report.rankings
    assert ranking.overlap > 0.85
    assert ranking.ndcg < 1, "rankings are those of fp32"
    assert run_gate(encoder, entry, host) == report  # as it was noted
    whole = encoder.backend.finish

    def sabotaged(output: Any, *, normalize: bool) -> Found:
        found = whole(output, normalize=normalize)
        found[:, 0] = [shaken(cell) for cell in found[:, 0]]
        return found

    encoder.backend.finish = sabotaged  # type: ignore[method-assign]
    found = measure_backend(encoder, entry, host)
    assert found is not None
    assert not found.rankings[0].passed
    assert "FAILED), nDCG@10" in str(found)


def test_what_no_other_backend_computes_is_refused_there_and_unknown_modules_by_name(tmp_path: Path) -> None:
    folder = make_sparse(tmp_path, Tiny())
    with pytest.raises(ModelError, match="gives sparse vectors, which the backends neuron and tensorrt don't compute"):
        resolve_model(str(folder))
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["type"] = "sentence_transformers.sparse_encoder.modules.sparse_auto_encoder.SparseAutoEncoder"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=r"SparseAutoEncoder, which embedctl does not compute: .* SpladePooling"):
        resolve_model(str(folder), plain=False)
