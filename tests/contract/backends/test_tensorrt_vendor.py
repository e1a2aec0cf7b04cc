"""Whether TensorRT and the GPU that it needs are present, the message if not, and that the GPU is chosen first."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from embedctl_config.errors import MissingExtra, WorkerError
from embedctl_workers.backends.tensorrt import runtime
from embedctl_workers.backends.tensorrt.runtime import CudaDevice

pytestmark = pytest.mark.slow


def importing(outcome: Any) -> Callable[[str], Any]:
    """What `import tensorrt` does on machines where it is not right."""

    def load(name: str) -> Any:
        assert name == "tensorrt"
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return load


@pytest.mark.parametrize(
    ("outcome", "kind", "message"),
    [
        (
            ModuleNotFoundError("No module named 'tensorrt'", name="tensorrt"),
            MissingExtra,
            r"backend 'tensorrt' needs an optional dependency: pip install 'embedctl\[tensorrt\]'",
        ),
        (
            ModuleNotFoundError("No module named 'tensorrt_libs'", name="tensorrt_libs"),
            WorkerError,
            "the package tensorrt is here without tensorrt_libs: install tensorrt with its libraries",
        ),
        (
            ImportError("libnvonnxparser.so.10: cannot open shared object file"),
            WorkerError,
            r"can't be loaded \(libnvonnxparser.so.10: cannot open .*\): install tensorrt with its libraries",
        ),
        (RuntimeError("The package you are trying to install\nis only a placeholder"), WorkerError, "can't be loaded"),
        (ModuleType("tensorrt"), WorkerError, "is a placeholder: install tensorrt with its libraries"),
    ],
)
def test_what_is_missing_of_tensorrt_is_said_in_one_line(
    outcome: Any, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "import_module", importing(outcome))
    with pytest.raises(kind, match=message) as raised:
        runtime.load_vendor()
    assert "\n" not in str(raised.value)


def test_without_a_gpu_tensorrt_is_not_even_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "import_module", importing(AssertionError("imported")))
    if not torch.cuda.is_available():
        with pytest.raises(WorkerError, match=r"torch \S+ (was built without CUDA|.*can use no GPU)"):
            runtime.open_runtime()
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def no_driver() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.")

    monkeypatch.setattr(torch.cuda, "init", no_driver)
    with pytest.raises(WorkerError, match=r"can use no GPU: `nvidia-smi` shows .*Found no NVIDIA driver"):
        runtime.open_runtime()
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(WorkerError, match=r"runs on NVIDIA's GPUs, and torch .* is built for ROCm"):
        CudaDevice()


ORDER = """
import os, sys
import embedctl_workers.commands.worker, embedctl_workers.commands.model
from embedctl_workers.machine import devices
HEAVY = ("tensorrt", "torch", "numpy", "onnx", "onnxruntime", "tokenizers")
assert not [name for name in HEAVY if name in sys.modules]
devices.pin(None, accelerator=devices.Accelerator("gpu", 1, "GPU-of-the-test"))
from embedctl_config.errors import WorkerError
import embedctl_workers.backends.tensorrt.backend
from embedctl_workers.backends.tensorrt import runtime
assert "tensorrt" not in sys.modules
try:
    runtime.load_vendor()
except WorkerError:
    pass
print(sys.modules["tensorrt"].SEEN, sys.modules["tensorrt"].__file__, os.environ["PYTORCH_ALLOC_CONF"])
"""


def test_the_gpu_is_chosen_before_tensorrt_is_imported(tmp_path: Path) -> None:
    (tmp_path / "tensorrt.py").write_text("import os\nSEEN = os.environ['CUDA_VISIBLE_DEVICES']\n")
    chosen = ("CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in chosen}
    done = subprocess.run(
        [sys.executable, "-c", ORDER],
        env={**environment, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["GPU-of-the-test", str(tmp_path / "tensorrt.py"), "expandable_segments:True"]
