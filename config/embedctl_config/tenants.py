"""Who a job belongs to, and how soon it is to be done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: The tenant of a job that names none.
DEFAULT = "default"
#: The lanes of jobs: `interactive` for whom somebody waits, `background` for what has time.
LANES = (INTERACTIVE, NORMAL, BACKGROUND) = ("interactive", "normal", "background")

_LONGEST_NAME = 64
#: What a name that becomes part of a key may consist of.
NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-/@")
_LEAST_WEIGHT, _MOST_WEIGHT = 0.001, 1000.0
#: The names of a tenant's limits: of what it has, and of what it begins in a second.
LIMITS = ("max_jobs", "max_waiting_records", "max_waiting_bytes")
RATES = ("max_requests_s", "max_texts_s")
#: The largest limit: Redis' scripts count exactly up to here.
_MOST = 2**53


@dataclass(frozen=True, slots=True)
class TenantEntry:
    """A tenant's share and its limits.

    Attributes:
        weight: its part of a queue's work relative to the other tenants that wait there.
        max_jobs: most jobs that have not ended; 0: no limit.
        max_waiting_records: most records that are not yet encoded, over all of its jobs; 0: no limit.
        max_waiting_bytes: most bytes of text that are not yet encoded, over all of its jobs; 0: no limit.
        max_requests_s: most jobs that begin in a second, and each request to a gateway for vectors is one; 0: no limit.
        max_texts_s: most texts that are added in a second, over all of its jobs; 0: no limit.
    """

    weight: float = 1.0
    max_jobs: int = 0
    max_waiting_records: int = 0
    max_waiting_bytes: int = 0
    max_requests_s: int = 0
    max_texts_s: int = 0

    @property
    def limits(self) -> dict[str, int]:
        """The values of :data:`LIMITS` and :data:`RATES` by name; 0 is no limit."""
        return {name: getattr(self, name) for name in (*LIMITS, *RATES)}


def check_tenant(name: str) -> str | None:
    """What is wrong with a tenant's name, or None. The name becomes part of a key, so its alphabet is small."""
    if not name or len(name) > _LONGEST_NAME or not NAME_CHARACTERS.issuperset(name):
        return f"tenant {name!r}: use 1 to {_LONGEST_NAME} characters, only letters, digits and . _ - / @"
    return None


def check_lane(name: str) -> str | None:
    """What is wrong with a lane's name, or None."""
    return None if name in LANES else f"lane {name!r} is none of {', '.join(LANES)}"


def problems_of(tenants: Mapping[str, TenantEntry]) -> list[str]:
    """What is wrong with the tenants of the settings."""
    problems = [f"tenants: {wrong}" for name in tenants if (wrong := check_tenant(name))]
    for name, entry in tenants.items():
        if not _LEAST_WEIGHT <= entry.weight <= _MOST_WEIGHT:
            problems.append(
                f"tenants.{name}.weight: {entry.weight} is not between {_LEAST_WEIGHT:g} and {_MOST_WEIGHT:g}"
            )
        problems += [
            f"tenants.{name}.{limit}: {value} is not between 0 (no limit) and 2**53"
            for limit, value in entry.limits.items()
            if not 0 <= value <= _MOST
        ]
    return problems
