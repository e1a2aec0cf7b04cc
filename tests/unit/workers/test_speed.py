"""Rates as the heartbeat tells them."""

from __future__ import annotations

import pytest

from embedctl_workers.serving.speed import Speed


def test_the_first_chunk_counts_whole() -> None:
    first = Speed().after(rows=10, tokens=300, positions=400, seconds=2.0)
    assert first == Speed(tokens_per_s=150.0, rows_per_s=5.0, padding=0.25)


def test_later_chunks_count_a_fifth() -> None:
    speed = Speed(tokens_per_s=100.0, rows_per_s=10.0, padding=0.5)
    speed = speed.after(rows=30, tokens=200, positions=200, seconds=1.0)
    assert speed.tokens_per_s == pytest.approx(120)
    assert speed.rows_per_s == pytest.approx(14)
    assert speed.padding == pytest.approx(0.4)


def test_a_chunk_that_gave_the_device_nothing_says_nothing_of_padding() -> None:
    assert Speed().after(rows=3, tokens=0, positions=0, seconds=0.0).padding == 0
    assert Speed(100.0, 10.0, 0.5).after(rows=3, tokens=0, positions=0, seconds=0.1).padding == 0.5
