"""The limits of tenants. Workers state them, the scripts enforce them, and whoever meets a wrong count corrects it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from embedctl.chunk_files import ChunkFiles
from embedctl.store.connection import Connection
from embedctl.store.scripts import KEPT_PART, ScriptCall
from embedctl.store.sweeps import next_slice
from embedctl_config import keys, tenants
from embedctl_config.errors import QuotaExceeded
from embedctl_config.tenants import LIMITS, RATES, TenantEntry

#: A worker that has stated nothing for this long no longer decides (seconds).
SILENT_S = 120.0
#: Jobs of one tenant that are corrected at once.
_SLICE = 100
#: Slices that are corrected before a new job is refused.
_MOST_SLICES = 10
#: Between two corrections for one tenant (seconds).
_PAUSE_S = 0.5
#: Tenants that are corrected in one round of the reaper.
_TENANTS = 20
#: The scripts that correct what is noted of a tenant's jobs, and where it is noted.
_CORRECTED = (("tally", keys.quota), ("recount", keys.kept))
#: The name of the bound of what a tenant of a gateway keeps, which is in no settings.
KEPT = "max_kept_bytes"
_WHAT = dict(zip(LIMITS, ("jobs that have not ended", "waiting records", "bytes of waiting text"), strict=True))
_IN_A_SECOND = dict(zip(RATES, ("jobs and requests", "texts"), strict=True))


@dataclass(frozen=True, slots=True)
class Quota:
    """A tenant's limits by name, which are in the settings of the worker `by`, and what it has of each that is no rate,
    as noted."""

    tenant: str
    by: str
    limits: Mapping[str, int]
    used: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Overruled:
    """Another weight and other limits of a tenant hold: those of a worker that was started later."""

    by: str
    values: tuple[float, ...]


class Quotas:
    """What Redis holds of the limits of tenants. Every method raises BrokerUnavailable if Redis can't be reached."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        #: Tenant → when what is noted of its jobs was corrected last.
        self._corrected: dict[str, float] = {}

    def state(self, tenant: str, entry: TenantEntry, *, by: str, since_ms: int) -> Overruled | None:
        """State a tenant's weight and limits. Returns what holds instead, if another worker decides; else None.

        Args:
            by: the name of the worker that states them.
            since_ms: when it was started, by Redis' clock: the worker that was started last decides.
        """
        stated = [entry.weight, *entry.limits.values()]
        args = [tenant, since_ms, by, keys.QUOTA_TTL_S * 1000, int(SILENT_S * 1000), *stated]
        answer, rest = self._connection.script("quota", [keys.quota(tenant), keys.QUOTAS], args)
        return None if answer == "ok" else Overruled(rest[0].decode(), tuple(float(each or 0) for each in rest[1:]))

    def correct(self, tenant: str) -> None:
        """Correct what is noted of a tenant's jobs: of all of them, or of as many as can be done at once. Refusals that
        follow one another ask for it, so it is done twice in a second at most."""
        now = time.monotonic()
        if now - self._corrected.get(tenant, -math.inf) < _PAUSE_S:
            return
        self._corrected[tenant] = now
        for script, key in _CORRECTED:
            ends = 0
            for _ in range(_MOST_SLICES):
                answer, rest = self._connection.script(script, [key(tenant)], [tenant, _SLICE])
                ends += 2 if answer == "none" else rest[0]
                if ends >= 2:  # the first slice was perhaps not the first of all
                    break

    def round(self, jobs: Sequence[tuple[str, str]]) -> None:
        """Correct a part of what is noted: of these active jobs (id, tenant), and of a slice of some tenants' jobs."""
        named: dict[str, list[str]] = {
            tenant: [] for tenant, _ in next_slice(self._connection, keys.QUOTAS, "quotas", _TENANTS)
        }
        of_jobs = sorted({tenant for _, tenant in jobs})
        stated = self._connection.ask_each(of_jobs, lambda pipe, tenant: pipe.zscore(keys.QUOTAS, tenant))
        named |= {tenant: [] for tenant, since in zip(of_jobs, stated, strict=True) if since is not None}
        for job_id, tenant in jobs:
            if tenant in named:
                named[tenant].append(job_id)
        self._tally(named)

    def list_again(self, stated: Sequence[str]) -> None:
        """List tenants whose limits workers have stated."""
        times = self._connection.ask_each(stated, lambda pipe, tenant: pipe.hget(keys.quota(tenant), "stated"))
        if since := {tenant: float(at) for tenant, at in zip(stated, times, strict=True) if at is not None}:
            with self._connection.client() as client:
                pipe = client.pipeline(transaction=False).zadd(keys.QUOTAS, since, nx=True)
                pipe.pexpire(keys.QUOTAS, keys.QUOTA_TTL_S * 1000).execute()

    def note_jobs(self, job_ids: Sequence[str]) -> None:
        """Correct what is noted of these jobs."""
        found = self._connection.ask_each(job_ids, lambda pipe, job_id: pipe.hget(keys.job(job_id), "tenant"))
        named: dict[str, list[str]] = {}
        for job_id, tenant in zip(job_ids, found, strict=True):
            named.setdefault(tenants.DEFAULT if tenant is None else tenant.decode(errors="replace"), []).append(job_id)
        self._tally(named)

    def note(self, tenant: str, job_ids: Sequence[str]) -> None:
        """Correct what is noted of these jobs of a tenant, which may be gone."""
        self._tally({tenant: job_ids})

    def _tally(self, named: Mapping[str, Sequence[str]]) -> None:
        self._connection.scripts(
            [
                ScriptCall(script, [key(tenant)], [tenant, _SLICE, *ids])
                for tenant, ids in named.items()
                for script, key in _CORRECTED
            ]
        )

    def all(self, most: int) -> list[Quota]:
        """The tenants whose limits workers have stated, at most so many."""
        with self._connection.client() as client:
            stated = [tenant.decode() for tenant in client.zrange(keys.QUOTAS, 0, most - 1)]
        limits_of = (*LIMITS, *RATES)
        asked = ("by", "jobs", "records", "bytes", *limits_of)
        answers = self._connection.ask_each(stated, lambda pipe, tenant: pipe.hmget(keys.quota(tenant), *asked))
        found = []
        for tenant, (by, *facts) in zip(stated, answers, strict=True):
            if by is not None:
                values = [int(fact or 0) for fact in facts]
                limits = {name: value for name, value in zip(limits_of, values[3:], strict=True) if value}
                found.append(Quota(tenant, by.decode(), limits, dict(zip(LIMITS, values[:3], strict=True))))
        return found


def kept_most(connection: Connection, files: ChunkFiles) -> int:
    """Most bytes that a tenant keeps through gateways: half of Redis, or 1 TiB outside of it."""
    return (0 if files.is_outside else connection.maxmemory() // 2) or keys.KEPT_BYTES


def is_rate(rest: Sequence[Any]) -> bool:
    """Whether a script's answer `full` is about what a tenant may begin in a second."""
    return rest[0].decode() in RATES


def larger_than_kept(tenant: str, needed: int, most: int) -> QuotaExceeded:
    """The error for a job, or a batch, that would need more than its tenant may keep if that had nothing else."""
    parts = math.ceil(needed / (most * KEPT_PART))
    return QuotaExceeded(
        f"it would need at least {needed:,} bytes with its file and its results, and tenant {tenant} keeps at most "
        f"{most:,} in jobs and files, the last tenth for others ({KEPT}): divide it into at least {parts}, and delete "
        "what one has given before the next; or give Redis more maxmemory, or chunk_files",
        tenant=tenant,
        limit=KEPT,
        most=most,
        used=needed,
        is_final=True,
    )


def exceeded(tenant: str, rest: Sequence[Any]) -> QuotaExceeded:
    """The error for a script's answer `full`."""
    limit, most, used = rest[0].decode(), int(rest[1]), int(rest[2])
    if len(rest) > 4:
        return larger_than_kept(tenant, int(rest[4]), most)
    if limit in RATES:
        after_s = used / 1000
        return QuotaExceeded(
            f"tenant {tenant} begins at most {most:,} {_IN_A_SECOND[limit]} in a second ({limit}): try again in "
            f"{after_s:.3g} s, or raise the limit in the settings of the workers",
            tenant=tenant,
            limit=limit,
            most=most,
            used=most,
            after_s=after_s,
        )
    if limit == KEPT:
        message = (
            f"tenant {tenant} keeps {used:,} of at most {most:,} bytes in jobs and files ({limit}), with what its "
            "waiting texts will give: fetch and discard jobs, delete files, or wait; or give Redis more maxmemory, or "
            "chunk_files"
        )
        return QuotaExceeded(message, tenant=tenant, limit=limit, most=most, used=used)
    return QuotaExceeded(
        f"tenant {tenant} has {used:,} of at most {most:,} {_WHAT[limit]} ({limit}): wait until some are done, discard "
        f"jobs (`embedctl list --tenant {tenant}`), or raise the limit in the settings of the workers",
        tenant=tenant,
        limit=limit,
        most=most,
        used=used,
    )
