"""Finds small chunks that wait in a queue, so that a small chunk in hand is encoded in one batch with them.

Their tickets stay in the queue until they are claimed: whatever ends this worker in between, no ticket is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from embedctl.queueing.broker import Broker
from embedctl.store import JobStatus
from embedctl.store.queues import QueuedTicket, Queues
from embedctl_config import keys
from embedctl_config.fingerprint import DECIDING_OPTIONS, LATER_OPTIONS
from embedctl_workers.serving.claimed import ClaimedChunk
from embedctl_workers.serving.messages import names_a_chunk

#: A token is about so many bytes of text.
_TOKEN_BYTES = 4
#: Most tickets that one look reads.
_MOST = 32
#: The options of a job that decide its vectors.
_DECIDING = (*DECIDING_OPTIONS, *LATER_OPTIONS)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A small chunk that nobody had claimed a moment ago."""

    ticket: QueuedTicket
    job: JobStatus


class Gathering:
    """Looks for small chunks in the queues of a worker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._queues = Queues(broker.connection)

    def candidates(self, claimed: ClaimedChunk) -> list[Candidate]:
        """The waiting chunks, unclaimed so far and so not suspect, that a small one may be encoded with, within a
        budget.
        """
        now_ms = self._broker.connection.about_now_ms()
        tickets = self._queues.next_tickets(claimed.job.queue, _MOST, now_ms=now_ms)
        if not tickets:
            return []
        jobs = {job.id: job for job in self._broker.jobs.find(list({ticket.job_id for ticket in tickets}))}
        alike = [
            Candidate(ticket, job)
            for ticket in tickets
            if names_a_chunk(ticket.job_id, ticket.chunk)
            and (job := jobs.get(ticket.job_id)) is not None
            and _are_alike(claimed.job, job)
        ]
        return self._unclaimed(list(_up_to(_room(claimed) - len(claimed.payload), alike)))

    def took(self, queue: str, taken: Sequence[QueuedTicket]) -> None:
        """Remove the tickets of chunks that were claimed; those that stay will find their chunks busy or done."""
        if taken:
            self._queues.remove(queue, taken)

    def _unclaimed(self, candidates: list[Candidate]) -> list[Candidate]:
        if not candidates:
            return []
        with self._broker.connection.client() as client:
            pipe = client.pipeline(transaction=False)
            for each in candidates:
                pipe.hget(keys.attempts(each.job.id), str(each.ticket.chunk))
            attempts = pipe.execute()
        return [each for each, claims in zip(candidates, attempts, strict=True) if claims is None]


def is_small(claimed: ClaimedChunk) -> bool:
    """Whether other chunks are to be joined to a claimed one."""
    return 2 * len(claimed.payload) <= _room(claimed) and may_be_joined(claimed)


def may_be_joined(claimed: ClaimedChunk) -> bool:
    """Whether a claimed chunk may be in one batch with others: not if anybody has failed with it."""
    return (
        claimed.held.attempt == 1
        and not claimed.is_suspect
        and claimed.job.data is None  # else its place may keep the others waiting
        and claimed.job.model == claimed.held.model
        and not claimed.encoder.backend.joins
    )


def _room(claimed: ClaimedChunk) -> int:
    return claimed.encoder.token_budget * _TOKEN_BYTES


def _are_alike(one: JobStatus, other: JobStatus) -> bool:
    """Whether chunks of two jobs may be in one batch."""
    return (
        not other.state.ended
        and (one.queue, one.precision, one.data) == (other.queue, other.precision, other.data)
        and _deciding(one.options) == _deciding(other.options)
    )


def _deciding(options: Mapping[str, Any]) -> list[Any]:
    return [options.get(name) for name in _DECIDING]


def _up_to(room: int, candidates: list[Candidate]) -> Iterator[Candidate]:
    """The first candidates that fit: a chunk has at most its job's waiting bytes."""
    for each in candidates:
        if 0 < each.job.waiting_bytes <= room:
            room -= each.job.waiting_bytes
            yield each
