"""The events of jobs: what happened to them, for those who wait."""

from __future__ import annotations

from typing import Any, NamedTuple

#: The states of a job that goes on. Any other one is looked at.
_GOES_ON = frozenset((b"submitting", b"queued", b"running"))


class Event(NamedTuple):
    """Something that happened to a job. `may_end` is false if the job goes on after it, as far as it tells."""

    id: str
    may_end: bool


def events_in(answer: Any) -> dict[bytes, list[Event]]:
    """Stream → its events, in an answer of XREAD."""
    # RESP3 answers a mapping of stream to lists of entries, RESP2 a list of pairs.
    pairs = ((name, of[0]) for name, of in answer.items()) if isinstance(answer, dict) else answer or ()
    return {name: [Event(entry.decode(), _may_end(facts)) for entry, facts in entries] for name, entries in pairs}


def _may_end(facts: dict[bytes, bytes] | None) -> bool:
    return not facts or not (b"chunk" in facts or facts.get(b"state") in _GOES_ON)
