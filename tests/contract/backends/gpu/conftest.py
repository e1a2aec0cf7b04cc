"""A backend `torch-gpu` on a stand-in for its device."""

from __future__ import annotations

from typing import Any

import pytest
from torch.nn.attention import varlen

from embedctl_workers.backends.gpu.backend import TorchGpuBackend
from embedctl_workers.machine.host import Host
from embedctl_workers.models.files import ModelFiles, fingerprint_of
from tests.support.stand_in_gpu import StandIn, varlen_attn
from tests.support.tiny_models import MakeModel, Tiny
from tests.support.torch_gpu import BERT, Load


@pytest.fixture
def load(tiny_model: MakeModel, host: Host) -> Load:
    def load(tiny: Tiny = BERT, on: StandIn | None = None, **options: Any) -> TorchGpuBackend:
        folder = tiny_model(tiny)
        return TorchGpuBackend(ModelFiles("tiny", folder, fingerprint_of(folder)), host, on or StandIn(), **options)

    return load


@pytest.fixture
def with_varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for torch's attention over packed texts, with the arguments that the real one has."""
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
