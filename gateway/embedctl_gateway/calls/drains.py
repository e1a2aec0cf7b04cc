"""Steps of callers that drain a job of theirs: what is durable at the caller's place leaves Redis."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from embedctl.jobs.options import is_whole
from embedctl.queueing.broker import Broker
from embedctl.store import BatchFacts, DrainState, Holder, JobStatus, PartFacts
from embedctl.store.drains import BEYOND, NOTED_CHUNKS
from embedctl_gateway.http.refusals import refuse

#: What the word of a holder is: Redis has them in a line.
_WORD = re.compile(r"[!-~]{0,255}")
_NAME = re.compile(r"part-(retry-)?[0-9]{6,12}\.parquet|batch-(retry-)?[0-9]{6,12}")
_HEX = re.compile(r"([0-9a-f]{2})*")
_DIGEST_BYTES = 16
_LONGEST_PLACE = 2000
#: Most names in one question.
_MOST_NAMES = 500


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_PLACE and value.isprintable()


def _is_number(value: object) -> bool:
    return is_whole(value) and isinstance(value, int) and 0 <= value < 2**53


def _are_numbers(value: object) -> bool:
    """Of chunks, which Redis counts in bitmaps."""
    return (
        isinstance(value, list)
        and len(value) <= NOTED_CHUNKS
        and all(_is_number(each) and each < 2**31 for each in value)
    )


def _are_names(value: object) -> bool:
    return isinstance(value, list) and len(value) <= _MOST_NAMES and all(map(_is_name, value))


def _is_word(value: object) -> bool:
    return isinstance(value, str) and _WORD.fullmatch(value) is not None


def _is_name(value: object) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


#: Field → whether a value is one of it.
FIELDS: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys(("machine", "process", "host", "dead"), _is_word),
    **dict.fromkeys(("high_water", "result_bytes"), _is_number),
    "place": _is_text,
    "name": _is_name,
    "facts": lambda value: isinstance(value, dict),
    "digests": lambda value: isinstance(value, str) and _HEX.fullmatch(value) is not None,
    "more": _are_numbers,
    "numbers": _are_numbers,
    "names": _are_names,
}


def _take(broker: Broker, job: JobStatus, given: Mapping[str, Any]) -> dict[str, Any]:
    """Redis' own processes open no address that a caller names, so its place is marked as one."""
    holder = Holder(*(given[name] for name in ("token", "machine", "process", "host")))
    found = broker.drains.take(
        job.id,
        holder,
        high_water=max(1, min(given["high_water"], broker.results_high_water())),
        place=BEYOND + given["place"] if given["place"] else "",
        dead=given["dead"],
        **({"lease_s": given["lease_s"]} if "lease_s" in given else {}),
    )
    return {"holder": dataclasses.astuple(found)} if isinstance(found, Holder) else _told(found)


def _state(broker: Broker, job: JobStatus, _: Mapping[str, Any]) -> dict[str, Any]:
    return _told(broker.drains.state(job.id))


def _told(state: DrainState) -> dict[str, Any]:
    return {"state": (state.next_chunk, state.parts, state.retry_parts, state.place.removeprefix(BEYOND))}


def _note(broker: Broker, job: JobStatus, given: Mapping[str, Any]) -> str:
    facts, digests, more = _facts_of(given["facts"]), bytes.fromhex(given["digests"]), given["more"]
    chunks = range(facts.first, facts.last + 1)
    if not (chunks or more) or len(chunks) + len(more) > NOTED_CHUNKS:
        refuse(f"a part holds 1 to {NOTED_CHUNKS:,} chunks", "invalid_value", "facts")
    if max((*chunks[-1:], *more)) >= job.chunks:
        refuse(f"the job has {job.chunks:,} chunks", "invalid_value", "facts")
    count = len(digests) // _DIGEST_BYTES
    if len(digests) % _DIGEST_BYTES or (count != len(chunks) if chunks else count > len(more)):
        refuse("there is one digest of 16 bytes for each chunk", "invalid_value", "digests")
    result_bytes = given["result_bytes"]
    return broker.drains.note(
        job.id, given["token"], given["name"], facts, result_bytes=result_bytes, digests=digests, more=more
    )


def _facts_of(given: dict[str, Any]) -> PartFacts | BatchFacts:
    try:
        facts = PartFacts(**given) if "sha256" in given else BatchFacts(**given)
    except TypeError:
        refuse("facts are those of no part and of no batch", "invalid_value", "facts")
    if not (_is_number(facts.first) and (_is_number(facts.last) or facts.last == facts.first - 1)):
        refuse("first and last are no range of chunks", "invalid_value", "facts")
    return facts


def _free(broker: Broker, job: JobStatus, given: Mapping[str, Any]) -> None:
    broker.drains.unlink(job.id, given["numbers"])


def _is_drained(broker: Broker, job: JobStatus, given: Mapping[str, Any]) -> bool:
    return broker.drains.is_drained(job.id, given["chunk"])


def _map(broker: Broker, job: JobStatus, given: Mapping[str, Any]) -> str:
    return broker.drains.drained_map(job.id, given["start"] // 8).hex()


def _facts(broker: Broker, job: JobStatus, given: Mapping[str, Any]) -> list[str | None]:
    return [None if each is None else each.decode() for each in broker.drains.noted(job.id, given["names"])]


STEPS: Mapping[str, Callable[[Broker, JobStatus, Mapping[str, Any]], object]] = {
    "drain": _take,
    "drain_state": _state,
    "note_drained": _note,
    "free_drained": _free,
    "is_drained": _is_drained,
    "drained_map": _map,
    "drained_facts": _facts,
}
