"""A job's state and facts, parsed from Redis for users."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from embedctl_config import keys, tenants


class JobState(StrEnum):
    """The state of a job, from its first chunk to its end."""

    SUBMITTING = "submitting"
    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    COMPLETED_WITH_ERRORS = "completed_with_errors"
    FAILED = "failed"
    STOPPED = "stopped"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether the job has ended."""
        return self not in _GOING


_GOING = frozenset({JobState.SUBMITTING, JobState.QUEUED, JobState.RUNNING})
#: The value of `stopped_by` in a job that :meth:`Job.stop` ended.
BY_REQUEST = "stop"


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job's facts at one moment. Counts are of records unless they say chunks; times are in UTC.

    Attributes:
        records: records accepted so far; all of them once `sealed`.
        truncated: records with a vector of their first tokens only.
        tokens: tokens encoded so far. Exact duplicates within a chunk count once, except in suspect chunks.
        claims: claims of chunks. Those in excess of `chunks_done` were repeated or are in progress.
        lapsed: leases that ran out.
        refused: results that came after the first one for their chunk.
        deaths: workers that died while they owned a lease; their chunks are :meth:`Job.suspects` until these end.
        trouble: the last reason, other than a death, why a worker gave a chunk back, or None.
        waiting_bytes: text stored and not yet encoded.
        result_bytes: results stored and not yet drained.
        results_high_water: while `result_bytes` exceeds it, the chunks of a job that is drained wait; None if it is not
            drained.
        drained_chunks: chunks whose results are in files, and no longer in Redis.
        drained_to: where these files are; None before the first of them.
        data: the id of the place that keeps the bytes of its chunks outside of Redis; None if Redis does.
        tenant: whom it belongs to.
        lane: `interactive`, `normal` or `background`: how soon it is to be done.
        expires_in: time until Redis forgets the job, if nothing more happens to it.
        dim: dimensions of a vector; None before the first chunk is done.
        pinned_by: the worker whose claim fixed the job's model fingerprint.
        mismatch: the fingerprints of the live workers, if the job has waited for some time and none of them is its own.
        original_chunks: number of the corpus' chunks, once the job is sealed; later chunks retry failed records.
        max_errors, max_errors_share: the error budget, as a number of records or as a share of them.
        stopped_by: `max_errors` where the error budget ended the job before its last record, `stop` where a user did,
            `damage` where its keys in Redis were damaged.
        lost_chunks: first and last chunk that Redis lost.
        live_workers: workers that serve this job's class and model now.
        near_models: if there are none, the models with a similar name that live workers serve now.
        hindrance: if there are none, what keeps them from being seen, in words: Redis is full, or they are not ready.
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
    max_errors: int | None = None
    max_errors_share: float | None = None
    producer_alive: bool = False
    sealed: bool = False
    records: int = 0
    done: int = 0
    failed: int = 0
    truncated: int = 0
    tokens: int = 0
    chunks: int = 0
    chunks_done: int = 0
    original_chunks: int | None = None
    stopped_by: str | None = None
    claims: int = 0
    lapsed: int = 0
    refused: int = 0
    deaths: int = 0
    waiting_bytes: int = 0
    result_bytes: int = 0
    drained_chunks: int = 0
    dim: int | None = None
    model_fingerprint: str | None = None
    pinned_by: str | None = None
    mismatch: str | None = None
    lost_chunks: tuple[int, int] | None = None
    trouble: str | None = None
    results_high_water: int | None = None
    drained_to: str | None = None
    data: str | None = None
    tenant: str = tenants.DEFAULT
    lane: str = tenants.NORMAL
    live_workers: int = 0
    near_models: tuple[str, ...] = ()
    hindrance: str = ""

    @property
    def queue(self) -> str:
        """The Celery queue that rings for the job."""
        return keys.queue(self.hardware, self.model)

    @property
    def waits_for_reader(self) -> bool:
        """Whether its chunks wait until some of its results are drained."""
        most = self.results_high_water
        return most is not None and self.result_bytes > most and not self.state.ended

    @property
    def stalled(self) -> bool:
        """Whether its producer died while submitting."""
        return self.state is JobState.SUBMITTING and not self.producer_alive


def lifetime_s(ttl_s: float) -> float:
    """How long an active job with this TTL is kept after its last progress (seconds)."""
    return max(ttl_s, keys.UNENDED_TTL_S)


#: The counters in a job's hash, which begin at 0.
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
    "deaths",
    "waiting_bytes",
    "result_bytes",
    "drained_chunks",
)

#: The numbers and the words in it that a job may lack.
PERHAPS_NUMBERS = ("max_errors", "dim", "original_chunks", "results_high_water")
_PERHAPS_WORDS = ("model_fingerprint", "stopped_by", "pinned_by", "trouble", "data", "tenant", "lane")

#: A chunk is stuck after this many owners in a row died in careful mode before they reached a row. It is then offered
#: after ever longer pauses.
STUCK_AFTER = 3


@dataclass(frozen=True, slots=True)
class Death:
    """The death of a chunk's owner: when it was noticed, and the owner's current row in careful mode."""

    at: datetime
    worker: str
    row: int | None


@dataclass(frozen=True, slots=True)
class Suspect:
    """A chunk whose owners died, until it ends. It is encoded in careful mode: alone, row by row.

    Attributes:
        given_up: the rows that owners died on in careful mode; they fail as `crashed_worker`.
        stuck: whether owners keep dying before they reach a row, as on a host that disappears.
        deaths: the last deaths, the oldest first.
    """

    chunk: int
    given_up: tuple[int, ...]
    stuck: bool
    deaths: tuple[Death, ...]


def _moment(milliseconds: str) -> datetime:
    return datetime.fromtimestamp(int(milliseconds) / 1000, UTC)


def parse_status(job_id: str, facts: Mapping[str, str], ttl_ms: int, producer_alive: bool) -> JobStatus:
    """A job's facts from its hash, its remaining lifetime, and whether its producer's lease exists."""
    known: dict[str, Any] = {name: int(facts[name]) for name in COUNTS}
    known["chunks"] = known.pop("added")
    known |= {name: int(facts[name]) for name in PERHAPS_NUMBERS if name in facts}
    known |= {name: facts[name] for name in _PERHAPS_WORDS if name in facts}
    return JobStatus(
        id=job_id,
        state=JobState.STOPPED if facts.get("stopped_by") == BY_REQUEST else JobState(facts["state"]),
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
        max_errors_share=float(facts["max_errors_share"]) if "max_errors_share" in facts else None,
        producer_alive=producer_alive,
        sealed=facts.get("sealed") == "1",
        lost_chunks=(int(facts["lost_first"]), int(facts["lost_last"])) if "lost_first" in facts else None,
        drained_to=facts.get("drain_to"),
        **known,
    )


def parse_suspect(name: str, facts: bytes) -> Suspect:
    """A suspect chunk from its entry in the hash of attempts."""
    known = json.loads(facts)
    deaths = [entry.split(" ") for entry in known["history"]]
    return Suspect(
        chunk=int(name.partition(":")[0]),
        given_up=tuple(int(row) for row in known["rows"].split(",") if row),
        stuck=known["unnamed"] >= STUCK_AFTER,
        deaths=tuple(Death(_moment(at), worker, int(row) if row else None) for at, worker, row in deaths),
    )
