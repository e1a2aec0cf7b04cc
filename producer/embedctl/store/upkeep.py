"""What the reaper does to Redis: tickets that need sending again, holes, lifetimes, and what cancelled jobs leave."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from embedctl.store.agenda import Agenda
from embedctl.store.connection import Connection, ScriptCall
from embedctl.store.jobs import issue_call
from embedctl.store.status import STUCK_AFTER, JobState, lifetime_s
from embedctl_config import keys
from embedctl_config.errors import BrokerRefused
from embedctl_config.settings import Settings

#: A ticket that nobody takes is sent again ever later, but not later than this (ms).
LONGEST_REISSUE_MS = 30 * 60 * 1000
#: A sealed job without progress for this long is audited (seconds).
AUDIT_AFTER_S = 60.0
#: A careful worker that is silent, and not known to have died, keeps its chunk for this many leases more: a record is
#: blamed only when it is as good as certain that it killed somebody.
PATIENCE = 3
_SLICE = 500


#: Later than any ticket was sent: none is known to be in its queue still.
_ANY_MS = 1 << 53
#: What the reaper reads of a job, and of the cursors of its sweeps.
_FACTS = ("version", "state", "hardware", "model", "added", "next", "ttl_ms", "created_ms", "progressed_ms")
#: What a job may lack.
_PERHAPS = ("stopped_by", "original_chunks")
_CURSORS = ("audit_at", "extend_at", "extend_next_ms")


@dataclass(frozen=True, slots=True)
class ActiveJob:
    """What the reaper has to know of a job, read at once.

    Attributes:
        chunks: how many were added, and `issued` how many of them were issued.
        left_ms: until it expires, if nothing more happens to it.
        ttl_ms: how long it is kept after its end.
        stopped: whether its error budget ended it.
        abandoned: whether it has all its records, and a process died that was to queue its failed ones again.
        audit_at, extend_at: the chunks at which these sweeps go on; 0 where none is under way.
        extend_next_ms: when the next one begins.
    """

    id: str
    version: int
    state: JobState
    queue: str
    chunks: int
    issued: int
    ttl_ms: int
    left_ms: int
    progressed_ms: int
    stopped: bool
    abandoned: bool
    audit_at: int
    extend_at: int
    extend_next_ms: int

    @property
    def life_ms(self) -> int:
        """How long it lives from its last progress, as long as it has not ended."""
        return int(lifetime_s(self.ttl_ms / 1000) * 1000)

    @property
    def settled(self) -> bool:
        """Whether it has ended, and its keys live no longer than it is to be kept."""
        return self.state.ended and self.life_ms == self.ttl_ms


@dataclass(frozen=True, slots=True)
class Looked:
    """What a look at a job found.

    Attributes:
        idle: whether no live worker consumes its queue.
        again: chunks that need another ticket.
        issued: chunks that get their first one.
        lost: chunks that the audit did not find.
        refused: why Redis refused a part of the look.
        audit_at: the chunk at which it goes on; 0 at the end.
    """

    idle: bool
    again: Sequence[int]
    issued: Sequence[int]
    lost: int = 0
    audit_at: int = 0
    refused: BrokerRefused | None = None


class Upkeep:
    """Bounded pieces of upkeep; none of them touches more than a slice of a job."""

    def __init__(self, connection: Connection, settings: Settings) -> None:
        self._connection = connection
        self._settings = settings
        self.agenda = Agenda(connection, settings)

    def read(self, job_ids: Sequence[str]) -> list[ActiveJob | Exception | None]:
        """What there is to know of each job; None of one that is gone, or why it can't be read.

        Raises:
            BrokerUnavailable: Redis can't be reached.
        """
        with self._connection.client() as client:
            pipe = client.pipeline(transaction=False)
            for job_id in job_ids:
                pipe.hmget(keys.job(job_id), *_FACTS, *_PERHAPS).pttl(keys.job(job_id))
                pipe.hmget(keys.cursors(job_id), *_CURSORS).exists(keys.producer(job_id))
            answers = [self._connection.answer_of(each) for each in pipe.execute(raise_on_error=False)]
        each_job = zip(job_ids, *(answers[at::4] for at in range(4)), strict=True)
        return [_active_job(job_id, *answered) for job_id, *answered in each_job]

    def look(
        self,
        jobs: Sequence[ActiveJob],
        *,
        audited: Sequence[bool],
        taken_before: Mapping[str, int],
        interval_ms: int,
        audit_after_ms: int,
    ) -> list[Looked | BrokerRefused]:
        """Look at jobs, in one round trip; what was found, or why Redis refuses it.

        Args:
            audited: whether a slice of the job is audited.
            taken_before: by queue, when the tickets were sent of which none is left in it.
            interval_ms: until the next look at the soonest.
            audit_after_ms: a job without progress for this long is audited.
        """
        calls: list[ScriptCall] = []
        for job, audit in zip(jobs, audited, strict=True):
            taken = taken_before.get(job.queue, _ANY_MS)
            calls.append(self._reap_call(job.id, job.queue, job.version, taken, interval_ms, audit_after_ms))
            if job.issued < job.chunks:  # chunks that are added from now on have it looked at again
                calls.append(issue_call(self._settings, job.id, job.queue))
            if audit:
                calls.append(self._audit_call(job.id, job.audit_at))
        answered: dict[str, dict[str, tuple[str, list[Any]] | BrokerRefused]] = {job.id: {} for job in jobs}
        for call, answer in zip(calls, self._connection.scripts(calls), strict=True):
            answered[call.args[0]][call.name] = answer
        return [_looked(answered[job.id]) for job in jobs]

    def active_jobs(self) -> Iterator[str]:
        """Ids of the jobs that still need upkeep, read in slices."""
        at = 0
        while True:
            with self._connection.client() as client:
                ids = client.zrange(keys.ACTIVE, at, at + _SLICE - 1)
            yield from (job_id.decode() for job_id in ids)
            if len(ids) < _SLICE:
                return
            at += _SLICE

    def forget(self, job_id: str) -> None:
        """Take a job off the list of those that need upkeep."""
        self.agenda.forget([job_id])

    def reap(self, job_id: str, queue: str, *, version: int = 1, taken_before: int = _ANY_MS) -> list[int]:
        """The issued chunks of a job that need another ticket now; see :meth:`look`."""
        call = self._reap_call(job_id, queue, version, taken_before, 0, int(AUDIT_AFTER_S * 1000))
        answer, rest = self._connection.script(call.name, call.keys, call.args)
        return [int(chunk) for chunk in rest] if answer == "ok" else []

    def audit(self, job_id: str) -> int:
        """Look at the next slice of a job's issued chunks; how many of them Redis lost."""
        call = self._audit_call(job_id, self._cursor(job_id, "audit_at"))
        answer, rest = self._connection.script(call.name, call.keys, call.args)
        if answer != "ok":
            return 0
        self.audited_to(job_id, int(rest[0]))
        return int(rest[2])

    def audited_to(self, job_id: str, chunk: int) -> None:
        """Go on with a job's audit at this chunk; with 0 from the first one."""
        self._move_cursor(job_id, "audit_at", chunk)

    def extend(self, job: ActiveJob, now_ms: int, interval_s: float) -> bool:
        """Renew lifetimes of an active job's chunk keys, if it is time; whether there is more to do in the next call.

        A sweep starts once in a quarter of the TTL, and each call does as many slices of it as bring it to its end
        within an eighth: an older version beside this one may have given the keys no longer lives than that.

        Args:
            interval_s: seconds until the next call.
        """
        at = job.extend_at
        if at == 0 and now_ms < job.extend_next_ms:
            return False
        kept_ms = int(job.life_ms * keys.CHUNK_TTL_FACTOR)
        calls = max(1, job.ttl_ms / 8 / (interval_s * 1000))
        end = min(at + _SLICE * math.ceil(job.chunks / _SLICE / calls), job.chunks)
        for start in range(at, end, _SLICE):
            with self._connection.client() as client:
                pipe = client.pipeline(transaction=False)
                for chunk in range(start, min(start + _SLICE, end)):
                    pipe.pexpire(keys.chunk_input(job.id, chunk), kept_ms)
                    pipe.pexpire(keys.chunk_result(job.id, chunk), kept_ms)
                    pipe.pexpire(keys.retry_pointer(job.id, chunk), kept_ms)
                pipe.execute()
        more = end < job.chunks
        moved = {"extend_at": end if more else 0}
        if at == 0:
            moved["extend_next_ms"] = now_ms + _extend_after(job.ttl_ms)
        with self._connection.client() as client:
            pipe = client.pipeline(transaction=False).hset(keys.cursors(job.id), mapping=moved)
            pipe.pexpire(keys.cursors(job.id), max(1, job.left_ms)).execute()
        return more

    def free_slice(self, job_id: str, chunks: int, *, results: bool = True) -> bool:
        """Free the next slice of a job's chunks, with or without their results; whether none is left."""
        cursor = "freed_to" if results else "freed_inputs_to"
        at = self._cursor(job_id, cursor)
        end = min(at + _SLICE, chunks)
        self._free(job_id, at, end, results=results)
        if at or end < chunks:
            self._move_cursor(job_id, cursor, 0 if end >= chunks else end)
        return end >= chunks

    def settle_slice(self, job_id: str) -> bool:
        """Shorten the lives of the next slice of an ended job's chunks to what its TTL leaves, and at last its own.

        A job that is open again by now stays as it is.

        Returns:
            Whether there is more to do.
        """
        answer, rest = self._connection.script(
            "settle",
            keys.of_job(job_id),
            [job_id, _SLICE],
        )
        return answer == "ok" and bool(rest[0])

    def expire(self, job_id: str, ttl_ms: int) -> None:
        """Shorten the life of a cancelled job whose chunks are freed."""
        with self._connection.client() as client:
            pipe = client.pipeline(transaction=False)
            for key in (keys.job(job_id), keys.events(job_id), keys.counted(job_id), keys.cursors(job_id)):
                pipe.pexpire(key, ttl_ms)
            pipe.execute()

    def free(self, job_id: str, chunks: int) -> None:
        """Free all of a job's chunks. Writes nothing, so that a full Redis may be freed too."""
        for at in range(0, chunks, _SLICE):
            self._free(job_id, at, min(at + _SLICE, chunks), results=True)

    def _free(self, job_id: str, start: int, end: int, *, results: bool) -> None:
        kinds = [keys.chunk_input, *([keys.chunk_result, keys.retry_pointer] if results else [])]
        doomed = [key(job_id, chunk) for chunk in range(start, end) for key in kinds]
        if doomed:
            with self._connection.client() as client:
                client.unlink(*doomed)

    def remove(self, job_id: str) -> None:
        """Remove what is left of a job whose chunks are freed: nothing of it stays, not even its name."""
        with self._connection.client() as client:
            idempotency = client.hget(keys.job(job_id), "idempotency_key")
            own = [key for key in keys.of_job(job_id) if key != keys.ACTIVE]
            own += [keys.producer(job_id), keys.cursors(job_id)]
            if idempotency and client.get(idempotency) == job_id.encode():
                own.append(idempotency)
            client.unlink(*own)
            client.zrem(keys.JOBS, job_id)
        self.forget(job_id)

    def _cursor(self, job_id: str, name: str) -> int:
        with self._connection.client() as client:
            return int(client.hget(keys.cursors(job_id), name) or 0)

    def _move_cursor(self, job_id: str, name: str, to: int) -> None:
        with self._connection.client() as client:
            left_ms = client.pttl(keys.job(job_id))
            if left_ms > 0:  # no cursor outlives its job
                pipe = client.pipeline(transaction=False).hset(keys.cursors(job_id), name, to)
                pipe.pexpire(keys.cursors(job_id), left_ms).execute()

    def _reap_call(
        self, job_id: str, queue: str, version: int, taken_before: int, soonest_ms: int, audit_after_ms: int
    ) -> ScriptCall:
        return ScriptCall(
            "reap",
            [*keys.of_job(job_id), keys.queue_workers(queue), keys.idle(version, queue)],
            [
                job_id,
                int(self._settings.reissue_s * 1000),
                LONGEST_REISSUE_MS,
                _SLICE,
                int(self._settings.lease_s * 1000 * PATIENCE),
                STUCK_AFTER,
                taken_before,
                soonest_ms,
                audit_after_ms,
            ],
        )

    def _audit_call(self, job_id: str, at: int) -> ScriptCall:
        return ScriptCall(
            "audit",
            keys.of_job(job_id),
            [job_id, at, keys.chunk_input(job_id, ""), keys.chunk_result(job_id, ""), _SLICE],
        )


def _extend_after(ttl_ms: int) -> int:
    """How long after one sweep the next one may begin: no job rests for longer than what is left of a quarter."""
    return ttl_ms * 3 // 16


def _active_job(
    job_id: str, facts: Any, left_ms: Any, cursors: Any, producer_lives: Any
) -> ActiveJob | Exception | None:
    for each in (facts, left_ms, cursors, producer_lives):
        if isinstance(each, Exception):
            return each
    if facts[0] is None:
        return None
    try:
        version, state, hardware, model, added, issued, ttl_ms, created_ms, progressed_ms = (
            fact.decode() for fact in facts[: len(_FACTS)]
        )
        stopped_by, original_chunks = facts[len(_FACTS) :]
        audit_at, extend_at, extend_next_ms = (int(cursor or 0) for cursor in cursors)
        return ActiveJob(
            id=job_id,
            version=int(version),
            state=JobState(state),
            queue=keys.queue(hardware, model),
            chunks=int(added),
            issued=int(issued),
            ttl_ms=int(ttl_ms),
            left_ms=left_ms,
            progressed_ms=int(progressed_ms),
            stopped=stopped_by is not None,
            abandoned=state == JobState.SUBMITTING and original_chunks is not None and not producer_lives,
            audit_at=audit_at,
            extend_at=extend_at,
            extend_next_ms=extend_next_ms or int(created_ms) + _extend_after(int(ttl_ms)),
        )
    except (ValueError, AttributeError) as error:
        return error


def _looked(answers: Mapping[str, tuple[str, list[Any]] | BrokerRefused]) -> Looked | BrokerRefused:
    """What each script that was run answered, together."""
    if isinstance(answers["reap"], BrokerRefused):
        return answers["reap"]
    found: dict[str, list[Any]] = {}
    refused: BrokerRefused | None = None
    for name, answer in answers.items():
        if isinstance(answer, BrokerRefused):
            refused = answer
        else:
            found[name] = answer[1] if answer[0] == "ok" else []
    audit_at, _, lost = found.get("audit") or (0, 0, 0)
    return Looked(
        idle=answers["reap"] == ("idle", []),
        again=[int(chunk) for chunk in found["reap"]],
        issued=[int(chunk) for chunk in found.get("issue", [])],
        lost=int(lost),
        audit_at=int(audit_at),
        refused=refused,
    )
