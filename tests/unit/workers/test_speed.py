"""Rates as the heartbeat tells them."""

from __future__ import annotations

import pytest

from embedctl_workers.serving.speed import Speed, SpeedMeter, Work


def test_the_first_chunk_counts_whole() -> None:
    first = Speed().after(Work(10, 300, 400), 2.0)
    assert first == Speed(tokens_per_s=150.0, rows_per_s=5.0, padding=0.25)


def test_later_chunks_count_a_fifth() -> None:
    speed = Speed(tokens_per_s=100.0, rows_per_s=10.0, padding=0.5)
    speed = speed.after(Work(30, 200, 200), 1.0)
    assert speed.tokens_per_s == pytest.approx(120)
    assert speed.rows_per_s == pytest.approx(14)
    assert speed.padding == pytest.approx(0.4)


def test_chunks_of_one_batch_count_together() -> None:
    meter = SpeedMeter(["m"])
    work = Work(rows=10, tokens=100, positions=100)
    for batch in range(1, 40):  # four a second, begun early
        for chunk in range(4):
            meter.encoded("m", work, began=batch - 1.5, ended=batch + chunk * 1e-5)
    assert meter.speed["m"].tokens_per_s == pytest.approx(400, rel=0.05)
    assert meter.speed["m"].rows_per_s == pytest.approx(40, rel=0.05)


def test_the_first_chunk_is_not_taken_for_the_moment_after_another_models_chunk() -> None:
    meter = SpeedMeter(["m", "other"])
    meter.encoded("other", Work(10, 100, 100), began=1.0, ended=2.0)
    meter.encoded("m", Work(rows=1000), began=0.0, ended=2.0)  # all its records had failed
    assert meter.speed["m"] == Speed()
    meter.encoded("m", Work(10, 100, 100), began=1.5, ended=2.00001)
    assert meter.speed["m"].tokens_per_s == pytest.approx(200, rel=0.01)


def test_a_chunk_that_never_used_the_device_takes_no_time() -> None:
    meter = SpeedMeter(["m"])
    meter.encoded("m", Work(10, 100, 100), began=1.0, ended=2.0)
    meter.encoded("m", Work(rows=10), began=0.0, ended=50.0)
    meter.encoded("m", Work(10, 100, 100), began=60.0, ended=61.0)
    assert meter.speed["m"].tokens_per_s == pytest.approx(100)


def test_only_large_chunks_tell_what_a_worker_sustains() -> None:
    small = Speed().after(Work(1, 8, 8), 0.01)
    assert small.sustained_tokens_per_s == 0
    large = small.after(Work(100, 8000, 8000), 1.0)
    assert large.sustained_tokens_per_s == 8000
    assert large.after(Work(1, 8, 8), 0.01).sustained_tokens_per_s == 8000
    assert large.after(Work(100, 5000, 5000), 1.0).sustained_tokens_per_s == pytest.approx(7400)
