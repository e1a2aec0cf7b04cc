"""A short benchmark, of the dummy backend and with rates that are made up."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from embedctl_config.errors import DeviceLost
from embedctl_workers.arrays.tokens import Side, Tokens
from embedctl_workers.backends.dummy import DummyBackend
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.measuring import short_benchmark
from embedctl_workers.measuring.rates import mixed_load, working_rate
from embedctl_workers.measuring.short_benchmark import Spread, benchmark


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates that are made up: of the rounds 0 (which does not count), 1, 2, …"""
    count = {"mixed lengths": -1, "long texts": -1}

    def rate(encoder: ChunkEncoder, load: Any, seconds: float) -> float:
        count[load.name] += 1
        return 1e6 if count[load.name] == 0 else 1000.0 * count[load.name]

    monkeypatch.setattr(short_benchmark, "encoding_rate", rate)


@pytest.mark.usefixtures("quick")
def test_the_first_round_is_left_out() -> None:
    found = benchmark(ChunkEncoder(DummyBackend(max_tokens=512), 256))
    assert [rate.name for rate in found.rates] == ["mixed lengths", "long texts"]
    for rate in found.rates:
        assert rate.tokens_per_s == Spread(3000.0, 1000.0, 5000.0)
        assert rate.texts_per_s.median == pytest.approx(3000 / rate.tokens_per_text)
        assert 0 < rate.tokenised_per_s.least <= rate.tokenised_per_s.most
    assert "3,000 (1,000 to 5,000)" in str(found)


class Counted(DummyBackend):
    """Counts its calls. A chunk takes a tenth of a second to tokenise, in one thread at a time, as under the GIL."""

    def __init__(self) -> None:
        super().__init__(max_tokens=512)
        self.tokenised = 0
        self.warmed: set[int] = set()
        self._host = threading.Lock()

    def tokenize(self, texts: Sequence[str], prompt: str | None, truncation_side: Side | None = None) -> Tokens:
        with self._host:
            self.tokenised += 1
            threading.Event().wait(0.1)
        return super().tokenize(texts, prompt, truncation_side)

    def warm_up_thread(self) -> None:
        self.warmed.add(threading.get_ident())


def test_a_workers_whole_work_is_measured_in_its_threads_which_are_warmed_up_first() -> None:
    backend = Counted()
    encoder = ChunkEncoder(backend, 100_000)
    load = mixed_load(encoder)
    for seconds in (0.5, 30.0):
        backend.tokenised = 0
        backend.warmed.clear()
        rate = working_rate(encoder, load, seconds, threads=3)
        assert len(backend.warmed) == 3
        if backend.tokenised >= 4:
            break  # else the machine was busy with something else
    assert backend.tokenised >= 4
    assert 0 < rate < 1.2 * load.lengths.sum() / 0.1
    assert working_rate(encoder, load, 0.0, threads=3, computing=1) > rate  # waiting takes no CPU time


def test_a_thread_that_can_not_be_warmed_up_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Counted()
    encoder = ChunkEncoder(backend, 100_000)
    load = mixed_load(encoder)

    def fail() -> None:
        raise DeviceLost("gone")

    monkeypatch.setattr(backend, "warm_up_thread", fail)
    with pytest.raises(DeviceLost, match="gone"):
        working_rate(encoder, load, 0.1, threads=2)
