"""Decides which process reaps, and which jobs it looks at: a sorted set that scripts update, and a slow sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from embedctl.store.connection import Connection
from embedctl.store.lease import due, keep_turn, take_turn
from embedctl.store.sweeps import next_slice
from embedctl_config import keys, tenants
from embedctl_config.errors import NotPermitted
from embedctl_config.settings import Settings

#: Active jobs that the sweep checks in one round.
_SWEPT = 500
#: In one round, the reaper checks whether this many of the oldest jobs are gone, and as many more from the whole list.
_NAMES = 100


class Agenda:
    """The time of the reaper's next look at each active job.

    A script that makes something due also schedules the job, no later than that time; `reap` schedules the look after.
    Redis may lose the set: the sweep adds jobs that are missing, and corrects those that are late.
    """

    def __init__(self, connection: Connection, settings: Settings) -> None:
        self._connection = connection
        self._settings = settings

    def take_turn(self, held_s: float) -> str:
        """A token if this process reaps now, for so many seconds unless :meth:`keep_turn` extends them; else empty.

        No process reaps during the first two leases after Redis started, because owners need that time to come back and
        renew.
        """
        token = take_turn(self._connection, keys.REAPER, held_s)
        return token if token and self._connection.uptime_s() >= 2 * self._settings.lease_s else ""

    def keep_turn(self, token: str, held_s: float) -> bool:
        """Let the turn end this many seconds from now. False if this process had lost it already."""
        return keep_turn(self._connection, keys.REAPER, token, held_s)

    def due(self, now_ms: int, limit: int) -> list[str]:
        """The jobs to look at now, in the order of their due times."""
        return due(self._connection, keys.UPKEEP, now_ms, limit)

    def running(self, now_ms: int, limit: int) -> list[str]:
        """Jobs that may be running. Each has a look scheduled before its next lease lapses, so within one lease."""
        return self.due(now_ms + int(self._settings.lease_s * 1000), limit)

    def look_at(self, job_ids: Sequence[str], at_ms: int, *, sooner: bool = False) -> None:
        """Set the time of the next look at jobs; with `sooner`, only of those whose time is later now."""
        if job_ids:
            with self._connection.client() as client:
                client.zadd(keys.UPKEEP, dict.fromkeys(job_ids, at_ms), xx=True, lt=sooner)

    def leave_out(self, job_ids: Sequence[str]) -> None:
        """Stop looking at jobs, until something happens to them."""
        if job_ids:
            with self._connection.client() as client:
                client.zrem(keys.UPKEEP, *job_ids)

    def forget(self, job_ids: Sequence[str]) -> None:
        """Take jobs off the list of those that need upkeep."""
        if job_ids:
            with self._connection.client() as client:
                client.zrem(keys.ACTIVE, *job_ids)
            self.leave_out(job_ids)

    def sweep(self, now_ms: int) -> list[tuple[str, str]]:
        """Check that the looks at the next active jobs are scheduled in time; returns their ids and their tenants.

        A job whose keys can't be read is looked at when something happens to it.
        """
        ids = self._slice(keys.ACTIVE, "active", _SWEPT)
        read = [(job_id, *own, first) for job_id, own, first in self._facts_of(ids) if isinstance(own, list)]
        self.forget([job_id for job_id, state, _, _ in read if state is None])
        there = [(job_id, tenant, first) for job_id, state, tenant, first in read if state is not None]
        late = {job_id: first for job_id, _, first in there if isinstance(first, float)}
        self._put(late, {job_id: now_ms for job_id, _, first in there if first is None})
        return [
            (job_id, tenants.DEFAULT if tenant is None else tenant.decode(errors="replace"))
            for job_id, tenant, _ in there
        ]

    def _put(self, late: Mapping[str, float], missing: Mapping[str, float]) -> None:
        if not late and not missing:
            return
        with self._connection.client() as client:
            pipe = client.pipeline(transaction=False)
            if late:
                pipe.zadd(keys.UPKEEP, late, lt=True)
            if missing:
                pipe.zadd(keys.UPKEEP, missing, nx=True)
            *_, left_ms, active, names, birth = (
                pipe.pttl(keys.UPKEEP).pttl(keys.ACTIVE).pttl(keys.JOBS).pttl(keys.BIRTH).execute()
            )
            if left_ms == -1:  # It is new. Scripts renew the other keys' lifetimes when this key's is short.
                there = [left for left in (active, names, birth) if left > 0]
                client.pexpire(keys.UPKEEP, min(there, default=keys.UNENDED_TTL_S * 1000))

    def drop_names(self) -> set[str]:
        """Remove jobs that are gone from the list of all jobs: in each round some of the oldest, and some others.

        Returns the queues of those that are not gone.
        """
        with suppress(NotPermitted):  # a process that may not read the list leaves this to others
            with self._connection.client() as client:
                oldest = [job_id.decode() for job_id in client.zrange(keys.JOBS, 0, _NAMES - 1)]
            names = [*oldest, *(self._slice(keys.JOBS, "names", _NAMES) if len(oldest) == _NAMES else [])]
            found = self._connection.ask_each(
                names, lambda pipe, job_id: pipe.hmget(keys.job(job_id), "hardware", "model"), refusals=True
            )
            if gone := [job_id for job_id, facts in zip(names, found, strict=True) if facts == [None] * 2]:
                with self._connection.client() as client:
                    client.zrem(keys.JOBS, *gone)
            routes = [facts for facts in found if isinstance(facts, list) and None not in facts]
            return {keys.queue(*(name.decode(errors="replace") for name in route)) for route in routes}
        return set()

    def _slice(self, members: str, cursor: str, count: int) -> list[str]:
        return [job_id for job_id, _ in next_slice(self._connection, members, cursor, count)]

    def _facts_of(self, ids: Sequence[str]) -> list[tuple[str, Any, object]]:
        """Of each job its id, its state with its tenant, and the end of its first lease."""

        def ask(pipe: Any, job_id: str) -> None:
            pipe.hmget(keys.job(job_id), "state", "tenant")
            pipe.hgetall(keys.owners(job_id))

        answers = self._connection.ask_each(ids, ask, refusals=True)
        return list(zip(ids, answers[::2], map(_first_end, answers[1::2]), strict=True))


def _first_end(owners: object) -> object:
    """The end of the first lease (ms); None if there is none, and what was answered if Redis refused to read them. The
    lease of an owner whose words are damaged has ended."""
    if not isinstance(owners, dict):
        return owners
    ends = [([*owner.split(b" "), *[b""] * 5])[4] for owner in owners.values()]
    return min((float(end) if end.isdigit() else 0.0 for end in ends), default=None)
