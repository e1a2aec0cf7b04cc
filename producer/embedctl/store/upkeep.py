"""The reaper's work in Redis: lapsed leases, lost chunks, lifetimes, and the chunks of cancelled jobs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from embedctl.chunk_files import ChunkFiles
from embedctl.store.agenda import Agenda
from embedctl.store.connection import Connection
from embedctl.store.outside import unlink_with_bytes
from embedctl.store.scripts import ScriptCall
from embedctl.store.status import BY_REQUEST, STUCK_AFTER, JobState, JobStatus, lifetime_s
from embedctl.store.unused import UnusedQueues
from embedctl_config import keys, wire
from embedctl_config.errors import BrokerRefused, ChunkFilesUnavailable, JobError
from embedctl_config.settings import Settings

#: A chunk over which owner after owner dies is offered again after this pause, then after twice that, up to the longest
#: one (ms). A job without progress is looked at after no longer pause either.
STUCK_PAUSE_MS, LONGEST_PAUSE_MS = 60 * 1000, 30 * 60 * 1000
#: A sealed job without progress for this long is audited (seconds).
AUDIT_AFTER_S = 60.0
#: A worker in careful mode that is silent, but not known to have died, keeps its chunk for this many more leases. So a
#: record is blamed only if it almost certainly killed a worker.
SILENT_LEASES = 3
_SLICE = 500
#: The most chunks of a job that is removed in one round trip.
_SMALL = 16
#: The most small jobs that are removed in one round trip.
_TOGETHER = 64
#: The states of a job of which every record was encoded, or has failed.
_COMPLETE = (JobState.COMPLETED, JobState.COMPLETED_WITH_ERRORS)
#: The fields of a job that the reaper reads; the cursors of its sweeps are below.
_FACTS = ("version", "state", "hardware", "model", "added", "ttl_ms", "created_ms", "progressed_ms")
#: Fields that a job may lack.
_PERHAPS = ("stopped_by", "original_chunks")
_CURSORS = ("audit_at", "extend_at", "extend_next_ms")


@dataclass(frozen=True, slots=True)
class ActiveJob:
    """The facts of a job that the reaper needs, read together.

    Attributes:
        chunks: how many were added.
        ttl_ms: how long it is kept after its end.
        left_ms: time until the job expires, if nothing more happens to it.
        stopped: whether its error budget or a user ended it before its last record.
        resumable: whether a user did, so that its corpus may resume it at any moment.
        abandoned: whether a retry of its failed records died before it was finished; the corpus is complete.
        audit_at, extend_at: the next chunk of each sweep; 0 if the sweep is not in progress.
        extend_next_ms: when the next sweep of `extend` begins, in ms by Redis' clock.
    """

    id: str
    state: JobState
    queue: str
    chunks: int
    ttl_ms: int
    left_ms: int
    progressed_ms: int
    stopped: bool
    resumable: bool
    abandoned: bool
    audit_at: int
    extend_at: int
    extend_next_ms: int

    @property
    def life_ms(self) -> int:
        """How long it lives after its last progress, while it has not ended."""
        return int(lifetime_s(self.ttl_ms / 1000) * 1000)

    @property
    def settled(self) -> bool:
        """Whether it has ended, and the lifetimes of its keys need no shortening."""
        return self.state.ended and self.life_ms == self.ttl_ms


@dataclass(frozen=True, slots=True)
class Looked:
    """The result of a look at a job.

    Attributes:
        again: chunks whose leases lapsed, and that may be taken again.
        found: how many chunks the audit found that nobody had, and that were not ready. They are ready now.
        lost: how many chunks the audit found missing.
        audit_at: the next chunk of the audit; 0 at its end.
        refused: why Redis refused a part of the look.
    """

    again: Sequence[int]
    found: int
    lost: int
    audit_at: int
    refused: BrokerRefused | None


#: For the reaper, which does not wait for another place.
_IN_REDIS = ChunkFiles()


class Upkeep:
    """Upkeep in bounded pieces: each touches at most a slice of a job."""

    def __init__(self, connection: Connection, settings: Settings, files: ChunkFiles | None = None) -> None:
        self._connection = connection
        self._files = files or ChunkFiles()
        self._settings = settings
        self.agenda = Agenda(connection, settings)
        self.queues = UnusedQueues(connection)

    def read(self, job_ids: Sequence[str]) -> list[ActiveJob | Exception | None]:
        """For each job its facts, None if it is gone, or the error if it can't be read."""

        def ask(pipe: Any, job_id: str) -> None:
            pipe.hmget(keys.job(job_id), *_FACTS, *_PERHAPS).pttl(keys.job(job_id))
            pipe.hmget(keys.cursors(job_id), *_CURSORS).exists(keys.producer(job_id))

        answers = self._connection.ask_each(job_ids, ask, refusals=True)
        each_job = zip(job_ids, *(answers[at::4] for at in range(4)), strict=True)
        return [_active_job(job_id, *answered) for job_id, *answered in each_job]

    def look(
        self,
        jobs: Sequence[ActiveJob],
        *,
        audited: Sequence[bool],
        interval_ms: int,
        audit_after_ms: int,
        only_dead: bool = False,
    ) -> list[Looked | BrokerRefused]:
        """Look at jobs, in one round trip. Returns for each job what was found, or why Redis refused the look.

        Args:
            audited: for each job, whether to audit a slice of it.
            interval_ms: the shortest time until the next look.
            audit_after_ms: a job without progress for this long is audited.
            only_dead: whether only owners that are known to have died lose their lapsed leases.
        """
        calls: list[ScriptCall] = []
        for job, audit in zip(jobs, audited, strict=True):
            calls.append(self._reap_call(job.id, interval_ms, audit_after_ms, ("", "") if only_dead else None))
            if audit:
                calls.append(_audit_call(job.id, job.audit_at))
        answered: dict[str, dict[str, tuple[str, list[Any]] | BrokerRefused]] = {job.id: {} for job in jobs}
        for call, answer in zip(calls, self._connection.scripts(calls), strict=True):
            answered[call.args[0]][call.name] = answer
        return [_looked(answered[job.id]) for job in jobs]

    def audited_to(self, job_id: str, chunk: int) -> None:
        """Let a job's audit resume at this chunk; 0 is the first one."""
        self._move_cursor(job_id, "audit_at", chunk)

    def extend(self, job: ActiveJob, now_ms: int, interval_s: float) -> bool:
        """Renew the lifetimes of an active job's chunk keys, if it is time. True if the next call has more to do.

        A sweep starts once in a quarter of the TTL. Each call, one in `interval_s` seconds, does enough slices to end
        the sweep within an eighth of the TTL.
        """
        at = job.extend_at
        if at == 0 and now_ms < job.extend_next_ms:
            return False
        kept_ms = int(job.life_ms * keys.CHUNK_TTL_FACTOR)

        def renew(pipe: Any, chunk: int) -> None:
            for key in (keys.chunk_input, keys.chunk_result, keys.retry_pointer):
                pipe.pexpire(key(job.id, chunk), kept_ms)

        calls = max(1, job.ttl_ms / 8 / (interval_s * 1000))
        end = min(at + _SLICE * math.ceil(job.chunks / _SLICE / calls), job.chunks)
        for start in range(at, end, _SLICE):
            self._connection.ask_each(range(start, min(start + _SLICE, end)), renew)
        more = end < job.chunks
        moved = {"extend_at": end if more else 0}
        if at == 0:
            moved["extend_next_ms"] = now_ms + _extend_after(job.ttl_ms)
        with self._connection.client() as client:
            pipe = client.pipeline(transaction=False).hset(keys.cursors(job.id), mapping=moved)
            pipe.pexpire(keys.cursors(job.id), max(1, job.left_ms)).execute()
        return more

    def free_slice(self, job_id: str, chunks: int, *, results: bool) -> bool:
        """Free the next slice of a job's chunks, with or without their results. True if none is left: the reaper then
        looks after the job no longer, and a cancelled one expires after its TTL.

        Bytes outside of Redis are left to the sweeper: the reaper does not wait for another place.
        """
        cursor = "freed_to" if results else "freed_inputs_to"
        at = self._cursor(job_id, cursor)
        end = min(at + _SLICE, chunks)
        to = [job_id, cursor, at, end if end < chunks else ""]
        self._free(job_id, range(at, end), results=results, unlink=partial(self._let_go, job_id, to))
        return end >= chunks

    def _let_go(self, job_id: str, to: Sequence[Any], doomed: Sequence[str]) -> bool:
        """Remove keys of a job if it has ended early: Redis may have come back without its end."""
        return self._connection.script("let_go", [keys.job(job_id), *doomed], to)[0] == "ok"

    def settle_slice(self, job_id: str) -> bool:
        """Shorten the lifetimes of an ended job's next chunks to the rest of its TTL; after the last chunk, its own.

        A job that was opened again stays unchanged. True if there is more to do.
        """
        answer, rest = self._connection.script("settle", [keys.job(job_id)], [job_id, _SLICE])
        return answer == "ok" and bool(rest[0])

    def free(self, job_id: str, chunks: int, *, if_ended_early: bool = False) -> None:
        """Free all of a job's chunks, and their bytes outside of Redis; or only if it still has ended early. Writes
        nothing, so it works in a full Redis."""
        unlink = partial(self._let_go, job_id, ()) if if_ended_early else None
        for at in range(0, chunks, _SLICE):
            self._free(job_id, range(at, min(at + _SLICE, chunks)), files=self._files, unlink=unlink)

    def _free(
        self,
        job_id: str,
        chunks: range,
        *,
        results: bool = True,
        files: ChunkFiles = _IN_REDIS,
        unlink: Callable[[Sequence[str]], bool] | None = None,
    ) -> None:
        kinds = (keys.chunk_input, keys.chunk_result) if results else (keys.chunk_input,)
        doomed = [key(job_id, chunk) for chunk in chunks for key in kinds]
        pointers = [keys.retry_pointer(job_id, chunk) for chunk in chunks] if results else []
        with suppress(ChunkFilesUnavailable):  # the sweeper removes the bytes later
            unlink_with_bytes(self._connection, files, doomed, pointers, unlink)

    def remove(self, job_id: str) -> None:
        """Remove the remaining keys of a job after its chunks were freed, and its id from all lists."""
        with self._connection.client() as client:
            idempotency = client.hget(keys.job(job_id), "idempotency_key")
            own = _own(job_id)
            if idempotency and client.get(idempotency) == job_id.encode():
                own.append(idempotency)
            client.unlink(*own)
            client.zrem(keys.JOBS, job_id)
        self.agenda.forget([job_id])

    def remove_damaged(self, job_id: str) -> None:
        """Remove the keys of a job whose facts can't be read, however many chunks it has.

        What is behind a gap of a whole slice expires by itself.
        """
        kinds = (keys.chunk_input, keys.chunk_result)
        for at in itertools.count(0, _SLICE):
            with self._connection.client() as client:
                if not client.exists(*(key(job_id, chunk) for chunk in range(at, at + _SLICE) for key in kinds)):
                    break
            self._free(job_id, range(at, at + _SLICE), files=self._files)
        with self._connection.client() as client:
            client.unlink(keys.job(job_id))

    def remove_complete(self, jobs: Sequence[JobStatus], also: Sequence[ScriptCall] = ()) -> set[str]:
        """Free and remove those of these jobs that are small and complete, in one round trip for many, in which other
        calls may be made too; their ids.

        The jobs are as they were a moment ago. Nobody adds to such a job, and none of its chunks is retried.
        """
        complete = [job for job in jobs if self._is_complete(job)]
        for start in range(0, len(complete), _TOGETHER):
            self._remove_complete(complete[start : start + _TOGETHER], () if start else also)
        if not complete:
            self._connection.scripts(also)
        return {job.id for job in complete}

    def _is_complete(self, job: JobStatus) -> bool:
        complete = job.state in _COMPLETE and job.chunks == job.original_chunks == job.chunks_done
        return complete and job.chunks <= _SMALL and not self._files.is_outside

    def _remove_complete(self, jobs: Sequence[JobStatus], also: Sequence[ScriptCall]) -> None:
        kinds = (keys.chunk_input, keys.chunk_result)
        chunks = [key(job.id, chunk) for job in jobs for chunk in range(job.chunks) for key in kinds]
        ids = [job.id for job in jobs]

        def ask(pipe: Any) -> None:
            for job_id in ids:
                pipe.hget(keys.job(job_id), "idempotency_key")
            pipe.unlink(*chunks, *(key for job_id in ids for key in _own(job_id)))
            for several in (keys.JOBS, keys.ACTIVE, keys.UPKEEP):
                pipe.zrem(several, *ids)

        answers = map(self._connection.answer_of, self._connection.raw_scripts(also, ask=ask))
        for job_id, key in zip(ids, list(answers)[len(also) :], strict=False):
            if isinstance(key, bytes):
                self._forget_key(key, job_id)

    def _forget_key(self, key: bytes, job_id: str) -> None:
        """Remove an idempotency key, unless it finds another job by now."""
        with self._connection.client() as client:
            if client.get(key) == job_id.encode():
                client.unlink(key)

    def _cursor(self, job_id: str, name: str) -> int:
        with self._connection.client() as client:
            return int(client.hget(keys.cursors(job_id), name) or 0)

    def _move_cursor(self, job_id: str, name: str, to: int) -> None:
        with self._connection.client() as client:
            left_ms = client.pttl(keys.job(job_id))
            if left_ms > 0:  # no cursor outlives its job
                pipe = client.pipeline(transaction=False).hset(keys.cursors(job_id), name, to)
                pipe.pexpire(keys.cursors(job_id), left_ms).execute()

    def judge_dead(self, in_hand: Sequence[set[str]]) -> None:
        """Let chunks be taken again whose owners are known to have died, and whose leases are over. Each owner had
        chunks of these jobs."""
        known = list({job_id for jobs in in_hand for job_id in jobs})
        tenants = dict(zip(known, self._connection.ask_each(known, _ask_tenant, refusals=True), strict=True))
        said: dict[str, str] = {}
        of_tenants: dict[str, str] = {}
        for jobs in in_hand:
            for job_id in jobs:  # if several were there, any may be to blame
                said[job_id] = "blame" if len(jobs) == 1 else said.get(job_id, "watch")
            one_of_each = {str(tenants[job_id]): job_id for job_id in jobs}
            for job_id in one_of_each.values():
                of_tenants[job_id] = "blame" if len(one_of_each) == 1 else of_tenants.get(job_id, "watch")
        calls = [
            self._reap_call(job_id, 0, AUDIT_AFTER_S * 1000, (word, of_tenants.get(job_id, "")))
            for job_id, word in said.items()
        ]
        for at in range(0, len(calls), _TOGETHER):
            self._connection.scripts(calls[at : at + _TOGETHER])

    def _reap_call(
        self, job_id: str, soonest_ms: int, audit_after_ms: float, said: tuple[str, str] | None = None
    ) -> ScriptCall:
        """With what is `said` of the job and its tenant, only owners are judged that are known to have died."""
        silent_ms = int(self._settings.lease_s * 1000 * SILENT_LEASES)
        pauses = [STUCK_PAUSE_MS, LONGEST_PAUSE_MS]
        dead = [int(said is not None), *(said or ("", ""))]
        args = [*pauses, _SLICE, silent_ms, STUCK_AFTER, soonest_ms, int(audit_after_ms), *dead]
        return ScriptCall("reap", [keys.job(job_id)], [job_id, *args])


def _audit_call(job_id: str, at: int) -> ScriptCall:
    chunks = [keys.chunk_input(job_id, ""), keys.chunk_result(job_id, "")]
    return ScriptCall("audit", [keys.job(job_id)], [job_id, at, *chunks, _SLICE])


def _ask_tenant(pipe: Any, job_id: str) -> None:
    pipe.hget(keys.job(job_id), "tenant")


def _own(job_id: str) -> list[str]:
    of_job = (keys.job, keys.owners, keys.attempts, keys.ready, keys.suspects, keys.events, keys.counted)
    of_processes = (keys.producer, keys.cursors, keys.drainer)
    return [*(key(job_id) for key in (*of_job, *of_processes)), *_of_drain(job_id)]


def _of_drain(job_id: str) -> list[str]:
    return [keys.drained(job_id), keys.parts(job_id), keys.digests(job_id)]


def _extend_after(ttl_ms: int) -> int:
    """A sweep may begin so long after the last one did (ms): a quarter of the TTL, less the longest pause of looks."""
    return ttl_ms * 3 // 16


def _active_job(
    job_id: str, facts: Any, left_ms: Any, cursors: Any, producer_lives: Any
) -> ActiveJob | Exception | None:
    if refused := next(
        (each for each in (facts, left_ms, cursors, producer_lives) if isinstance(each, Exception)), None
    ):
        return refused
    if facts[0] is None:
        return None
    try:
        version, state, hardware, model, added, ttl_ms, created_ms, progressed_ms = (
            fact.decode() for fact in facts[: len(_FACTS)]
        )
        if version != str(wire.VERSION):
            return JobError(f"it is of version {version}, and this embedctl handles version {wire.VERSION}")
        stopped_by, original_chunks = facts[len(_FACTS) :]
        audit_at, extend_at, extend_next_ms = (int(cursor or 0) for cursor in cursors)
        return ActiveJob(
            id=job_id,
            state=JobState(state),
            queue=keys.queue(hardware, model),
            chunks=int(added),
            ttl_ms=int(ttl_ms),
            left_ms=left_ms,
            progressed_ms=int(progressed_ms),
            stopped=stopped_by is not None,
            resumable=stopped_by is not None and stopped_by.decode() == BY_REQUEST,
            abandoned=state == JobState.SUBMITTING and original_chunks is not None and not producer_lives,
            audit_at=audit_at,
            extend_at=extend_at,
            extend_next_ms=extend_next_ms or int(created_ms) + _extend_after(int(ttl_ms)),
        )
    except (ValueError, AttributeError) as error:
        return error


def _looked(answers: Mapping[str, tuple[str, list[Any]] | BrokerRefused]) -> Looked | BrokerRefused:
    refused = next((each for each in answers.values() if isinstance(each, BrokerRefused)), None)
    if refused is not None and refused is answers["reap"]:
        return refused
    found = {name: each[1] for name, each in answers.items() if not isinstance(each, BrokerRefused) and each[0] == "ok"}
    audit_at, ready, lost = map(int, found.get("audit", (0, 0, 0)))
    return Looked([int(chunk) for chunk in found.get("reap", ())], ready, lost, audit_at, refused)
