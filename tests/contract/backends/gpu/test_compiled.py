"""Batches filled up to one of a few sizes, and layers compiled for these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from embedctl_workers.backends.gpu import backend as torch_gpu
from embedctl_workers.backends.gpu import buckets, compiled
from tests.support.stand_in_gpu import StandIn
from tests.support.torch_gpu import BERT, Load, tokens_of


def compiling(calls: list[int], made_for: list[int]) -> compiled.Compiler:
    """torch's compiler without what makes code; notes the sizes that the layers were called with, and compiled for."""

    def backend(graph: Any, _: Any) -> Any:
        made_for.append(0)
        return graph.forward

    def compile_it(function: Callable[..., Any]) -> Callable[..., Any]:
        made = torch.compile(function, backend=backend, dynamic=False, fullgraph=True)

        def run(x: Any, *args: Any) -> Any:
            calls.append(len(x))
            before = len(made_for)
            found = made(x, *args)
            made_for[before:] = [len(x)] * (len(made_for) - before)
            return found

        return run

    return compile_it


@pytest.mark.slow
@pytest.mark.usefixtures("with_varlen", "few_sizes")
def test_batches_are_filled_up_to_a_size_and_their_vectors_stay_the_same(load: Load) -> None:
    tiny = replace(BERT, max_seq_length=48)
    calls: list[int] = []
    made_for: list[int] = []
    plain = load(tiny, dtype="fp32")
    filled = load(tiny, dtype="fp32", compile=True, compile_with=compiling(calls, made_for))
    assert filled.engine.endswith("packed, varlen, compiled")
    rng = np.random.default_rng(0)
    texts = tokens_of([rng.integers(1, 50, length).tolist() for length in (30, 9, 48, 12, 3)])

    def assert_same(rows: list[int]) -> None:
        found, expected = (
            each.finish(each.forward(texts, np.array(rows)), normalize=False) for each in (filled, plain)
        )
        np.testing.assert_allclose(found, expected, atol=2e-6)

    of_64, of_128 = ([0, 1], [2], [1, 4, 1], [4] * 8), ([2, 0], [2, 2])
    for rows, size in (*((each, 64) for each in of_64), *((each, 128) for each in of_128), ([2] * 5, 256)):
        assert_same(rows)
        assert calls.pop() == filled.positions(texts.lengths[rows]) == size
    assert made_for == [64, 128, 256]  # once each, whatever the texts
    for rows in ([2] * 6, [4] * 40):  # more tokens, or more texts, than the largest size has
        assert_same(rows)
        assert calls == []
        assert filled.positions(texts.lengths[rows]) == texts.lengths[rows].sum()


def blocks(offsets: Any, longest: int) -> int:
    """Blocks of FlashAttention's grid for each head: of 128 tokens of the longest text, for every text."""
    return (len(offsets) - 1) * -(-longest // 128)


@pytest.mark.parametrize(
    ("lengths", "most"),
    [
        ([*range(10, 64)] * 10 + [150], 512),  # 20,000 tokens of short texts
        ([450] * 72, 512),
        ([3], 512),
        ([8] * 4096, 512),
        ([48, 3], 48),
        ([512] * 64, 512),
    ],
    ids=["W1", "W2", "one", "tiny", "short model", "full"],
)
def test_the_filling_of_a_size_is_texts_like_others(lengths: list[int], most: int) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    bucket = buckets.Bucket.of(np.array(lengths), most)
    assert bucket is not None
    ends = bucket.ends(offsets)
    assert ends[: len(offsets)].tolist() == offsets.tolist()
    assert (ends[-1], len(ends) - 1) == (bucket.tokens, bucket.texts)
    assert 0 <= np.diff(ends).min() <= np.diff(ends).max() <= bucket.longest
    assert max(lengths) <= bucket.longest <= most
    filling = len(range(0, bucket.tokens - sum(lengths), bucket.longest))
    assert bucket.texts == 32 or bucket.texts < 2 * (len(lengths) + filling)
    if len(lengths) > 32:
        assert blocks(ends, bucket.longest) < 2.2 * blocks(offsets, max(lengths))


def test_sizes_are_compiled_before_chunks_come(load: Load, with_varlen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (buckets, torch_gpu):
        monkeypatch.setattr(module, "BUCKETS", (64, 128, 256))
    monkeypatch.setattr(torch_gpu, "SAMPLE_TOKENS", 128)
    calls: list[int] = []
    on = StandIn(varlen=True)
    on.free, on.peak = 2500, 128 * 10
    backend = load(on=on, dtype="bf16", compile=True, compile_with=compiling(calls, []))
    backend.warm_up()
    assert backend.token_budget == 128  # memory would suffice for 200: such a batch is filled up to 256
    assert calls[-2:] == [64, 128]
