"""OpenAI's batch format: a line for each request, with the vectors of its texts; failed requests go to another file."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from embedctl.destinations.unfinished import json_line
from embedctl.store import JobState, JobStatus
from embedctl.store.status import BY_REQUEST
from embedctl.waiting.results import ChunkVectors, FailedRecord, Vectors
from embedctl_config.errors import InputError, JobCancelled, JobError, JobLost, JobNotFound
from embedctl_config.outputs import Output, asked_by
from embedctl_config.wire import ErrorCode

#: What is before the vectors of a text in an answer, as OpenAI and vLLM have it.
EMBEDDING, POOLING = b'{"object":"embedding","index":%d,"embedding":', b'{"object":"pooling","index":%d,"data":'
#: Gives the custom_id of each request of a job, and its number of inputs, in order.
ReadRequests = Callable[[], Iterable[tuple[str, int]]]
#: The codes of errors that the request is to blame for → those of OpenAI, and the field, "" for that of the texts. All
#: others are the server's.
_OF_REQUESTS = {
    ErrorCode.EMPTY: ("empty_input", ""),
    ErrorCode.TOO_LONG: ("context_length_exceeded", ""),
    ErrorCode.NOT_TEXT: ("invalid_type", ""),
    ErrorCode.INVALID_UTF8: ("invalid_type", ""),
    ErrorCode.NO_PROMPT: ("invalid_value", "prompt_name"),
    ErrorCode.NO_DIMENSIONS: ("invalid_value", "dimensions"),
    ErrorCode.NO_OUTPUT: ("output_not_given", "model"),
}


class Told(NamedTuple):
    """What a caller is told of a text without a vector: a sentence, OpenAI's code, and the field that is to blame; None
    if the server is."""

    message: str
    code: str
    param: str | None


def told_of(failed: FailedRecord, texts: str, first: int, count: int) -> Told:
    """What is told of a request with so many texts from this position on, whose field is `texts`."""
    code, param = _OF_REQUESTS.get(failed.code, (failed.code.value, None))
    is_of_one = not param and count > 1
    message = f"{texts}[{failed.position - first}]: {failed.message}" if is_of_one else failed.message
    return Told(message, code, texts if param == "" else param)


def is_of_batch(status: JobStatus) -> bool:
    return bool(status.options.get("batch_file"))


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


class Answer(NamedTuple):
    line: bytes
    failed: bool


class _Input(NamedTuple):
    """What became of one input of a request."""

    position: int
    numbers: bytes
    error: FailedRecord | None
    tokens: int


@dataclass(slots=True)
class _Open:
    """A request of which not all inputs have come."""

    custom_id: str | None
    first: int
    size: int
    encoding_format: str
    inputs: list[_Input] = field(default_factory=list)


class Answers:
    """Makes the lines of a job's requests from its chunks, in order. A request may extend over several chunks.

    Attributes:
        open: the request whose other inputs are in the next chunk.
        left_out: whether requests between those that were run have no line, because nobody knows them.

    Args:
        read: reads the job's requests, if the files that it was made of are at hand. Those that were not run have a
            line then.
        begin: the position of the first record that belongs to no line yet.
        reason: why requests were not run; None if the job tells.
    """

    def __init__(
        self,
        job: JobStatus,
        latest: Callable[[], JobStatus],
        read: ReadRequests | None = None,
        *,
        begin: int = 0,
        reason: Reason | None = None,
    ) -> None:
        self.open: _Open | None = None
        self._job = job
        self._output = asked_by(job.options)[0]
        self._latest = latest
        self._requests = None if read is None else Requests(job.id, read)
        self._begin = self._known = begin
        self._reason = reason
        self._given_up = False
        self.left_out = False

    @property
    def known(self) -> int:
        """The position up to which all requests have a line, apart from one that is open."""
        return self._known if self.open is None else self.open.first

    def of(self, chunk: ChunkVectors) -> Iterator[Answer]:
        """The lines of the requests that are complete with this chunk."""
        if not len(chunk.positions):
            return  # of a job that was ended, and so without vectors of any kind
        errors = {error.position: error for error in chunk.errors}
        vectors = chunk.of(self._output)
        assert vectors is not None, "a result has what its job asks for"
        for row, (position, vector) in enumerate(zip(chunk.positions.tolist(), vectors, strict=True)):
            if position < self._begin:
                continue
            facts: Mapping[str, object] = {} if chunk.kept is None else chunk.kept[row]
            index, size = _whole(facts.get("index"), 0), _whole(facts.get("inputs"), 1)
            if self.open is not None and position - index != self.open.first:  # the job was ended before its end
                yield self._unanswered(self.open.custom_id, self.open.first)
                self.open = None
            if self.open is None:
                label = chunk.ids[row]
                custom_id = None if label is None else str(label)
                yield from self._not_run(position - index, custom_id)
                self.open = _Open(custom_id, position - index, size, str(facts.get("encoding_format")))
                self._known = position - index + size
            tokens = 0 if chunk.tokens is None else int(chunk.tokens[row])
            numbers = b"" if position in errors else b"".join(self._numbers(self.open, vector))
            self.open.inputs.append(_Input(position, numbers, errors.get(position), tokens))
            if index == size - 1:
                complete, self.open = self.open, None
                yield self._answer(complete)

    def give_up(self, error: JobError) -> bool:
        """Take a job that can't be read any more as one that ended before it ran all its requests; whether that is so,
        and these are known."""
        reason = None if self._requests is None else reason_of_error(error)
        if reason is not None:
            self._reason, self._given_up = self._reason or reason, True
        return self._given_up

    def end(self) -> Iterator[Answer]:
        """After the last chunk: the lines of requests that were not run, or of which some inputs were not encoded."""
        if self.open is not None:
            yield self._unanswered(self.open.custom_id, self.open.first)
            self.open = None
        if self._requests is not None:
            job = self._job if self._job.sealed or self._given_up else self._latest()
            yield from self._not_run(job.records if job.sealed else None)

    def _answer(self, request: _Open) -> Answer:
        failed = next((each.error for each in request.inputs if each.error is not None), None)
        if len(request.inputs) < request.size:
            return self._unanswered(request.custom_id, request.first)
        return self._success(request) if failed is None else self._failure(request, failed)

    def _numbers(self, request: _Open, vector: Any) -> Iterable[bytes]:
        if self._output is Output.SPARSE:
            return as_pairs(vector)
        return as_base64(vector) if request.encoding_format == "base64" else as_floats(vector)

    def _success(self, request: _Open) -> Answer:
        tokens = sum(each.tokens for each in request.inputs)
        texts = ((each.numbers,) for each in request.inputs)
        told: dict[str, object] = {"model": self._job.model, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
        before = EMBEDDING if self._output is Output.DENSE else POOLING
        if before is POOLING:
            told |= {"id": f"pool-{self._name(request.first)}", "created": int(self._job.created_at.timestamp())}
        body = in_array(texts) if self._output is Output.SPARSE else in_list(before, texts, told)
        line = b'%b,"response":{"status_code":200,"request_id":%b,"body":%b},"error":null}' % (
            _head(self._name(request.first), request.custom_id),
            json_line(f"req_{self._name(request.first)}"),
            b"".join(body),
        )
        return Answer(line, failed=False)

    def _failure(self, request: _Open, failed: FailedRecord) -> Answer:
        told = told_of(failed, "inputs" if self._output is Output.SPARSE else "input", request.first, request.size)
        error = {
            "message": told.message,
            "type": "invalid_request_error" if told.param else "server_error",
            "param": told.param,
            "code": told.code,
        }
        response = {
            "status_code": 400 if told.param else 500,
            "request_id": f"req_{self._name(request.first)}",
            "body": {"error": error},
        }
        head = _head(self._name(request.first), request.custom_id)
        return Answer(head + b',"response":' + json_line(response) + b',"error":null}', failed=True)

    def _not_run(self, end: int | None, before: str | None = None) -> Iterator[Answer]:
        """The lines of the requests between the last one that is known and a position, or those that are left."""
        if self._known == end:
            return
        if self._requests is None:
            self.left_out = True
            return
        for first, custom_id in self._requests.between(self._known, end, before):
            yield self._unanswered(custom_id, first)

    def _unanswered(self, custom_id: str | None, first: int) -> Answer:
        if self._reason is None:
            self._reason = reason_of(self._latest())
        return _unanswered(self._name(first), custom_id, self._reason)

    def _name(self, first: int) -> str:
        """The same each time that the job is fetched."""
        return f"{self._job.id}_{first}"


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


def none_run(name: str, read: ReadRequests, reason: Reason) -> Iterator[Answer]:
    """The lines of all requests, none of which was run. Their ids begin with `name`, in place of a job's id."""
    for first, custom_id in Requests(name, read).between(0, None):
        yield _unanswered(f"{name}_{first}", custom_id, reason)


def _unanswered(name: str, custom_id: str | None, reason: Reason) -> Answer:
    rest = b',"response":null,"error":' + json_line(reason._asdict()) + b"}"
    return Answer(_head(name, custom_id) + rest, failed=True)


def _head(name: str, custom_id: str | None) -> bytes:
    return json_line({"id": f"batch_req_{name}", "custom_id": custom_id})[:-1]


def _whole(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) else otherwise


def in_list(before: bytes, texts: Iterable[Iterable[bytes]], told: Mapping[str, object]) -> Iterator[bytes]:
    """The answer to a request, in pieces: a list with an object for each text, and what else is told. `before` the
    vectors of a text, each object has the text's index."""
    yield b'{"object":"list","data":'
    yield from in_array(chain((before % index,), pieces, (b"}",)) for index, pieces in enumerate(texts))
    yield b"," + json_line(told)[1:]


def in_array(values: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """A JSON array, in pieces, of values in pieces."""
    yield b"["
    for index, pieces in enumerate(values):
        if index:
            yield b","
        yield from pieces
    yield b"]"


def as_floats(vectors: Vectors) -> Iterable[bytes]:
    """A text's vector, or vectors, as JSON arrays, in pieces, each number exact."""
    return (_dumped(vectors),) if vectors.ndim == 1 else in_array((_dumped(each),) for each in vectors)


def as_base64(vectors: Vectors) -> Iterable[bytes]:
    """The same as OpenAI's base64 of float32, in quotes; that of several vectors does not tell how long each is."""
    return (b'"%b"' % base64.b64encode(vectors.astype("<f4", copy=False).tobytes()),)


def as_pairs(vector: tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]) -> Iterable[bytes]:
    """A text's sparse vector, of its indices and its weights, as TEI writes it."""
    pairs = zip(vector[0].tolist(), vector[1], strict=True)
    return (_dumped([{"index": index, "value": weight} for index, weight in pairs]),)


def _dumped(value: object) -> bytes:
    import orjson  # here, because most commands write no line

    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
