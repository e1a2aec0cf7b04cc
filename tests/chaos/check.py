"""Checks that an ended job holds every record exactly once, with the right content: by the public library and by raw
Redis. One that its error budget ended must give the reason, and its results so far must be readable."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embedctl import Job, JobFailed, JobState, JobStatus
from embedctl.destinations.part_reader import DrainedChunks
from embedctl.queueing.broker import Broker
from embedctl_config import keys, wire
from embedctl_config.wire import ErrorCode
from tests.chaos.jobs import Expected, Plan
from tests.chaos.stack import DAMAGED

_SLICE = 500
#: Most sentences about one job.
_MOST_WORDS = 6


@dataclass
class Verdict:
    """What is wrong with a job: counts of records, and sentences.

    Attributes:
        difference: the largest difference between any vector's element and its expected value.
        blamed: records that ended as `crashed_worker` but are not poison: a random kill hit a worker while it tried
            records with care.
    """

    lost: int = 0
    doubled: int = 0
    wrong_vectors: int = 0
    wrong_errors: int = 0
    other: int = 0
    difference: float = 0.0
    blamed: list[int] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    @property
    def fine(self) -> bool:
        return not (self.lost or self.doubled or self.wrong_vectors or self.wrong_errors or self.other)

    def say(self, words: str) -> None:
        if len(self.words) < _MOST_WORDS:
            self.words.append(words)

    def must_be(self, what: str, found: object, expected: object) -> None:
        """Count a fact that differs from its expected value."""
        if found != expected:
            self.other += 1
            self.say(f"{what} is {found}, not {expected}")


def check_job(job: Job, broker: Broker, raw: Any, plan: Plan, expected: Expected) -> Verdict:
    """Compare an ended job with its expected results.

    Raises:
        JobNotFound, JobLost, JobUnfinished, BrokerUnavailable: as the library does.
    """
    verdict = Verdict()
    status = job.status()
    failed = _check_records(job, plan, expected, verdict)
    verdict.must_be("status.records", status.records, plan.records)
    verdict.must_be("done + failed", status.done + status.failed, plan.records)
    verdict.must_be("status.failed", status.failed, len(failed))
    verdict.must_be("status.chunks_done", status.chunks_done, status.chunks)
    verdict.must_be("state", status.state, _state(plan.records, len(failed)))
    verdict.must_be("whether its budget was spent", is_spent(plan, len(failed), plan.records), False)
    verdict.must_be("positions of errors()", [each.position for each in job.errors()], sorted(failed))
    if expected.cuts is not None and not verdict.blamed:
        verdict.must_be("status.truncated", status.truncated, len(expected.cuts))
    _check_raw(broker, raw, status, len(failed), verdict)
    return verdict


def check_stopped(job: Job, broker: Broker, raw: Any, plan: Plan, expected: Expected) -> Verdict:
    """Compare a job that its budget ended with its expected results.

    Raises:
        JobNotFound, JobLost, BrokerUnavailable: as the library does.
    """
    verdict = Verdict()
    status = job.status()
    verdict.must_be("state", status.state, JobState.FAILED)
    verdict.must_be("stopped_by", status.stopped_by, "max_errors")
    verdict.must_be("whether its budget was spent", is_spent(plan, status.failed, status.records), True)
    failed = _check_stored(broker, status, expected, verdict)
    verdict.must_be("status.failed", status.failed, len(failed))
    verdict.must_be("positions of iter_errors()", [each.position for each in job.iter_errors()], sorted(failed))
    _check_readable(job, status.chunks, verdict)
    verdict.must_be("text kept", not freed(raw, job.id, results=False), False)
    for key in (keys.ready(job.id), keys.suspects(job.id), keys.owners(job.id)):
        verdict.must_be(f"{key.rpartition(':')[2]} kept", raw.exists(key), 0)
    return verdict


def _check_stored(broker: Broker, status: JobStatus, expected: Expected, verdict: Verdict) -> dict[int, ErrorCode]:
    """Check each stored result, wherever it is in the job. Return the codes of the failed records."""
    failed: dict[int, ErrorCode] = {}
    seen: Counter[int] = Counter()
    for chunk in range(status.chunks):
        data = broker.jobs.result(status.id, chunk)
        if data is None:
            continue
        result = wire.decode_result(data)
        positions = (
            list(result.positions) if result.positions else list(range(result.first, result.first + result.rows))
        )
        if chunk < (status.original_chunks or status.chunks):  # later chunks hold retried records
            seen.update(positions)
        failed.update({positions[each.row]: each.code for each in result.errors})
        vectors = np.frombuffer(result.vectors, result.dtype).reshape(result.rows, result.dim)
        check_vectors(vectors, positions, failed, expected, verdict)
    verdict.doubled += sum(count - 1 for count in seen.values())
    if seen:
        check_codes(failed, expected, verdict, list(seen))
    return failed


def _check_readable(job: Job, chunks: int, verdict: Verdict) -> None:
    """The results up to the first missing one must be readable; then the error must give the reason."""
    read, told = 0, ""
    try:
        for _ in job.iter_results():
            read += 1
    except JobFailed as error:
        told = str(error)
    if not told:
        verdict.must_be("chunks read of a job that told no reason", read, chunks)
    else:
        verdict.must_be("whether the budget is told as the reason", "budget" in told, True)


def is_spent(plan: Plan, failed: int, records: int) -> bool:
    """Whether `failed` of `records` exceed the job's error budget."""
    if plan.max_errors is None:
        return False
    number, percent, _ = str(plan.max_errors).partition("%")
    return failed > (float(number) / 100 * records if percent else int(number))


def _state(records: int, failed: int) -> JobState:
    if not failed:
        return JobState.COMPLETED
    return JobState.FAILED if failed == records else JobState.COMPLETED_WITH_ERRORS


def _check_records(job: Job, plan: Plan, expected: Expected, verdict: Verdict) -> dict[int, ErrorCode]:
    """Check each record's vector or error. Return the codes of the failed records."""
    seen: Counter[int] = Counter()
    failed: dict[int, ErrorCode] = {}
    cuts: dict[int, tuple[int, int]] = {}
    for chunk in job.iter_results():
        positions = chunk.positions.tolist()
        seen.update(positions)
        errors = Counter(each.position for each in chunk.errors)
        verdict.doubled += sum(errors.values()) - len(errors)
        failed.update({each.position: each.code for each in chunk.errors})
        cuts.update({each.position: (each.used, each.lost) for each in chunk.truncations})
        inside = [row for row, position in enumerate(positions) if position < plan.records]
        check_vectors(chunk.vectors[inside], [positions[row] for row in inside], failed, expected, verdict)
        for row in inside:
            if chunk.ids[row] != expected.ids[positions[row]]:
                verdict.must_be(f"id of record {positions[row]}", chunk.ids[row], expected.ids[positions[row]])
            found = None if chunk.kept is None else chunk.kept[row] or None
            wanted = None if expected.kept is None else expected.kept[positions[row]] or None
            if found != wanted and found is not None and wanted is not None:  # perhaps read from a part
                wanted = {name: _in_a_column(value) for name, value in wanted.items()}
            verdict.must_be(f"what record {positions[row]} keeps", found, wanted)
            counted = None if chunk.tokens is None else int(chunk.tokens[row])
            tokens = None if expected.tokens is None else expected.tokens[positions[row]]
            if tokens and positions[row] in errors:  # blamed by chance, perhaps
                tokens = 0
            verdict.must_be(f"tokens of record {positions[row]}", counted, tokens)
    verdict.lost += sum(position not in seen for position in range(plan.records))
    verdict.doubled += sum(count - 1 for count in seen.values())
    verdict.doubled += sum(position >= plan.records for position in seen)
    check_codes(failed, expected, verdict)
    if expected.cuts is not None:
        of_failed = set(failed)
        verdict.must_be("truncations", cuts, {at: cut for at, cut in expected.cuts.items() if at not in of_failed})
    return failed


def _in_a_column(value: object) -> object:
    """A kept field as parquet holds it: an object or a list is its JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) if isinstance(value, dict | list) else value


def check_vectors(
    vectors: Any, positions: list[int], failed: dict[int, ErrorCode], expected: Expected, verdict: Verdict
) -> None:
    if not positions:
        return
    finite = np.isfinite(vectors).all(axis=1)
    with_error = np.array([position in failed for position in positions])
    neither, both = ~finite & ~with_error, finite & with_error
    verdict.lost += int(neither.sum())
    verdict.doubled += int(both.sum())
    wanted = expected.vectors[positions]
    comparable = finite & ~with_error & np.isfinite(wanted).all(axis=1)
    if vectors.shape[1] != wanted.shape[1]:
        verdict.wrong_vectors += len(positions)
        return
    differences = np.abs(vectors[comparable] - wanted[comparable]).max(axis=1, initial=0.0)
    verdict.difference = max(verdict.difference, float(differences.max(initial=0.0)))
    wrong = differences > expected.tolerance
    if wrong.any():
        verdict.wrong_vectors += int(wrong.sum())
        verdict.say(f"record {np.array(positions)[comparable][wrong][0]} has a wrong vector")


def check_codes(failed: dict[int, ErrorCode], expected: Expected, verdict: Verdict, seen: Collection[int] = ()) -> None:
    """Compare the errors of the records that were seen, or of all where none are given."""
    of = failed.keys() | expected.codes.keys()
    for position in sorted(of & set(seen) if seen else of):
        found, wanted = failed.get(position), expected.codes.get(position)
        if found == wanted:
            continue
        if found is ErrorCode.CRASHED_WORKER:
            verdict.blamed.append(position)
        else:
            verdict.wrong_errors += 1
            verdict.say(f"record {position} ended as {found}, not {wanted}")


def _check_raw(broker: Broker, raw: Any, status: JobStatus, failed: int, verdict: Verdict) -> None:
    """Redis must agree: each chunk is counted once, nothing is under way, and only the text of failed rows is left."""
    rows = still_failed = 0
    parts = None if status.drained_to is None else DrainedChunks(broker.drains, status.id, status.drained_to)
    for chunk in range(status.chunks):
        data = broker.jobs.result(status.id, chunk)
        if data is None and parts is not None and broker.drains.is_drained(status.id, chunk):
            found = parts.chunk(chunk)  # None if it is laid over the chunk whose records it retried
            rows += len(found.positions) if found is not None and chunk < (status.original_chunks or 0) else 0
            continue
        if data is None:
            verdict.lost += 1
            verdict.say(f"chunk {chunk} has no result in Redis")
            continue
        result = wire.decode_result(data)
        if chunk < (status.original_chunks or 0):
            rows += result.rows
        moved = broker.jobs.retried_as(status.id, chunk) is not None
        still_failed += 0 if moved else len(result.errors)
        has_input = broker.jobs.input(status.id, chunk) is not None
        verdict.must_be(f"text of chunk {chunk} kept", has_input, bool(result.errors) and not moved)
    verdict.must_be("rows of all results", rows, status.records)
    if not status.drained_chunks:
        verdict.must_be("errors of all results", still_failed, failed)
    verdict.must_be("bits of counted", raw.bitcount(keys.counted(status.id)), status.chunks)
    verdict.must_be("chunks ready", raw.zcard(keys.ready(status.id)), 0)
    verdict.must_be("chunks suspect", raw.zcard(keys.suspects(status.id)), 0)
    verdict.must_be("chunks owned", raw.hlen(keys.owners(status.id)), 0)
    verdict.must_be("waiting_bytes", status.waiting_bytes, 0)


def freed(raw: Any, job_id: str, *, results: bool = True) -> bool:
    """Whether a stopped job's texts and vectors are all gone. Keys of chunks that were never counted expire."""
    chunks = int(raw.hget(keys.job(job_id), "added") or 0)
    kinds = [keys.chunk_input, *([keys.chunk_result, keys.retry_pointer] if results else [])]
    doomed = [key(job_id, chunk) for chunk in range(chunks) for key in kinds]
    return not any(raw.exists(*doomed[at : at + _SLICE]) for at in range(0, len(doomed), _SLICE))


def keys_without_ttl(raw: Any) -> list[str]:
    """Our keys that have no TTL and would stay for good. Those that Celery makes get one when a worker next rings."""
    celery = {keys.UNACKED.encode(), keys.UNACKED_INDEX.encode()}
    names = [name for name in raw.scan_iter(match="embed:*", count=1000) if name not in celery]
    endless = []
    for at in range(0, len(names), _SLICE):
        pipe = raw.pipeline(transaction=False)
        for name in names[at : at + _SLICE]:
            pipe.pttl(name)
        endless += [
            name.decode() for name, left in zip(names[at : at + _SLICE], pipe.execute(), strict=True) if left == -1
        ]
    return endless


#: Keys that all jobs share. They live as long as the longest-lived job might have.
_SHARED = (keys.ACTIVE, keys.JOBS, keys.BIRTH, keys.UNACKED, keys.UNACKED_INDEX)


def left_over(raw: Any) -> dict[str, float]:
    """Our keys that still exist, and the seconds that each has left. A key that all jobs share counts only if it names
    a job that still exists."""
    shared = {name.encode() for name in _SHARED}
    for pattern in ("embed:reaper:*", keys.turns("*"), keys.ledger("*"), keys.CLOCK):  # the last two are of gateways
        shared.update(raw.scan_iter(match=pattern, count=1000))
    names = [name for name in raw.scan_iter(match="embed:*", count=1000) if name not in shared]
    names += [name for name in shared if raw.type(name) == b"zset" and _speaks_of_a_job(raw, name)]
    return {name.decode(): raw.pttl(name) / 1000 for name in names}


def _speaks_of_a_job(raw: Any, name: bytes) -> bool:
    return any(raw.exists(keys.job(member.decode())) for member in raw.zrange(name, 0, -1))


def unknown_jobs(raw: Any, known: set[str]) -> list[str]:
    """Jobs in Redis that nobody ordered: a submission that was counted twice."""
    unknown = {name.decode() for name in raw.zrange(keys.JOBS, 0, -1)} - known
    tenants = {name: raw.hget(keys.job(name), "tenant") for name in unknown if raw.exists(keys.job(name))}
    return [name for name, tenant in tenants.items() if tenant != DAMAGED.encode()]
