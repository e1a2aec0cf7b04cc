"""The answers to a batch: pages of them while it runs, and its files after its end. The lines of files: of requests,
which are bounded, because anybody may have written them, and of answers."""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Self

from embedctl.destinations.answers import Answer, Answers, ReadRequests, Reason, none_run
from embedctl.destinations.reader import ResultReader
from embedctl.jobs.job import Job
from embedctl.queueing.broker import Broker
from embedctl.store.batches import StoredBatch
from embedctl.store.stored_files import FileStore, PartWriter, StoredFile
from embedctl.waiting.waiter import Waiter
from embedctl_config.errors import EmbedctlError, JobCancelled, JobFailed
from embedctl_gateway.http.bodies import SMALL_BYTES, check_values
from embedctl_gateway.http.refusals import Refusal, refuse

#: Inputs of a request that is no text: many short ones, with what is around each of them.
_LEAST_BYTES = 4 * 1024 * 1024
#: A page ends with the answer that makes it as long (bytes).
_PAGE_BYTES = 4 * 1024 * 1024
_PLACE = re.compile(r"([0-9]{1,12})(?:\.([0-9]{1,12})\.([0-9]{1,12}))?")
#: The end of an answer's id: the position of its request's first input.
_POSITION = re.compile(rb'\{"id":"[^"]*_(\d+)"')


class BadLine(Exception):
    """Raised for a line that is too large to be looked at, with its number and a code."""

    def __init__(self, message: str, code: str, line: int) -> None:
        super().__init__(message)
        self.code = code
        self.line = line


def requests_of(parts: Iterable[bytes], longest: int) -> Iterator[bytes]:
    """The lines of a file of requests with texts up to the `longest` (bytes). Raises BadLine if one of them has more
    bytes than that may take, or more values than a request: to parse it would hold up all else."""
    most = max(6 * longest, _LEAST_BYTES) + SMALL_BYTES  # of six bytes, an escape makes one byte at least
    for number, line in enumerate(lines_of(parts, most), start=1):
        if len(line) > most:
            raise BadLine(f"the line has more than {most:,} bytes", "request_too_large", number)
        if len(line) > SMALL_BYTES:
            try:
                check_values(line)
            except Refusal as refusal:
                raise BadLine(refusal.message, refusal.code or "invalid_value", number) from None
        yield line


def lines_of(parts: Iterable[bytes], most: int = 0) -> Iterator[bytes]:
    """The lines of a file, each with its end. Memory holds a part and a line. If `most` is given, reading ends in
    a line of more bytes."""
    begun = bytearray()
    for part in parts:
        begin = 0
        while (end := part.find(b"\n", begin) + 1) > 0:  # not at a carriage return, which is white space in JSON
            yield bytes(begun) + part[begin:end]
            begun.clear()
            begin = end
        begun += part[begin:]
        if 0 < most < len(begun):
            break
    if begun:
        yield bytes(begun)


def only(requests: Iterable[bytes], answers: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of the requests that some answers are to, with the requests and the answers in the same order."""
    wanted = (_custom_id(answer) for answer in answers)
    next_one = next(wanted, None)
    for line in requests:
        if next_one is None:
            return
        if line.strip() and _custom_id(line) == next_one:
            yield line if line.endswith(b"\n") else line + b"\n"
            next_one = next(wanted, None)


def _custom_id(line: bytes) -> object:
    return json.loads(line)["custom_id"]


@dataclass(frozen=True, slots=True)
class Written:
    """The files of a batch, which nobody sees yet, None in place of an empty one; how many requests are `completed`,
    with vectors, and `failed`; and how many tokens were encoded."""

    output: StoredFile | None
    error: StoredFile | None
    completed: int
    failed: int
    tokens: int

    @property
    def files(self) -> list[StoredFile]:
        return [file for file in (self.output, self.error) if file is not None]


def write(
    files: FileStore,
    batch: StoredBatch,
    by_chunk: Iterable[tuple[Iterable[Answer], int]],
    check: Callable[[], None],
) -> Written:
    """Write the answers to a batch, which :func:`answers_by_chunk` gives. `check` is called after each chunk; what it
    raises ends the writing, and what was written is removed."""
    output, error = files.writer(), files.writer()
    completed = failed = tokens = 0
    try:
        for answers, encoded in by_chunk:
            for answer in answers:
                (error if answer.failed else output).add(answer.line + b"\n")
                completed += not answer.failed
                failed += answer.failed
            tokens += encoded
            check()
        return Written(_finished(output, batch, "output"), _finished(error, batch, "error"), completed, failed, tokens)
    except BaseException:
        for writer in (output, error):
            with suppress(EmbedctlError):  # it goes with its time to live
                writer.discard()
        raise


def answers_by_chunk(
    batch: StoredBatch, job: Job | None, read: ReadRequests | None, reason: Reason
) -> Iterator[tuple[Iterable[Answer], int]]:
    """The answers to a batch whose job has ended that end with each chunk, and how many tokens the chunk has.

    Without a job, nothing was run. `read` reads the requests; None if they are gone. `reason` says why requests were
    not run. Raises JobNotFound if the job, or a result of it, is gone.
    """
    if job is None:
        for answer in none_run(batch.id, read, reason) if read is not None else ():
            yield (answer,), 0
        return
    answers = Answers(job.status(), job.status, read, reason=reason)
    try:
        for chunk in job.iter_results():
            yield answers.of(chunk), 0 if chunk.tokens is None else int(chunk.tokens.sum())
    except JobFailed:
        pass  # somebody gave it an error budget, and what is done is there
    except JobCancelled as error:
        if not answers.give_up(error):
            raise
    yield answers.end(), 0


def _finished(writer: PartWriter, batch: StoredBatch, what: str) -> StoredFile | None:
    if not writer.size:
        return None
    return writer.finish(
        tenant=batch.tenant,
        name=f"{batch.id}_{what}.jsonl",
        purpose="batch_output",
        ttl_s=batch.number("output_ttl_s"),
    )


class Place(NamedTuple):
    """How far a caller has read: so many answers, in the order of the requests. The next answer begins in that `chunk`
    of the job, or a later one, with the `position` of its request's first input, if the caller knows it."""

    line: int
    chunk: int = 0
    position: int = 0

    @classmethod
    def of(cls, given: str | None) -> Self:
        """The parameter `after`: a number of lines, or what a page's header `x-last-line` told, which is found sooner;
        raises Refusal if it is neither."""
        found = _PLACE.fullmatch(given or "0")
        if found is None:
            refuse(
                "after is neither a number of lines nor the x-last-line of an earlier answer", "invalid_value", "after"
            )
        line, chunk, position = (int(each or 0) for each in found.groups())
        return cls(line, chunk, position)

    def __str__(self) -> str:
        return f"{self.line}.{self.chunk}.{self.position}"


def page(broker: Broker, job_id: str, after: Place) -> tuple[bytes, Place]:
    """The next answers that are there, and the place behind them; does not wait. Raises JobNotFound or JobCancelled if
    Redis has lost the job, or its batch has ended."""
    waiter = Waiter(job_id, broker)
    lines, place, gap = _page(waiter, after)
    if gap and not lines and after.chunk:  # the job was submitted again, and cut in another way
        lines, place, _ = _page(waiter, after._replace(chunk=0))
    return b"".join(lines), place


def _page(waiter: Waiter, after: Place) -> tuple[list[bytes], Place, bool]:
    """The same, and whether there is a gap before the next answer that is there."""
    to_skip = 0 if after.position or not after.line else after.line
    answers = Answers(waiter.status(), waiter.status, begin=after.position)
    lines: list[bytes] = []
    place, size = after, 0
    for index, chunk in enumerate(ResultReader(waiter).ready(after.chunk), after.chunk):
        for answer in answers.of(chunk):
            if answers.left_out:
                return lines, place, True
            if to_skip:
                to_skip -= 1
                continue
            place = Place(place.line + 1, index, answers.known)
            lines.append(answer.line + b"\n")
            size += len(answer.line)
            if size >= _PAGE_BYTES:
                return lines, place, False
    return lines, place, False


def in_order(store: FileStore, files: Iterable[StoredFile], after: int) -> Iterator[bytes]:
    """The answers of a batch, which are in several files, in the order of its requests, without the first ones. Raises
    FileGone if a file has been deleted, or has expired."""
    merged = heapq.merge(*(lines_of(store.read(file)) for file in files), key=_position)
    return islice(merged, after, None)


def _position(answer: bytes) -> int:
    found = _POSITION.match(answer)
    assert found, "every answer begins with its id"
    return int(found[1])
