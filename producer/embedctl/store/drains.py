"""Draining a job: who may do it, which parts are durable, and which chunks they hold."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from embedctl.store.connection import Connection
from embedctl.store.jobs import JobStore
from embedctl.store.quotas import exceeded
from embedctl_config import keys
from embedctl_config.errors import JobDrained

_SLICE = 500
#: Most chunks that are noted in one step.
NOTED_CHUNKS = 20_000
#: What the name of a place begins with that a caller of a gateway gave: nobody but callers opens it.
BEYOND = "beyond the gateway: "
#: Bytes of the bitmap that are read at once.
_MAP_SLICE = 4096


@dataclass(frozen=True, slots=True)
class PartFacts:
    """What Redis knows of a durable part.

    Attributes:
        sha256: in hexadecimal, of the file.
        first, last: its range of chunks; last is first - 1 in a part of retried records.
    """

    sha256: str
    bytes: int
    first: int
    last: int
    records: int

    def as_json(self) -> str:
        """The form in Redis."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """What Redis knows of a batch that is durable in a database: which chunks it holds, and what no table tells.

    Attributes:
        first, last: its range of chunks; last is first - 1 in a batch of retried records.
        rows: of each chunk, how many of its records have a vector.
        unchanged: how many of these were there already.
        failed: the records without a vector: chunk, position, id, code and message.
        refused: those that the table does not take: position, id and reason.
        retried: of each chunk without a range, the positions of its records.
        sample: the id of one of its rows; None if it has none.
        by_position: whether ids are made of positions.

    Ids are as :func:`embedctl_config.record_ids.tagged` gives them.
    """

    first: int
    last: int
    rows: Sequence[tuple[int, int]] = ()
    unchanged: int = 0
    failed: Sequence[tuple[int, int, object, str, str]] = ()
    refused: Sequence[tuple[int, object, str]] = ()
    retried: Sequence[tuple[int, Sequence[int]]] = ()
    sample: object = None
    by_position: bool = False

    def as_json(self) -> str:
        """The form in Redis."""
        return json.dumps({name: value for name, value in asdict(self).items() if value or name in ("first", "last")})


@dataclass(frozen=True, slots=True)
class DrainState:
    """How far a job is drained.

    Attributes:
        next_chunk: the first of the corpus' chunks that no part holds.
        parts, retry_parts: how many of each kind are durable.
        place: where they are; empty before the first drain.
    """

    next_chunk: int
    parts: int
    retry_parts: int
    place: str

    def after(self, chunks: tuple[int, int]) -> Self:
        """The state when one more part of such a range is durable."""
        if chunks[1] >= chunks[0]:
            return replace(self, next_chunk=chunks[1] + 1, parts=self.parts + 1)
        return replace(self, retry_parts=self.retry_parts + 1)


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that drains a job, as it described itself."""

    token: str
    machine: str
    process: str
    host: str

    def __str__(self) -> str:
        return f"process {self.process.partition('.')[0]} on {self.host}"

    def as_text(self) -> str:
        """The form in Redis: four words."""
        return " ".join((self.token, self.machine or "-", self.process or "-", self.host or "-"))


class Drains:
    """Redis' part in draining jobs. Every method raises BrokerUnavailable if Redis can't be reached."""

    def __init__(self, connection: Connection, jobs: JobStore) -> None:
        self._connection = connection
        self._jobs = jobs

    def take(
        self,
        job_id: str,
        holder: Holder,
        *,
        high_water: int,
        place: str = "",
        dead: str = "",
        lease_s: float = keys.DRAINER_LEASE_S,
    ) -> DrainState | Holder:
        """Take or renew the right to drain a job, and mark the job as one that is drained.

        Args:
            high_water: most bytes of results in Redis; above it, workers get only the chunk that the drainer waits for.
            place: where the parts are, if that is known now.
            dead: the token of a holder that is known to have died.
            lease_s: 0 gives the right up.

        Returns how far the job is drained, or the process that has the right.
        """
        args = [holder.token, holder.as_text(), int(lease_s * 1000), high_water, place, dead]
        answer, rest = self._jobs.job_script("drainer", job_id, [keys.drainer(job_id)], args)
        if answer == "held":
            return Holder(*rest[0].decode().split(" ", 3))
        return DrainState(int(rest[0]), int(rest[1]), int(rest[2]), rest[3].decode())

    def note(
        self,
        job_id: str,
        token: str,
        name: str,
        facts: PartFacts | BatchFacts,
        *,
        result_bytes: int,
        digests: bytes,
        more: Sequence[int] = (),
    ) -> str:
        """Note a durable part. Only after `ok` may the results of its chunks be unlinked.

        Args:
            result_bytes: what these results take in Redis.
            digests: of the range's inputs, one after the other; without a range, of the first of `more`.
            more: chunks outside of the range, which hold retried or repaired records.

        Returns `ok`; `not_owner`; or, if another drainer was here, `already` or `missing`. Raises QuotaExceeded if the
        facts are long, and the job is a gateway's whose tenant keeps more than it may.
        """
        part = [name, facts.as_json(), result_bytes, facts.first, facts.last, digests]
        args: list[Any] = [token, keys.DRAINER_LEASE_S * 1000, *part, *more]
        answer, rest = self._jobs.job_script("drain", job_id, [keys.drainer(job_id)], args)
        if answer == "full":
            raise exceeded(rest[3].decode(), rest)
        return answer

    def state(self, job_id: str) -> DrainState:
        """How far a job is drained."""
        with self._connection.client() as client:
            found = client.hmget(keys.job(job_id), "drained_next", "parts", "retry_parts", "drain_to")
        next_chunk, parts, retry_parts, place = found
        return DrainState(int(next_chunk or 0), int(parts or 0), int(retry_parts or 0), (place or b"").decode())

    def unlink(self, job_id: str, chunks: Sequence[int]) -> None:
        """Free the results of drained chunks, in slices. Bytes outside of Redis are left to the sweeper."""
        for at in range(0, len(chunks), _SLICE):
            these = chunks[at : at + _SLICE]
            results = (keys.chunk_result(job_id, chunk) for chunk in these)
            self._connection.script("free", [keys.job(job_id), *results], [job_id, *these])

    def unlink_drained(self, job_id: str, count: int) -> None:
        """Free what a drainer has left that died before it did, of the first `count` chunks."""
        if left := list(self.chunks(job_id, count, drained=True)):
            self.unlink(job_id, left)

    def is_held(self, job_id: str) -> bool:
        """Whether a process has the right to drain a job."""
        with self._connection.client() as client:
            return bool(client.exists(keys.drainer(job_id)))

    def is_drained(self, job_id: str, chunk: int) -> bool:
        """Whether a durable part holds a chunk's result."""
        with self._connection.client() as client:
            return bool(client.getbit(keys.drained(job_id), chunk))

    def chunks(self, job_id: str, count: int, *, drained: bool) -> Iterator[int]:
        """The chunks among the first `count` that are drained, or those that are not; the bitmap is read in slices."""
        for at in range(0, (count + 7) // 8, _MAP_SLICE):
            found, first = self.drained_map(job_id, at), 8 * at
            for chunk in range(first, min(first + 8 * _MAP_SLICE, count)):
                byte = found[(chunk - first) // 8] if (chunk - first) // 8 < len(found) else 0
                if bool(byte >> (7 - chunk % 8) & 1) is drained:
                    yield chunk

    def drained_map(self, job_id: str, at: int) -> bytes:
        """A slice of the bitmap of drained chunks, from this byte on."""
        with self._connection.client() as client:
            found: bytes = client.getrange(keys.drained(job_id), at, at + _MAP_SLICE - 1)
        return found

    def parts(self, job_id: str, names: Sequence[str]) -> Iterator[tuple[str, PartFacts]]:
        """The facts of these parts, read in slices; raises JobDrained if Redis lost them."""
        for name, facts in self._facts(job_id, names):
            yield name, PartFacts(**facts)

    def batches(self, job_id: str, state: DrainState) -> Iterator[BatchFacts]:
        """The facts of a job's batches in a database, the later ones last; raises as :meth:`parts`."""
        for _, facts in self._facts(job_id, batch_names(state)):
            yield BatchFacts(**facts)

    def _facts(self, job_id: str, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        for at in range(0, len(names), _SLICE):
            these = names[at : at + _SLICE]
            for name, facts in zip(these, self.noted(job_id, these), strict=True):
                if facts is None:
                    raise JobDrained(f"Redis lost what it knew of {name} of job {job_id}: read the parts themselves")
                yield name, json.loads(facts)

    def noted(self, job_id: str, names: Sequence[str]) -> list[bytes | None]:
        """What is noted under some names, as JSON; None under those that Redis does not know."""
        with self._connection.client() as client:
            return list(client.hmget(keys.parts(job_id), names)) if names else []


def part_names(state: DrainState) -> list[str]:
    """The names of a job's durable parts, in the order in which later records replace earlier ones."""
    retried = range(1, state.retry_parts + 1)
    return [*map(part_name, range(state.parts)), *map(retry_part_name, retried)]


def batch_names(state: DrainState) -> list[str]:
    """The names under which Redis knows the batches of a job that goes into a database, in the order of time of each
    kind; those of retried records are the last."""
    retried = range(1, state.retry_parts + 1)
    return [*map(batch_name, range(state.parts)), *(batch_name(number, retried=True) for number in retried)]


def batch_name(number: int, *, retried: bool = False) -> str:
    return f"batch-{'retry-' if retried else ''}{number:06d}"


def first_part(state: DrainState) -> str | None:
    """The name of a job's first durable part; None if there is none."""
    return next(iter(part_names(state)), None)


def part_name(number: int) -> str:
    """The name of a part of the corpus' chunks; the first number is 0."""
    return f"part-{number:06d}.parquet"


def retry_part_name(number: int) -> str:
    """The name of a part of retried records; the first number is 1."""
    return f"part-retry-{number:06d}.parquet"
