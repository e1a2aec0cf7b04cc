"""What a run is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from embedctl_config.settings import Settings

#: The product's own lease where no other is asked for (seconds).
DEFAULT_LEASE_S = Settings().lease_s
DUMMY = "dummy"


@dataclass(frozen=True)
class Options:
    """A run's options; None takes what suits the lease or the model.

    Attributes:
        minutes: how long faults go on.
        lease_s: of `lease_s` and `reissue_s`; None leaves the product's defaults.
        pause_s: seconds between two faults, on average.
        settle_s: longest wait for all jobs once faults are over.
        ttl_s: of jobs.
        crashers: whether records that kill or hang a worker are among the poison.
        wait_for_expiry: wait until nothing is left in Redis.
        model: "dummy", or a real one.
        records: how many, with a real model.
        reference: where the real model's vectors are kept between runs.
        only: how the names of the faults begin that are drawn; all where empty.
        beside: so many small jobs are queued beside, most of them for nobody.
        keep: a folder for logs and data that stays.
    """

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
    records: int = 20_000
    reference: Path | None = None
    only: tuple[str, ...] = ()
    beside: int = 0
    report: Path | None = None
    keep: Path | None = None

    @property
    def lease(self) -> float:
        """The lease in force (seconds)."""
        return DEFAULT_LEASE_S if self.lease_s is None else self.lease_s

    @property
    def pause(self) -> float:
        """Seconds between two faults, on average. A real model takes longer to start again."""
        return self.pause_s or (3.0 if self.model == DUMMY else 6.0)

    @property
    def settle(self) -> float:
        """Longest wait for all jobs once faults are over (seconds). Nobody may take a dead producer's job for 30 s,
        and who waits for one that Redis forgot is told after that."""
        return self.settle_s or 120 + 8 * self.lease

    @property
    def ttl(self) -> float:
        """Of jobs (seconds): longer than any outage that the faults may make of each other."""
        return self.ttl_s or max(120.0, 10 * self.lease)

    @property
    def waits_for_expiry(self) -> bool:
        """Whether to wait until nothing is left in Redis; by itself only a long run does."""
        return self.minutes >= 5 if self.wait_for_expiry is None else self.wait_for_expiry
