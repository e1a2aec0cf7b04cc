"""Reads how much of each active job waits, a slice of jobs at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from embedctl.store.connection import Connection
from embedctl.store.status import JobState
from embedctl_config import keys, tenants, wire

#: Jobs that are read together.
_SLICE = 200
_FACTS = (
    "version",
    "state",
    "hardware",
    "model",
    "lane",
    "tenant",
    "added",
    "chunks_done",
    "waiting_bytes",
    "progressed_ms",
)


@dataclass(frozen=True, slots=True)
class Place:
    """A position in the list of active jobs: how many jobs with this score were read already."""

    score: float | str = "-inf"
    read: int = 0


#: The first job.
START = Place()


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """What waits of a job that has not ended.

    Attributes:
        chunks: added and not yet encoded; workers may have begun some of them.
        size: bytes of text stored and not yet encoded.
        opened_ms: when the job was made, or opened again for a retry.
        progressed_ms: when a chunk of it was last added or encoded.
    """

    hardware: str
    model: str
    lane: str
    tenant: str
    chunks: int
    size: int
    opened_ms: int
    progressed_ms: int


@dataclass(frozen=True, slots=True)
class Slice:
    """Jobs that were read together: those that have not ended.

    So many of the others have facts that can't be read, or are of another version. None is next after the last slice.
    """

    jobs: Sequence[WaitingJob]
    unreadable: int
    next: Place | None


def check_access(connection: Connection) -> None:
    """Read a job that there is not, so that a missing permission shows, as NotPermitted, before the first job."""
    with connection.client() as client:
        client.hmget(keys.job("0" * 8 + "-" + "0" * 6 + "-" + "0" * 10), *_FACTS)


def read_slice(connection: Connection, place: Place) -> Slice:
    """The next jobs of the list of active jobs.

    The position is a score and not an index, so a job that ends meanwhile hides no other. A job that is opened again
    may be read twice. Raises NotPermitted if this user of Redis may not read jobs.
    """
    with connection.client() as client:
        found = client.zrangebyscore(keys.ACTIVE, place.score, "+inf", start=place.read, num=_SLICE, withscores=True)
    ids = [job_id.decode() for job_id, _ in found]
    answers = connection.ask_each(ids, lambda pipe, job_id: pipe.hmget(keys.job(job_id), *_FACTS), refusals=True)
    jobs: list[WaitingJob] = []
    unreadable = 0
    for (_, score), answer in zip(found, answers, strict=True):
        try:
            job = _waiting(answer, int(score))
        except (LookupError, TypeError, ValueError):
            unreadable += 1
        else:
            if job is not None:
                jobs.append(job)
    return Slice(jobs, unreadable, _after(place, [score for _, score in found]))


def _after(place: Place, scores: Sequence[float]) -> Place | None:
    if len(scores) < _SLICE:
        return None
    last = scores[-1]
    return Place(last, scores.count(last) + (place.read if last == place.score else 0))


def _waiting(answer: Any, opened_ms: int) -> WaitingJob | None:
    """What waits of a job; None if it is gone or has ended.

    Raises TypeError if Redis refused to read it, LookupError if a fact is missing, and ValueError if one is none.
    """
    facts: Mapping[str, str] = {
        name: value.decode() for name, value in zip(_FACTS, answer, strict=True) if value is not None
    }
    if not facts:
        return None
    if facts["version"] != str(wire.VERSION):
        raise ValueError("of another version")
    if JobState(facts["state"]).ended:
        return None
    size = int(facts["waiting_bytes"])
    # A stopped job that is resumed has no text yet for chunks that were added once.
    chunks = max(0, int(facts["added"]) - int(facts["chunks_done"])) if size else 0
    return WaitingJob(
        hardware=facts["hardware"],
        model=facts["model"],
        lane=facts.get("lane", tenants.NORMAL),
        tenant=facts.get("tenant", tenants.DEFAULT),
        chunks=chunks,
        size=size,
        opened_ms=opened_ms,
        progressed_ms=int(facts["progressed_ms"]),
    )
