"""The options of a run, and those of its command."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embedctl_config.settings import Settings

#: The product's default lease, used unless a run asks for another (seconds).
DEFAULT_LEASE_S = Settings().lease_s
DUMMY = "dummy"


def _option(default: Any, words: str, **argument: Any) -> Any:
    """A field that the command has as an option, with arguments of `argparse`."""
    return field(default=default, metadata={"help": words, **argument})


@dataclass(frozen=True)
class Options:
    """A run's options. None means a default that suits the lease or the model."""

    minutes: float = _option(10.0, "how long faults go on (default: 10)", type=float)
    faults: int = _option(0, "how many come at least, however long that takes", type=int)
    seed: int = _option(None, "of jobs and faults (default: a random one)", type=int)
    workers: int = _option(3, "worker processes (default: 3)", type=int)
    producers: int = _option(2, "producer processes at once (default: 2)", type=int)
    lease_s: float | None = _option(None, "lease_s (default: the product's)", type=float)
    pause_s: float | None = _option(None, "seconds between two faults, on average", type=float)
    settle_s: float | None = _option(None, "longest wait for all jobs after the faults", type=float)
    ttl_s: float | None = _option(None, "ttl of jobs in seconds", type=float)
    crashers: bool = _option(
        True, "whether records kill or hang workers (default: yes)", action=argparse.BooleanOptionalAction
    )
    wait_for_expiry: bool | None = _option(
        None,
        "whether to wait until nothing is left in Redis (default: in runs of 5 minutes or more)",
        action=argparse.BooleanOptionalAction,
    )
    model: str = _option(DUMMY, "a real model, on the class cpu (default: the dummy)")
    records: int | None = _option(
        None,
        "of a real model's jobs (default: 20000); of all jobs of the dummy, some of which are huge then: with so many, "
        "the run ends, perhaps before its time (default: any number)",
        type=int,
    )
    reference: Path | None = _option(None, "where a real model's vectors are kept between runs (.npz)", type=Path)  # noqa: RUF009  (a field)
    only: tuple[str, ...] = _option(
        (), "draw only faults that begin so; may be repeated", action="append", metavar="NAME"
    )
    sentinels: bool = _option(
        False, "two instances of Redis with sentinels, and failovers among the faults", action="store_true"
    )
    chunk_files: str = _option("redis", "where chunks are (default: redis)", choices=("redis", "folder", "s3"))
    report: Path | None = _option(None, "write the tables here as well", type=Path)  # noqa: RUF009  (a field)
    keep: Path | None = _option(None, "a folder for logs and data that stays", type=Path)  # noqa: RUF009  (a field)

    @property
    def lease(self) -> float:
        """The lease in force (seconds)."""
        return DEFAULT_LEASE_S if self.lease_s is None else self.lease_s

    @property
    def supervised(self) -> bool:
        """Whether some workers are those of `embedctl up`, which other records kill than the harness does."""
        return self.model == DUMMY and self.crashers and self.workers > 2

    @property
    def gateway(self) -> bool:
        """Whether some producers submit through a gateway."""
        return self.model == DUMMY and self.workers > 2

    @property
    def pause(self) -> float:
        """Seconds between two faults, on average. A real model takes longer to start again."""
        return self.pause_s or (3.0 if self.model == DUMMY else 6.0)

    @property
    def settle(self) -> float:
        """Longest wait for all jobs once faults are over (seconds). Nobody may take over a dead producer's job for
        30 s. A client that waits for a job that Redis forgot gets its error only after that. Each record that kills a
        worker of `embedctl up` takes two starts in quarantine, one after the other."""
        return self.settle_s or 120 + 8 * self.lease + 360 * self.supervised

    @property
    def ttl(self) -> float:
        """TTL of jobs (seconds): longer than any outage that overlapping faults can cause."""
        return self.ttl_s or max(120.0, 10 * self.lease)

    @property
    def waits_for_expiry(self) -> bool:
        """Whether to wait until nothing is left in Redis. By default only runs of 5 minutes or more do."""
        return self.minutes >= 5 if self.wait_for_expiry is None else self.wait_for_expiry
