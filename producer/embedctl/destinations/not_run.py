"""The requests of a batch file that a job never ran, because it ended before it came to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from embedctl.store import JobState, JobStatus
from embedctl.store.status import BY_REQUEST
from embedctl_config.errors import InputError, JobCancelled, JobError, JobLost, JobNotFound

#: Gives the custom_id of each request of a job, and its number of inputs, in order.
ReadRequests = Callable[[], Iterable[tuple[str, int]]]


class Reason(NamedTuple):
    """Why requests were not run: OpenAI's code, and a sentence."""

    code: str
    message: str


_CANCELLED = Reason("batch_cancelled", "This request was not executed, because the job was cancelled.")
STOPPED = Reason("batch_cancelled", "This request was not executed, because the job was stopped.")
EXPIRED = Reason("batch_expired", "This request could not be executed before the completion window expired.")
_FAILED = Reason("batch_failed", "This request was not executed, because too many records of the job had failed.")


def reason_of(status: JobStatus) -> Reason:
    """Why a job ended before it had run all its requests."""
    if status.state is JobState.CANCELLED:
        return _CANCELLED
    return STOPPED if status.stopped_by == BY_REQUEST else _FAILED


def reason_of_error(error: JobError) -> Reason | None:
    """The same of a job that can't be read any more; None if it can go on."""
    if isinstance(error, JobCancelled):
        return _CANCELLED
    return EXPIRED if isinstance(error, JobNotFound) and not isinstance(error, JobLost) else None


class Requests:
    """Finds requests by the positions of their inputs. It goes through them once, and not before it is asked."""

    def __init__(self, job_id: str, read: ReadRequests) -> None:
        self._job_id = job_id
        self._read = read
        self._rest: Iterator[tuple[str, int]] | None = None
        self._head: tuple[str, int] | None = None
        self._at = 0

    def between(self, begin: int, end: int | None, before: str | None = None) -> Iterator[tuple[int, str]]:
        """The first position and the custom_id of each request from one position up to another one, or to the last.
        `begin` is not below the `end` of an earlier call; `before` is the custom_id of the request at `end`, if that is
        known. InputError: these are not the requests of the job."""
        if self._rest is None:
            self._rest = iter(self._read())
            self._head = next(self._rest, None)
        while self._head is not None and (end is None or self._at < end):
            (custom_id, inputs), first = self._head, self._at
            self._head, self._at = next(self._rest, None), first + inputs
            if first >= begin:
                yield first, custom_id
            elif self._at > begin:
                raise self._others(begin)
        if end is not None and (self._at != end or (before is not None and (self._head or ("",))[0] != before)):
            raise self._others(end)

    def _others(self, position: int) -> InputError:
        return InputError(
            f"these are not the requests that job {self._job_id} was made of: its request at position {position} is "
            "another one. Give the same files, in the same order"
        )
