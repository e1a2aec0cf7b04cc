"""What a job is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from embedctl_config import tenants


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The specification of a job. It must be the same when the job is resumed.

    `options` determine the vectors or the chunks, and are JSON values. More failed records than `max_errors`, or than
    the share `max_errors_share` of all records, end the job early. `ttl_s` counts from the job's end. A job with
    `results_high_water` is made to be drained: while Redis holds more bytes of its results, it gets no tickets. `data`
    is the id of the place that keeps the bytes of its chunks; None if Redis does. Jobs that wait
    for the same workers take turns by `lane` and `tenant`, whose `weight` this is.
    """

    model: str
    hardware: str
    precision: str
    options: Mapping[str, Any]
    ttl_s: float
    idempotency_key: str | None = None
    max_errors: int | None = None
    max_errors_share: float | None = None
    results_high_water: int | None = None
    data: str | None = None
    tenant: str = tenants.DEFAULT
    lane: str = tenants.NORMAL
    weight: float = 1.0
