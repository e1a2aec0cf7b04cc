"""Reads jobs: their facts, their chunks' results and their events. Nothing here runs a script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, compress, islice
from typing import Any, NamedTuple

from embedctl.chunk_files import ChunkFiles
from embedctl.chunk_files.references import is_reference
from embedctl.store import job_ids
from embedctl.store.connection import MAX_BLOCK_MS, Connection
from embedctl.store.status import JobStatus, Suspect, parse_status, parse_suspect
from embedctl_config import keys, tenants, wire
from embedctl_config.errors import JobDamaged, JobError, JobLost, JobNotFound, NotPermitted, WireForeign, WireTruncated
from embedctl_config.wire import ChunkResult

_SLICE = 200
#: Jobs of all tenants that are looked at for those of one.
_LOOKED_AT = 500
#: Size of the first read of a result's head, which stands before the vectors (bytes). The head of 512 records with
#: short ids is smaller.
_HEAD_BYTES = 16 * 1024
#: The states of a job that goes on. Any other one is looked at.
_GOES_ON = frozenset((b"submitting", b"queued", b"running"))


class Event(NamedTuple):
    """Something that happened to a job. `may_end` is false if the job goes on after it, as far as it tells."""

    id: str
    may_end: bool


class JobReader:
    """Reads jobs from Redis. Every method raises BrokerUnavailable if Redis can't be reached.

    Those that read a chunk also raise ChunkFilesUnavailable if it is outside of Redis and can't be reached there, and
    JobLost if its bytes there are gone or damaged.
    """

    def __init__(self, connection: Connection, files: ChunkFiles | None = None) -> None:
        self._connection = connection
        self._files = files or ChunkFiles()

    def status(self, job_id: str) -> JobStatus:
        """A job's facts; raises as :meth:`absent` if Redis does not know the job."""
        if not keys.is_job_id(job_id):
            raise self.absent(job_id)
        return self._known(job_id, *self._connection.ask_each([job_id], facts_asked, refusals=True))

    def status_for(self, tenant: str, job_id: str) -> JobStatus:
        """As :meth:`status`, which raises as :meth:`absent` alike if it is the job of another tenant. JobDamaged also
        if nothing tells whose it is."""
        if not keys.is_job_id(job_id):
            raise self.absent(job_id)
        facts = self._connection.ask_each([job_id], facts_asked, refusals=True)
        if isinstance(facts[0], dict) and facts[0].get(b"tenant", tenants.DEFAULT.encode()) != tenant.encode():
            raise self.absent(job_id)
        return self._known(job_id, *facts)

    def is_damaged(self, job_id: str) -> bool:
        """Whether a job can't be read, because another program lost or changed what Redis holds of it."""
        try:
            self.status(job_id)
        except JobDamaged:
            return True
        except JobError:
            return False
        return False

    def status_and_result(
        self, job_id: str, after: str | None = None, timeout_s: float = 0.0
    ) -> tuple[JobStatus, bytes | None, list[Event]]:
        """A job's facts, and the result of its first chunk in one round trip; None also if that is outside of Redis.
        With `after`, what they are once :meth:`events` would return, and its events."""
        with self._connection.client() as client:
            pipe = client.pipeline(transaction=False)
            if after is not None:
                _ask_events(pipe, job_id, after, timeout_s)
            *found, result = facts_asked(pipe, job_id).get(keys.chunk_result(job_id, 0)).execute()
        events = _events_of_one(found[0]) if after is not None else []
        return self._known(job_id, *found[-3:]), None if result is None or is_reference(result) else result, events

    def find(self, ids: Sequence[str]) -> list[JobStatus]:
        """Those of these jobs that exist, in this order, read in slices. One of another version must not hide them."""
        found: list[JobStatus] = []
        ids = [job_id for job_id in ids if keys.is_job_id(job_id)]
        for at in range(0, len(ids), _SLICE):
            found += [each for each in self._read(ids[at : at + _SLICE]) if isinstance(each, JobStatus)]
        return found

    def resolve(self, job_id: str) -> str:
        """The full id of the job whose id begins or ends so. A full id is not looked up.

        Raises JobNotFound if no id begins or ends so, and JobAmbiguous if several do.
        """
        if keys.is_job_id(job_id):
            return job_id
        found = job_ids.find(self._connection, job_id)
        if len(found) > 1:
            raise job_ids.ambiguous(job_id, found)
        if not found:
            raise self.absent(job_id)
        return found[0]

    def with_key(self, idempotency_key: str, tenant: str = tenants.DEFAULT) -> str | None:
        """The id of the job of a tenant's idempotency key; None if there is none."""
        with self._connection.client() as client:
            job_id = client.get(keys.idempotency(idempotency_key, tenant))
        return None if job_id is None else str(job_id.decode())

    def newest(self, most: int = _SLICE) -> Iterator[JobStatus]:
        """Every job, the newest first, read in slices. Jobs that are gone are removed from the list of all jobs.

        A job of another version is left out, because it must not hide all others. A caller that needs only so many
        says that: a slice then has at most `most`.
        """
        for ids in job_ids.newest_first(self._connection, size=min(most, _SLICE)):
            read = list(self._read(ids))
            gone = [job_id for job_id, status in zip(ids, read, strict=True) if status is None]
            # A monitor is not permitted to remove them, and leaves this to others.
            with suppress(NotPermitted), self._connection.client() as client:
                if gone:
                    client.zrem(keys.JOBS, *gone)
            yield from (status for status in read if isinstance(status, JobStatus))

    def page(
        self, tenant: str, shortened: str, behind: job_ids.Place | None
    ) -> tuple[list[JobStatus], job_ids.Place | None]:
        """A part of a tenant's jobs whose ids begin or end so, the newest first: those among a slice of all jobs behind
        a place, or among the newest. Also the place up to which was looked; None at the end."""
        ids, place = job_ids.older(self._connection, behind, size=_LOOKED_AT)
        ids = [job_id for job_id in ids if job_ids.fits(job_id, shortened)]
        found = self._connection.ask_each(
            ids, lambda pipe, job_id: pipe.hget(keys.job(job_id), "tenant"), refusals=True
        )
        mine = (None, tenant.encode()) if tenant == tenants.DEFAULT else (tenant.encode(),)
        return self.find([job_id for job_id, whose in zip(ids, found, strict=True) if whose in mine]), place

    def newest_ids(self, limit: int) -> list[str]:
        """The ids of the last jobs, the newest first; some of the jobs may be gone."""
        return list(islice(chain.from_iterable(job_ids.newest_first(self._connection, size=limit)), limit))

    def active_ids(self, limit: int) -> tuple[list[str], int]:
        """The ids of the jobs that need upkeep, and their number. If there are more than `limit` (at least 2), half of
        these ids are the newest, and half the oldest."""
        half = limit // 2
        with self._connection.client() as client:
            pipe = client.pipeline(transaction=False).zcard(keys.ACTIVE)
            count, newest, oldest = pipe.zrevrange(keys.ACTIVE, 0, half - 1).zrange(keys.ACTIVE, 0, half - 1).execute()
        return [job_id.decode() for job_id in dict.fromkeys([*newest, *oldest])], count

    def suspects(self, job_id: str) -> list[Suspect]:
        """The chunks of a job whose owners died, in order."""
        with self._connection.client() as client:
            found = list(client.hscan_iter(keys.attempts(job_id), match="*:deaths", count=_SLICE))
        return sorted((parse_suspect(name.decode(), facts) for name, facts in found), key=lambda each: each.chunk)

    def failed_chunks(self, job_id: str, start: int, count: int) -> list[int]:
        """The chunks among `count` from `start` with failed records that no new chunk retries."""
        chunks = range(start, start + count)
        found = self._connection.ask_each(chunks, lambda pipe, chunk: pipe.exists(keys.chunk_input(job_id, chunk)))
        return list(compress(chunks, found))

    def chunks_with_errors(self, job_id: str, start: int, count: int) -> set[int]:
        """The chunks among `count` from `start` of an ended job that may have failed records.

        These are the chunks whose failed records are kept or retried by a new chunk, and the chunks without a result.
        A drained chunk has a result. The method does not work for a job that its error budget ended, because the job's
        texts are freed.
        """

        def ask(pipe: Any, chunk: int) -> None:
            pipe.exists(keys.chunk_input(job_id, chunk), keys.retry_pointer(job_id, chunk))
            pipe.exists(keys.chunk_result(job_id, chunk)).getbit(keys.drained(job_id), chunk)

        found = self._connection.ask_each(range(start, start + count), ask)
        return {start + at for at in range(count) if found[3 * at] or not (found[3 * at + 1] or found[3 * at + 2])}

    def retried_as(self, job_id: str, chunk: int) -> int | None:
        """The chunk that retries a chunk's failed records, or None."""
        with self._connection.client() as client:
            pointer = client.get(keys.retry_pointer(job_id, chunk))
        return None if pointer is None else int(pointer)

    def input(self, job_id: str, chunk: int) -> bytes | None:
        """A chunk's stored input, or None once it is encoded."""
        return self._bytes_at(keys.chunk_input(job_id, chunk), job_id, chunk)

    def result(self, job_id: str, chunk: int) -> bytes | None:
        """A chunk's stored result, or None."""
        return self._bytes_at(keys.chunk_result(job_id, chunk), job_id, chunk)

    def result_head(self, job_id: str, chunk: int) -> ChunkResult | None:
        """A chunk's stored result without its vectors, which are not read; None if there is no result."""
        size = _HEAD_BYTES
        while True:
            data = self.result_start(job_id, chunk, size)
            if not data:
                return None
            try:
                return wire.decode_result_head(data)
            except WireTruncated:
                if len(data) < size:  # that was the whole value
                    raise
                size *= 4

    def result_start(self, job_id: str, chunk: int, size: int) -> bytes | None:
        """The first `size` bytes of a chunk's stored result, or None."""
        return self._bytes_at(keys.chunk_result(job_id, chunk), job_id, chunk, size)

    def _bytes_at(self, key: str, job_id: str, chunk: int, size: int | None = None) -> bytes | None:
        """The bytes of a chunk, or the first `size` of them; None if Redis holds neither them nor a reference."""
        gone: bytes | None = None
        while True:
            with self._connection.client() as client:
                value: bytes | None = client.get(key) if size is None else client.getrange(key, 0, size - 1) or None
            if value is None:
                return None
            try:
                found = self._files.get(value, size)
            except WireForeign as error:
                raise JobLost(
                    f"chunk {chunk} of job {job_id}: {error}. Submit the same corpus with --resume {job_id}"
                ) from error
            if found is not None:
                return found
            if value == gone:  # nothing has replaced or removed the reference
                raise JobLost(
                    f"chunk {chunk} of job {job_id} is gone from chunk_files: submit the same corpus with --resume "
                    f"{job_id}"
                )
            gone = value

    def has_result(self, job_id: str, chunk: int) -> bool:
        """Whether a chunk's result is stored."""
        with self._connection.client() as client:
            return bool(client.exists(keys.chunk_result(job_id, chunk)))

    def events(self, job_id: str, after: str, timeout_s: float) -> list[Event]:
        """The events of a job after this one ("$": from now on). Blocks until there are any, or the time is over."""
        with self._connection.client() as client:
            return _events_of_one(_ask_events(client, job_id, after, timeout_s))

    def absent(self, job_id: str) -> JobNotFound:
        """The error for a job that Redis does not know: JobLost if the database is younger than the job's id."""
        with self._connection.client() as client:
            birth = client.get(keys.BIRTH)
        try:
            created = keys.created_s(job_id)
        except ValueError:
            if len(job_id) < job_ids.SHORTEST:
                return JobNotFound(f"there is no job {job_id!r}: give at least {job_ids.SHORTEST} characters of an id")
            return JobNotFound(f"there is no job {job_id!r}: no id begins or ends so; `embedctl list` shows the jobs")
        if not birth or created + 1 < int(birth) / 1000:
            return JobLost(
                f"job {job_id} was lost by the broker: Redis was emptied or replaced after the job was made, or was "
                "unused for longer than the job is kept. Submit its corpus again."
            )
        return JobNotFound(f"there is no job {job_id}: it was never made here, was freed, or its time to live ran out")

    def _of_other_version(self, job_id: str, version: str) -> JobError:
        return JobError(
            f"job {job_id} is of version {version or 'unknown'}, and this embedctl handles version {wire.VERSION}: use "
            "the one that made it"
        )

    def _known(self, job_id: str, raw: Any, ttl_ms: Any, alive: Any) -> JobStatus:
        """The job of an answer to :func:`facts_asked`. Raises as :meth:`status`."""
        status = self._parsed(job_id, raw, ttl_ms, alive)
        if status is None:
            raise self.absent(job_id)
        if isinstance(status, JobError):
            raise status
        return status

    def _read(self, ids: Sequence[str]) -> Iterator[JobStatus | JobError | None]:
        """For each job its facts, None if it is gone, or the error if it is of another version or damaged."""
        answers = self._connection.ask_each(ids, facts_asked, refusals=True)
        for job_id, raw, ttl_ms, alive in zip(ids, answers[::3], answers[1::3], answers[2::3], strict=True):
            yield self._parsed(job_id, raw, ttl_ms, alive)

    def _parsed(self, job_id: str, raw: Any, ttl_ms: Any, alive: Any) -> JobStatus | JobError | None:
        """What :func:`facts_asked` tells of a job. One that can't be read must not hide others."""
        if not raw:
            return None
        try:
            facts = {name.decode(): value.decode() for name, value in raw.items()}
            if (version := facts.get("version", "")) != str(wire.VERSION):
                return self._of_other_version(job_id, version)
            return parse_status(job_id, facts, ttl_ms, bool(alive))
        except (LookupError, ValueError, AttributeError) as error:
            why = "is of another type" if isinstance(raw, Exception) else f"can't be read ({error!r})"
            return damaged(job_id, f"{keys.job(job_id)} {why}")


def damaged(job_id: str, what: str) -> JobDamaged:
    """The error for a job that can't go on, because another program lost or changed what Redis holds of it."""
    return JobDamaged(
        f"job {job_id} is damaged: {what}. Remove it, and submit its corpus again: embedctl discard {job_id}"
    )


def facts_asked(pipe: Any, job_id: str) -> Any:
    """The pipeline, with the questions about a job's facts."""
    return pipe.hgetall(keys.job(job_id)).pttl(keys.job(job_id)).exists(keys.producer(job_id))


def _ask_events(client: Any, job_id: str, after: str, timeout_s: float) -> Any:
    block_ms = max(1, min(MAX_BLOCK_MS, int(timeout_s * 1000)))
    return client.xread({keys.events(job_id): after}, block=block_ms, count=keys.EVENTS_KEPT)


def _events_of_one(answer: Any) -> list[Event]:
    return next(iter(events_in(answer).values()), [])


def events_in(answer: Any) -> dict[bytes, list[Event]]:
    """Stream → its events, in an answer of XREAD."""
    # RESP3 answers a mapping of stream to lists of entries, RESP2 a list of pairs.
    pairs = ((name, of[0]) for name, of in answer.items()) if isinstance(answer, dict) else answer or ()
    return {name: [Event(entry.decode(), _may_end(facts)) for entry, facts in entries] for name, entries in pairs}


def _may_end(facts: dict[bytes, bytes] | None) -> bool:
    return not facts or not (b"chunk" in facts or facts.get(b"state") in _GOES_ON)
