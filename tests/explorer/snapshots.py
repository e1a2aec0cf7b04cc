"""Snapshots of a job's data in Redis. They are read and restored as a whole. Comparing two of them ignores times and
purely informative counters."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any

from embedctl.store.connection import Connection, Put, ScriptCall
from embedctl_config import keys, wire
from embedctl_config.errors import BrokerUnavailable
from embedctl_config.settings import Settings
from tests.explorer.resp import Refused, Wire


class Snapshot(dict[bytes, bytes]):
    """Key → value, packed by `_DUMP`. Immutable once made."""

    @cached_property
    def canonical(self) -> tuple[Any, ...]:
        """The part that decides how things go on. Two snapshots that no actor can tell apart are equal here."""
        told = []
        for key in sorted(self):
            if not key.startswith(_UNTOLD) and not key.endswith(b":cursors"):
                parts = key.split(b":")
                name = "job" if len(parts) == 3 and parts[1] == b"job" else parts[-1].decode()
                told.append((key, _canonical(name, self[key])))
        return tuple(told)


#: Prefixes of keys that no decision in the explored world depends on.
_UNTOLD = (b"embed:worker:", b"embed:machine:", b"embed:birth", b"embed:jobs")

#: Leases and re-issues of the explored world (seconds). They are long because time passes only in explicit steps.
LONG_S = 1_000_000.0
_PAST = 1_000_000_000_000  # ms since 1970; every real time is later
#: The time of the reaper's next look at a job, as snapshots store it (ms).
NOW, LATER = 1, 8 * 10**15

# Each value becomes one string: `s` and the bytes, or `h`/`z` and items as `length:bytes`. Keys without a TTL are
# reported. The others get a long TTL, so that only a step can make them expire. Streams are left alone: no decision
# depends on them. Of the reaper's next look at a job, only "now or later" matters, so only that is kept.
_DUMP = f"""
local out, bare = {{}}, {{}}
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local jobs = redis.call('ZRANGE', '{keys.UPKEEP}', 0, -1, 'WITHSCORES')
for each = 1, #jobs, 2 do
  redis.call('ZADD', '{keys.UPKEEP}', tonumber(jobs[each + 1]) <= now and {NOW} or {LATER}, jobs[each])
end
"""
_DUMP += """
for _, key in ipairs(redis.call('KEYS', 'embed:*')) do
  if redis.call('PTTL', key) < 0 then bare[#bare + 1] = key else redis.call('PEXPIRE', key, 86400000) end
  local kind = redis.call('TYPE', key).ok
  if kind == 'string' then
    out[#out + 1] = key
    out[#out + 1] = 's' .. redis.call('GET', key)
  elseif kind ~= 'stream' then
    local items = kind == 'hash' and redis.call('HGETALL', key) or redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
    local packed = {kind == 'hash' and 'h' or 'z'}
    for at, item in ipairs(items) do packed[at + 1] = #item .. ':' .. item end
    out[#out + 1] = key
    out[#out + 1] = table.concat(packed)
  end
end
return {bare, out}
"""
_RESTORE = """
for at = 1, #ARGV, 2 do
  local key, packed = ARGV[at], ARGV[at + 1]
  redis.call('DEL', key)
  local kind = packed:sub(1, 1)
  if kind == 's' then
    redis.call('SET', key, packed:sub(2), 'PX', 86400000)
  elseif kind ~= '' then
    local items, from = {}, 2
    while from <= #packed do
      local colon = packed:find(':', from, true)
      local size = tonumber(packed:sub(from, colon - 1))
      items[#items + 1] = packed:sub(colon + 1, colon + size)
      from = colon + size + 1
    end
    for each = 1, #items, 2 do
      if kind == 'h' then redis.call('HSET', key, items[each], items[each + 1])
      else redis.call('ZADD', key, items[each + 1], items[each]) end
    end
    redis.call('PEXPIRE', key, 86400000)
  end
end
return 1
"""


class ScriptFault(AssertionError):
    """A script raised an error."""


class ExplorerConnection(Connection):
    """The connection of the explored store. One write holds the state to restore, a script, and the look after it.

    Args:
        scripts: the text of each script by its name.
    """

    def __init__(self, settings: Settings, path: str, scripts: Callable[[str], str]) -> None:
        super().__init__(settings)
        self.wire = Wire(path)
        self._source = scripts
        self._dump, self._restore = self.wire.ask(["SCRIPT", "LOAD", _DUMP], ["SCRIPT", "LOAD", _RESTORE])
        self._shas: dict[str, bytes] = {}
        self._now = Snapshot()
        self._queued: list[list[Any]] = []
        self._pending: Snapshot | None = None
        self._looked = False
        self.bare: list[bytes] = []
        self.commands = 0

    def put(self, target: Snapshot) -> None:
        """Make Redis hold this snapshot from the next command on."""
        self._pending = target

    def look(self) -> Snapshot:
        """The snapshot that Redis holds now, or will hold from the next command on."""
        if self._pending is not None and not self._queued:
            return self._pending
        if not self._looked or self._queued:
            answers = self.wire.ask(*self._restoring(), *self._told(), ["EVALSHA", self._dump, 0])
            self._check(answers)
            self._saw(answers[-1])
        return self._now

    def script(self, name: str, script_keys: Any, args: Any = ()) -> tuple[str, list[Any]]:
        sha = self._shas.get(name)
        if sha is None:
            (sha,) = self.wire.ask(["SCRIPT", "LOAD", self._source(name)])
            assert isinstance(sha, bytes), sha
            self._shas[name] = sha
        call = ["EVALSHA", sha, len(script_keys), *script_keys, *args]
        *before, answer, seen = self.wire.ask(*self._restoring(), *self._told(), call, ["EVALSHA", self._dump, 0])
        self._check(before)
        self._saw(seen)
        self.commands += 1
        if isinstance(answer, Refused):
            raise ScriptFault(f"{name}: {answer}")
        word, *rest = answer
        return word.decode(), rest

    def scripts(self, calls: Sequence[ScriptCall]) -> list[Any]:
        return [self.script(call.name, call.keys, call.args) for call in calls]

    def raw_scripts(
        self, calls: Sequence[ScriptCall], put: Put | None = None, ask: Callable[[Any], object] | None = None
    ) -> list[Any]:
        if put is not None:
            self.queue("SET", put.key, put.value, "EX", put.ttl_s)
        answers = self.scripts(calls)
        if ask is None:
            return answers
        with self.client() as client:
            pipe = client.pipeline(transaction=False)
            ask(pipe)
            return [*answers, *pipe.execute()]

    @contextmanager
    def client(self) -> Iterator[Any]:
        self.commands += 1
        with super().client() as real:
            yield _Looks(self, real)

    def queue(self, *command: Any) -> None:
        """Send a command together with the next one: nobody needs its answer."""
        self._queued.append(list(command))

    def go_behind(self) -> None:
        """Prepare for a change to Redis that does not pass through this connection."""
        self.flush()
        self._looked = False

    def flush(self) -> None:
        """Restore the pending snapshot and send the queued commands now."""
        if waiting := self._restoring() + self._told():
            self._check(self.wire.ask(*waiting))

    @staticmethod
    def _check(answers: list[Any]) -> None:
        refused = [each for each in answers if isinstance(each, Refused)]
        assert not refused, refused

    def uptime_s(self) -> int:
        return 10**9

    def _told(self) -> list[list[Any]]:
        queued, self._queued = self._queued, []
        if queued:
            self._looked = False
        return queued

    def _restoring(self) -> list[list[Any]]:
        target, self._pending = self._pending, None
        if target is None or (self._looked and target is self._now):
            return []
        current = self._now if self._looked else self._held()
        changed: list[Any] = []
        for key in current.keys() - target.keys():
            changed += [key, b""]
        for key, value in target.items():
            if current.get(key) != value:
                changed += [key, value]
        self._now, self._looked = target, True
        return [["EVALSHA", self._restore, 0, *changed]] if changed else []

    def _held(self) -> Snapshot:
        (seen,) = self.wire.ask(["EVALSHA", self._dump, 0])
        self._saw(seen)
        return self._now

    def _saw(self, answer: Any) -> None:
        if isinstance(answer, Refused):
            raise BrokerUnavailable(str(answer))
        self.bare, flat = answer
        self._now = Snapshot(zip(flat[::2], flat[1::2], strict=True))
        self._looked = True


class _Looks:
    """A client that answers reads from the known snapshot of Redis, and passes everything else to the real client."""

    def __init__(self, connection: ExplorerConnection, real: Any) -> None:
        self._connection, self._real = connection, real

    def get(self, key: str) -> bytes | None:
        found = self._connection.look().get(key.encode())
        return None if found is None else found[1:]

    def hget(self, key: str, field: str) -> bytes | None:
        return self.hgetall(key).get(field.encode())

    def hgetall(self, key: str) -> dict[bytes, bytes]:
        return fields(self._connection.look().get(key.encode()))

    def hmget(self, key: str, *names: str) -> list[bytes | None]:
        known = self.hgetall(key)
        return [known.get(name.encode()) for name in names]

    def zrange(self, key: str, start: int, end: int, *, withscores: bool = False) -> list[Any]:
        found = self._members(key)
        found = found[start : None if end == -1 else end + 1]
        return found if withscores else [member for member, _ in found]

    def zrangebyscore(
        self, key: str, least: str, most: float, *, start: int, num: int, withscores: bool = False
    ) -> list[Any]:
        assert least == "-inf"
        found = [each for each in self._members(key) if each[1] <= most][start : start + num]
        return found if withscores else [member for member, _ in found]

    def zcount(self, key: str, least: float, most: str) -> int:
        assert most == "+inf"
        return sum(score >= least for _, score in self._members(key))

    def _members(self, key: str) -> list[tuple[bytes, float]]:
        found = fields(self._connection.look().get(key.encode()))
        return sorted(((member, float(score)) for member, score in found.items()), key=lambda each: (each[1], each[0]))

    def pttl(self, key: str) -> int:
        if not self.exists(key):
            return -2
        return -1 if key.encode() in self._connection.bare else 86_400_000

    def exists(self, *names: str) -> int:
        held = self._connection.look()
        return sum(name.encode() in held for name in names)

    def set(self, key: str, value: bytes, *, ex: int) -> bool:
        self._connection.queue("SET", key, value, "EX", ex)
        return True

    # Nobody needs the answers of these commands.

    def zadd(
        self, key: str, scores: Mapping[Any, float], *, nx: bool = False, xx: bool = False, lt: bool = False
    ) -> None:
        flags = [flag for flag, wanted in (("NX", nx), ("XX", xx), ("LT", lt)) if wanted]
        self._connection.queue("ZADD", key, *flags, *(part for member, at in scores.items() for part in (at, member)))

    def zrem(self, key: str, *members: Any) -> None:
        self._connection.queue("ZREM", key, *members)

    def pexpire(self, key: str, ms: int) -> None:
        self._connection.queue("PEXPIRE", key, ms)

    def unlink(self, *names: str) -> None:
        self._connection.queue("UNLINK", *names)

    def pipeline(self, transaction: bool = True) -> Any:
        return _Pipeline(self)

    def __getattr__(self, name: str) -> Any:
        self._connection.go_behind()
        return getattr(self._real, name)


class _Pipeline:
    """Runs its commands one after the other. Nothing can come between them: each step of the explorer is one write."""

    def __init__(self, client: _Looks) -> None:
        self._client = client
        self._asked: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def ask(*args: Any, **named: Any) -> _Pipeline:
            self._asked.append((name, args, named))
            return self

        return ask

    def execute(self, *, raise_on_error: bool = True) -> list[Any]:
        return [getattr(self._client, name)(*args, **named) for name, args, named in self._asked]


@lru_cache(maxsize=200_000)
def items(packed: bytes) -> list[bytes]:
    """The items of a packed hash or sorted set."""
    found, at = [], 1
    while at < len(packed):
        colon = packed.index(b":", at)
        end = colon + 1 + int(packed[at:colon])
        found.append(packed[colon + 1 : end])
        at = end
    return found


def fields(packed: bytes | None) -> dict[bytes, bytes]:
    """A packed hash, or a packed sorted set as member → score."""
    if not packed:
        return {}
    flat = items(packed)
    return dict(zip(flat[::2], flat[1::2], strict=True))


#: Informative fields of a job's hash. Comparing them would make every state a different one.
_TELLING = {
    b"claims", b"lapsed", b"refused", b"deaths", b"tokens", b"created_ms", b"mismatch", b"trouble", b"pinned_by",
    b"options", b"truncated",
}  # fmt: skip
_TIMES = {b"progressed_ms", b"started_ms", b"ended_ms"}


def lies_in_the_past(score: bytes | float, now_ms: float | None = None) -> bool:
    """Whether a time in ms is over. Future times lie ahead by :data:`LONG_S`, or nearly that."""
    return float(score) < (time.time() * 1000 if now_ms is None else now_ms) + LONG_S


@lru_cache(maxsize=200_000)
def _canonical(name: str, packed: bytes) -> Any:
    kind = packed[:1]
    if kind == b"s":
        return packed
    known = fields(packed)
    if name == "job":
        return tuple(
            sorted(
                (field, (int(value) > _PAST) if field in _TIMES else value)
                for field, value in known.items()
                if field not in _TELLING
            )
        )
    if name == "attempts":
        return tuple(
            sorted((chunk, _deaths(facts) if chunk.endswith(b":deaths") else 1) for chunk, facts in known.items())
        )
    if name == "reissues":
        return tuple(sorted(known))
    if kind == b"z":
        return tuple(sorted((member, lies_in_the_past(score)) for member, score in known.items()))
    return tuple(sorted(known.items()))


def _deaths(facts: bytes) -> tuple[str, int]:
    known = json.loads(facts)
    return known["rows"], min(known["unnamed"], 4)


#: What stands for the result of such a chunk.
VOID = b"void"


class View:
    """One job's part of a snapshot."""

    def __init__(self, snapshot: Snapshot, job_id: str) -> None:
        self.snapshot, self.job_id = snapshot, job_id
        self.job = fields(snapshot.get(keys.job(job_id).encode()))

    def number(self, field: str) -> int:
        return int(self.job.get(field.encode(), 0))

    def text(self, field: str) -> str | None:
        value = self.job.get(field.encode())
        return None if value is None else value.decode()

    @property
    def in_agenda(self) -> bool:
        """Whether the reaper will look at the job, now or later."""
        return self.job_id.encode() in self.fields(keys.UPKEEP)

    @property
    def is_active(self) -> bool:
        """Whether a sweep of the reaper finds the job."""
        return self.job_id.encode() in self.fields(keys.ACTIVE)

    @property
    def state(self) -> str:
        return self.text("state") or "gone"

    @property
    def ended(self) -> bool:
        return self.state in ("completed", "completed_with_errors", "failed", "cancelled", "gone")

    def fields(self, key: str) -> dict[bytes, bytes]:
        return fields(self.snapshot.get(key.encode()))

    def string(self, key: str) -> bytes | None:
        found = self.snapshot.get(key.encode())
        return None if found is None else found[1:]

    def input(self, chunk: int) -> bytes | None:
        return self.string(keys.chunk_input(self.job_id, chunk))

    def result(self, chunk: int) -> wire.ChunkResult | None:
        found = self.string(keys.chunk_result(self.job_id, chunk))
        if found is None:
            found = self._parts.get(chunk) if _bit(self.string(keys.drained(self.job_id)), chunk) else None
        return None if found in (None, VOID) else _result(found or b"")

    @cached_property
    def _parts(self) -> dict[int, bytes]:
        """Chunk → its result in the last durable part that holds it; see `bodies.drains`."""
        found: dict[int, bytes] = {}
        for _, facts in sorted(self.fields(keys.parts(self.job_id)).items()):
            chunk, _, data = json.loads(facts)["sha256"].partition(":")
            found[int(chunk)] = bytes.fromhex(data)
        return found

    def undrained_bytes(self) -> int:
        """The size of all results in Redis that no part holds."""
        drained = self.string(keys.drained(self.job_id))
        stored = {chunk: self.string(keys.chunk_result(self.job_id, chunk)) for chunk in range(self.number("added"))}
        return sum(len(data) for chunk, data in stored.items() if data is not None and not _bit(drained, chunk))

    def is_missing(self, chunk: int) -> bool:
        """Whether a chunk's records are counted but its result is missing."""
        counted = _bit(self.string(keys.counted(self.job_id)), chunk)
        there = self.string(keys.chunk_result(self.job_id, chunk)) is not None
        return counted and not there and not _bit(self.string(keys.drained(self.job_id)), chunk)

    def is_void(self, chunk: int) -> bool:
        """Whether a chunk of retried records no longer counts."""
        return self.string(keys.chunk_result(self.job_id, chunk)) == VOID

    def pointer(self, chunk: int) -> int | None:
        found = self.string(keys.retry_pointer(self.job_id, chunk))
        return None if found is None else int(found)


def _bit(bits: bytes | None, chunk: int) -> bool:
    bits = bits or b""
    return chunk // 8 < len(bits) and bool(bits[chunk // 8] & (128 >> chunk % 8))


@lru_cache(maxsize=10_000)
def _result(data: bytes) -> wire.ChunkResult:
    return wire.decode_result(data)
