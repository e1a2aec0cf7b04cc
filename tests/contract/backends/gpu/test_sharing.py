"""Workers that share a GPU: the part of its memory that each takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from embedctl_config.errors import ModelError, SettingsError
from embedctl_config.hardware import ModelEntry
from embedctl_workers.machine.host import Host
from embedctl_workers.models.files import ModelFiles

torch = pytest.importorskip("torch")
pytest.importorskip("sentence_transformers")

from embedctl_workers.backends.gpu import backend as torch_gpu  # noqa: E402
from embedctl_workers.backends.gpu import device, memory  # noqa: E402
from embedctl_workers.backends.gpu.backend import TorchGpuBackend  # noqa: E402
from tests.support.stand_in_gpu import StandIn  # noqa: E402
from tests.support.torch_gpu import BERT, MakeModel  # noqa: E402


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


def test_a_worker_that_has_a_gpu_alone_takes_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = SharedGpu([])
    gpu = worker.open(monkeypatch, 1)
    worker.weights, worker.cached = 2 << 30, 1 << 30
    assert gpu.free_memory() == worker.free + worker.cached
    assert worker.fraction == 1.0


def test_a_gpu_that_is_too_small_for_so_many_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedGpu, "TOTAL", 4 << 30)
    with pytest.raises(
        SettingsError, match=r"8 workers can't share a GPU of 4\.3 GB, because each takes 0\.5 GB before"
    ):
        SharedGpu([]).open(monkeypatch, 8)


def test_a_model_that_does_not_fit_into_a_workers_part_says_what_to_lower(
    tiny_model: MakeModel, tmp_path: Path
) -> None:
    files, on = ModelFiles("tiny", tiny_model(BERT), "f" * 64), StandIn(2)
    on.free = -5
    backend = TorchGpuBackend(files, Host(1, tmp_path, sharing=2), on, dtype="fp32")
    with pytest.raises(
        ModelError, match=r"does not fit into a part of 1/2 of the memory of .* Set a lower workers_per_device"
    ):
        backend.warm_up()


def test_a_reduced_budget_is_of_as_many_workers_as_shared_the_gpu(tiny_model: MakeModel, tmp_path: Path) -> None:
    files = ModelFiles("tiny", tiny_model(BERT), "f" * 64)

    def start(sharing: int) -> TorchGpuBackend:
        backend = TorchGpuBackend(files, Host(1, tmp_path, sharing=sharing), StandIn(sharing), dtype="fp32")
        backend.warm_up()
        return backend

    start(4).remember_budget(100)
    assert [start(sharing).token_budget for sharing in (4, 2, 1)] == [100, memory.MOST_TOKENS, memory.MOST_TOKENS]


def test_the_device_is_opened_for_as_many_workers_as_share_it(
    tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[StandIn] = []

    def open_gpu(sharing: int) -> StandIn:
        opened.append(StandIn(sharing))
        return opened[-1]

    monkeypatch.setattr(torch_gpu, "open_gpu", open_gpu)
    entry = ModelEntry(source=str(tiny_model(BERT)))
    TorchGpuBackend.load("tiny", entry, Host(1, tmp_path, sharing=4), {"dtype": "fp32"})
    assert [each.sharing for each in opened] == [4]
