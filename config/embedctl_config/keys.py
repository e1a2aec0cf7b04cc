"""Every Redis key, queue name and lifetime. Nothing else spells out a key.

Under ``embed:`` every key has a TTL, so that an abandoned job frees itself. Queues (``embed.…``) are Celery's lists.
"""

from __future__ import annotations

import hashlib

#: What all our keys begin with.
PREFIX = "embed:"

#: Sorted set of job ids that still need a reaper, by creation time in ms.
ACTIVE = "embed:active"

#: Sorted set of all job ids by creation time in ms; one whose job is gone is dropped when somebody looks.
JOBS = "embed:jobs"

#: When this database was first used, in ms since 1970: a job id older than that was lost with an earlier one.
BIRTH = "embed:birth"

#: Sorted set of worker instances by the time in ms until which their heartbeat counts.
WORKERS = "embed:workers"

#: A worker whose heartbeat is older than this is silent: dead, stopped or cut off (seconds).
HEARTBEAT_TTL_S = 15

#: A worker that is gone is remembered for this long: longer than any lease or careful attempt of it may last (seconds).
GONE_TTL_S = 300

#: A result waits this long under its temporary name for `complete` to rename it (seconds).
UNCOMMITTED_TTL_S = 600

#: A producer that is silent for this long has died, and another may take over its job (seconds).
PRODUCER_LEASE_S = 30

#: Lifetime of chunk keys as a multiple of the job's TTL. The reaper renews them every quarter of the TTL while the
#: job is active, so when a job ends each of them has at least one whole TTL left.
CHUNK_TTL_FACTOR = 1.25

#: How many events a job's stream keeps.
EVENTS_KEPT = 256


def reaper(version: int) -> str:
    """String: held by the one process of a version that reaps in this interval. Older ones leave newer jobs alone."""
    return f"embed:reaper:{version}"


def job(job_id: str) -> str:
    """Hash: the job's state, counts and options."""
    return f"embed:job:{job_id}"


def due(job_id: str) -> str:
    """Sorted set: issued chunks by the time in ms at which they need another ticket."""
    return f"embed:job:{job_id}:due"


def owners(job_id: str) -> str:
    """Hash: leased chunk → `token worker-instance`, and the row that a careful worker is at."""
    return f"embed:job:{job_id}:owners"


def attempts(job_id: str) -> str:
    """Hash: issued chunk → how often it was claimed; `CHUNK:deaths` → the deaths of its owners, as JSON."""
    return f"embed:job:{job_id}:attempts"


def reissues(job_id: str) -> str:
    """Hash: issued chunk without owner → how often its ticket was sent again."""
    return f"embed:job:{job_id}:reissues"


def events(job_id: str) -> str:
    """Capped stream: one entry for each chunk that ended and each change of state."""
    return f"embed:job:{job_id}:events"


def counted(job_id: str) -> str:
    """Bitmap: the chunks whose records are counted as done or failed; one bit a chunk."""
    return f"embed:job:{job_id}:counted"


def cursors(job_id: str) -> str:
    """Hash: how far each of the reaper's sweeps over the job's chunks has come."""
    return f"embed:job:{job_id}:cursors"


def producer(job_id: str) -> str:
    """String: the token of the producer that is submitting the job."""
    return f"embed:job:{job_id}:producer"


def chunk_input(job_id: str, chunk: int | str) -> str:
    """String: a chunk's input in wire format."""
    return f"embed:job:{job_id}:in:{chunk}"


def chunk_result(job_id: str, chunk: int | str) -> str:
    """String: a chunk's result in wire format."""
    return f"embed:job:{job_id}:out:{chunk}"


def retry_pointer(job_id: str, chunk: int | str) -> str:
    """String: the chunk into which a chunk's failed records were put to be tried again."""
    return f"embed:job:{job_id}:retry:{chunk}"


def uncommitted_result(job_id: str, chunk: int, token: str) -> str:
    """String: a result that `complete` has not yet renamed."""
    return f"embed:job:{job_id}:out:{chunk}:{token}"


def idempotency(key: str) -> str:
    """String: the job id made with this idempotency key. The key is hashed: it may be long, or private."""
    return f"embed:idempotency:{hashlib.sha256(key.encode()).hexdigest()}"


def heartbeat(instance: str) -> str:
    """String: what a worker instance says of itself, as JSON."""
    return f"embed:worker:{instance}"


#: In the place of a death: the worker stopped as it was told to, and what it could not give back blames nobody.
LEFT = "left"


def died(instance: str) -> str:
    """String: how a worker instance is known to have died, or :data:`LEFT`."""
    return f"embed:died:{instance}"


def machine(machine_id: str) -> str:
    """Hash: worker instances of one machine → process. Whoever runs there too sees which of them still do."""
    return f"embed:machine:{machine_id}"


def queue_workers(queue: str) -> str:
    """Sorted set: worker instances that consume a queue, by the time in ms until which their heartbeat counts."""
    return f"embed:queue:{queue}:workers"


def queue(hardware: str, model: str) -> str:
    """The Celery queue of a hardware class and a model."""
    return f"embed.{hardware}.{model}"


def of_job(job_id: str) -> list[str]:
    """The keys that every script is given first, in the order in which `prelude.lua` names them."""
    return [
        job(job_id),
        ACTIVE,
        due(job_id),
        owners(job_id),
        attempts(job_id),
        reissues(job_id),
        events(job_id),
        counted(job_id),
    ]
