"""Layers captured as CUDA graphs: vectors are those of the same layers without, whatever comes in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from embedctl_workers.arrays.tokens import Tokens, Vectors
from embedctl_workers.backends.gpu import attention, graphs, memory, packed
from embedctl_workers.backends.gpu.backend import TorchGpuBackend
from tests.support.stand_in_gpu import StandIn, Waits
from tests.support.stand_in_graph import StandInGraph
from tests.support.torch_gpu import BERT, Load, tokens_of

pytestmark = pytest.mark.usefixtures("few_sizes")

TINY = replace(BERT, max_seq_length=48)
ALL_MODES = replace(TINY, include_prompt=False, pooling="cls+max+mean+mean_sqrt_len_tokens+weightedmean+lasttoken")
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
NOT_PERMITTED = torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")

LENGTHS = (30, 9, 48, 12, 3, 32)
#: Rows of the texts of these lengths, and the tokens that such a batch is filled up to.
SMALL, MIDDLE, LARGE = ([0, 1], 64), ([2, 0], 128), ([2] * 5, 256)


@pytest.fixture
def started(load: Load) -> Callable[..., TorchGpuBackend]:
    def start(on: StandIn | None = None, tiny: Any = TINY, **options: Any) -> TorchGpuBackend:
        backend = load(tiny, on=on, dtype="fp32", graphs=True, **options)
        backend.warm_up()
        return backend

    return start


Both = tuple[StandIn, TorchGpuBackend, Any]


@pytest.fixture
def both(load: Load, started: Callable[..., TorchGpuBackend]) -> Both:
    on = StandIn()
    return on, load(TINY, dtype="fp32"), started(on)


def texts() -> Tokens:
    rng = np.random.default_rng(0)
    return tokens_of([rng.integers(1, 50, length).tolist() for length in LENGTHS])


def run(backend: TorchGpuBackend, rows: Sequence[int], tokens: Tokens | None = None) -> Vectors:
    return backend.finish(backend.forward(tokens or texts(), np.array(rows)), normalize=False)


def assert_same(found: Vectors, expected: Vectors) -> None:
    # A product of another size is summed in another order; the components of some poolings are larger than 1.
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("tiny", [TINY, ALL_MODES], ids=["mean", "all modes"])
def test_vectors_are_the_same_with_and_without_graphs(tiny: Any, load: Load, started: Any) -> None:
    on = StandIn()
    plain, graphed = load(tiny, dtype="fp32"), started(on, tiny)
    assert graphed.engine.endswith("packed, varlen, graphs")
    assert graphed.token_budget == 256
    prompted = [replace(texts(), prompt_tokens=prompt) for prompt in (None, 2)]
    batches = [
        *(SMALL, MIDDLE, SMALL, LARGE, SMALL, MIDDLE, MIDDLE, LARGE, LARGE),
        # Other texts of the same sizes, one of them longer than those of the capture.
        *(([1, 0], 64), ([1, 5], 64), ([0, 2], 128), ([3] * 5, 64), ([3, 1, 3, 1, 3], 64)),
        *(SMALL, LARGE, MIDDLE, SMALL),
    ]
    begun = []
    for at, (rows, size) in enumerate(batches):
        tokens = prompted[at % 2]
        assert graphed.positions(tokens.lengths[rows]) == size
        begun.append((tokens, rows, graphed.forward(tokens, np.array(rows))))
    assert on.captured >= 3
    for tokens, rows, output in reversed(begun):
        assert_same(graphed.finish(output, normalize=False), run(plain, rows, tokens))


def test_the_second_batch_is_captured_and_the_third_is_one_call(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on = StandIn()
    backend = started(on)
    products, linear = [0], torch.nn.functional.linear

    def product(*args: Any) -> Any:
        products[0] += 1
        return linear(*args)

    monkeypatch.setattr(torch.nn.functional, "linear", product)
    found, used = [], []
    for _ in range(3):
        products[0] = 0
        found.append(run(backend, SMALL[0]))
        used.append((products[0] > 0, on.captured))
    assert used == [(True, 0), (True, 1), (False, 1)]
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])
    with Waits() as waits:
        output = backend.forward(texts(), np.array(SMALL[0]))
    assert waits.seen == []
    assert_same(backend.finish(output, normalize=False), found[0])


def test_sizes_that_no_graph_is_for_run_as_they_are(both: Both) -> None:
    on, plain, graphed = both
    graphed._graphs.allow(128)
    for rows in ([2] * 5, [2] * 6, [4] * 40):  # larger than allowed, than any size, and more texts than any size has
        for _ in range(3):
            assert_same(run(graphed, rows), run(plain, rows))
        assert graphed.positions(texts().lengths[rows]) == texts().lengths[rows].sum()
    assert on.captured == 0


def test_the_graph_that_was_not_used_for_longest_makes_room(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MOST_GRAPHS", 2)
    on, plain, graphed = both
    captured = []
    for rows, _ in (SMALL, SMALL, MIDDLE, MIDDLE, SMALL, LARGE, LARGE, SMALL, MIDDLE, MIDDLE, MIDDLE, LARGE):
        assert_same(run(graphed, rows), run(plain, rows))
        captured.append(on.captured)
        assert len(graphed._graphs._graphs) <= 2
    assert captured == [0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]  # MIDDLE had to go for LARGE, and then LARGE for MIDDLE


def test_work_that_can_not_be_captured_runs_without_graphs(both: Both, caplog: pytest.LogCaptureFixture) -> None:
    on, plain, graphed = both
    for _ in range(3):
        run(graphed, MIDDLE[0])
    on.refuses = [NOT_PERMITTED]
    for _ in range(4):
        for rows, _ in (SMALL, MIDDLE):
            assert_same(run(graphed, rows), run(plain, rows))
    assert on.captured == 1
    assert caplog.text.count("CUDA graphs are not used: AcceleratorError: CUDA error: operation not permitted") == 1
    assert graphed.positions(np.array([30, 9])) == 39  # nor are batches filled up any more


def test_a_size_too_large_for_the_memory_runs_without_a_graph(both: Both, caplog: pytest.LogCaptureFixture) -> None:
    on, plain, graphed = both
    on.refuses = [NO_MEMORY]
    for rows, _ in (LARGE, LARGE, LARGE, MIDDLE, MIDDLE, MIDDLE, LARGE, SMALL, SMALL, SMALL):
        assert_same(run(graphed, rows), run(plain, rows))
    assert on.captured == 2
    assert (
        caplog.text.count("batches of 256 tokens and more run without CUDA graphs: OutOfMemoryError: CUDA out of") == 1
    )


def test_graphs_give_their_memory_back_to_a_batch_that_lacks_it(both: Both, caplog: pytest.LogCaptureFixture) -> None:
    on, plain, graphed = both
    for _ in range(3):
        run(graphed, SMALL[0])
    engine_run, held = graphed._engine.run, []

    def limited(inputs: Any, facts: Any) -> Any:
        held.append(len(graphed._graphs._graphs))
        if held[-1]:
            raise NO_MEMORY
        return engine_run(inputs, facts)

    graphed._engine.run = limited
    for rows, _ in (LARGE, SMALL, SMALL, SMALL):
        assert_same(run(graphed, rows), run(plain, rows))
    assert held == [1, 0, 0, 0, 0]
    assert caplog.text.count("CUDA graphs are given up, because a batch needs their memory") == 1
    assert on.captured == 1


@pytest.mark.parametrize("wrong", [torch.nan, 1.0])
def test_a_graph_with_other_vectors_is_not_used(wrong: float, both: Both, caplog: pytest.LogCaptureFixture) -> None:
    on, plain, graphed = both

    capture = on.capture

    def capture_wrongly(work: Any, beside: Any) -> StandInGraph:
        graph = capture(work, beside)
        replay = graph.replay

        def replay_wrongly() -> None:
            replay()
            graphed._graphs._buffers._result[3:5] += wrong

        graph.replay = replay_wrongly  # type: ignore[method-assign]
        return graph

    on.capture = capture_wrongly  # type: ignore[method-assign]
    for _ in range(4):
        assert_same(run(graphed, SMALL[0]), run(plain, SMALL[0]))
    assert caplog.text.count("CUDA graphs are not used: they give other vectors here") == 1


@pytest.mark.parametrize("options", [{"engine": "padded"}, {}], ids=["padded", "SDPA"])
def test_what_can_not_be_captured_runs_as_it_is(
    options: Any, started: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed, "attention_for", lambda *_: attention.Bucketed())
    on = StandIn()
    backend = started(on, **options)
    assert "model tiny is not captured: " in caplog.text
    assert not backend.engine.endswith("graphs")
    assert backend.token_budget == memory.most_tokens(backend.dim, packed=backend.budget_by_sum)
    for _ in range(3):
        run(backend, SMALL[0])
    assert on.captured == 0


def test_graphs_are_left_half_of_the_memory(load: Load) -> None:
    on = StandIn()
    backend = load(TINY, on=on, dtype="fp32", graphs=True)
    on.free, on.peak = 2_000_000, 96 * 5000  # 320 tokens, or 160 beside graphs
    backend.warm_up()
    assert backend.token_budget == backend._graphs.most == 128  # type: ignore[union-attr]
    on.free = 500_000  # 40 tokens: fewer than the smallest size has
    backend.warm_up()
    assert backend.token_budget == pytest.approx(40, rel=0.05)
    assert backend.positions(np.array([9])) == 9
