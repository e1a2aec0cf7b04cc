"""fp16, bf16 or fp32: which is chosen, and what overflows."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedctl_config.errors import ModelError
from embedctl_config.wire import ErrorCode
from embedctl_workers.arrays.tokens import Vectors
from embedctl_workers.machine.host import Host
from embedctl_workers.models.files import ModelFiles, fingerprint_of

torch = pytest.importorskip("torch")
pytest.importorskip("sentence_transformers")

from embedctl_workers.backends.gpu import precision  # noqa: E402
from embedctl_workers.backends.gpu.backend import TorchGpuBackend  # noqa: E402
from tests.support.stand_in_gpu import StandIn  # noqa: E402
from tests.support.tiny_models import Tiny  # noqa: E402
from tests.support.torch_gpu import BERT, Load, MakeModel, cosines, encode, reference, texts_of  # noqa: E402


def test_the_type_that_is_nearer_is_chosen_and_what_overflows_loses() -> None:
    exact = np.eye(4, dtype=np.float32)
    half, brain = torch.float16, torch.bfloat16

    def with_errors(**errors: float) -> precision.Choice:
        return precision.choose((half, brain), exact, lambda dtype: exact + errors["h" if dtype == half else "b"])

    assert with_errors(h=0.01, b=0.02).dtype == half
    assert with_errors(h=0.02, b=0.01).dtype == brain
    assert with_errors(h=0, b=0).dtype == half
    assert with_errors(h=np.nan, b=0.1).dtype == brain
    assert "fp16 not finite" in with_errors(h=np.nan, b=0.1).why
    with pytest.raises(ModelError, match="set the class's option dtype to fp32"):
        with_errors(h=np.nan, b=np.nan)


def test_a_type_that_the_device_can_not_compute_in_loses(caplog: pytest.LogCaptureFixture) -> None:
    exact = np.eye(4, dtype=np.float32)

    def encode(dtype: Any) -> Vectors:
        if dtype == torch.float16:
            raise RuntimeError("expected mat1 and mat2 to have the same dtype")
        return exact

    assert precision.choose((torch.float16, torch.bfloat16), exact, encode).dtype == torch.bfloat16
    assert "fp16 does not run here: RuntimeError: expected mat1" in caplog.text


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


@pytest.mark.slow
def test_a_model_that_overflows_in_fp16_runs_in_bf16(
    tmp_path: Path, tiny_model: MakeModel, host: Host, load: Load
) -> None:
    folder = overflowing(tiny_model(BERT), tmp_path / "large")
    backend = TorchGpuBackend(ModelFiles("large", folder, fingerprint_of(folder)), host, StandIn())
    assert "bf16 (off by" in backend.engine
    assert "fp16 not finite" in backend.engine


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
    assert cosines(found.vectors, reference(folder).encode(texts)).min() > 0.9998
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
    on.dtypes = tuple(precision.DTYPES[each] for each in dtypes)
    backend = load(Tiny("mpnet"), on=on, dtype=dtype)
    assert f", {chosen}" in backend.engine
    engine: Any = backend._engine
    kept = {each.dtype for name, each in engine._first.named_parameters() if ".intermediate." in name}
    others = {each.dtype for name, each in engine._first.named_parameters() if ".intermediate." not in name}
    assert others == {precision.DTYPES[chosen[:4]]}
    assert kept == ({torch.float32} if chosen.startswith("fp16") else others)


def test_fp32_is_not_rounded(load: Load) -> None:
    torch.set_float32_matmul_precision("medium")
    load(dtype="fp32")
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32
