"""Vectors on a stand-in for a GPU: they are those of the model, whatever the type, the neighbours and the batch."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embedctl_config.errors import ModelError, SettingsError
from embedctl_config.hardware import HardwareClass
from embedctl_config.wire import ErrorCode
from embedctl_workers.accuracy.gate import measure_backend
from embedctl_workers.backends.gpu.backend import DTYPES, Choice, TorchGpuBackend, choose
from embedctl_workers.backends.torch.backend import TorchBackend
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.machine.host import Host
from embedctl_workers.models.files import ModelFiles, fingerprint_of, resolve_model
from tests.support.references_here import sentence_transformer
from tests.support.stand_in_gpu import StandIn
from tests.support.tiny_models import MakeModel, Tiny
from tests.support.torch_gpu import BERT, QWEN, Load, cosines, encode, texts_of, tokens_of


@pytest.mark.parametrize(
    ("family", "engine", "dtype"),
    [
        *((family, "auto", "fp16") for family in ("bert", "mpnet", "modernbert", "qwen3")),
        ("bert", "auto", "bf16"),
        ("bert", "padded", "fp16"),
    ],
)
def test_in_16_bits_vectors_stay_close(family: Any, engine: str, dtype: str, load: Load, tiny_model: MakeModel) -> None:
    tiny = Tiny(family, pooling="lasttoken" if family.startswith("qwen") else "mean", normalize=True)
    texts = texts_of(range(1, 40, 2))
    found = encode(load(tiny, dtype=dtype, engine=engine), texts)
    assert found.errors == []
    bound = 0.9998 if dtype == "fp16" else 0.995  # random layers magnify what rounding leaves; real models do not
    assert cosines(found.vectors, sentence_transformer(tiny_model(tiny)).encode(texts)).min() > bound


@pytest.mark.slow
def test_the_gate_passes_with_weights_that_were_trained(host: Host) -> None:
    backend = TorchGpuBackend(resolve_model("all-MiniLM-L6-v2"), host, StandIn(), dtype="bf16")
    report = measure_backend(ChunkEncoder(backend, 4096), HardwareClass(backend="torch-gpu", precision="fp16"), host)
    assert report is not None
    assert report.passed, str(report)


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
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str, load: Load) -> None:
    with pytest.raises(SettingsError, match=message):
        load(**options)


def test_the_type_that_is_nearer_is_chosen_and_what_overflows_loses() -> None:
    exact = np.eye(4, dtype=np.float32)
    half, brain = torch.float16, torch.bfloat16

    def with_errors(**errors: float) -> Choice:
        return choose((half, brain), exact, lambda dtype: exact + errors["h" if dtype == half else "b"])

    assert with_errors(h=0.01, b=0.02).dtype == half
    assert with_errors(h=0.02, b=0.01).dtype == brain
    assert with_errors(h=0, b=0).dtype == half
    assert with_errors(h=np.nan, b=0.1).dtype == brain
    assert "fp16 not finite" in with_errors(h=np.nan, b=0.1).why
    with pytest.raises(ModelError, match="set the class's option dtype to fp32"):
        with_errors(h=np.nan, b=np.nan)


def overflowing(model: Path, folder: Path, factor: float = 3e5) -> Path:
    """A copy of a model, with the same vectors in fp32, whose inner values are too large for fp16."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith("intermediate.dense.weight"):
            weights[name] *= factor
        if name.endswith(("output.dense.weight",)) and "attention" not in name:
            weights[name] /= factor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("engine", ["auto", "padded"])
def test_a_text_that_overflows_in_fp16_is_encoded_in_fp32(
    engine: str, tmp_path: Path, tiny_model: MakeModel, host: Host, with_varlen: None
) -> None:
    folder = overflowing(tiny_model(BERT), tmp_path / "large", 2e4)  # not the weights, but what is computed
    files, on = ModelFiles("large", folder, fingerprint_of(folder)), StandIn(varlen=True)
    backend = TorchGpuBackend(files, host, on, dtype="fp16", engine=engine)
    before = {name: id(each) for name, each in vars(backend._engine).items()}
    texts = texts_of([3, 9])
    found = encode(backend, texts)
    assert found.errors == []
    assert cosines(found.vectors, sentence_transformer(folder).encode(texts)).min() > 0.9998
    assert {name: id(each) for name, each in vars(backend._engine).items()} == before

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    backend.forward_wider = fail  # type: ignore[assignment,method-assign]
    assert {each.code for each in encode(backend, texts).errors} == {ErrorCode.NON_FINITE}


@pytest.mark.parametrize(
    ("dtypes", "dtype", "chosen"),
    [
        (("fp16", "bf16"), "auto", "bf16 (off by"),
        (("fp16",), "auto", "fp32 (off by"),
        (("fp16", "bf16"), "fp16", "fp16,"),
    ],
)
def test_a_model_with_parts_that_fp16_is_not_enough_for_runs_in_another_type(
    dtypes: Sequence[str], dtype: str, chosen: str, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import MPNetModel

    monkeypatch.setattr(MPNetModel, "_keep_in_fp32_modules", ["intermediate"])
    on = StandIn()
    on.dtypes = tuple(DTYPES[each] for each in dtypes)
    backend = load(Tiny("mpnet"), on=on, dtype=dtype)
    assert f", {chosen}" in backend.engine
    engine: Any = backend._engine
    kept = {each.dtype for name, each in engine._first.named_parameters() if ".intermediate." in name}
    others = {each.dtype for name, each in engine._first.named_parameters() if ".intermediate." not in name}
    assert others == {DTYPES[chosen[:4]]}
    assert kept == ({torch.float32} if chosen.startswith("fp16") else others)


def test_fp32_is_not_rounded(load: Load) -> None:
    torch.set_float32_matmul_precision("medium")
    load(dtype="fp32")
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32
