"""What a job is made of, what the steps of its life report and answer, and what workers could not do with a chunk."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

from embedctl.store.status import JobStatus
from embedctl_config import tenants

#: The row of a worker that fell sick without knowing its row.
_UNKNOWN_ROW = -1
#: At most this many workers that fell sick over a chunk are remembered, the last ones.
_MOST_SICK = 16


@dataclass(frozen=True, slots=True)
class Doubts:
    """The failures that workers reported when they gave a chunk back.

    Attributes:
        rows: worker instance → the rows that it could not encode.
        unreadable: the instances that could not read the chunk's input.
        rounds: how often the chunk was given back so that another worker may try.
        sick: worker instance that fell sick while it held the chunk → the row that it fell sick after; -1 if unknown.
    """

    rows: Mapping[str, frozenset[int]] = field(default_factory=dict)
    unreadable: frozenset[str] = frozenset()
    rounds: int = 0
    sick: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_suspect(self) -> bool:
        """Whether more than one worker fell sick over the chunk, so that one of its rows may be the cause."""
        return len(self.sick) > 1

    @property
    def named(self) -> frozenset[int]:
        """The rows that a worker fell sick after, having been well before."""
        return frozenset(self.sick.values()) - {_UNKNOWN_ROW}

    @property
    def poisonous(self) -> frozenset[int]:
        """The rows that at least two workers fell sick after, having been well before."""
        times = Counter(self.sick.values())
        return frozenset(row for row in self.named if times[row] > 1)

    def with_rows(self, instance: str, rows: Collection[int]) -> Self:
        """A copy which records that an instance could not encode these rows, and gave the chunk back."""
        mine = self.rows.get(instance, frozenset()) | frozenset(rows)
        return replace(self, rows={**self.rows, instance: mine}, rounds=self.rounds + 1)

    def with_unreadable(self, instance: str) -> Self:
        """A copy which records that an instance could not read the input, and gave the chunk back."""
        return replace(self, unreadable=self.unreadable | {instance}, rounds=self.rounds + 1)

    def with_sick(self, instance: str, row: int | None) -> Self:
        """A copy which records that an instance fell sick over the chunk, in careful mode after this row if known."""
        sick = {**self.sick, instance: _UNKNOWN_ROW if row is None else row}
        named = self.poisonous  # poisonous rows are never forgotten
        forgotten = [each for each in sick if sick[each] not in named][: max(0, len(sick) - _MOST_SICK)]
        return replace(self, sick={each: at for each, at in sick.items() if each not in forgotten})

    def as_json(self) -> str:
        """The JSON that the store keeps."""
        rows = {instance: sorted(rows) for instance, rows in self.rows.items()}
        facts = {"rows": rows, "unreadable": sorted(self.unreadable), "rounds": self.rounds, "sick": dict(self.sick)}
        return json.dumps(facts, separators=(",", ":"))

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """The inverse of :meth:`as_json`."""
        facts = json.loads(data)
        rows = {instance: frozenset(rows) for instance, rows in facts["rows"].items()}
        return cls(rows, frozenset(facts["unreadable"]), facts["rounds"], facts["sick"])


#: What a job's status repeats of its specification.
_IN_STATUS = ("model", "hardware", "precision", "options", "ttl_s", "max_errors", "max_errors_share", "tenant", "lane")


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The specification of a job. It must be the same when the job is resumed.

    `options` determine the vectors or the chunks, and are JSON values. More failed records than `max_errors`, or than
    the share `max_errors_share` of all records, end the job early. `ttl_s` counts from the job's end. A job with
    `results_high_water` is made to be drained: while Redis holds more bytes of its results, workers get only the chunk
    that the drainer waits for. `data` is the id of the place that keeps the bytes of its chunks; None if Redis does.
    Jobs that wait for the same workers take turns by `lane` and `tenant`, whose `weight` this lowers, if it is less
    than what workers state. What is kept of a job with `keeps` counts for its tenant; see `sums.lua`.
    """

    model: str
    hardware: str
    precision: str
    options: Mapping[str, Any]
    ttl_s: float
    idempotency_key: str | None = None
    max_errors: int | None = None
    max_errors_share: float | None = None
    results_high_water: int | None = None
    data: str | None = None
    tenant: str = tenants.DEFAULT
    lane: str = tenants.NORMAL
    weight: float | None = None
    keeps: str = ""

    def as_status(self, **facts: Any) -> JobStatus:
        """The status of a job of this specification, with what else is known of it."""
        return JobStatus(**{name: getattr(self, name) for name in _IN_STATUS}, **facts)


class Added(StrEnum):
    """The answers of :meth:`JobStore.add` that are not errors."""

    OK = "ok"
    WANTED = "wanted"
    SKIPPED = "skipped"
    DIFFERS = "differs"
    HELD = "held"
    SEALED = "sealed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Claimant:
    """Who asks for chunks: an instance of a worker, with the fingerprint of the model that it encodes a queue's jobs
    with, and its precision. With `takes_new`, it also takes jobs that no worker has begun, which are then pinned to its
    fingerprint. In `quarantine`, it takes what may kill a worker, and nothing else."""

    instance: str
    fingerprint: str
    precision: str
    takes_new: bool = True
    quarantine: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """A chunk that was leased to a worker.

    Attributes:
        token: identifies this claim in calls of renew, release and complete.
        attempt: how often the chunk was claimed, this claim included.
        input: what Redis holds of the chunk's text: :meth:`ChunkFiles.get` gives the text.
        given_up: None unless the chunk is suspect, because an owner of it died. A suspect chunk is to be encoded in
            careful mode, without these rows: earlier owners died on them.
        doubts: the failures that earlier owners reported.
        waited_s: seconds since the job's last turn, or since it had chunks that were ready.
        job: its job, if that is a small one.
    """

    job_id: str
    chunk: int
    token: str
    attempt: int
    input: bytes
    given_up: frozenset[int] | None = None
    doubts: Doubts | None = None
    waited_s: float = 0.0
    job: JobStatus | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """The chunks that a worker was given. `later`: there are more, which are left to other workers for now. `unusable`
    are jobs of which no chunk can be given, each with the reason."""

    claims: Sequence[Claim] = ()
    later: bool = False
    unusable: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True, slots=True)
class Completed:
    """A worker's report with a chunk's result: counts of records, and of tokens. The work is in tokens, each counted by
    the products that it took. The input of the failed records is a value of an :class:`Upload`."""

    done: int
    failed: int
    truncated: int
    tokens: int
    work: int
    dim: int
    failed_input: bytes = b""


@dataclass(frozen=True, slots=True)
class InlineJob:
    """What came of making an inline job: one of one chunk, in one round trip.

    Attributes:
        job_id: None if the job was not made, because its tenant's limits leave no room, or another job has its id.
        sealed_at: the id of the event of its sealing; None if a step did not do what it should. Then each is to be
            taken by itself.
    """

    job_id: str | None
    records: int
    sealed_at: str | None


def claim_of(token: str, facts: Sequence[Any], job: JobStatus | None) -> Claim:
    """A claim in the answer of the script `next`."""
    job_id, chunk, attempt, data, rows, doubts, waited_ms = facts[:7]
    return Claim(
        job_id.decode(),
        int(chunk),
        token,
        int(attempt),
        data,
        None if rows is None else frozenset(map(int, filter(None, rows.split(b",")))),
        None if doubts is None else Doubts.parse(doubts),
        max(0, int(waited_ms)) / 1000,
        job,
    )
