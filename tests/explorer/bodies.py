"""The code of the programs: the real client code, called as its usual callers call it."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from embedctl.corpus.rows import Rows, records_of
from embedctl.jobs.enqueue import submit
from embedctl.jobs.job import Job
from embedctl.jobs.options import SubmitOptions
from embedctl.queueing.broker import Broker
from embedctl.queueing.reaper import Reaper
from embedctl.store import Holder, PartFacts
from embedctl.store.drains import part_name, retry_part_name
from embedctl_config import wire
from tests.explorer.actors import Body
from tests.explorer.snapshots import VOID


def corpus(*words: str) -> list[str]:
    """Two records per word; each word makes one chunk."""
    return [f"{word} {chunk} {row}" for chunk, word in enumerate(words) for row in range(2)]


def submits(texts: Sequence[str]) -> Body:
    """A producer: it submits a corpus to the job, or the missing part of it, and waits for the end."""

    def body(broker: Broker, job_id: str) -> str:
        records = records_of(texts, Rows(1000))
        return str(submit(broker, records, SubmitOptions(resume=job_id)).wait().state)

    return body


def waits(broker: Broker, job_id: str) -> str:
    return str(Job(job_id, broker).wait().state)


def fetches(broker: Broker, job_id: str) -> Any:
    """Positions and failures of all results of a job."""
    seen: list[int] = []
    for chunk in Job(job_id, broker).iter_results():
        seen += chunk.positions.tolist()
    return tuple(seen)


def drains(broker: Broker, job_id: str) -> str:
    """A drainer of what is there. Its parts hold one chunk each, and are in Redis' list of parts instead of files.

    The order of its steps is that of embedctl.destinations.parts.
    """
    token = secrets.token_hex(8)
    state = broker.drains.take(job_id, Holder(token, "m", token, "h"), high_water=10**9, place="/parts")
    if isinstance(state, Holder):
        return "held"
    status = broker.jobs.status(job_id)
    while (chunk := state.next_chunk) < (status.original_chunks or status.chunks):
        data = broker.jobs.result(job_id, chunk)
        if data is None:
            return "waits"
        answer = _noted(broker, job_id, token, chunk, data, part_name(state.parts), corpus=True)
        if answer != "ok":
            return answer
        state = replace(state, next_chunk=chunk + 1, parts=state.parts + 1)
    for chunk in broker.drains.chunks(job_id, status.chunks, drained=False) if status.state.ended else ():
        data = broker.jobs.result(job_id, chunk)
        if data is None or data == VOID:
            continue
        answer = _noted(broker, job_id, token, chunk, data, retry_part_name(state.retry_parts + 1), corpus=False)
        if answer != "ok":
            return answer
        state = replace(state, retry_parts=state.retry_parts + 1)
    return "drained"


def _noted(broker: Broker, job_id: str, token: str, chunk: int, data: bytes, name: str, *, corpus: bool) -> str:
    facts = PartFacts(f"{chunk}:{data.hex()}", len(data), chunk, chunk if corpus else chunk - 1, 2)
    answer = broker.drains.note(
        job_id,
        token,
        name,
        facts,
        result_bytes=len(data),
        digests=wire.digest_of(data) if corpus else b"",
        more=[] if corpus else [chunk],
    )
    if answer == "ok":
        broker.drains.unlink(job_id, [chunk])
    return answer


def cancels(broker: Broker, job_id: str) -> str:
    return str(Job(job_id, broker).cancel().state)


def stops(broker: Broker, job_id: str) -> str:
    return str(Job(job_id, broker).stop().state)


def retries(broker: Broker, job_id: str) -> int:
    return Job(job_id, broker).retry_failed()


def looks_after(broker: Broker, job_id: str) -> None:
    """A reaper's look after the jobs that are due."""
    Reaper(broker)._look_after_due(broker.connection.now_ms(), math.inf)


def sweeps(broker: Broker, job_id: str) -> None:
    """A reaper's sweep: it finds the jobs that the agenda lacks, and corrects what is noted of them."""
    broker.quotas.round(broker.upkeep.agenda.sweep(broker.connection.now_ms()))
