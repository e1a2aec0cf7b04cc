"""Batches in flight: their copies, several threads, and a device that is lost meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from embedctl_config.errors import DeviceLost
from embedctl_workers.backends.base import WarmsThreads
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.encoding.prepared import Stopped
from tests.support.chunks import chunk_of
from tests.support.device_use import RecordedUse
from tests.support.stand_in_gpu import StandIn
from tests.support.torch_gpu import Load, encode_with, texts_of, tokens_of


def error_of_cuda() -> Exception:
    error: Exception = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    return error


@pytest.mark.parametrize("late", [True, False], ids=["in finish", "in forward"])
def test_a_device_that_computes_no_more_is_lost(late: bool, load: Load) -> None:
    on = StandIn()
    backend = load(on=on, dtype="fp32")
    encoder = ChunkEncoder(backend, 64)
    on.broken = True
    if late:
        on.fails_late = error_of_cuda()
    else:
        backend._engine.run = lambda *_: (_ for _ in ()).throw(error_of_cuda())  # type: ignore[method-assign]
    with pytest.raises(DeviceLost, match=r"the CPU as a stand-in is lost to this process: .*illegal memory access"):
        encode_with(encoder, texts_of([5, 6]))


def test_an_error_of_python_does_not_ask_the_device(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    on = StandIn()
    backend = load(on=on, dtype="fp32")
    on.broken = True
    backend._engine.run = lambda *_: (_ for _ in ()).throw(RuntimeError("a shape"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="a shape"):
        backend.forward(tokens_of([[1, 2]]), np.array([0]))


def test_a_batch_is_waited_for_once_and_its_tensors_are_kept(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    on = StandIn()
    backend = load(on=on, dtype="fp32")
    tokens = backend.tokenize(texts_of([4, 9]), None)
    transfer, run = backend._transfer, backend._engine.run
    ran_on = []

    def noted(*args: Any) -> Any:
        ran_on.append(on.current)
        return run(*args)

    monkeypatch.setattr(backend._engine, "run", noted)
    on.waits, on.kept = 0, []
    output = backend.forward(tokens, np.array([0, 1]))
    streams: Any = (transfer._inward, transfer._compute, transfer._outward)  # of the stand-in, which note more
    inward, compute, outward = streams
    assert ran_on == [compute]
    assert on.current is None
    assert (on.waits, on.kept) == (0, [compute, outward])
    assert (inward.waited, compute.waited[-1].stream, outward.waited[-1].stream) == ([], inward, compute)
    arrived: Any = output.arrived
    assert arrived.stream is outward
    backend.finish(output, normalize=True)
    assert on.waits == 1


def test_chunks_of_two_threads_do_not_mix(load: Load) -> None:
    """As the worker does it: forwards take turns, and the last batches of one chunk end beside those of the next."""
    backend = load(dtype="fp32")
    encoder, turn = ChunkEncoder(backend, 64), threading.Lock()
    chunks = [texts_of(range(at, at + 12)) for at in range(1, 9)]
    expected = [encode_with(encoder, texts).vectors for texts in chunks]

    def run(at: int) -> bool:
        chunk = chunk_of(*chunks[at])
        prepared = encoder.prepare(chunk, {"normalize": False})
        if at % 3 == 2:  # an outcome that nobody waits for
            asked = iter([True, True])
            with pytest.raises(Stopped):
                encoder.encode(prepared, RecordedUse(wanted=lambda: next(asked, False), turn=lambda: turn))
            return True
        found = encoder.encode(prepared, RecordedUse(turn=lambda: turn)).vectors
        return bool(np.array_equal(found, expected[at]))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(run, list(range(8)) * 2))


def test_a_thread_can_be_warmed_up_beside_others(load: Load) -> None:
    on = StandIn()
    backend: Any = load(on=on, dtype="fp32")
    assert isinstance(backend, WarmsThreads)
    on.waits = 0
    with ThreadPoolExecutor(1) as pool:
        pool.submit(backend.warm_up_thread).result()
    assert on.waits > 0
