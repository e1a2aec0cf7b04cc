"""The parts of one job: what Redis knows of them, and what is at their place."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

from embedctl.destinations.numbers import Numbers
from embedctl.destinations.part import footer_of, rows_of_chunks
from embedctl.destinations.place import MANIFEST, Place
from embedctl.destinations.right import overtaken
from embedctl.store import DrainState, JobStatus, PartFacts
from embedctl.store.drains import Drains, first_part, part_name, part_names, retry_part_name
from embedctl_config.errors import OutputError, UnusableOutput


def check_own(place: Place, name: str, job_id: str | None) -> None:
    """Raise UnusableOutput unless a file at a place for parts is of this job."""
    try:
        found: Mapping[str, Any] = json.loads(place.read(name)) if name == MANIFEST else footer_of(place.source(name))
        owner = str(found.get("job", ""))
    except (ValueError, TypeError, AttributeError):
        owner = ""  # it does not say
    if owner != job_id:
        of = f"job {owner}" if owner else "something else"
        raise UnusableOutput(f"{place.name} holds {name} of {of}: choose another folder")


class PartList:
    """The durable parts of a job. `state` tells how far Redis knows the job to be drained."""

    def __init__(self, place: Place, drains: Drains, job_id: str, state: Callable[[], DrainState]) -> None:
        self._place, self._drains, self._job_id, self._state = place, drains, job_id, state

    def check(self) -> None:
        """Raise OutputError unless the place holds the parts as they were written, and nothing of another job."""
        there = self._place.sizes()
        for name, facts in self._facts():
            self._check_part(name, facts, there)
        for name in self._unknown(there):
            self.check_own(name)

    def check_own(self, name: str) -> None:
        """Raise UnusableOutput unless a file at the place is of this job."""
        check_own(self._place, name, self._job_id)

    def numbers(self) -> Numbers | None:
        """How the parts store vectors; None if there is none."""
        if (first := first_part(self._state())) is None:
            return None
        self.check_own(first)  # a store may keep the digest of an object that it damaged
        return Numbers.of_facts(footer_of(self._place.source(first))["vectors"])

    def next_name(self, *, of_corpus: bool) -> str:
        return part_name(self._state().parts) if of_corpus else retry_part_name(self._state().retry_parts + 1)

    def publish_over(self, name: str, *, of_corpus: bool) -> None:
        """Publish a part in the place of one that Redis does not know: a drainer has died before it could note it."""
        if name != self.next_name(of_corpus=of_corpus):
            raise overtaken(self._job_id)
        self.check_own(name)
        self._place.remove(name)
        self._place.publish(name)

    def counts(self, status: JobStatus) -> tuple[int, int]:
        """How many records of the corpus are in the parts, where those that were retried or repaired count once; and
        how many of all have a vector that the parts' numbers could not hold."""
        end, rows, refused = status.original_chunks or status.chunks, dict[int, int](), 0
        for name in part_names(self._state()):
            footer = footer_of(self._place.source(name))
            rows |= {chunk: count for chunk, _, count in rows_of_chunks(footer) if chunk < end}
            refused += footer["refused"]
        return sum(rows.values()), refused

    def sum_up(self, status: JobStatus, numbers: Numbers, fingerprint: str) -> list[str]:
        """Write the manifest, when everything else is there; returns the full names of all files, this one last.
        OutputError: a part was removed or changed meanwhile."""
        parts, there = [], self._place.sizes()
        for name, facts in self._facts():
            if there.get(name) != facts.bytes:
                self._check_part(name, facts, there)
            parts.append({"name": name, "sha256": facts.sha256, "bytes": facts.bytes, "records": facts.records})
        for name in self._unknown(there):
            self.check_own(name)
            if name != MANIFEST:  # Redis came back without its last parts, once
                self._place.remove(name)
        manifest = {
            "job": self._job_id,
            "model": status.model,
            "fingerprint": fingerprint,
            "precision": status.precision,
            "dim": status.dim,
            "dtype": numbers.kind.value,
            **({} if numbers.ranges is None else {"ranges": numbers.ranges.tolist()}),
            "records": status.records,
            "failed": status.failed,
            "parts": parts,
        }
        scratch = self._place.scratch(MANIFEST)
        scratch.unlink(missing_ok=True)
        scratch.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        self._place.publish(MANIFEST, replace=True)
        return [self._place.path_of(name) for name in (*part_names(self._state()), MANIFEST)]

    def _facts(self) -> Iterator[tuple[str, PartFacts]]:
        return self._drains.parts(self._job_id, part_names(self._state()))

    def _unknown(self, there: Iterable[str]) -> list[str]:
        listed = set(part_names(self._state()))
        return [name for name in there if name not in listed]

    def _check_part(self, name: str, facts: PartFacts, there: Container[str]) -> None:
        if name not in there:
            was = "" if self._state().place == self._place.name else f", which was drained to {self._state().place},"
            raise OutputError(
                f"{self._place.name} does not hold {name} of job {self._job_id}{was}: bring it back, and the same "
                "command resumes. Nothing more was removed from Redis"
            )
        if self._place.digest(name) != (facts.sha256, facts.bytes):
            raise OutputError(
                f"{name} in {self._place.name} was changed after it was written (its sha256 is not "
                f"{facts.sha256[:12]}…): restore it from a copy, and the same command resumes. Nothing more was "
                "removed from Redis"
            )
