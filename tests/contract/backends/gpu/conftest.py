"""A backend `torch-gpu` on a stand-in for its device."""

from __future__ import annotations

from typing import Any

import pytest
from torch.nn.attention import varlen

from embedctl_workers.backends.gpu import attention, backend, buckets, packed
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


@pytest.fixture
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sizes of batches, and attention in float32 that runs them."""
    monkeypatch.setattr(packed, "attention_for", lambda *_: attention.Varlen(varlen_attn))
    monkeypatch.setattr(buckets, "BUCKETS", (64, 128, 256))
    monkeypatch.setattr(buckets, "_LONGEST", (16, 32))
    monkeypatch.setattr(buckets, "_FEWEST_TEXTS", 2)
    monkeypatch.setattr(backend, "SAMPLE_TOKENS", 96)
