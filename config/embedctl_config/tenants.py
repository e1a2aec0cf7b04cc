"""Who a job belongs to, and how soon it is to be done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: The tenant of a job that names none.
DEFAULT = "default"
#: The lanes of jobs: `interactive` for whom somebody waits, `background` for what has time.
LANES = (INTERACTIVE, NORMAL, BACKGROUND) = ("interactive", "normal", "background")

_LONGEST_NAME = 64
_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-/@")
_LEAST_WEIGHT, _MOST_WEIGHT = 0.001, 1000.0


@dataclass(frozen=True, slots=True)
class TenantEntry:
    """A tenant's share.

    Attributes:
        weight: its part of a queue's work relative to the other tenants that wait there.
    """

    weight: float = 1.0


def check_tenant(name: str) -> str | None:
    """What is wrong with a tenant's name, or None. The name becomes part of a key, so its alphabet is small."""
    if not name or len(name) > _LONGEST_NAME or not _CHARACTERS.issuperset(name):
        return f"tenant {name!r}: use 1 to {_LONGEST_NAME} characters, only letters, digits and . _ - / @"
    return None


def check_lane(name: str) -> str | None:
    """What is wrong with a lane's name, or None."""
    return None if name in LANES else f"lane {name!r} is none of {', '.join(LANES)}"


def problems_of(tenants: Mapping[str, TenantEntry]) -> list[str]:
    """What is wrong with the tenants of the settings."""
    return [f"tenants: {wrong}" for name in tenants if (wrong := check_tenant(name))] + [
        f"tenants.{name}.weight: {entry.weight} is not between {_LEAST_WEIGHT:g} and {_MOST_WEIGHT:g}"
        for name, entry in tenants.items()
        if not _LEAST_WEIGHT <= entry.weight <= _MOST_WEIGHT
    ]
