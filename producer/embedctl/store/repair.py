"""Makes every index again from the records: `embedctl repair`.

The records are hashes: those of jobs, of tenants' limits, and of the gateway's files, batches and events. Everything
that names several of them, or a job's chunks in some order, follows from them. Live workers list themselves with each
heartbeat, every two seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from embedctl.store.connection import Connection
from embedctl.store.quotas import Quotas
from embedctl.store.scripts import ScriptCall
from embedctl.store.upkeep import AUDIT_AFTER_S, ActiveJob, Looked, Upkeep
from embedctl_config import keys
from embedctl_config.errors import BrokerRefused

#: Keys that Redis looks at in one call.
_SCANNED = 1000


@dataclass(frozen=True, slots=True)
class Repaired:
    """What a step put right.

    Attributes:
        jobs, others: records that are listed now: of jobs; and limits, files, batches and events.
        again: chunks that nobody had and that were not ready; they are now.
        lost: chunks whose text and result are gone.
        unreadable: job → why it is left as it is.
    """

    jobs: int
    others: int
    again: int
    lost: int
    unreadable: Mapping[str, str]


class Repair:
    """Each call is bounded, and may be made again: so a repair may be killed, and run beside others and everybody else.

    Raises BrokerUnavailable if Redis can't be reached, and NotPermitted if this user of Redis may not scan it.
    """

    def __init__(self, connection: Connection, upkeep: Upkeep, quotas: Quotas) -> None:
        self._connection = connection
        self._upkeep = upkeep
        self._quotas = quotas

    def steps(self) -> Iterator[Repaired]:
        """Go through the database once, some keys at a step. What is made meanwhile lists itself."""
        cursor = None
        while cursor != 0:
            with self._connection.client() as client:
                cursor, found = client.scan(cursor or 0, match="embed:*", count=_SCANNED, _type="hash")
            names = [name.decode(errors="replace") for name in found]
            limited = _after(keys.QUOTA, names)
            self._quotas.list_again(limited)
            others = len(limited) + self._list_others(names)
            yield self._jobs([name for name in _after(keys.job(""), names) if keys.is_job_id(name)], others)

    def _list_others(self, names: Sequence[str]) -> int:
        calls = [
            ScriptCall("relist_made", [keys.webhook_event(name), keys.UNTOLD], [name])
            for name in _after(keys.webhook_event(""), names)
        ]
        for key, set_of in ((keys.file, keys.files), (keys.batch, keys.batches)):
            made = {key(name): name for name in _after(key(""), names)}
            tenants_of = self._connection.ask_each(made, lambda pipe, record: pipe.hget(record, "tenant"))
            calls += [
                ScriptCall("relist_made", [record, set_of(tenant.decode())], [made[record]])
                for record, tenant in zip(made, tenants_of, strict=True)
                if tenant is not None  # it is gone by now
            ]
        self._connection.scripts(calls)
        return len(calls)

    def _jobs(self, job_ids: Sequence[str], others: int) -> Repaired:
        read = zip(job_ids, self._upkeep.read(job_ids), strict=True)
        found = {job_id: job for job_id, job in read if job is not None}
        answers = self._connection.scripts([ScriptCall("relist", [keys.job(each)], [each]) for each in found])
        unreadable = {
            job_id: str(each)
            for job_id, *both in zip(found, found.values(), answers, strict=True)
            for each in both
            if isinstance(each, Exception)
        }
        left = [
            replace(job, audit_at=0)
            for job in found.values()
            if isinstance(job, ActiveJob) and job.id not in unreadable and not job.state.ended
        ]
        self._quotas.note_jobs([*found])
        again = lost = 0
        positions: dict[str, int] = {}
        while left:
            for job, looked in zip(left, self._look(left), strict=True):
                error = looked if isinstance(looked, Exception) else looked.refused
                if error is not None:
                    unreadable[job.id] = str(error)
                if isinstance(looked, Looked):
                    again, lost = again + len(looked.again) + looked.found, lost + looked.lost
                    positions[job.id] = looked.audit_at
            left = [replace(job, audit_at=at) for job in left if (at := positions.pop(job.id, 0))]
        return Repaired(len(found) - len(unreadable), others, again, lost, unreadable)

    def _look(self, jobs: Sequence[ActiveJob]) -> Sequence[Looked | BrokerRefused]:
        """Let chunks be taken whose owners died, and audit a slice of each job, which lists it."""
        return self._upkeep.look(
            jobs,
            audited=[True] * len(jobs),
            interval_ms=keys.LOOK_AFTER_S * 1000,
            audit_after_ms=int(AUDIT_AFTER_S * 1000),
            only_dead=True,  # Redis may have come back a moment ago, and owners are not back yet
        )


def _after(prefix: str, names: Sequence[str]) -> list[str]:
    """What follows a prefix in those names that have it."""
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
