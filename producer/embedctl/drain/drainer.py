"""Draining one job: its results go to durable parts, and only then leave Redis."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from embedctl.destinations.loop import BeginAgain
from embedctl.drain.part import OpenPart, Taken, footer_of
from embedctl.drain.places import MANIFEST, Place
from embedctl.kept import tells_tokens
from embedctl.machine import machine_id, process_id, runs
from embedctl.output.about import About
from embedctl.output.columns import KeptColumns
from embedctl.output.digest_rows import digest_of
from embedctl.output.numbers import CALIBRATED_ON, FLOAT32, Numbers, OutputType, ranges_of
from embedctl.reader import check_fingerprint
from embedctl.results import ChunkVectors, Vectors, chunk_vectors, overlaid
from embedctl.retrying import TimeLimit
from embedctl.store import DrainState, Holder, JobState, JobStatus, PartFacts
from embedctl.store.drains import first_part, part_name, part_names, retry_part_name
from embedctl.store.lease import Lease
from embedctl.waiting import Progress, Waiter, ended_by_budget, lost_chunks, refuse_cancelled
from embedctl_config import keys, wire
from embedctl_config.errors import (
    BrokerUnavailable,
    EmbedctlError,
    JobCancelled,
    JobError,
    JobFailed,
    JobHeld,
    OutputError,
)

log = logging.getLogger(__name__)

#: Chunks whose results are freed together at the start.
_FREED_AT_ONCE = 500
#: Fewest vectors that ranges are taken from if Redis holds no more. sentence-transformers warns below that.
_FEWEST = 100
#: Chunks that may be missing among those that the ranges are taken from, of a job that does not go on by itself.
_MOST_MISSING = 10_000
#: In place of a result whose records another chunk holds.
_VOID = b"void"


def drain(
    waiter: Waiter,
    place: Place,
    *,
    progress: Progress | None = None,
    written: Callable[[ChunkVectors], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
    numbers: Numbers | None = None,
) -> list[str]:
    """Move a job's results to parts as they arrive, until the job has ended and Redis holds none.

    Args:
        progress: as for :meth:`Job.wait`.
        written: called with each chunk once it is in a part, which may not be durable yet.
        stopped: whether the caller does not want any more. Asked while the drain waits, and after each part.
        numbers: how the parts store vectors; None: as those that are there do, else float32. Int8 without ranges takes
            those of the parts that are there, else of the first 100,000 records, or of as many as Redis holds.

    Returns:
        The full names of all parts, and the manifest's.

    Raises:
        JobHeld: another process drains the job.
        OutputError: the folder or the disk refuses, the folder holds something else, or a part was changed or removed;
            the parts that are there store vectors otherwise; too few records have a vector for the ranges.
        JobCancelled, JobFailed, JobLost, JobStalled, BrokerUnavailable: as for :meth:`Job.iter_results`. The parts that
            are durable stay.
    """
    try:
        return _Drainer(waiter, place, progress, written, stopped, numbers).run()
    except BrokerUnavailable:  # also an OSError, but one of Redis
        raise
    except OSError as error:
        raise OutputError(
            f"{place.name} can't be written: {error.strerror or error}. What is not in a part is still in Redis; the "
            "same command goes on"
        ) from error


class Interrupted(Exception):
    """Raised when the caller of a drain wants no more."""


class _Drainer:
    def __init__(
        self,
        waiter: Waiter,
        place: Place,
        progress: Progress | None,
        written: Callable[[ChunkVectors], None] | None,
        stopped: Callable[[], bool],
        numbers: Numbers | None,
    ) -> None:
        self._waiter, self._place = waiter, place
        self._progress, self._written, self._stopped = progress, written, stopped
        self._wanted = numbers
        self._job_id, self._broker = waiter.job_id, waiter.broker
        self._drains = waiter.broker.drains
        self._me = Holder(secrets.token_hex(8), machine_id(), process_id(os.getpid()), socket.gethostname())
        self._high_water = waiter.ask(waiter.broker.results_high_water)
        self._part: OpenPart | None = None
        self._laid_over: set[int] = set()  # chunks that are in a part with the chunk whose records they retried

    def run(self) -> list[str]:
        status = self._look()
        refuse_cancelled(status)
        self._state = self._take_right()
        with self._right_kept(), self._place.locked():
            self._kept = KeptColumns(status.options.get("keep", ()))
            self._check_folder()
            self._state = self._renew(self._place.name)
            status = self._look()
            self._free_leftovers(status)
            self._tokens = tells_tokens(status.options)
            self._digests = bool(status.options.get("digests"))
            self._numbers = self._agreed_numbers(status)
            try:
                self._drain_corpus(status)
                status = self._drain_rest()
            except JobCancelled:
                self._keep_what_is_done()
                raise
            finally:
                self._abandon()
            written = self._sum_up(status)
        if status.stopped_by is not None and status.state is JobState.FAILED:
            raise JobFailed(f"{ended_by_budget(status)}. What is done is in {self._place.name}")
        return written

    def _look(self) -> JobStatus:
        return self._waiter.look(self._progress, None)

    # ------------------------------------------------------------------------------------------------------ the right

    def _take_right(self) -> DrainState:
        """Become the job's only drainer.

        Raises:
            JobHeld: another process is.
        """
        found = self._ask_right()
        if isinstance(found, Holder) and found.machine == self._me.machine != "" and not runs(found.process):
            log.warning("job %s: its drainer, %s, has died; this process goes on", self._job_id, found)
            found = self._ask_right(dead=found.token)
        if isinstance(found, Holder):
            raise JobHeld(
                f"job {self._job_id} is being drained by {found}: wait for that. If it died, another may drain the job "
                f"{keys.DRAINER_LEASE_S} s later"
            )
        return found

    def _ask_right(self, **options: Any) -> DrainState | Holder:
        return self._waiter.ask(
            partial(self._drains.take, self._job_id, self._me, high_water=self._high_water, **options)
        )

    def _renew(self, place: str = "") -> DrainState:
        found = self._ask_right(place=place)
        if isinstance(found, Holder):
            raise JobHeld(
                f"job {self._job_id} is being drained by {found}, because this process stood still for too long"
            )
        return found

    @contextmanager
    def _right_kept(self) -> Iterator[None]:
        """Renew the right meanwhile, and give it up at the end: writing a part may take long."""
        take = partial(self._drains.take, self._job_id, self._me, high_water=self._high_water)
        try:
            with Lease(lambda: isinstance(take(), DrainState), keys.DRAINER_LEASE_S / 3):
                yield
        finally:
            with suppress(EmbedctlError):  # otherwise the lease runs out, only later
                take(lease_s=0)

    # ------------------------------------------------------------------------------------------------------ the folder

    def _check_folder(self) -> None:
        """See that the folder holds the job's parts as they were written, and nothing of another job.

        Raises:
            OutputError: it does not.
        """
        listed = part_names(self._state)
        there = self._place.names()
        for name, facts in self._drains.parts(self._job_id, listed):
            self._check_part(name, facts, there)
        for name in there:
            if name not in listed:
                self._check_own(name)

    def _check_own(self, name: str) -> None:
        """See that a file is of this job.

        Raises:
            OutputError: it is not.
        """
        owner = self._owner_of(name)
        if owner != self._job_id:
            raise OutputError(
                f"{self._place.name} holds {name} of {f'job {owner}' if owner else 'something else'}: choose another "
                "folder"
            )

    def _check_part(self, name: str, facts: PartFacts, there: Sequence[str]) -> None:
        if name not in there:
            was = "" if self._state.place == self._place.name else f", which was drained to {self._state.place},"
            raise OutputError(
                f"{self._place.name} does not hold {name} of job {self._job_id}{was}: bring it back, and the same "
                "command goes on. Nothing more was removed from Redis"
            )
        if self._place.digest(name) != (facts.sha256, facts.bytes):
            raise OutputError(
                f"{name} in {self._place.name} was changed after it was written (its sha256 is not "
                f"{facts.sha256[:12]}…): restore it from a copy, and the same command goes on. Nothing more was "
                "removed from Redis"
            )

    def _owner_of(self, name: str) -> str:
        """The id of the job of a file in the folder; empty if it does not say."""
        try:
            if name == MANIFEST:
                return str(json.loads(self._place.read(name))["job"])
            return str(footer_of(self._place.source(name)).get("job", ""))
        except (ValueError, LookupError, TypeError):
            return ""

    # ----------------------------------------------------------------------------------------------------- the numbers

    def _agreed_numbers(self, status: JobStatus) -> Numbers:
        """How all parts store vectors: as the first one does, or, before there is one, as the caller wants it.

        Raises:
            OutputError: the caller wants something else, or there are too few vectors for ranges.
        """
        if (first := first_part(self._state)) is not None:
            self._check_own(first)  # a store may keep the digest of an object that it damaged
            return self._like(Numbers.of_facts(footer_of(self._place.source(first))["vectors"]))
        wanted = self._wanted or FLOAT32
        if wanted.kind is OutputType.INT8 and wanted.ranges is None:
            return Numbers(wanted.kind, self._ranges(status))
        return wanted

    def _like(self, stored: Numbers) -> Numbers:
        wanted = self._wanted or stored
        if wanted.kind is not stored.kind:
            raise OutputError(
                f"{self._place.name} holds parts of job {self._job_id} in {stored.kind}, and all its parts have one "
                f"type: omit the output type {wanted.kind}"
            )
        if wanted.ranges is not None and wanted.mark() != stored.mark():
            raise OutputError(
                f"{self._place.name} holds parts of job {self._job_id} with other ranges, and all its parts have the "
                "same ones: omit the ranges"
            )
        return stored

    def _ranges(self, status: JobStatus) -> Vectors:
        """The ranges of the first records. The first part fixes them for all drains to come."""
        ranges, seen = ranges_of(self._first_chunks(status), f"job {self._job_id}")
        if seen < CALIBRATED_ON and self._is_held_back(self._look()):
            if seen < _FEWEST:
                raise OutputError(
                    f"job {self._job_id}: int8 needs the range of each component, and Redis holds only {seen} records "
                    f"with a vector at once ({self._high_water} bytes): give a file with --ranges, or raise "
                    "Redis' maxmemory"
                )
            log.warning(
                "job %s: the ranges of int8 are those of %d records, because Redis holds no more", self._job_id, seen
            )
        return ranges

    def _first_chunks(self, status: JobStatus) -> Iterator[ChunkVectors]:
        """The first chunks, as far as the job makes them without anybody taking some away."""
        index, missing, held_back = 0, 0, False
        while missing < _MOST_MISSING and ((known := status.original_chunks) is None or index < known):
            taken = self._waiter.ask(partial(self._taken, index, status))
            if taken is not None:
                yield taken.vectors
            elif status.stopped_by is None and not held_back:
                status = self._wait_for(index, or_held_back=True)
                held_back = self._is_held_back(status)
                continue
            else:
                missing += 1
            index += 1

    def _is_held_back(self, status: JobStatus) -> bool:
        """Whether no more results may come before some leave Redis."""
        return not status.state.ended and (status.waits_for_reader or self._waiter.ask(self._broker.connection.is_full))

    # ------------------------------------------------------------------------------------------------------ the chunks

    def _drain_corpus(self, status: JobStatus) -> None:
        index = self._state.next_chunk
        while (known := status.original_chunks) is None or index < known:
            taken = self._waiter.ask(partial(self._taken, index, status))
            if taken is None and self._is_drained(index):  # before the job was continued that had been stopped
                self._finish_part(status, corpus=True)
                index += 1
                continue
            if taken is None and status.stopped_by is not None:
                break  # what else is done comes with the rest
            if taken is None:
                status = self._wait_for(index)
                continue
            self._add(taken, status, corpus=True)
            index += 1
            status = self._waiter.look_again(status, self._progress)
        self._finish_part(status, corpus=True)

    def _drain_rest(self) -> JobStatus:
        """Wait for the job's end, and drain the chunks that retried or repaired records meanwhile."""
        while True:
            status = self._waiter.until(self._may_drain_rest, TimeLimit.from_now(None), self._progress)
            self._check_wanted()
            found = False
            self._laid_over.clear()
            for chunk in self._drains.chunks(self._job_id, status.chunks, drained=False):
                if chunk in self._laid_over:
                    continue
                taken = self._waiter.ask(partial(self._taken, chunk, status))
                if taken is not None:
                    found = True
                    self._add(taken, status, corpus=False)
                elif status.state.ended and status.stopped_by is None and not self._is_void(chunk):
                    self._raise_lost(chunk)
            self._finish_part(status, corpus=False)
            if not found and status.state.ended:
                return status

    def _raise_lost(self, chunk: int) -> NoReturn:
        """Say why an ended job has no result of a chunk."""
        if self._is_drained(chunk):
            raise self._overtaken()
        raise lost_chunks(self._job_id, chunk, chunk)

    def _is_drained(self, chunk: int) -> bool:
        return self._waiter.ask(partial(self._drains.is_drained, self._job_id, chunk))

    def _is_void(self, chunk: int) -> bool:
        return self._waiter.ask(partial(self._broker.jobs.has_result, self._job_id, chunk))

    def _may_drain_rest(self, status: JobStatus) -> bool:
        self._check_wanted()
        refuse_cancelled(status)
        return status.state.ended or status.waits_for_reader

    def _taken(self, index: int, status: JobStatus) -> Taken | None:
        """The result of a chunk, with those of its retried records that are there; None if there is no result."""
        jobs = self._broker.jobs
        data = jobs.result(self._job_id, index)
        if data is None or data == _VOID:
            return None
        result = wire.decode_result(data)
        check_fingerprint(self._waiter, status, index, result)
        chunk, size, more, at = chunk_vectors(result), len(data), [], index
        while chunk.errors and (later := jobs.retried_as(self._job_id, at)) is not None:
            again = jobs.result(self._job_id, later)
            if again is None or again == _VOID:  # not done yet: a part of retried records will hold it
                break
            chunk = overlaid(chunk, chunk_vectors(wire.decode_result(again)))
            size += len(again)
            more.append(later)
            at = later
        return Taken(index, chunk, tuple(more), size, result.digest, result.backend)

    def _wait_for(self, index: int, *, or_held_back: bool = False) -> JobStatus:
        """Wait until a chunk's result is there, the corpus turns out to have no such chunk, or, if asked for, the job
        is held back."""

        def is_there(status: JobStatus) -> bool:
            self._check_wanted()
            refuse_cancelled(status)
            if status.original_chunks is not None and index >= status.original_chunks:
                return True
            if self._waiter.ask(partial(self._broker.jobs.has_result, self._job_id, index)):
                return True
            if status.stopped_by is not None:
                return True  # what is there, is there
            if status.state.ended:
                self._raise_lost(index)
            if status.waits_for_reader:
                self._finish_part(status, corpus=True)  # smaller than others, but workers wait for room
            return or_held_back and self._is_held_back(status)

        return self._waiter.until(is_there, TimeLimit.from_now(None), self._progress)

    def _check_wanted(self) -> None:
        if self._stopped():
            raise Interrupted

    # ------------------------------------------------------------------------------------------------------- the parts

    def _add(self, taken: Taken, status: JobStatus, *, corpus: bool) -> None:
        self._check_wanted()
        most = max(1, self._high_water // 2)  # the other half is for workers, while this one is made durable
        if self._part is not None and not self._part.has_room_for(taken, most_bytes=most):
            self._finish_part(status, corpus=corpus)
        self._part = self._part or self._begin_part(corpus=corpus)
        try:
            self._part.add(taken)
        except BeginAgain:
            self._part = self._rewritten(self._part, taken, status, corpus=corpus)
        self._laid_over.update(self._part.more)
        if self._written is not None:
            self._written(taken.vectors)
        if self._part.records >= self._broker.settings.limits.part_records:
            self._finish_part(status, corpus=corpus)

    def _begin_part(self, *, corpus: bool) -> OpenPart:
        scratch = self._place.scratch(self._next_name(corpus=corpus))
        return OpenPart(scratch, self._kept, self._numbers, tokens=self._tokens, digests=self._digests)

    def _next_name(self, *, corpus: bool) -> str:
        return part_name(self._state.parts) if corpus else retry_part_name(self._state.retry_parts + 1)

    def _rewritten(self, part: OpenPart, taken: Taken, status: JobStatus, *, corpus: bool) -> OpenPart:
        """The same part, with wider columns: its chunks are still in Redis."""
        part.abandon()
        fresh = self._begin_part(corpus=corpus)
        for chunk in part.chunks:
            again = self._waiter.ask(partial(self._taken, chunk, status))
            if again is None:
                self._raise_lost(chunk)
            fresh.add(again)
        fresh.add(taken)
        return fresh

    def _finish_part(self, status: JobStatus, *, corpus: bool) -> None:
        """Make the open part durable, note it, and free its results, in this order."""
        part, self._part = self._part, None
        if part is None or not part.chunks:
            return
        name = self._next_name(corpus=corpus)
        try:
            part.finish(self._job_id, self._about(status))
            sha256, size = digest_of(part.path)
            self._publish(name, corpus=corpus)
        except FileNotFoundError:  # another drainer has started the part again
            raise self._overtaken() from None
        except BaseException:
            part.abandon()
            raise
        first, last = (part.chunks[0], part.chunks[-1]) if corpus else (0, -1)
        facts = PartFacts(sha256, size, first, last, part.records)
        self._note(name, facts, part, corpus=corpus)
        self._waiter.ask(partial(self._drains.unlink, self._job_id, [*part.chunks, *part.more]))
        self._state = (
            replace(self._state, next_chunk=last + 1, parts=self._state.parts + 1)
            if corpus
            else replace(self._state, retry_parts=self._state.retry_parts + 1)
        )
        if not status.state.ended:
            self._waiter.ask(partial(self._broker.send_issued, status))
        self._check_wanted()

    def _publish(self, name: str, *, corpus: bool) -> None:
        """Give the part its name. A file of that name that is not noted is left over from a drainer that died."""
        try:
            self._place.publish(name)
        except FileExistsError:
            self._state = self._renew()
            if name != self._next_name(corpus=corpus):
                raise self._overtaken() from None
            self._check_own(name)
            self._place.remove(name)
            self._place.publish(name)

    def _note(self, name: str, facts: PartFacts, part: OpenPart, *, corpus: bool) -> None:
        more = part.more if corpus else [*part.chunks, *part.more]
        note = partial(
            self._drains.note,
            self._job_id,
            self._me.token,
            name,
            facts,
            result_bytes=part.bytes,
            digests=part.digests,
            more=more,
        )
        answer = self._waiter.ask(note)
        if answer == "not_owner":  # this process stood still, or Redis lost the lease
            self._renew()
            answer = self._waiter.ask(note)
        if answer != "ok":
            raise self._overtaken()

    def _overtaken(self) -> JobHeld:
        return JobHeld(
            f"job {self._job_id} was drained by another process, while this one stood still; the same command goes on "
            "from there"
        )

    def _about(self, status: JobStatus) -> About:
        return About.of(status, status.model_fingerprint or self._broker.jobs.status(self._job_id).model_fingerprint)

    def _abandon(self) -> None:
        if self._part is not None:
            self._part.abandon()
            self._part = None

    def _keep_what_is_done(self) -> None:
        """Keep the results so far of a job that ended before it was done. A cancelled job has none."""
        with suppress(JobError):
            self._finish_part(self._broker.jobs.status(self._job_id), corpus=True)

    def _free_leftovers(self, status: JobStatus) -> None:
        """Free results that are in a part already: an earlier drainer may have died before it freed them."""
        if self._state.parts + self._state.retry_parts:
            found: list[int] = []
            for chunk in self._drains.chunks(self._job_id, status.chunks, drained=True):
                found.append(chunk)
                if len(found) == _FREED_AT_ONCE:
                    self._drains.unlink(self._job_id, found)
                    found.clear()
            self._drains.unlink(self._job_id, found)

    # ---------------------------------------------------------------------------------------------------- the manifest

    def _sum_up(self, status: JobStatus) -> list[str]:
        """Write the manifest, when everything else is there."""
        names = part_names(self._state)
        parts = []
        for name, facts in self._drains.parts(self._job_id, names):
            if self._place.size(name) != facts.bytes:
                self._check_part(name, facts, self._place.names())
            parts.append({"name": name, "sha256": facts.sha256, "bytes": facts.bytes, "records": facts.records})
        for name in self._place.names():
            if name not in names:
                self._check_own(name)
                if name != MANIFEST:  # Redis came back without its last parts, once
                    self._place.remove(name)
        manifest = {
            "job": self._job_id,
            "model": status.model,
            "fingerprint": self._about(status).fingerprint,
            "precision": status.precision,
            "dim": status.dim,
            "output_type": self._numbers.kind.value,
            **({} if self._numbers.ranges is None else {"ranges": self._numbers.ranges.tolist()}),
            "records": status.records,
            "failed": status.failed,
            "parts": parts,
        }
        scratch = self._place.scratch(MANIFEST)
        scratch.unlink(missing_ok=True)
        scratch.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        self._place.publish(MANIFEST, replace=True)
        return [self._place.path_of(name) for name in (*names, MANIFEST)]
