"""What the backend says where there is no GPU that it can use."""

from __future__ import annotations

import pytest
import torch

from embedctl_config.errors import WorkerError
from embedctl_workers.backends.gpu import device


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
