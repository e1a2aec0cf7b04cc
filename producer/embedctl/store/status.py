"""A job's state and facts, as Redis holds them and as users see them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from embedctl_config import keys


class JobState(StrEnum):
    """Where a job stands, from its first chunk to its end."""

    SUBMITTING = "submitting"
    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    COMPLETED_WITH_ERRORS = "completed_with_errors"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more."""
        return self in _ENDED


_ENDED = frozenset({JobState.COMPLETED, JobState.COMPLETED_WITH_ERRORS, JobState.FAILED, JobState.CANCELLED})


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job's facts at one moment. Counts are of records unless they say chunks; times are in UTC.

    Attributes:
        records: records accepted so far; all of them once `sealed`.
        truncated: records with a vector of their first tokens only.
        tokens: tokens encoded so far; exact duplicates within a chunk count once.
        claims: executions begun; beyond `chunks_done` they were repeated or are under way.
        lapsed: leases that ran out.
        refused: results that came after the first one for their chunk.
        waiting_bytes: text stored and not yet encoded.
        expires_in: until the job is forgotten, if nothing more happens to it.
        dim: length of a vector; None before the first chunk is done.
        pinned_by: the worker whose claim fixed the job's model fingerprint.
        mismatch: the last worker that was refused for serving other weights, and its fingerprint.
        original_chunks: chunks that the corpus made, once it is sealed; those beyond hold failed records tried again.
        stopped_by: `max_errors` where the error budget ended the job.
        lost_chunks: first and last chunk that Redis lost.
        live_workers: workers that serve this job's class and model now.
    """

    id: str
    state: JobState
    model: str
    hardware: str
    precision: str
    options: Mapping[str, Any]
    created_at: datetime
    progressed_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    expires_in: timedelta
    ttl_s: float
    producer_alive: bool
    sealed: bool
    records: int
    done: int
    failed: int
    truncated: int
    tokens: int
    chunks: int
    chunks_done: int
    original_chunks: int | None
    stopped_by: str | None
    claims: int
    lapsed: int
    refused: int
    waiting_bytes: int
    dim: int | None
    model_fingerprint: str | None
    pinned_by: str | None
    mismatch: str | None
    lost_chunks: tuple[int, int] | None
    live_workers: int = 0

    @property
    def queue(self) -> str:
        """The Celery queue of the job's tickets."""
        return keys.queue(self.hardware, self.model)

    @property
    def stalled(self) -> bool:
        """Whether its producer died while submitting."""
        return self.state is JobState.SUBMITTING and not self.producer_alive


#: The fields of a job's hash that count something and begin at 0.
COUNTS = (
    "records",
    "done",
    "failed",
    "truncated",
    "tokens",
    "added",
    "chunks_done",
    "claims",
    "lapsed",
    "refused",
    "waiting_bytes",
)


def _moment(milliseconds: str) -> datetime:
    return datetime.fromtimestamp(int(milliseconds) / 1000, UTC)


def parse_status(job_id: str, facts: Mapping[str, str], ttl_ms: int, producer_alive: bool) -> JobStatus:
    """A job's facts from its hash, the time it still has to live, and whether its producer's lease lives."""
    count = {name: int(facts[name]) for name in COUNTS}
    chunks = count.pop("added")
    return JobStatus(
        id=job_id,
        state=JobState(facts["state"]),
        model=facts["model"],
        hardware=facts["hardware"],
        precision=facts["precision"],
        options=json.loads(facts["options"]),
        created_at=_moment(facts["created_ms"]),
        progressed_at=_moment(facts["progressed_ms"]),
        started_at=_moment(facts["started_ms"]) if "started_ms" in facts else None,
        ended_at=_moment(facts["ended_ms"]) if "ended_ms" in facts else None,
        expires_in=timedelta(milliseconds=ttl_ms),
        ttl_s=int(facts["ttl_ms"]) / 1000,
        producer_alive=producer_alive,
        sealed=facts.get("sealed") == "1",
        chunks=chunks,
        dim=int(facts["dim"]) if "dim" in facts else None,
        model_fingerprint=facts.get("model_fingerprint"),
        original_chunks=int(facts["original_chunks"]) if "original_chunks" in facts else None,
        stopped_by=facts.get("stopped_by"),
        pinned_by=facts.get("pinned_by"),
        mismatch=facts.get("mismatch"),
        lost_chunks=(int(facts["lost_first"]), int(facts["lost_last"])) if "lost_first" in facts else None,
        **count,
    )
