"""Removes bytes of chunks that nothing in Redis refers to: of lost claims, and of jobs that are gone."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence

from embedctl.chunk_files.chunks import GRACE_S
from embedctl.chunk_files.place import Entry
from embedctl.chunk_files.references import MOST_BYTES, NAME, parse_reference
from embedctl.queueing.broker import Broker
from embedctl.store.lease import take_turn
from embedctl_config import keys
from embedctl_config.errors import ChunkFilesUnavailable, WireError

log = logging.getLogger(__name__)

#: A round begins nothing new after this (seconds); the next one, in any process, resumes where it stopped.
BUDGET_S = 5.0
#: Seconds between two rounds of all processes together, and between the end of a sweep and the next one.
_PAUSE_S, _REST_S = 60.0, 600.0
#: Seconds between the two looks at a name before it is removed. A Redis that comes back without its last seconds may
#: refer again to what it had let go of.
_LOOK_AGAIN_S = 60.0
#: The most names that wait for the second look; others are found again by the next sweep.
_MOST_WAITING = 100_000
#: Names that are looked at together.
_TOGETHER = 500
#: Folders above the bytes: a day, a job, `in` or `out`, a shard.
_LEVELS = 4


class Sweeper:
    """Goes through this database's part of the place, one folder after the other. Bytes that were put less than
    `grace_s` ago, by the place's own clock, stay: their process may be about to note them. Nothing is removed before a
    second look. The part of another database is never touched, so a second Redis on one place, or an emptied one, loses
    nothing."""

    def __init__(
        self,
        broker: Broker,
        *,
        grace_s: float = GRACE_S,
        rest_s: float = _REST_S,
        again_s: float = _LOOK_AGAIN_S,
    ) -> None:
        self._broker = broker
        self._files = broker.chunk_files
        self._grace_s = grace_s
        self._rest_s = rest_s
        self._again_s = again_s
        #: When each was found, by the monotonic clock, its folder, and names that nothing referred to.
        self._found: deque[tuple[float, str, list[str]]] = deque()
        self._waiting = 0

    def round(self) -> int:
        """Remove what was found some time ago, and do a part of a sweep, unless another process has just done one;
        returns how many names were removed. Raises BrokerUnavailable, also if the place can't be reached, or
        SettingsError if `chunk_files` is not the producers' place."""
        removed = self._remove()
        if not take_turn(self._broker.connection, keys.SWEEP, min(_PAUSE_S, self._rest_s)):
            return removed
        with self._broker.connection.client() as client:
            found = client.hmget(keys.NOTES, "data_at", "data_next_ms")
        now_ms = self._broker.connection.now_ms()
        at = (found[0] or b"").decode()
        if not at and now_ms < int(found[1] or 0):
            return removed
        until = time.monotonic() + BUDGET_S
        place_now = self._files.now()
        if place_now is None:
            return removed
        for folder in self._folders(at):
            self._look(folder, place_now - self._grace_s)
            if time.monotonic() > until:
                self._note(folder, 0)
                return removed
        self._note("", now_ms + int(self._rest_s * 1000))
        return removed

    def _note(self, at: str, next_ms: int) -> None:
        with self._broker.connection.client() as client:
            pipe = client.pipeline(transaction=False)
            pipe.hset(keys.NOTES, mapping={"data_at": at, "data_next_ms": next_ms})
            pipe.pexpire(keys.NOTES, keys.NOTES_TTL_S * 1000).execute()

    def _folders(self, after: str) -> Iterator[str]:
        """The folders that hold bytes, in order, after this one: `DAY/JOB/in|out/SHARD`."""

        last = after.split("/") if after else []

        def below(folder: str, level: int) -> Iterator[str]:
            for each in self._listed(folder):
                path = each.name.split("/")
                if not each.is_folder or path < last[:level]:
                    continue
                if level < _LEVELS:
                    yield from below(each.name, level + 1)
                    self._files.remove_empty(each.name)
                elif path != last:
                    yield each.name

        return below("", 1)

    def _listed(self, folder: str) -> list[Entry]:
        """What is in a folder; nothing if only this folder can't be read, so that the sweep goes on after it."""
        try:
            return list(self._files.list(folder))
        except ChunkFilesUnavailable as error:
            if not folder:
                raise
            list(self._files.list(""))  # the place itself may be away
            log.warning("a folder is not swept: %s", error)
            return []

    def _look(self, folder: str, before: float) -> None:
        old = [each.name for each in self._listed(folder) if not each.is_folder and each.modified < before]
        for at in range(0, len(old), _TOGETHER):
            unused = self._unused(folder, old[at : at + _TOGETHER])
            if unused and self._waiting < _MOST_WAITING:
                self._found.append((time.monotonic(), folder, unused))
                self._waiting += len(unused)
        self._files.remove_empty(folder)

    def _remove(self) -> int:
        """Remove what was found long enough ago, and is still nobody's; returns how many names that were."""
        removed = 0
        while self._found and time.monotonic() - self._found[0][0] >= self._again_s:
            _, folder, names = self._found.popleft()
            self._waiting -= len(names)
            unused = self._unused(folder, names)
            self._files.remove_names(unused)
            removed += len(unused)
        if removed:
            log.info("%d chunks' bytes that no job refers to were removed from chunk_files", removed)
        return removed

    def _unused(self, folder: str, names: Sequence[str]) -> list[str]:
        """Those of some names of one folder that no value in Redis refers to."""
        _, job_id, kind, _ = folder.split("/")
        if not keys.is_job_id(job_id):
            return []
        key_of = keys.chunk_input if kind == "in" else keys.chunk_result
        own = [name for name in names if NAME.fullmatch(f"0/{name}") is not None]
        asked = [(name, int(name.rpartition("/")[2].partition(".")[0])) for name in own]
        with self._broker.connection.client() as client:
            pipe = client.pipeline(transaction=False)
            for _, chunk in asked:
                pipe.getrange(key_of(job_id, chunk), 0, MOST_BYTES - 1)
            values = pipe.execute()
        unused = [(name, chunk) for (name, chunk), value in zip(asked, values, strict=True) if not _names(value, name)]
        return [name for name, chunk in unused if kind == "out" or not self._is_retried(job_id, chunk, name)]

    def _is_retried(self, job_id: str, chunk: int, name: str) -> bool:
        """Whether a chunk that retries failed records has this input: it was moved there, under its old name."""
        later = self._broker.jobs.retried_as(job_id, chunk)
        while later is not None:
            with self._broker.connection.client() as client:
                if _names(client.getrange(keys.chunk_input(job_id, later), 0, MOST_BYTES - 1), name):
                    return True
            later = self._broker.jobs.retried_as(job_id, later)
        return False


def _names(value: bytes, name: str) -> bool:
    """Whether a value is a reference to this name, which lacks its database."""
    try:
        reference = parse_reference(value)
    except WireError:
        return False
    return reference is not None and reference.name.partition("/")[2] == name
