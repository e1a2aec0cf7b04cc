"""Batches of the gateway: their facts in Redis, which process runs them, and the events that tell their ends."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from embedctl.store.connection import Connection
from embedctl.store.lease import take_due
from embedctl.store.scripts import flat
from embedctl.store.stored_files import Once, StoredFile, listed, make, new_id, texts_of
from embedctl_config import keys


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch. Its facts are name → text, as its hash holds them."""

    id: str
    facts: Mapping[str, str]

    @property
    def tenant(self) -> str:
        """Whom it belongs to."""
        return self.facts["tenant"]

    @property
    def status(self) -> str:
        """As OpenAI names it."""
        return self.facts["status"]

    def number(self, name: str) -> int:
        """A fact that is a number; 0 if it is not there."""
        return int(self.facts.get(name) or 0)

    def parsed(self, name: str) -> Any:
        """A fact that is JSON; None if it is not there."""
        text = self.facts.get(name)
        return json.loads(text) if text else None


@dataclass(frozen=True, slots=True)
class Step:
    """What a runner notes of a batch.

    Attributes:
        facts: the new ones.
        before: the status that it must still have; any if empty.
        after: whether the runner keeps the batch, releases it, or has ended it.
        next_s: when somebody is to look at it (seconds from now); of `keep`, the length of the lease.
        files: which are made with the step.
        told: whether the batch's end is an event that a webhook is to tell.
    """

    facts: Mapping[str, object] = field(default_factory=dict)
    before: str = ""
    after: Literal["keep", "release", "end"] = "keep"
    next_s: float = keys.BATCH_LEASE_S
    files: Sequence[StoredFile] = ()
    told: bool = False


class BatchStore:
    """All batches. Threads may share it. Every method raises BrokerUnavailable if Redis can't be reached."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def make(self, batch_id: str, facts: Mapping[str, object], request: Once) -> str:
        """Make a batch that somebody is to run, as :meth:`FileStore.make`. Its facts have `tenant`."""
        script_keys = [keys.batch(batch_id), keys.batches(str(facts["tenant"]))]
        return make(self._connection, script_keys, batch_id, keys.FILE_TTL_S * 1000, flat(facts), request)

    def new_id(self, prefix: str) -> str:
        """An id for a new batch."""
        return new_id(prefix, self._connection.recent_now_ms())

    def get(self, batch_id: str, tenant: str) -> StoredBatch | None:
        """A tenant's batch; None if it has no such batch."""
        found = self._found(batch_id)
        return found if found is not None and found.tenant == tenant else None

    def newest(self, tenant: str, some: int, after: str = "") -> Iterator[list[StoredBatch]]:
        """A tenant's batches, the newest first, from the one after `after` on, up to `some` at a time."""
        for made in listed(self._connection, keys.batches(tenant), some, after, descending=True):
            yield [_parse(batch_id, facts) for batch_id, facts in made]

    def cancel(self, batch_id: str, tenant: str) -> str | None:
        """Ask for the end of a batch. Returns its status; None if the tenant has no such batch."""
        answer, _ = self._connection.script("cancel_batch", [keys.batch(batch_id)], [batch_id, tenant])
        return None if answer == "gone" else answer

    def take(self, token: str, lease_s: float, most_bytes: int = keys.KEPT_BYTES) -> StoredBatch | None:
        """Take a batch that somebody is to look at, with the runner's token for it; None if there is none. Tenants take
        turns. A file with more requests than `most_bytes` is not taken."""
        batch_id = self._due(token, lease_s, most_bytes)
        return None if batch_id is None else self._found(batch_id)

    def are_due(self, most_bytes: int = keys.KEPT_BYTES) -> bool:
        """Whether batches wait for a runner."""
        return self._due("", 0.0, most_bytes) is not None

    def end_late(self, *, told: bool) -> list[str]:
        """Let batches go on to their ends whose deadlines are over, and tell the ends if `told`. Returns the jobs of
        those that could not be ended in any other way: nobody waits for them."""
        _, rest = self._connection.script("late", [], [int(told)])
        return [each.decode() for each in rest]

    def note(self, batch: StoredBatch, token: str, step: Step) -> str | None:
        """Note a step; returns the batch's status now, or None if the runner has lost the batch, and nothing was noted.

        The status differs from what the step was to make of it if the step came too late to be noted.
        """
        told: dict[str, Any] = {
            "known": batch.status,
            "after": step.after,
            "next_ms": int(step.next_s * 1000),
            "fields": flat(step.facts),
            "files": [
                {"id": each.id, "size": each.size, "ttl_ms": each.ttl_ms, "fields": each.fields()}
                for each in step.files
            ],
            "told": step.told,
        }
        if step.before:
            told["before"] = step.before
        if "status" in step.facts:
            told["status"] = step.facts["status"]
        script_keys = [keys.batch(batch.id), keys.files(batch.tenant), *(keys.file(each.id) for each in step.files)]
        answer, rest = self._connection.script("step_batch", script_keys, [batch.id, token, json.dumps(told)])
        return None if answer == "lost" else str(rest[0].decode())

    def status(self, batch: StoredBatch) -> str:
        """The status now; empty if the batch is gone."""
        with self._connection.client() as client:
            found = client.hget(keys.batch(batch.id), "status")
        return "" if found is None else str(found.decode())

    def _due(self, token: str, lease_s: float, most_bytes: int) -> str | None:
        _, rest = self._connection.script("take_batch", [], [token, int(lease_s * 1000), most_bytes])
        return rest[0].decode() if rest else None

    def _found(self, batch_id: str) -> StoredBatch | None:
        with self._connection.client() as client:
            facts = client.hgetall(keys.batch(batch_id))
        return _parse(batch_id, facts) if facts else None


def _parse(batch_id: str, facts: Mapping[bytes, bytes]) -> StoredBatch:
    return StoredBatch(batch_id, texts_of(facts))


@dataclass(frozen=True, slots=True)
class Event:
    """The end of a batch.

    Attributes:
        type: as OpenAI names it, such as `batch.completed`.
        created_s: since 1970.
        tries: how often it was told in vain.
    """

    id: str
    type: str
    batch_id: str
    created_s: int
    tries: int


class EventStore:
    """All events that are to be told. Threads may share it. Raises BrokerUnavailable if Redis can't be reached."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def take(self, token: str, lease_s: float) -> Event | None:
        """Take an event that is to be told now; None if there is none. As :func:`embedctl.store.lease.take_due`."""
        event_id = take_due(self._connection, keys.UNTOLD, keys.webhook_event, token, lease_s)
        if event_id is None:
            return None
        with self._connection.client() as client:
            found = client.hgetall(keys.webhook_event(event_id))
        facts = texts_of(found)
        if "type" not in facts:  # it has expired meanwhile
            return None
        return Event(event_id, facts["type"], facts["batch"], int(facts["created"]), int(facts.get("tries", 0)))

    def note(self, event: Event, token: str, next_s: float | None) -> None:
        """Note a try, and when the next one is (seconds from now); None if the event is told, or given up.

        Counts for nothing if another process has taken the event since.
        """
        next_ms = -1 if next_s is None else int(next_s * 1000)
        self._connection.script("note_event", [keys.webhook_event(event.id), keys.UNTOLD], [event.id, token, next_ms])
