"""The store of jobs as it was when the scripts in `old_scripts` were, to call them. Do not mend it."""

from __future__ import annotations

import calendar
import json
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from embedctl.store import Issued
from embedctl.store.connection import Connection
from embedctl.store.status import COUNTS, JobState, JobStatus, Suspect, parse_status, parse_suspect
from embedctl_config import keys, wire
from embedctl_config.errors import (
    CorpusChanged,
    JobCancelled,
    JobError,
    JobLost,
    JobNotFound,
    JobUnfinished,
    NotPermitted,
)
from embedctl_config.settings import Settings

#: A ticket refused for its model's fingerprint is offered again after this part of `reissue_s`: soon enough for a
#: worker with the right weights, seldom enough when there is none.
_MISMATCH_PART = 1 / 12


_SLICE = 200


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What a job is made with; a resumed job must be made with the same.

    `options` are the ones that decide the vectors or the chunks, as JSON values. More failed records than `max_errors`,
    or than `max_errors_share` of all, end the job early.
    """

    model: str
    hardware: str
    precision: str
    options: Mapping[str, Any]
    ttl_s: float
    idempotency_key: str | None = None
    max_errors: int | None = None
    max_errors_share: float | None = None


class Added(StrEnum):
    """The answers to :meth:`JobStore.add` that are no error."""

    OK = "ok"
    SKIPPED = "skipped"
    DIFFERS = "differs"
    HELD = "held"
    SEALED = "sealed"
    STOPPED = "stopped"


class ClaimAnswer(StrEnum):
    """The answers to :meth:`JobStore.claim`."""

    OK = "ok"
    DONE = "done"
    BUSY = "busy"
    MISMATCH = "mismatch"
    LOST = "lost"
    GONE = "gone"
    CANCELLED = "cancelled"
    NEWER = "newer"


@dataclass(frozen=True, slots=True)
class Claim:
    """What a claim came back with: `attempt` and `input` with OK, the pinned `fingerprint` with MISMATCH.

    `given_up` is None unless the chunk is suspect: an owner of it died. Then it is to be encoded with care, without the
    rows in `given_up`, at which earlier owners died.
    """

    answer: ClaimAnswer
    attempt: int = 0
    input: bytes = b""
    fingerprint: str = ""
    given_up: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class Completed:
    """What a worker reports with a chunk's result: counts of records, tokens encoded, and what `retry` needs."""

    done: int
    failed: int
    truncated: int
    tokens: int
    dim: int
    failed_input: bytes = b""


class JobStore:
    """Jobs in Redis.

    Steps of a chunk's life make one round trip, but for :meth:`complete`, which makes two. Every method raises
    BrokerUnavailable when Redis can't be reached. Where the answer concerns the caller (a worker with a ticket), it is
    returned; where it concerns a person, it is raised as an error of the job.
    """

    def __init__(self, connection: Connection, settings: Settings) -> None:
        self._connection = connection
        self._settings = settings
        self._lease_ms = int(settings.lease_s * 1000)
        self._mismatch_ms = int(settings.reissue_s * 1000 * _MISMATCH_PART)

    def create(self, spec: JobSpec) -> tuple[str, bool]:
        """Make a job, or find the one that this idempotency key made.

        Returns:
            The job's id, and whether it is new.
        """
        now = self._connection.now_ms()
        ttl_ms = int(spec.ttl_s * 1000)
        job_id = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now / 1000))}-{secrets.token_hex(5)}"
        fields: dict[str, Any] = {
            "version": wire.version_for(spec.options, spec.precision),
            "state": JobState.SUBMITTING,
            "model": spec.model,
            "hardware": spec.hardware,
            "precision": spec.precision,
            "options": json.dumps(dict(spec.options), sort_keys=True),
            "ttl_ms": ttl_ms,
            "created_ms": now,
            "progressed_ms": now,
            "window": self._settings.window,
            **dict.fromkeys(COUNTS, 0),
            "next": 0,
        }
        script_keys = [keys.job(job_id), keys.ACTIVE, keys.BIRTH, keys.JOBS]
        if spec.idempotency_key is not None:
            script_keys.append(keys.idempotency(spec.idempotency_key))
            fields["idempotency_key"] = script_keys[-1]
        if spec.max_errors is not None:
            fields["max_errors"] = spec.max_errors
        if spec.max_errors_share is not None:
            fields["max_errors_share"] = spec.max_errors_share
        kept_ms = int(ttl_ms * keys.CHUNK_TTL_FACTOR)
        flat = [part for item in fields.items() for part in item]
        answer, rest = self._connection.script(
            "create", script_keys, [job_id, now, ttl_ms, kept_ms, keys.job(""), *flat]
        )
        return (rest[0].decode(), False) if answer == "exists" else (job_id, True)

    def hold(self, job_id: str, token: str, *, lease_s: float | None = None) -> bool:
        """Keep the right to add to a job, or take it over from a producer that died. True also once it is sealed.

        Args:
            lease_s: how long to keep it; 0 gives it up.
        """
        lease_ms = max(1, int((keys.PRODUCER_LEASE_S if lease_s is None else lease_s) * 1000))
        answer, _ = self._job_script("hold", job_id, [keys.producer(job_id)], [token, lease_ms])
        return answer != "held"

    def add(
        self, job_id: str, chunk: int, payload: bytes, *, digest: bytes, rows: int, token: str
    ) -> tuple[Added, int]:
        """Store a chunk's input once.

        Args:
            payload: the chunk in wire format.
            token: this producer's, as given to :meth:`hold`.

        Returns:
            The answer, and the bytes of text of this job that wait to be encoded.

        Raises:
            JobLost: an earlier chunk is gone, with Redis' last writes before a crash.
        """
        answer, rest = self._job_script(
            "add",
            job_id,
            [keys.producer(job_id), keys.chunk_input(job_id, chunk), keys.chunk_result(job_id, chunk)],
            [chunk, digest, rows, payload, token, keys.PRODUCER_LEASE_S * 1000, *wire.DIGEST_RANGE],
        )
        if answer == "gap":
            raise JobLost(
                f"Redis lost what it was last told of job {job_id}: only {int(rest[0])} of its first {chunk} "
                f"chunks are there. Go on where they end: embedctl submit CORPUS --resume {job_id}"
            )
        return Added(answer), int(rest[0]) if rest else 0

    def seal(self, job_id: str, chunks: int) -> None:
        """Say that a job has all its chunks.

        Raises:
            CorpusChanged: the job already holds another number of chunks.
        """
        answer, rest = self._job_script("seal", job_id, [keys.producer(job_id)], [chunks])
        if answer == "gap" or (answer == "sealed" and int(rest[0]) != chunks):
            raise CorpusChanged(
                f"job {job_id} holds {int(rest[0])} chunks, and the corpus now makes {chunks}: it was begun with "
                "another corpus. Submit it as a new job."
            )

    def issue(self, job_id: str, queue: str, over: int | None = None) -> list[Issued]:
        """Choose the chunks whose tickets are to be sent now, as far as the job's window has room."""
        answer, rest = self._ticket_script(
            "issue",
            job_id,
            [keys.queue_workers(queue)],
            [
                self._settings.window_per_worker,
                int(self._settings.reissue_s * 1000),
                keys.chunk_result(job_id, ""),
            ],
        )
        return [Issued(job_id, int(chunk), 1) for chunk in rest] if answer == "ok" else []

    def claim(self, job_id: str, chunk: int, *, token: str, instance: str, fingerprint: str) -> Claim:
        """Ask for the lease of a chunk and its text.

        Args:
            token: names this claim; renew and release want it again.
            instance: this worker process.
            fingerprint: of the model it serves.
        """
        answer, rest = self._ticket_script(
            "claim",
            job_id,
            [keys.chunk_input(job_id, chunk), keys.chunk_result(job_id, chunk)],
            [chunk, token, instance, fingerprint, self._lease_ms, self._mismatch_ms],
        )
        if answer == ClaimAnswer.OK:
            given_up = frozenset(map(int, filter(None, rest[2].split(b",")))) if len(rest) > 2 else None
            return Claim(ClaimAnswer.OK, attempt=int(rest[0]), input=rest[1], given_up=given_up)
        if answer == ClaimAnswer.MISMATCH:
            return Claim(ClaimAnswer.MISMATCH, fingerprint=rest[0].decode())
        return Claim(ClaimAnswer(answer))

    def renew(self, job_id: str, chunk: int, token: str, *, row: int | None = None) -> str:
        """Keep a lease: `ok`, `done`, `not_owner`, `gone`, `cancelled` or `newer`.

        Args:
            row: of a suspect chunk, the row that the worker comes to now; -1 for none any more. Should the worker die
                before the next call with a row, that row is given up.
        """
        noted = [] if row is None else [row if row >= 0 else ""]
        return self._ticket_script("renew", job_id, [], [chunk, token, self._lease_ms, *noted])[0]

    def end_leases(self, job_id: str, dead: Collection[str]) -> None:
        """End the leases of worker instances that are known to have died now, not in their time."""
        with self._connection.client() as client:
            owners = list(client.hscan_iter(keys.owners(job_id), count=_SLICE))
        for chunk, owner in owners:
            token, instance, *_ = owner.decode().split(" ")
            if instance in dead:
                self._ticket_script("renew", job_id, [], [int(chunk), token, 0])

    def release(self, job_id: str, chunk: int, token: str, *, delay_s: float, trouble: str = "") -> bool:
        """Give a lease back unfinished; the reaper sends a ticket after the delay unless the caller does.

        Args:
            trouble: what went wrong, for :attr:`JobStatus.trouble`; no text of a record.
        """
        return self._ticket_script("release", job_id, [], [chunk, token, int(delay_s * 1000), trouble])[0] == "ok"

    def drop_input(self, job_id: str, chunk: int) -> None:
        """Forget an input whose bytes are damaged: the chunk counts as lost, which the same corpus repairs."""
        with self._connection.client() as client:
            client.unlink(keys.chunk_input(job_id, chunk))

    def suspects(self, job_id: str) -> list[Suspect]:
        """The chunks of a job whose owners died, in order."""
        with self._connection.client() as client:
            found = list(client.hscan_iter(keys.attempts(job_id), match="*:deaths", count=_SLICE))
        return sorted((parse_suspect(name.decode(), facts) for name, facts in found), key=lambda each: each.chunk)

    def complete(
        self, job_id: str, chunk: int, token: str, payload: bytes, report: Completed, *, fingerprint: str
    ) -> str:
        """Store a chunk's result and count it once: `ok`, `refused`, `mismatch`, `gone`, `cancelled` or `newer`.

        The vectors travel outside of the script, under a name of this claim's own, so that the script moves no bytes.
        """
        temporary = keys.uncommitted_result(job_id, chunk, token)
        script_keys = [keys.chunk_input(job_id, chunk), keys.chunk_result(job_id, chunk), temporary]
        args = [
            chunk,
            fingerprint,
            report.done,
            report.failed,
            report.truncated,
            report.tokens,
            report.dim,
            report.failed_input,
        ]
        while True:
            with self._connection.client() as client:
                client.set(temporary, payload, ex=keys.UNCOMMITTED_TTL_S)
            answer, _ = self._ticket_script("complete", job_id, script_keys, args)
            if answer in ("gone", "cancelled", "newer"):
                with self._connection.client() as client:
                    client.unlink(temporary)
            if answer != "missing":
                return answer

    def failed_chunks(self, job_id: str, start: int, count: int) -> list[int]:
        """Which of `count` chunks from `start` hold failed records that were not put into a new chunk."""
        with self._connection.client() as client:
            pipe = client.pipeline(transaction=False)
            for chunk in range(start, start + count):
                pipe.exists(keys.chunk_input(job_id, chunk))
            found = pipe.execute()
        return [start + at for at, exists in enumerate(found) if exists]

    def retry(self, job_id: str, chunk: int, new_chunk: int, token: str) -> int:
        """Put a chunk's failed records into a new chunk; how many they are. The job is open until sealed again.

        Raises:
            JobUnfinished: the job has not ended.
            JobError: its error budget ended it, or another process retries it at this moment.
        """
        answer, rest = self._job_script(
            "retry",
            job_id,
            [
                keys.producer(job_id),
                keys.chunk_input(job_id, chunk),
                keys.retry_pointer(job_id, chunk),
                keys.chunk_input(job_id, new_chunk),
            ],
            [chunk, new_chunk, token, keys.PRODUCER_LEASE_S * 1000],
        )
        if answer == "busy":
            raise JobUnfinished(f"job {job_id} has not ended: what fails can be retried once it has")
        if answer == "stopped":
            raise JobError(
                f"job {job_id} was ended by its error budget (max_errors): mend its corpus and submit it anew"
            )
        if answer in ("held", "gap"):
            raise JobError(f"job {job_id} is being retried by another process")
        return int(rest[0]) if answer == "ok" else 0

    def retried_as(self, job_id: str, chunk: int) -> int | None:
        """The chunk that a chunk's failed records were put into, or None."""
        with self._connection.client() as client:
            pointer = client.get(keys.retry_pointer(job_id, chunk))
        return None if pointer is None else int(pointer)

    def newest(self) -> Iterator[JobStatus]:
        """Every job, the newest first, read in slices; forgets those that are gone."""
        at = 0
        while True:
            with self._connection.client() as client:
                ids = [job_id.decode() for job_id in client.zrevrange(keys.JOBS, at, at + _SLICE - 1)]
            gone = []
            for job_id in ids:
                status = self._find(job_id)
                if status is None:
                    gone.append(job_id)
                else:
                    yield status
            if gone and not self._dropped(gone):
                gone = []
            if len(ids) < _SLICE:
                return
            at += _SLICE - len(gone)

    def _dropped(self, gone: Sequence[str]) -> bool:
        """Take jobs off the list of all; whether this user may."""
        try:
            with self._connection.client() as client:
                client.zrem(keys.JOBS, *gone)
        except NotPermitted:  # who only looks leaves it to others
            return False
        return True

    def cancel(self, job_id: str) -> JobState:
        """End a job now; what was not fetched is freed. Returns the state that it has from here on."""
        answer, rest = self._ticket_script("cancel", job_id, [], [])
        if answer == "gone":
            raise self.absent(job_id)
        if answer == "newer":
            raise self._made_by_newer(job_id)
        return JobState(rest[0].decode()) if answer == "ended" else JobState.CANCELLED

    def status(self, job_id: str) -> JobStatus:
        """A job's facts.

        Raises:
            JobLost: Redis is younger than the job.
            JobNotFound: Redis knows no such job.
        """
        status = self._find(job_id) if keys.is_job_id(job_id) else None
        if status is None:
            raise self.absent(job_id)
        return status

    def find(self, job_ids: Sequence[str]) -> list[JobStatus]:
        """Those of these jobs that there are, in this order, read in slices.

        One of a newer version that this one can't read is left out: it must not hide all others.
        """
        found: list[JobStatus] = []
        job_ids = [job_id for job_id in job_ids if keys.is_job_id(job_id)]
        for at in range(0, len(job_ids), _SLICE):
            found += [each for each in self._read(job_ids[at : at + _SLICE]) if isinstance(each, JobStatus)]
        return found

    def newest_ids(self, limit: int) -> list[str]:
        """The ids of the jobs that were made last, the newest first; some may be gone."""
        with self._connection.client() as client:
            return [job_id.decode() for job_id in client.zrevrange(keys.JOBS, 0, limit - 1)]

    def active_ids(self, limit: int) -> tuple[list[str], int]:
        """The ids of the jobs that need upkeep, of too many the newest and the oldest ones; and how many there are.

        Args:
            limit: most ids; at least 2.
        """
        half = limit // 2
        with self._connection.client() as client:
            pipe = client.pipeline(transaction=False).zcard(keys.ACTIVE)
            count, newest, oldest = pipe.zrevrange(keys.ACTIVE, 0, half - 1).zrange(keys.ACTIVE, 0, half - 1).execute()
        return [job_id.decode() for job_id in dict.fromkeys([*newest, *oldest])], count

    def _find(self, job_id: str) -> JobStatus | None:
        (status,) = self._read([job_id])
        if isinstance(status, JobError):
            raise status
        return status

    def _read(self, job_ids: Sequence[str]) -> Iterator[JobStatus | JobError | None]:
        """Each job's facts, None where it is gone, or why they can't be read."""
        with self._connection.client() as client:
            pipe = client.pipeline(transaction=False)
            for job_id in job_ids:
                pipe.hgetall(keys.job(job_id)).pttl(keys.job(job_id)).exists(keys.producer(job_id))
            answers = pipe.execute()
        for job_id, raw, ttl_ms, alive in zip(job_ids, answers[::3], answers[1::3], answers[2::3], strict=True):
            facts = {name.decode(): value.decode() for name, value in raw.items()}
            try:
                yield parse_status(job_id, facts, ttl_ms, bool(alive)) if facts else None
            except (LookupError, ValueError):
                if int(facts.get("version", 0)) <= wire.VERSION:
                    raise
                yield self._made_by_newer(job_id)

    def input(self, job_id: str, chunk: int) -> bytes | None:
        """A chunk's stored input, or None once it is encoded."""
        with self._connection.client() as client:
            data: bytes | None = client.get(keys.chunk_input(job_id, chunk))
        return data

    def result(self, job_id: str, chunk: int) -> bytes | None:
        """A chunk's stored result, or None."""
        with self._connection.client() as client:
            data: bytes | None = client.get(keys.chunk_result(job_id, chunk))
        return data

    def has_result(self, job_id: str, chunk: int) -> bool:
        """Whether a chunk's result is stored."""
        with self._connection.client() as client:
            return bool(client.exists(keys.chunk_result(job_id, chunk)))

    def absent(self, job_id: str) -> JobNotFound:
        """The error for a job that Redis does not know: lost when the database is younger than the job's id."""
        with self._connection.client() as client:
            birth = client.get(keys.BIRTH)
        try:
            created = time.strptime(job_id[:15] + "UTC", "%Y%m%d-%H%M%S%Z")
        except ValueError:
            return JobNotFound(f"there is no job {job_id!r}; `embedctl submit` printed its id")
        if not birth or calendar.timegm(created) + 1 < int(birth) / 1000:
            return JobLost(
                f"job {job_id} was lost by the broker: Redis was emptied or replaced after the job was made, or nobody "
                "used it for longer than the job is kept. Submit its corpus again."
            )
        return JobNotFound(f"there is no job {job_id}: it was never made here, was freed, or its time to live ran out")

    def _job_script(self, name: str, job_id: str, more_keys: list[str], args: list[Any]) -> tuple[str, list[Any]]:
        """A script whose caller can do nothing about a job that is gone."""
        answer, rest = self._ticket_script(name, job_id, more_keys, args)
        if answer == "gone":
            raise self.absent(job_id)
        if answer == "cancelled":
            raise JobCancelled(f"job {job_id} was cancelled")
        if answer == "newer":
            raise self._made_by_newer(job_id)
        return answer, rest

    def _made_by_newer(self, job_id: str) -> JobError:
        return JobError(f"job {job_id} was made by a newer embedctl: upgrade this one")

    def _ticket_script(self, name: str, job_id: str, more_keys: list[str], args: list[Any]) -> tuple[str, list[Any]]:
        return self._connection.script(name, [*keys.of_job(job_id), *more_keys], [job_id, *args])
