"""The device's memory: the budget that it allows, what is done about too little, and how workers share it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from embedctl_config.errors import ModelError, SettingsError
from embedctl_workers.backends.gpu import device
from embedctl_workers.backends.gpu.backend import TorchGpuBackend
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.machine.host import Host
from embedctl_workers.models.files import ModelFiles
from tests.support.stand_in_gpu import StandIn
from tests.support.tiny_models import MakeModel
from tests.support.torch_gpu import BERT, Load, encode_with, texts_of


def test_the_budget_is_what_memory_allows(load: Load) -> None:
    on = StandIn()
    backend = load(on=on, dtype="fp32")
    backend.warm_up()
    assert backend.token_budget == device.MOST_TOKENS
    on.free, on.peak = 1_000_000, 4096 * 500
    backend.warm_up()
    assert backend.token_budget == pytest.approx(0.8 * 1_000_000 / 500, rel=0.02)
    assert device.affordable(10**9, 4096, 10, device.MOST_TOKENS) == 1


def short_of_memory(backend: TorchGpuBackend, most: int, message: str = "CUDA out of memory.") -> None:
    """Let the backend's device fail for batches of more positions."""
    engine = backend._engine
    run = engine.run

    def limited(inputs: Any, facts: Any) -> Any:
        if len(inputs["ids"]) > most:
            raise torch.OutOfMemoryError(message) if message.startswith("CUDA out") else RuntimeError(message)
        return run(inputs, facts)

    engine.run = limited  # type: ignore[method-assign]


@pytest.mark.parametrize("message", ["CUDA out of memory.", "CUBLAS_STATUS_ALLOC_FAILED when calling"])
def test_a_budget_that_was_too_large_is_halved(message: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    files, on = ModelFiles("tiny", tiny_model(replace(BERT, max_seq_length=64)), "f" * 64), StandIn()
    backend = TorchGpuBackend(files, Host(threads=1, cache=tmp_path), on, dtype="fp32")
    backend.warm_up()
    short_of_memory(backend, 300, message)
    encoder = ChunkEncoder(backend, backend.token_budget)
    texts = texts_of([30] * 25)
    emptied = on.emptied
    assert encode_with(encoder, texts).errors == []
    assert on.emptied > emptied
    assert encoder.token_budget < 1000


def test_a_batch_that_fits_once_memory_is_in_one_piece_lowers_no_budget(load: Load, tmp_path: Path) -> None:
    on = StandIn()
    backend = load(on=on, dtype="fp32")
    run, sizes = backend._engine.run, []

    def in_pieces(inputs: Any, facts: Any) -> Any:
        sizes.append(len(inputs["ids"]))
        if not on.emptied:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return run(inputs, facts)

    backend._engine.run = in_pieces  # type: ignore[method-assign]
    encoder = ChunkEncoder(backend, 64)
    assert encode_with(encoder, texts_of([20] * 5)).errors == []
    assert sizes[0] == sizes[1]  # the same batch again
    assert len(set(sizes[:2])) == 1
    assert encoder.token_budget == 64


def test_a_model_that_does_not_fit_is_refused(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr("embedctl_workers.backends.gpu.backend.PackedGpuEngine", full)
    with pytest.raises(
        ModelError, match=r"'tiny' does not fit into the free memory of the CPU as a stand-in: .*20.00 MiB"
    ):
        load(dtype="fp16")


class SharedGpu:
    """`torch.cuda` of one process, as far as memory goes. Others of the same class and list are on the same GPU.

    Attributes:
        weights, cached: bytes of this process' tensors, and of memory that torch holds for more of them.
    """

    TOTAL, CONTEXT = 80 << 30, 400 << 20

    def __init__(self, all_of_them: list[SharedGpu]) -> None:
        self.weights = self.cached = 0
        self.fraction = 1.0
        self._all = all_of_them
        all_of_them.append(self)

    def open(self, monkeypatch: pytest.MonkeyPatch, sharing: int) -> device.Gpu:
        facts = SimpleNamespace(name="A100", total_memory=self.TOTAL, major=8)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self.limit)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (self.free, self.TOTAL))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: self.weights)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: self.weights + self.cached)
        return device.Gpu(sharing)

    def limit(self, fraction: float, device: object) -> None:
        self.fraction = fraction

    @property
    def free(self) -> int:
        return self.TOTAL - sum(self.CONTEXT + each.weights + each.cached for each in self._all)


@pytest.mark.parametrize("sharing", [2, 4, 8])
def test_workers_that_share_a_gpu_never_take_more_than_it_has(sharing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[SharedGpu] = []

    def load(weights: int, *, grows: bool) -> int:
        """The free memory that a worker finds as it loads; afterwards it holds all of that if it `grows`."""
        worker = SharedGpu(running)
        gpu = worker.open(monkeypatch, sharing)
        worker.weights = weights
        free = gpu.free_memory()
        worker.cached = free if grows else 0
        assert worker.weights + free <= worker.fraction * worker.TOTAL
        return free

    weights = 2 << 30
    # The first ones load side by side, and the last one when they hold all that they may.
    found = [load(weights, grows=False) for _ in range(sharing - 1)]
    for worker, free in zip(running, found, strict=True):
        worker.cached = free
    found.append(load(weights, grows=True))
    assert len(set(found)) == 1
    assert running[0].free >= 0
    # One that is restarted finds the same again while all others hold theirs.
    del running[0]
    assert load(weights, grows=True) == found[0]
    assert running[0].free >= 0
    # Neither is there more because a neighbour is away.
    del running[1:]
    assert load(weights, grows=True) == found[0]


def test_a_gpu_that_is_too_small_for_so_many_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedGpu, "TOTAL", 4 << 30)
    with pytest.raises(
        SettingsError, match=r"8 workers can't share a GPU of 4\.3 GB, because each takes 0\.5 GB before"
    ):
        SharedGpu([]).open(monkeypatch, 8)


def test_a_model_too_large_for_a_workers_part_says_what_to_lower(tiny_model: MakeModel, tmp_path: Path) -> None:
    files, on = ModelFiles("tiny", tiny_model(BERT), "f" * 64), StandIn(2)
    on.free = -5
    backend = TorchGpuBackend(files, Host(1, tmp_path, sharing=2), on, dtype="fp32")
    with pytest.raises(
        ModelError, match=r"does not fit into a part of 1/2 of the memory of .* Set a lower workers_per_device"
    ):
        backend.warm_up()
