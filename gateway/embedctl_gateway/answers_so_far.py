"""The answers of a batch while it runs, a page at a time."""

from __future__ import annotations

import re
from typing import NamedTuple, Self

from embedctl.broker import Broker
from embedctl.output.batch import Answers
from embedctl.reader import ResultReader
from embedctl.waiting import Waiter
from embedctl_gateway.refusals import refuse

#: A page ends with the answer that makes it as long (bytes).
_PAGE_BYTES = 4 * 1024 * 1024
_PLACE = re.compile(r"([0-9]{1,12})(?:\.([0-9]{1,12})\.([0-9]{1,12}))?")


class Place(NamedTuple):
    """How far a caller has read.

    Attributes:
        line: how many answers it has, in the order of the requests.
        chunk: of the job, in which the next answer begins, or an earlier one.
        position: of the first input of the next answer's request, if the caller knows it.
    """

    line: int
    chunk: int = 0
    position: int = 0

    @classmethod
    def of(cls, given: str | None) -> Self:
        """The parameter `after`: a number of lines, or what a page's header `x-last-line` told, which is found sooner.

        Raises:
            Refusal: it is neither.
        """
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
    """The next answers that are there, and the place behind them. Does not wait.

    Raises:
        JobNotFound, JobCancelled: the job is gone: Redis has lost it, or its batch has ended.
        BrokerUnavailable: Redis can't be reached.
    """
    waiter = Waiter(job_id, broker)
    lines, place, gap = _page(waiter, after)
    if gap and not lines and after.chunk:  # the job was submitted again, and cut in another way
        lines, place, _ = _page(waiter, after._replace(chunk=0))
    return b"".join(lines), place


def _page(waiter: Waiter, after: Place) -> tuple[list[bytes], Place, bool]:
    """The same, and whether there is a gap before the next answer that is there."""
    status = waiter.status()
    to_skip = 0 if after.position or not after.line else after.line
    answers = Answers(status, waiter.status, begin=after.position, known=after.position)
    lines: list[bytes] = []
    place, size = after, 0
    for index, chunk in enumerate(ResultReader(waiter).ready(after.chunk), after.chunk):
        for answer in answers.of(chunk):
            if answers.left_out:
                return lines, place, True
            if to_skip:
                to_skip -= 1
                continue
            assert answers.known is not None
            place = Place(place.line + 1, index, answers.known)
            lines.append(answer.line + b"\n")
            size += len(answer.line)
            if size >= _PAGE_BYTES:
                return lines, place, False
    return lines, place, False
