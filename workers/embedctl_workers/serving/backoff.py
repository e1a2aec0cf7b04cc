"""Exponential back-off."""

from __future__ import annotations


def backoff_s(tries: int, *, first_s: float, longest_s: float) -> float:
    """The pause after a number of failed tries in a row: it doubles with each, up to the longest."""
    return min(longest_s, first_s * 2.0 ** min(max(0, tries - 1), 30))
