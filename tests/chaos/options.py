"""The options of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from embedctl_config.settings import Settings

#: The product's default lease, used unless a run asks for another (seconds).
DEFAULT_LEASE_S = Settings().lease_s
DUMMY = "dummy"


@dataclass(frozen=True)
class Options:
    """A run's options, which `python -m tests.chaos --help` explains. None means a default that suits the lease or the
    model."""

    minutes: float
    seed: int
    workers: int = 3
    producers: int = 2
    lease_s: float | None = None
    pause_s: float | None = None
    settle_s: float | None = None
    ttl_s: float | None = None
    crashers: bool = True
    wait_for_expiry: bool | None = None
    model: str = DUMMY
    records: int | None = None
    reference: Path | None = None
    only: tuple[str, ...] = ()
    sentinels: bool = False
    chunk_files: str = "redis"
    report: Path | None = None
    keep: Path | None = None

    @property
    def lease(self) -> float:
        """The lease in force (seconds)."""
        return DEFAULT_LEASE_S if self.lease_s is None else self.lease_s

    @property
    def supervised(self) -> bool:
        """Whether some workers are those of `embedctl up`, which other records kill than the harness does."""
        return self.model == DUMMY and self.crashers and self.workers > 2

    @property
    def pause(self) -> float:
        """Seconds between two faults, on average. A real model takes longer to start again."""
        return self.pause_s or (3.0 if self.model == DUMMY else 6.0)

    @property
    def settle(self) -> float:
        """Longest wait for all jobs once faults are over (seconds). Nobody may take over a dead producer's job for
        30 s. A client that waits for a job that Redis forgot gets its error only after that."""
        return self.settle_s or 120 + 8 * self.lease

    @property
    def ttl(self) -> float:
        """TTL of jobs (seconds): longer than any outage that overlapping faults can cause."""
        return self.ttl_s or max(120.0, 10 * self.lease)

    @property
    def waits_for_expiry(self) -> bool:
        """Whether to wait until nothing is left in Redis. By default only runs of 5 minutes or more do."""
        return self.minutes >= 5 if self.wait_for_expiry is None else self.wait_for_expiry
