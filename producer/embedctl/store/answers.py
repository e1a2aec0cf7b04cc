"""What a job is made of, and what the steps of its life report and answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from embedctl.store.doubts import Doubts
from embedctl.store.issuing import Issued
from embedctl_config import tenants


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The specification of a job. It must be the same when the job is resumed.

    `options` determine the vectors or the chunks, and are JSON values. More failed records than `max_errors`, or than
    the share `max_errors_share` of all records, end the job early. `ttl_s` counts from the job's end. A job with
    `results_high_water` is made to be drained: while Redis holds more bytes of its results, it gets no tickets. `data`
    is the id of the place that keeps the bytes of its chunks; None if Redis does. Jobs that wait for the same workers
    take turns by `lane` and `tenant`, whose `weight` this is.
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


class Added(StrEnum):
    """The answers of :meth:`JobStore.add` that are not errors."""

    OK = "ok"
    WANTED = "wanted"
    SKIPPED = "skipped"
    DIFFERS = "differs"
    HELD = "held"
    SEALED = "sealed"
    STOPPED = "stopped"


class ClaimAnswer(StrEnum):
    """The answers of :meth:`JobStore.claim`."""

    OK = "ok"
    DONE = "done"
    BUSY = "busy"
    MISMATCH = "mismatch"
    OTHER = "other"
    LOST = "lost"
    GONE = "gone"
    CANCELLED = "cancelled"
    VERSION = "version"


@dataclass(frozen=True, slots=True)
class Claimant:
    """Who claims chunks: an instance of a worker, and a model that it serves. The worker claims none of a job that it
    does not know, unless the job wants this `precision` and `model`."""

    instance: str
    fingerprint: str
    precision: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """The result of a claim: `attempt` and `input` with OK, the pinned `fingerprint` with MISMATCH.

    `input` is what Redis holds of the chunk's text: :meth:`ChunkFiles.get` gives the text.

    `given_up` is None unless the chunk is suspect, because an owner of it died. A suspect chunk is to be encoded in
    careful mode, without the rows in `given_up`: earlier owners died on them. `doubts` are the failures that earlier
    owners reported.
    """

    answer: ClaimAnswer
    attempt: int = 0
    input: bytes = b""
    fingerprint: str = ""
    given_up: frozenset[int] | None = None
    doubts: Doubts | None = None


@dataclass(frozen=True, slots=True)
class Completed:
    """A worker's report with a chunk's result. The input of the failed records is a value of an :class:`Upload`."""

    done: int
    failed: int
    truncated: int
    tokens: int
    dim: int
    failed_input: bytes = b""


@dataclass(frozen=True, slots=True)
class InlineJob:
    """What came of making an inline job: one of one chunk, in one round trip.

    Attributes:
        job_id: None if the job was not made, because its tenant's limits leave no room.
        issued: the chunks whose tickets are to be sent now, perhaps of other jobs.
        sealed_at: the id of the event of its sealing; None if a step did not do what it should. Then each is to be
            taken by itself.
    """

    job_id: str | None
    queue: str
    records: int
    issued: list[Issued]
    sealed_at: str | None


def claim_of(answer: str, rest: Sequence[Any]) -> Claim:
    """What the script of a claim answered."""
    if answer == ClaimAnswer.OK:
        attempt, data, rows, doubts = (*rest, None, None)[:4]
        return Claim(
            ClaimAnswer.OK,
            attempt=int(attempt),
            input=data,
            given_up=None if rows is None else frozenset(map(int, filter(None, rows.split(b",")))),
            doubts=None if doubts is None else Doubts.parse(doubts),
        )
    if answer == ClaimAnswer.MISMATCH:
        return Claim(ClaimAnswer.MISMATCH, fingerprint=rest[0].decode())
    return Claim(ClaimAnswer(answer))
