"""What `enqueue_embeddings` makes of its arguments."""

from __future__ import annotations

import pytest

from embedctl import SettingsError
from embedctl.jobs.options import parse_budget


@pytest.mark.parametrize(
    ("given", "budget"),
    [
        (None, (None, None)),
        (0, (0, None)),
        (100, (100, None)),
        ("100", (100, None)),
        ("1%", (None, 0.01)),
        ("0%", (None, 0.0)),
        ("100%", (None, 1.0)),
    ],
)
def test_a_budget_is_a_number_or_a_share(given: int | str | None, budget: tuple[int | None, float | None]) -> None:
    assert parse_budget(given) == budget


@pytest.mark.parametrize("given", [-1, "-1", "", "many", "101%", "-1%", "%", "nan%", 0.01, True])
def test_what_is_neither_is_refused_with_both_forms(given: int | str) -> None:
    with pytest.raises(SettingsError, match=r"max_errors .* such as 100 nor a share such as 1%"):
        parse_budget(given)
