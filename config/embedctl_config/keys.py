"""Every Redis key, queue name and lifetime. Nothing else spells out a key.

Under ``embed:`` every key has a TTL, so that an abandoned job frees itself. Queues (``embed.…``) are Celery's lists.

Each key declares the roles that use it. `embedctl config acl` makes Redis' access list from these declarations.
"""

from __future__ import annotations

import calendar
import hashlib
import inspect
import json
import re
import time
from collections.abc import Callable
from typing import TypeVar

from embedctl_config.tenants import DEFAULT

#: Job ids as a pattern for Redis' access lists. Its length is fixed: a role that may read a job's hash must not match
#: the keys of the job's chunks, which begin with the hash's key.
JOB_IDS = "????????-??????-??????????"
_JOB_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{10}")

#: A producer submits and fetches, a worker encodes, and a monitor sees jobs and workers, but no text and no vector.
_PRODUCER, _WORKER, _MONITOR = "producer", "worker", "monitor"

#: Every key, as a pattern for Redis' access lists → the roles that use it.
ACCESS: dict[str, tuple[str, ...]] = {}

F = TypeVar("F", bound=Callable[..., str])


def _shared(key: str, *roles: str) -> str:
    """Declare a key that exists once."""
    ACCESS[key] = roles
    return key


def _used_by(*roles: str, pattern: str = "") -> Callable[[F], F]:
    """Declare the roles that use the keys of a function. Unless a pattern is given, it is the result for wildcards."""

    def declare(function: F) -> F:
        wildcards = [JOB_IDS if name == "job_id" else "*" for name in inspect.signature(function).parameters]
        ACCESS[pattern or function(*wildcards)] = roles
        return function

    return declare


def _of_each(prefix: str, *roles: str) -> Callable[[str], str]:
    """Declare a key that exists for each queue, tenant, worker, file or the like, whose name ends it."""

    @_used_by(*roles)
    def key(name: str) -> str:
        return f"{prefix}{name}"

    return key


def _of_job(rest: str, *roles: str) -> Callable[[str], str]:
    """Declare a key that exists for each job."""

    @_used_by(*roles)
    def key(job_id: str) -> str:
        return f"embed:job:{job_id}{rest}"

    return key


def _of_chunk(kind: str, *roles: str) -> Callable[[str, int | str], str]:
    """Declare a key that exists for each chunk of a job."""

    @_used_by(*roles)
    def key(job_id: str, chunk: int | str) -> str:
        return f"embed:job:{job_id}:{kind}:{chunk}"

    return key


#: Sorted set of job ids that still need the reaper, by creation time in ms.
ACTIVE = _shared("embed:active", _PRODUCER, _WORKER, _MONITOR)

#: Sorted set of all job ids by creation time in ms. The id of a job that is gone is dropped at the next look.
JOBS = _shared("embed:jobs", _PRODUCER, _WORKER, _MONITOR)

#: When this database was first used, in ms since 1970. A job with an older id was lost with an earlier database.
BIRTH = _shared("embed:birth", _PRODUCER, _WORKER, _MONITOR)

#: Sorted set of worker instances by the expiry of their heartbeats in ms.
WORKERS = _shared("embed:workers", _PRODUCER, _WORKER, _MONITOR)

#: Sorted set of workers that are not ready, by when what they said is out of date, in ms.
STARTING = _shared("embed:workers:starting", _PRODUCER, _WORKER, _MONITOR)

#: A worker whose heartbeat is older than this is silent: dead, stopped or cut off (seconds).
HEARTBEAT_TTL_S = 15

#: A worker that is gone is remembered for this long: longer than its leases and careful attempts can last (seconds).
GONE_TTL_S = 300

#: A result waits this long under its temporary name for `complete` to rename it (seconds).
UNCOMMITTED_TTL_S = 600

#: A producer that is silent for this long counts as dead, and another may take over its job (seconds).
PRODUCER_LEASE_S = 30

#: A drainer that is silent for this long counts as dead, and another may take over (seconds).
DRAINER_LEASE_S = 30

#: A job that has not ended is kept for at least this long after its last progress (seconds). Its TTL may be shorter,
#: because it counts from the job's end.
UNENDED_TTL_S = 7 * 24 * 3600

#: A job without a chunk is kept for this long after its producer's last word (seconds). Nobody misses it: the same
#: submission makes another one.
UNBEGUN_TTL_S = 600

#: Lifetime of chunk keys as a multiple of the job's lifetime. While the job is active, the reaper renews them every
#: quarter of the job's lifetime. So when the job ends, each of them has at least one whole TTL left.
CHUNK_TTL_FACTOR = 1.25

#: The event stream of an ended job lives this long; every process that waits sees the end within a second (seconds).
ENDED_EVENTS_S = 60

#: The reaper looks at a job at most this long after a chunk of it was added or taken (seconds): Redis may have lost its
#: place in the lists of turns.
LOOK_AFTER_S = 5

#: How many events a job's stream keeps.
EVENTS_KEPT = 256


#: String: held by the one process that reaps in this interval.
REAPER = _shared("embed:reaper:turn", _PRODUCER, _WORKER)

#: Sorted set of active jobs by the time of the reaper's next look in ms.
UPKEEP = _shared("embed:reaper:due", _PRODUCER, _WORKER)


# Whose turn it is in a queue. Each begins the keys of queues, lanes, kinds and tenants; see `turns.lua`.

#: Sorted set: lanes of a queue, by the work that they had, divided by their parts of the queue.
_LANES = "embed:turns:lanes:"
#: Set: the lists of tenants that a queue had, as `LANE:KIND`. A kind is a precision, a wire version, and the
#: fingerprint that jobs are pinned to, or `*`; or such a kind after `apart:`.
_KINDS = "embed:turns:kinds:"
#: Sorted set: tenants that have jobs with ready chunks, by the work that they had, divided by their weights.
_FLOWS = "embed:turns:flows:"
#: Sorted set: the same for tenants that have none, if they had more than the one whose turn it was last.
_SERVED = "embed:turns:served:"
#: Hash: lane → the work that the tenant whose turn it was last had had.
_LEVELS = "embed:turns:levels:"
#: Sorted sets: jobs with ready chunks, by the chunks that are left of them, and by when they were listed in ms.
_LEFT, _WAIT = "embed:turns:left:", "embed:turns:wait:"
#: String: exists while the background lane of a queue need not have a turn.
_PAUSE = "embed:turns:pause:"
#: String: how many bells were rung.
_BELLS = "embed:turns:bells"
#: What the keys of turns begin with, in the order of their names in the scripts.
TURNS = (_LANES, _KINDS, _FLOWS, _SERVED, _LEVELS, _LEFT, _WAIT, _PAUSE, _BELLS)

turns = _of_each("embed:turns:", _PRODUCER, _WORKER)

#: String: the chunks that a call for the next ones was given, `job chunk` each, in case that its answer was lost.
given = _of_each("embed:turns:given:", _PRODUCER, _WORKER)

#: What the keys of tenants' quotas begin with.
QUOTA = "embed:reaper:quota:"

#: Sorted set of the tenants that have limits, by the time in ms when a worker last stated them.
QUOTAS = _shared("embed:reaper:quotas", _PRODUCER, _WORKER, _MONITOR)


#: String: exists while no further worker with the same limits need state them.
stating = _of_each("embed:reaper:stating:", _WORKER)

#: A tenant's limits hold for this long after a worker last stated them (seconds).
QUOTA_TTL_S = 7 * 24 * 3600


#: Hash: a tenant's limits, who stated them, what is noted of each of its jobs, and the sums of that.
quota = _of_each(QUOTA, _PRODUCER, _WORKER, _MONITOR)

#: Hash: what counts as kept of each job that a tenant has through gateways, in bytes; the `sum` of that; and a cursor.
kept = _of_each("embed:reaper:kept:", _PRODUCER, _WORKER)

#: Hash: notes of one round of the reaper for the next: the positions of its sweeps, and which places are known.
NOTES = _shared("embed:reaper:notes", _PRODUCER, _WORKER)

#: String: held by the one process that sweeps the bytes outside of Redis.
SWEEP = _shared("embed:reaper:data", _PRODUCER, _WORKER)

#: Lifetime of the reaper's notes (seconds).
NOTES_TTL_S = 24 * 3600

#: Sorted set of queues by the time when a job of them was last seen, in ms.
QUEUES = _shared("embed:reaper:queues", _PRODUCER, _WORKER)

#: An empty queue is forgotten this long after its last job was seen: no process that worked on the job then can still
#: ring (seconds).
QUEUE_KEPT_S = 7 * 24 * 3600

#: The queues are remembered for this long where nobody uses embedctl (seconds).
QUEUES_TTL_S = 365 * 24 * 3600


#: Hash: the job's state, counts and options.
job = _of_job("", _PRODUCER, _WORKER, _MONITOR)

#: Hash: leased chunk → `token worker-instance work claims end`, and the current row of a worker in careful mode. The
#: work is an estimate, in tokens; the claims are how often the chunk was claimed; the end is that of the lease, in ms.
owners = _of_job(":owners", _PRODUCER, _WORKER)

#: Hash: chunk that was given back → how often it was claimed; `CHUNK:deaths` → the deaths of its owners, as JSON;
#: `CHUNK:doubts` → what owners could not do with it, as JSON; `CHUNK:not` → the worker that leaves it to others, and
#: until when.
attempts = _of_job(":attempts", _PRODUCER, _WORKER, _MONITOR)

#: Sorted set: chunks that were given back, by the time in ms when they may be taken again.
ready = _of_job(":ready", _PRODUCER, _WORKER)

#: Sorted set: the same for chunks whose owners died.
suspects = _of_job(":suspects", _PRODUCER, _WORKER)

#: Capped stream: one entry for each chunk that ended and each change of state.
events = _of_job(":events", _PRODUCER, _WORKER)

#: Bitmap: the chunks whose records are counted as done or failed; one bit per chunk.
counted = _of_job(":counted", _PRODUCER, _WORKER)

#: Hash: the positions of the reaper's sweeps over the job's chunks.
cursors = _of_job(":cursors", _PRODUCER, _WORKER)

#: String: the token of the producer that is submitting the job.
producer = _of_job(":producer", _PRODUCER, _WORKER, _MONITOR)

#: String: a chunk's input in wire format.
chunk_input = _of_chunk("in", _PRODUCER, _WORKER)

#: String: a chunk's result in wire format.
chunk_result = _of_chunk("out", _PRODUCER, _WORKER)

#: Bitmap: the chunks whose results a durable part holds, outside of Redis; one bit per chunk.
drained = _of_job(":out:drained", _PRODUCER, _WORKER)

#: Hash: the name of a durable part → its facts, as JSON.
parts = _of_job(":out:parts", _PRODUCER, _WORKER)

#: String: the digests of the drained chunks, 16 bytes each, so that a changed corpus is still detected.
digests = _of_job(":out:digests", _PRODUCER, _WORKER)

#: String: `token machine process host` of the process that drains the job.
drainer = _of_job(":out:drainer", _PRODUCER, _WORKER)

#: String: the chunk that retries a chunk's failed records.
retry_pointer = _of_chunk("retry", _PRODUCER, _WORKER)


@_used_by(_WORKER)
def uncommitted_result(job_id: str, chunk: int, token: str) -> str:
    """String: a result that `complete` has not yet renamed."""
    return f"embed:job:{job_id}:out:{chunk}:{token}"


@_used_by(_PRODUCER, _WORKER, pattern="embed:idempotency:*")
def idempotency(key: str, tenant: str = DEFAULT) -> str:
    """String: the job id made with this idempotency key. The key is hashed: it may be long, or private.

    Two tenants may use the same key.
    """
    return f"embed:idempotency:{_hashed(tenant, key)}"


def _hashed(tenant: str, name: str) -> str:
    return hashlib.sha256(json.dumps([tenant, name]).encode()).hexdigest()


#: String: a worker instance's heartbeat, as JSON.
heartbeat = _of_each("embed:worker:", _PRODUCER, _WORKER, _MONITOR)

#: String: what a worker that is not ready does, as JSON.
starting = _of_each("embed:starting:", _PRODUCER, _WORKER, _MONITOR)

# What the gateway keeps. The parts of a file are results of an id that has the form of a job's, and that no job has: so
# access lists permit them, and what sweeps the bytes outside of Redis knows them.

#: Lifetime of a file, and of a batch after its end (seconds).
FILE_TTL_S = 30 * 24 * 3600

#: Lifetime of the parts of a file that is not complete yet (seconds).
UNFINISHED_FILE_TTL_S = 2 * 3600

#: A second request to make the same file or batch is recognised for this long (seconds).
MADE_TTL_S = 600

#: A process that runs a batch and is silent for this long counts as dead, and another one may resume it (seconds).
BATCH_LEASE_S = 30

#: A batch that has not ended by then expires (seconds).
BATCH_WINDOW_S = 24 * 3600

#: The answers of a batch that ends are to be written in this time; then it ends without them (seconds). Outages of an
#: afternoon fit into it, and results of the batch's job are there for longer.
BATCH_END_S = 6 * 3600

#: A step of Redis' clock counts for the deadlines of batches as this at most (seconds): gateways look more often.
CLOCK_STEP_S = 10


#: Hash: the facts of a file.
file = _of_each("embed:file:", _PRODUCER)

#: Sorted set: the ids of a tenant's files, which begin with their time, all with the same score.
files = _of_each("embed:files:", _PRODUCER)

#: Hash: the facts of a batch, and the token of the process that runs it.
batch = _of_each("embed:batch:", _PRODUCER)

#: Sorted set: the ids of a tenant's batches, which begin with their time, all with the same score.
batches = _of_each("embed:batches:", _PRODUCER)

#: Sorted set of a tenant's batches that have not ended, by the time in ms when somebody is to look at them.
unfinished = _of_each("embed:batches_unfinished:", _PRODUCER)

#: Sorted set of the tenants that have such batches, by the time in ms when one of them last had a turn.
BATCH_TURNS = _shared("embed:batches_turns", _PRODUCER)

#: Sorted set of the same batches by the deadline of their state, in ms by the time of the ledger.
DEADLINES = _shared("embed:batches_deadlines", _PRODUCER)

#: What gateways hold of the room that all of them share: sums by kind and tenant, the gateways by the ends of their
#: leases, what each of them holds, and tenants by when they last asked. And the bytes that each tenant keeps in files.
ledger = _of_each("embed:ledger:", _PRODUCER)

#: A gateway that is silent for this long holds no room any more (seconds).
LEDGER_LEASE_S = 30

#: A tenant that asked so lately counts as one that asks: refused callers come again sooner (seconds).
LATELY_S = 10

#: Most files, and most batches, that a tenant keeps; more than a list of files has.
KEPT_MOST = 20_000

#: Most bytes of a tenant's files outside of Redis. In Redis, they are half of its maxmemory.
KEPT_BYTES = 2**40

#: Files up to this size may use the last part of what a tenant may keep (bytes).
SMALL_FILE_BYTES = 1024 * 1024

#: This part of all room is kept for tenants below their share.
RESERVE = 8

#: Hash: Redis' time when it was last looked at for deadlines, and the time of the ledger, both in ms.
CLOCK = _shared("embed:batches_clock", _PRODUCER)


#: Lifetime of an event that is to be told: longer than all tries (seconds).
EVENT_TTL_S = 7 * 24 * 3600


#: Hash: the facts of an event that a webhook is to tell, and the token of the process that tells it.
webhook_event = _of_each("embed:webhook:", _PRODUCER)

#: Sorted set of the events that are to be told, by the time in ms of their next try.
UNTOLD = _shared("embed:webhooks_untold", _PRODUCER)


#: String: the file or the batch that a request has made, and whether that request was a further try, and its digest.
made = _of_each("embed:made:", _PRODUCER)

#: Stored in place of a death: the worker stopped on request. Chunks that it could not give back do not become suspect.
LEFT = "left"


#: String: how a worker instance is known to have died, or :data:`LEFT`.
died = _of_each("embed:died:", _PRODUCER, _WORKER, _MONITOR)

#: String: the watched job whose chunks a worker instance has, since when, and one that waits for the worker.
watched = _of_each("embed:watched:", _PRODUCER, _WORKER)

#: Hash: what deaths of a queue's workers say of a tenant's jobs, as the fields of a job say it of that job.
faults = _of_each("embed:faults:", _PRODUCER, _WORKER)

#: Hash: worker instances of one machine → process. Other processes of that machine can see which of them run.
machine = _of_each("embed:machine:", _PRODUCER, _WORKER)


#: What the keys about a queue begin with.
QUEUE_KEY = "embed:queue:"


@_used_by(_PRODUCER, _WORKER, _MONITOR)
def queue_workers(queue: str) -> str:
    """Sorted set: worker instances that consume a queue, by the expiry of their heartbeats in ms."""
    return f"{QUEUE_KEY}{queue}:workers"


@_used_by(_PRODUCER, _WORKER)
def queue_quarantine(queue: str) -> str:
    """Sorted set: workers that take what may kill a worker, by the expiry of their heartbeats in ms."""
    return f"{QUEUE_KEY}{queue}:quarantine"


@_used_by(_PRODUCER, _WORKER, _MONITOR)
def queue(hardware: str, model: str) -> str:
    """The Celery queue of a hardware class and a model."""
    return f"embed.{hardware}.{model}"


#: The one Celery task, which a bell asks for: take what is next in this queue.
TASK = "embedctl.encode"
#: Kombu's keys for messages that workers have received and not yet handled. Their names are ours, because each Celery
#: application that uses the usual ones gives back the others' messages as well.
UNACKED = _shared("embed:celery:unacked", _WORKER)
UNACKED_INDEX = _shared("embed:celery:unacked_index", _WORKER)
UNACKED_MUTEX = _shared("embed:celery:unacked_mutex", _WORKER)

#: Kombu's keys that describe a queue, without its name. Nothing reads them to ring or to hear a bell.
BINDINGS = ("_kombu.binding", "_kombu.binding_permanent")


def is_job_id(text: str) -> bool:
    """Whether a text has the form of a job's id. Any other text never becomes part of a key."""
    return _JOB_ID.fullmatch(text) is not None


def patterns_of(role: str) -> list[str]:
    """The keys of a role, as patterns for Redis' access lists."""
    return [pattern for pattern, roles in ACCESS.items() if role in roles]


def created_s(job_id: str) -> int:
    """When a job was made, in seconds since 1970, from its id; raises ValueError for another text."""
    if not is_job_id(job_id):
        raise ValueError(f"{job_id!r} is not the id of a job")
    return calendar.timegm(time.strptime(job_id[:15], "%Y%m%d-%H%M%S"))


def of_queue(name: str) -> tuple[str, str]:
    """The hardware class and the model in a queue's name. The name of a class has no dot; that of a model may have."""
    hardware, _, model = name.removeprefix("embed.").partition(".")
    return hardware, model
