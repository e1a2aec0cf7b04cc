"""The backend where there is a GPU, and what it says where there is none."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from embedctl_config.errors import WorkerError
from embedctl_config.hardware import HardwareClass
from embedctl_workers.accuracy.gate import measure_backend
from embedctl_workers.arrays.tokens import Vectors
from embedctl_workers.backends.gpu import device
from embedctl_workers.backends.gpu.backend import TorchGpuBackend
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.machine.host import Host
from embedctl_workers.models.files import ModelFiles, fingerprint_of
from tests.support.chunks import chunk_of
from tests.support.device_use import RecordedUse
from tests.support.references_here import sentence_transformer
from tests.support.tiny_models import MakeModel, Tiny
from tests.support.torch_gpu import QWEN, cosines, texts_of


@pytest.mark.needs("gpu")
@pytest.mark.parametrize("dtype", ["auto", "fp16", "bf16", "fp32"])
@pytest.mark.parametrize("tiny", [Tiny(hidden=128, heads=2, max_seq_length=128), QWEN], ids=str)
def test_on_a_gpu(tiny: Tiny, dtype: str, tiny_model: MakeModel, host: Host, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder = tiny_model(tiny)
    backend = TorchGpuBackend(ModelFiles("tiny", folder, fingerprint_of(folder)), host, device.open_gpu(), dtype=dtype)
    backend.warm_up()
    assert backend.token_budget > 1000
    hardware = HardwareClass(device="gpu", backend="torch-gpu", precision="fp32" if dtype == "fp32" else "fp16")
    encoder = ChunkEncoder(backend, 2048)
    report = measure_backend(encoder, replace(hardware, min_cosine=0.0 if dtype == "fp32" else 0.99), host)
    assert report is not None
    assert report.passed, str(report)
    texts = texts_of(np.random.default_rng(1).integers(1, 100, 200).tolist())
    expected = sentence_transformer(folder).encode(texts)
    assert least_cosine(encoder, [texts] * 20, [expected] * 20) > (0.99999 if dtype == "fp32" else 0.99)
    backend.close()


def least_cosine(encoder: ChunkEncoder, chunks: Sequence[list[str]], expected: Sequence[Vectors]) -> float:
    turn = threading.Lock()

    def run(texts: list[str], vectors: Vectors) -> float:
        prepared = encoder.prepare(chunk_of(*texts), {"normalize": False})
        found = encoder.encode(prepared, RecordedUse(turn=lambda: turn))
        assert found.errors == []
        return float(cosines(found.vectors, vectors).min())

    with ThreadPoolExecutor(2) as pool:
        return min(pool.map(run, chunks, expected))


def test_a_torch_without_cuda_is_refused() -> None:
    if torch.version.cuda or torch.version.hip:
        pytest.skip("this torch has support for GPUs")
    with pytest.raises(WorkerError, match=r"torch .* was built without CUDA: pip install .*docs/gpu\.md"):
        device.open_gpu()


@pytest.mark.parametrize(
    ("says", "message"),
    [
        (
            "Found no NVIDIA driver on your system. Please check …",
            r"can use no GPU: `nvidia-smi` shows .*, and CUDA_VISIBLE_DEVICES=GPU-1 is set\. Its error: .*no NVIDIA",
        ),
        ("No CUDA GPUs are available", "can use no GPU"),
        (
            "The NVIDIA driver on your system is too old (found version 11040).",
            r"the GPU's driver is too old for torch .* \(CUDA 13\.0\): update the driver, or install a torch",
        ),
        ("CUDA error: no kernel image is available for execution on the device", "holds no code for this GPU"),
    ],
)
def test_why_there_is_no_gpu_is_told(says: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError(says)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    with pytest.raises(WorkerError, match=message):
        device.open_gpu()
