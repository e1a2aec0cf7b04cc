"""How often batches that wait are looked at."""

from __future__ import annotations

import pytest

from embedctl_gateway.batches.looks import Looks


def test_many_batches_of_one_tenant_delay_nobody_elses() -> None:
    looks = Looks(per_s=10.0)
    assert looks.pause_s("a", 2.0) == 2.0
    many = [looks.pause_s("a", 2.0) for _ in range(1000)]
    assert many[-1] == pytest.approx(100.0, abs=1.0)
    assert looks.pause_s("b", 2.0) == 2.0
    again = [looks.pause_s("b", 0.0) for _ in range(10)]
    assert again[-1] == pytest.approx(11 * 2 / 10.0, abs=0.5), "two tenants share the looks"
