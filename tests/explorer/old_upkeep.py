"""Upkeep as it was when the scripts in `old_scripts` were. Do not mend it."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator

from embedctl.store.connection import Connection
from embedctl.store.status import STUCK_AFTER
from embedctl_config import keys, wire
from embedctl_config.settings import Settings

#: A ticket that nobody takes is sent again ever later, but not later than this (ms).
LONGEST_REISSUE_MS = 30 * 60 * 1000
#: A sealed job without progress for this long is audited (seconds).
AUDIT_AFTER_S = 60.0
#: A careful worker that is silent, and not known to have died, keeps its chunk for this many leases more: a record is
#: blamed only when it is as good as certain that it killed somebody.
PATIENCE = 3
_SLICE = 500


class Upkeep:
    """Bounded pieces of upkeep; none of them touches more than a slice of a job."""

    def __init__(self, connection: Connection, settings: Settings) -> None:
        self._connection = connection
        self._settings = settings

    def take_turn(self, interval_s: float) -> bool:
        """Whether it is this process that reaps in the present interval.

        Nobody reaps in the first two leases after Redis started: owners need that long to come back and renew.
        """
        with self._connection.client() as client:
            taken = client.set(
                keys.reaper(wire.VERSION), secrets.token_hex(8), nx=True, px=max(1, int(interval_s * 1000))
            )
        return bool(taken) and self._connection.uptime_s() >= 2 * self._settings.lease_s

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
        with self._connection.client() as client:
            client.zrem(keys.ACTIVE, job_id)

    def reap(self, job_id: str, queue: str) -> list[int]:
        """The issued chunks of a job that need another ticket now."""
        answer, rest = self._connection.script(
            "reap",
            [*keys.of_job(job_id), keys.queue_workers(queue)],
            [
                job_id,
                int(self._settings.reissue_s * 1000),
                LONGEST_REISSUE_MS,
                _SLICE,
                int(self._settings.lease_s * 1000 * PATIENCE),
                STUCK_AFTER,
            ],
        )
        return [int(chunk) for chunk in rest] if answer == "ok" else []

    def audit(self, job_id: str) -> int:
        """Look at the next slice of a job's issued chunks; how many of them Redis lost."""
        answer, rest = self._connection.script(
            "audit",
            keys.of_job(job_id),
            [
                job_id,
                self._cursor(job_id, "audit_at"),
                keys.chunk_input(job_id, ""),
                keys.chunk_result(job_id, ""),
                _SLICE,
            ],
        )
        if answer != "ok":
            return 0
        self._move_cursor(job_id, "audit_at", int(rest[0]))
        return int(rest[2])

    def extend(self, job_id: str, chunks: int, ttl_ms: int, now_ms: int, interval_s: float) -> None:
        """Renew lifetimes of an active job's chunk keys. A sweep starts every quarter of the TTL, and each call does as
        many slices of it as bring it to its end within an eighth.

        Args:
            interval_s: seconds until the next call.
        """
        at = self._cursor(job_id, "extend_at")
        if at == 0:
            if now_ms < self._cursor(job_id, "extend_next_ms"):
                return
            self._move_cursor(job_id, "extend_next_ms", now_ms + ttl_ms // 4)
        kept_ms = int(ttl_ms * keys.CHUNK_TTL_FACTOR)
        calls = max(1, ttl_ms / 8 / (interval_s * 1000))
        end = min(at + _SLICE * math.ceil(chunks / _SLICE / calls), chunks)
        for start in range(at, end, _SLICE):
            with self._connection.client() as client:
                pipe = client.pipeline(transaction=False)
                for chunk in range(start, min(start + _SLICE, end)):
                    pipe.pexpire(keys.chunk_input(job_id, chunk), kept_ms)
                    pipe.pexpire(keys.chunk_result(job_id, chunk), kept_ms)
                    pipe.pexpire(keys.retry_pointer(job_id, chunk), kept_ms)
                pipe.execute()
        self._move_cursor(job_id, "extend_at", 0 if end >= chunks else end)

    def free_slice(self, job_id: str, chunks: int, *, results: bool = True) -> bool:
        """Free the next slice of a job's chunks, with or without their results; whether none is left."""
        cursor = "freed_to" if results else "freed_inputs_to"
        at = self._cursor(job_id, cursor)
        end = min(at + _SLICE, chunks)
        self._free(job_id, at, end, results=results)
        self._move_cursor(job_id, cursor, 0 if end >= chunks else end)
        return end >= chunks

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
