"""What Redis knows of the records of a job that left it for a database."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from embedctl.destinations.loop import Delivered, RefusedRecord
from embedctl.destinations.registry import is_database
from embedctl.store import BatchFacts, Drains, DrainState
from embedctl.waiting.results import ChunkVectors, FailedRecord
from embedctl_config.errors import JobDrained
from embedctl_config.record_ids import RecordId, untagged
from embedctl_config.wire import ErrorCode


class Released:
    """The records of all batches of a job that are durable in a database, whichever process has written them.
    `refused` are those that the table did not take."""

    def __init__(self, batches: Iterable[BatchFacts] = ()) -> None:
        self.refused: dict[int, RefusedRecord] = {}
        self.samples: list[RecordId] = []
        self.by_position: bool | None = None
        self._rows: dict[int, int] = {}
        self._failed: dict[int, list[FailedRecord]] = {}
        self._retried: dict[int, Sequence[int]] = {}
        self._unchanged = 0
        for facts in batches:
            self.add(facts)

    def add(self, facts: BatchFacts) -> None:
        self._rows.update(facts.rows)  # a chunk that was repaired counts once
        self._failed |= {chunk: [] for chunk, _ in facts.rows}
        for chunk, position, label, code, message in facts.failed:
            self._failed[chunk].append(FailedRecord(position, untagged(label), ErrorCode(code), message))
        self._retried.update(facts.retried)
        self.refused |= {
            position: RefusedRecord(position, untagged(label), why) for position, label, why in facts.refused
        }
        self._unchanged += facts.unchanged
        self.by_position = facts.by_position
        if (sample := untagged(facts.sample)) is not None:
            self.samples.append(sample)

    def count(self, done: Delivered) -> None:
        """Put the figures into what became of the job's records."""
        done.refused, done.unchanged = len(self.refused), self._unchanged
        done.written = sum(self._rows.values()) - done.refused - done.unchanged

    def chunk(self, index: int) -> ChunkVectors | None:
        """The failed records of a chunk, and, of one that retried some, all of these, without their vectors; None if
        its records are laid over those of another chunk."""
        if index not in self._failed:
            return None
        failed = self._failed[index]
        positions = self._retried.get(index, [each.position for each in failed])
        labels = {each.position: each.id for each in failed}
        return ChunkVectors(
            np.array(positions, np.int64),
            [labels.get(position) for position in positions],
            np.empty((len(positions), 0), np.float32),
            failed,
            [],
        )


def refuse_database(drains: Drains, job_id: str, state: DrainState, *, but: str = "") -> None:
    """Raise JobDrained if results of a job have left Redis for a database, where they can't be read from, `but` not if
    it is the one of this name."""
    if is_database(state.place) and state.place != but and (state.parts or state.retry_parts):
        done = Delivered()
        Released(drains.batches(job_id, state)).count(done)
        raise JobDrained(
            f"{done.written + done.unchanged:,} vectors of job {job_id} have left Redis for {state.place}: read them "
            f"there. `embedctl fetch {job_id} -o '{state.place}'` delivers the others there"
        )
