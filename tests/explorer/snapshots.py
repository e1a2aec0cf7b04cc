"""Snapshots of a job's data in Redis. They are read and restored as a whole. Comparing two of them ignores times and
purely informative counters."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any, NoReturn

from embedctl.store.connection import Connection
from embedctl_config import keys, wire
from embedctl_config.settings import Settings
from tests.support.store import QUEUE


class Snapshot(dict[bytes, bytes]):
    """Key → value, packed by `_DUMP`. Immutable once made."""

    @cached_property
    def canonical(self) -> tuple[Any, ...]:
        """The part that decides how things go on. Two snapshots that no actor can tell apart are equal here."""
        told = [key for key in sorted(self) if not key.startswith(_UNTOLD) and not key.endswith(b":cursors")]
        return tuple((key, _canonical(_name_of(key), self[key])) for key in told)

    @property
    def bells(self) -> int:
        return int(self.get(QUEUE.encode(), b"l0")[1:])

    @property
    def is_guarded(self) -> bool:
        """Whether there is a live worker in quarantine."""
        return any(not lies_in_the_past(at) for at in fields(self.get(keys.queue_quarantine(QUEUE).encode())).values())

    def is_listed(self, fingerprint: str, *, quarantine: bool = False) -> bool:
        """Whether a job is listed that a worker can take."""
        apart = ("apart:",) if quarantine else ("",) if self.is_guarded else ("", "apart:")
        kinds = tuple(
            f":{QUEUE}:{each}fp32/{wire.VERSION}:{of}".encode() for each in apart for of in (fingerprint, "*")
        )
        return any(key.startswith(TURNS + b"flows:") and key.endswith(kinds) for key in self)


TURNS = b"embed:turns:"
WATCHED = keys.watched("").encode()
FAULTS = keys.faults("").encode()
#: Prefixes of keys that no decision in the explored world depends on.
_UNTOLD = (
    *(b"embed:worker:", b"embed:machine:", b"embed:birth", b"embed:jobs"),
    *(TURNS + b"levels:", TURNS + b"bells"),
)


def _name_of(key: bytes) -> str:
    parts = key.split(b":")
    if key.startswith(TURNS):
        return "turns"
    if key.startswith(WATCHED):
        return "watched"
    is_job = (len(parts) == 3 and parts[1] == b"job") or key.startswith(FAULTS)  # both have the same fields
    return "job" if is_job else parts[-1].decode()


#: Leases and delays of the explored world (seconds). They are long because time passes only in explicit steps.
LONG_S = 1_000_000.0
_PAST = 1_000_000_000_000  # ms since 1970; every real time is later
#: The time of the reaper's next look at a job, as snapshots store it (ms).
NOW, LATER = 1, 8 * 10**15

# Each value becomes one string: `s` and the bytes, or `h`/`z`/`e` (a set) and items as `length:bytes`, or `l` and the
# number of bells. Keys without a TTL are reported, but a queue has none. The others get a long TTL, so that only a step
# can make them expire. Streams are left alone: no decision depends on them. Of the reaper's next look at a job, only
# "now or later" matters, so only that is kept.
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
for _, key in ipairs(redis.call('KEYS', 'embed*')) do
  local kind = redis.call('TYPE', key).ok
  if kind ~= 'list' and redis.call('PTTL', key) < 0 then bare[#bare + 1] = key
  else redis.call('PEXPIRE', key, 86400000) end
  if kind == 'string' then
    out[#out + 1] = key
    out[#out + 1] = 's' .. redis.call('GET', key)
  elseif kind == 'list' then
    out[#out + 1] = key
    out[#out + 1] = 'l' .. redis.call('LLEN', key)
  elseif kind ~= 'stream' then
    local items = kind == 'hash' and redis.call('HGETALL', key) or kind == 'set' and redis.call('SMEMBERS', key)
      or redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
    if kind == 'set' then table.sort(items) end
    local packed = {kind == 'hash' and 'h' or kind == 'set' and 'e' or 'z'}
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
  elseif kind == 'l' then
    for _ = 1, tonumber(packed:sub(2)) do redis.call('LPUSH', key, 'bell') end
  elseif kind ~= '' then
    local items, from = {}, 2
    while from <= #packed do
      local colon = packed:find(':', from, true)
      local size = tonumber(packed:sub(from, colon - 1))
      items[#items + 1] = packed:sub(colon + 1, colon + size)
      from = colon + size + 1
    end
    if kind == 'e' then redis.call('SADD', key, unpack(items)) end
    for each = 1, kind == 'e' and 0 or #items, 2 do
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
    """The connection of the explored store, which takes snapshots of Redis and restores them."""

    def __init__(self, settings: Settings, scripts: Callable[[str], str]) -> None:
        super().__init__(settings)
        self._source = scripts
        self._dump, self._restore = map(self._redis.register_script, (_DUMP, _RESTORE))
        self._held: Snapshot | None = None
        self._pending: Snapshot | None = None
        self._now_ms = time.time_ns() // 1_000_000
        self.bare: list[bytes] = []

    def put(self, target: Snapshot) -> None:
        """Make Redis hold this snapshot from the next command on."""
        self._pending, self.bare = target, []

    def _flush(self) -> None:
        target, self._pending = self._pending, None
        if target is None:
            return
        held = self.look()
        changed: list[bytes] = []
        for key in held.keys() - target.keys():
            changed += [key, b""]
        for key, value in target.items():
            if held.get(key) != value:
                changed += [key, value]
        if changed:
            self._restore(args=changed)
        self._held = target

    def look(self) -> Snapshot:
        """The snapshot that Redis holds now, or will hold from the next command on."""
        if self._pending is not None:
            return self._pending
        if self._held is None:
            self.bare, flat = self._dump()
            self._held = Snapshot(zip(flat[::2], flat[1::2], strict=True))
        return self._held

    @contextmanager
    def client(self) -> Iterator[Any]:
        self._flush()
        self._held = None
        with super().client() as client:
            yield client

    def explained(self, error: Exception) -> NoReturn:
        raise ScriptFault(str(error)) from error

    def now_ms(self) -> int:
        return self._now_ms

    def check_server(self) -> None:
        pass

    def _script(self, name: str) -> Any:
        if name not in self._scripts:
            self._scripts[name] = self._redis.register_script(self._source(name))
        return self._scripts[name]


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
    b"claims", b"lapsed", b"refused", b"deaths", b"tokens", b"work", b"created_ms", b"trouble", b"pinned_by",
    b"options", b"truncated", b"owed",
}  # fmt: skip
_TIMES = {b"progressed_ms", b"started_ms", b"ended_ms", b"distrusted_ms", b"watched_ms", b"killed_ms", b"mixed_ms"}


def lies_in_the_past(score: bytes | float, now_ms: float | None = None) -> bool:
    """Whether a time in ms is over. Future times lie ahead by :data:`LONG_S`, or nearly that."""
    return float(score) < (time.time() * 1000 if now_ms is None else now_ms) + LONG_S


@lru_cache(maxsize=200_000)
def _canonical(name: str, packed: bytes) -> Any:
    kind = packed[:1]
    if name == "watched":
        job_id, since, *waiting = packed.split(b" ")
        return job_id, int(since) > _PAST, *waiting
    if kind in (b"s", b"l"):
        return packed if kind == b"s" else True  # how many bells there are matters little
    if kind == b"e":
        return tuple(items(packed))
    known = fields(packed)
    if name == "turns":
        return tuple(sorted(known, key=lambda each: (float(known[each]), each)))
    if name == "owners":
        words = {chunk: facts.split(b" ") for chunk, facts in known.items()}
        return tuple(sorted((chunk, *own[:2], lies_in_the_past(own[4]), *own[5:]) for chunk, own in words.items()))
    if name == "job":
        return tuple(
            sorted(
                (field, (int(value) > _PAST) if field in _TIMES else value)
                for field, value in known.items()
                if field not in _TELLING
            )
        )
    if name == "attempts":
        return tuple(sorted((chunk, _attempts(chunk, facts)) for chunk, facts in known.items()))
    if kind == b"z":
        return tuple(sorted((member, lies_in_the_past(score)) for member, score in known.items()))
    return tuple(sorted(known.items()))


def _attempts(chunk: bytes, facts: bytes) -> Any:
    if chunk.endswith(b":deaths"):
        known = json.loads(facts)
        return known["rows"], min(known["unnamed"], 4)
    if chunk.endswith(b":not"):
        instance, until_ms = facts.split(b" ")
        return instance.decode(), int(not lies_in_the_past(until_ms))
    return "", 1


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
        counted = _bit(self.string(keys.counted(self.job_id)), chunk)
        there = self.string(keys.chunk_result(self.job_id, chunk)) is not None
        return counted and not there and not _bit(self.string(keys.drained(self.job_id)), chunk)

    def is_void(self, chunk: int) -> bool:
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
