"""A producer and a worker in single steps, so that a test may stop between any two steps."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar, cast

import redis as redis_py

from embedctl.chunk_files import Where
from embedctl.queueing.broker import Broker
from embedctl.queueing.reaper import Reaper
from embedctl.store import Added, Claim, Claimant, Completed, JobSpec, ServedModel, WorkerRow
from embedctl.store.connection import Connection
from embedctl.store.upkeep import AUDIT_AFTER_S, _audit_call
from embedctl_config import keys, wire
from embedctl_config.fingerprint import job_fingerprint
from embedctl_config.tenants import DEFAULT, NORMAL
from embedctl_config.wire import ChunkInput, ChunkResult, ErrorCode, RecordError
from tests.support.waiting import eventually

if TYPE_CHECKING:
    import pytest

QUEUE = "embed.dummy.dummy"
MINE, OTHER = "aa" * 32, "bb" * 32
OPTIONS = {"prompt": None, "long": "cut", "normalize": True, "chunk_size": 2, "chunk_bytes": 1024}
DIM = 3
TTL_S = 1000.0
#: The names of round trips, their seconds, and whether Redis answered.
Trips = list[tuple[str, float, bool]]


T = TypeVar("T")


def some(found: T | None) -> T:
    """What was found, which must be there."""
    assert found is not None
    return found


def spec(**changes: Any) -> JobSpec:
    plain: dict[str, Any] = {
        "model": "dummy",
        "hardware": "dummy",
        "precision": "fp32",
        "options": OPTIONS,
        "ttl_s": TTL_S,
    }
    return JobSpec(**{**plain, **changes})


def payload(index: int, *, word: str = "text") -> bytes:
    """A chunk of two records."""
    texts = [f"{word} {index} {row}".encode() for row in range(2)]
    return wire.encode_input(ChunkInput(2 * index, bytes(2), texts))


def add(broker: Broker, job_id: str, index: int, *, word: str = "text", token: str = "p") -> tuple[Added, int]:
    data = payload(index, word=word)
    value = _put(broker, Where(job_id, "in", index), data)
    return broker.jobs.add(job_id, index, value, digest=wire.digest_of(data), rows=2, token=token)


def new_job(broker: Broker, chunks: int = 2, *, seal: bool = True, **changes: Any) -> str:
    job_id, created = broker.jobs.create(spec(**changes))
    assert created
    for index in range(chunks):
        assert add(broker, job_id, index)[0] is Added.OK
    if seal:
        broker.jobs.seal(job_id, chunks)
    return job_id


def take(
    broker: Broker, token: str = "t", *, instance: str = "w", fingerprint: str = MINE, queue: str = QUEUE
) -> Claim | None:
    """What a worker is given at a bell: the chunk whose turn it is; None if there is none for it."""
    given = broker.jobs.next(queue, token, Claimant(instance, fingerprint, "fp32"))
    return given.claims[0] if given.claims else None


def take_all(broker: Broker) -> list[int]:
    """Take chunks of a queue until there is none; returns their numbers."""
    claims = iter(lambda: take(broker, secrets.token_hex(4)), None)
    return [each.chunk for each in claims if each is not None]


def claim(broker: Broker, job_id: str, chunk: int, token: str = "t", **by: str) -> Claim | None:
    """The same, where it is made the turn of this chunk, if that is ready; never the answer of an earlier call."""
    with broker.connection.client() as client:
        client.unlink(keys.given(token))
    bring_forward(broker, job_id, chunk)
    found = take(broker, token, **by)
    assert found is None or (found.job_id, found.chunk) == (job_id, chunk)
    return found


def bring_forward(broker: Broker, job_id: str, chunk: int) -> None:
    """Put a job before others of its tenant, and a chunk of it that is ready before its others."""
    now_ms = broker.connection.now_ms()
    with broker.connection.client() as client:
        if client.type(keys.job(job_id)) != b"hash" or client.type(keys.ready(job_id)) not in (b"zset", b"none"):
            return
        facts = {name.decode(): value.decode() for name, value in client.hgetall(keys.job(job_id)).items()}
        first, added = (int(facts.get(name, 0)) for name in ("next", "added"))
        ready, suspect = (client.zscore(key(job_id), chunk) for key in (keys.ready, keys.suspects))
        leased = client.type(keys.owners(job_id)) == b"hash" and client.hexists(keys.owners(job_id), chunk)
        if not leased and suspect is None and (first < chunk < added if ready is None else ready <= now_ms):
            client.zadd(keys.ready(job_id), {str(chunk): 0})
        names = [facts.get("lane", NORMAL), facts.get("tenant", DEFAULT)]
        queue, precision = keys.queue(facts["hardware"], facts["model"]), f"{facts['precision']}/{wire.VERSION}"
        names += [queue, *(["apart"] if suspect else []), precision]
        for ordered, files in product(("left", "wait"), (facts.get("model_fingerprint", "*"), "*")):
            before_all = {job_id: -time.monotonic()}
            client.zadd(keys.turns(":".join([ordered, *names, files])), before_all, xx=True)


def encoded(
    data: bytes, failed: Iterable[int] = (), *, dim: int = DIM, fingerprint: str = MINE, message: str = "empty"
) -> tuple[bytes, Completed]:
    """The result of an input, some rows of which fail with this message, and the report that goes with it."""
    chunk = wire.decode_input(data)
    rows = [row for row in failed if row < len(chunk)]
    result = ChunkResult(
        first=chunk.first,
        rows=len(chunk),
        dim=dim,
        digest=wire.digest_of(data),
        fingerprint=job_fingerprint(fingerprint, OPTIONS),
        precision="fp32",
        backend="dummy",
        vectors=bytes(len(chunk) * dim * 4),
        checksums=chunk.row_checksums(),
        ids=chunk.ids,
        positions=chunk.positions,
        errors=[RecordError(row, ErrorCode.EMPTY, message) for row in rows],
        kept=chunk.kept,
    )
    rest = wire.encode_input(chunk.select(rows)) if rows else b""
    return wire.encode_result(result), Completed(
        len(chunk) - len(rows), len(rows), 0, tokens=10, work=10, dim=dim, failed_input=rest
    )


def complete(
    broker: Broker,
    job_id: str,
    chunk: int,
    token: str = "t",
    *,
    failed: Iterable[int] | int = 0,
    truncated: int = 0,
    text: bytes = b"",
    **more: Any,
) -> str:
    """Complete a chunk with a result for its stored text, or for another one. These rows fail, or that many."""
    rows = range(failed) if isinstance(failed, int) else failed
    made, report = encoded(text or broker.jobs.input(job_id, chunk) or payload(chunk), rows, **more)
    rest = report.failed_input and _put(broker, Where(job_id, "in", chunk), report.failed_input)
    return broker.jobs.complete(
        job_id,
        chunk,
        token,
        _put(broker, Where(job_id, "out", chunk), made),
        replace(report, truncated=truncated, failed_input=rest),
        fingerprint=more.get("fingerprint", MINE),
    )


def _put(broker: Broker, where: Where, data: bytes) -> bytes:
    """Put bytes where the job keeps them: outside of Redis if it was made with `data`."""
    if not broker.chunk_files.is_outside:
        return data
    with broker.connection.client() as client:
        outside = client.hexists(keys.job(where.job_id), "data")
    return broker.chunk_files.put(where, data) if outside else data


def work(broker: Broker, job_id: str, *chunks: int, **how: Any) -> None:
    """Claim and complete."""
    for chunk in chunks:
        assert claim(broker, job_id, chunk, f"t{chunk}") is not None
        assert complete(broker, job_id, chunk, f"t{chunk}", **how) == "ok"


def active_jobs(broker: Broker) -> list[str]:
    """The jobs that still need upkeep."""
    with broker.connection.client() as client:
        return [job_id.decode() for job_id in client.zrange(keys.ACTIVE, 0, -1)]


def reaped(broker: Broker, job_id: str) -> list[int]:
    """The chunks of a job whose leases lapsed; see :meth:`Upkeep.look`."""
    call = broker.upkeep._reap_call(job_id, 0, int(AUDIT_AFTER_S * 1000))
    answer, rest = broker.connection.script(call.name, call.keys, call.args)
    return [int(chunk) for chunk in rest] if answer == "ok" else []


def look_after(broker: Broker, *job_ids: str) -> None:
    """What a round of the reaper does to these jobs."""
    Reaper(broker)._look_after(job_ids, broker.connection.now_ms(), math.inf)


def audited(broker: Broker, job_id: str) -> int:
    """How many of the next slice of a job's chunks Redis lost."""
    call = _audit_call(job_id, broker.upkeep._cursor(job_id, "audit_at"))
    answer, rest = broker.connection.script(call.name, call.keys, call.args)
    if answer != "ok":
        return 0
    broker.upkeep.audited_to(job_id, int(rest[0]))
    return int(rest[2])


def leases(raw: redis_py.Redis, job_id: str) -> dict[int, int]:
    """The leased chunks of a job, with the ends of their leases in ms."""
    owners = cast(dict[bytes, bytes], raw.hgetall(keys.owners(job_id)))  # this client decodes nothing
    return {int(chunk): int(owner.split(b" ")[4]) for chunk, owner in owners.items()}


def lapse(raw: redis_py.Redis, job_id: str, *chunks: int, at_ms: float = 1) -> None:
    """Let the leases of these chunks lapse: move their ends into the past."""
    for chunk in chunks:
        words = cast(bytes, some(raw.hget(keys.owners(job_id), str(chunk)))).split(b" ")
        words[4] = b"%d" % at_ms
        raw.hset(keys.owners(job_id), str(chunk), b" ".join(words))


def end_pause(broker: Broker, raw: redis_py.Redis, job_id: str, *chunks: int) -> None:
    """Let the pauses of these suspects end, and the reaper see it."""
    for chunk in chunks:
        assert raw.zscore(keys.suspects(job_id), chunk) is not None
        raw.zadd(keys.suspects(job_id), {str(chunk): 1})
    reaped(broker, job_id)


def assert_from_now(broker: Broker, noted_ms: float, *, after_s: float, since_ms: float) -> None:
    """A step since then must have noted this time, by Redis' clock, however long the test took."""
    assert since_ms - 1 < noted_ms - after_s * 1000 < broker.connection.now_ms() + 1


def pass_ms(broker: Broker, passes: int = 1) -> None:
    """Wait until Redis' clock, which tells the order of steps and the end of turns, has moved on (milliseconds)."""
    until = broker.connection.now_ms() + passes
    eventually(lambda: broker.connection.now_ms() >= until, what="a later millisecond of Redis")


def at_use(number: int, connection: Connection, what: Callable[[], object], patch: pytest.MonkeyPatch) -> None:
    """Let something happen just before a connection is used for the n-th time from now on."""
    uses, client = [0], connection.client

    def counted() -> AbstractContextManager[Any]:
        uses[0] += 1
        if uses[0] == number:
            what()
        return client()

    patch.setattr(connection, "client", counted)


def score(raw: redis_py.Redis, key: str, member: str | int) -> float:
    """The score of a member, which must be in the sorted set."""
    return some(raw.zscore(key, member))


def members(raw: redis_py.Redis, key: str) -> list[str]:
    """The members of a sorted set, by score."""
    return [name.decode() for name in raw.zrange(key, 0, -1) if isinstance(name, bytes)]


def row(instance: str = "w", *models: str, hardware: str = "dummy", **changes: Any) -> WorkerRow:
    served = {model: ServedModel(MINE, DIM, 100.0) for model in models or ("dummy",)}
    plain: dict[str, Any] = {
        "instance": instance,
        "name": f"{instance}@host",
        "pid": 1,
        "host": "host",
        "hardware": hardware,
        "backend": "dummy",
        "precision": "fp32",
        "cpus": "0-1",
        "threads": 2,
        "models": served,
        "machine": "here",
        "process": "",
    }
    return WorkerRow(**{**plain, **changes})


def calls(raw: redis_py.Redis, command: str) -> int:
    """How often Redis was asked this since its statistics were reset."""
    return int(raw.info("commandstats").get(f"cmdstat_{command}", {}).get("calls", 0))


def keys_of(raw: redis_py.Redis, job_id: str) -> set[str]:
    return {key.decode() for key in raw.scan_iter(match=f"*{job_id}*", count=1000)}
