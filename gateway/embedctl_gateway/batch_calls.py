"""OpenAI's calls of batches."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator

from starlette.responses import JSONResponse, Response, StreamingResponse

from embedctl.broker import Broker
from embedctl.polling import in_shared_thread
from embedctl.store.batches import StoredBatch
from embedctl.store.stored_files import PART_BYTES, StoredFile, digest_of, new_id
from embedctl_config.errors import JobCancelled, JobNotFound
from embedctl_gateway.answers_so_far import Place, page
from embedctl_gateway.calls import Call
from embedctl_gateway.line_files import in_order
from embedctl_gateway.objects import (
    after_of,
    batch_object,
    facts_of_batch,
    facts_of_retry,
    is_id,
    limit_of,
    missing,
    page_of,
)
from embedctl_gateway.refusals import refuse

_KIND, _KIND_OF_FILE = "batch_", "file-"
_LISTED, _MOST_LISTED = 20, 100
#: The statuses of a batch that is cancelled, or is to be.
_CANCELLED = ("cancelling", "cancelled")
#: Those of a batch that has ended, with and without answers.
_ANSWERED, _REFUSED = ("completed", "expired", "cancelled"), "failed"
#: Lines are sent together up to this size (bytes).
_PIECE_BYTES = 256 * 1024


async def create(call: Call) -> Response:
    """`POST /v1/batches`."""
    fields = await call.fields()
    facts = {"tenant": call.tenant, **facts_of_batch(fields, int(time.time()))}
    file_id = str(facts["input_file_id"])
    file = await _file(call, file_id)
    if file is None:
        raise missing("file", "input_file_id")
    if file.purpose != "batch":
        refuse("the purpose of this file is not batch", "invalid_value", "input_file_id")
    request = digest_of(
        file_id, facts["endpoint"], facts["completion_window"], facts["metadata"], facts["output_ttl_s"]
    )
    return await _made(call, facts, request)


async def listed(call: Call) -> Response:
    """`GET /v1/batches`."""
    asked = call.request.query_params
    limit, after = limit_of(asked.get("limit"), _LISTED, _MOST_LISTED), after_of(asked.get("after"), _KIND)
    found = await in_shared_thread(lambda: call.gateway.batches.newest(call.tenant, limit + 1, after))
    return JSONResponse(page_of([batch_object(each) for each in found], limit))


async def retrieve(call: Call) -> Response:
    """`GET /v1/batches/ID`."""
    return JSONResponse(batch_object(await _batch(call, call.request.path_params["id"])))


async def cancel(call: Call) -> Response:
    """`POST /v1/batches/ID/cancel`."""
    batch = await _batch(call, call.request.path_params["id"])
    status = await in_shared_thread(lambda: call.gateway.batches.cancel(batch.id, call.tenant))
    if status is None:
        raise missing("batch")
    if status not in _CANCELLED:
        refuse(f"the batch is {status} already, and can't be cancelled", "invalid_value", "batch_id")
    call.gateway.runner.wake()
    return JSONResponse(batch_object(await _batch(call, batch.id)))


async def results(call: Call) -> Response:
    """`GET /v1/batches/ID/results`: the answers that are there, in the order of the requests."""
    after = Place.of(call.request.query_params.get("after"))
    batch_id = call.request.path_params["id"]
    batch = await _batch(call, batch_id)
    if batch.status not in (*_ANSWERED, _REFUSED):
        lines, place = b"", after
        if job_id := batch.facts.get("job"):
            call.hold(2 * PART_BYTES)
            broker = Broker.shared(call.gateway.settings)
            try:
                lines, place = await call.gateway.in_thread(lambda: page(broker, job_id, after))
            except (JobNotFound, JobCancelled):
                batch = await _batch(call, batch_id)  # it may have ended since
        if batch.status not in (*_ANSWERED, _REFUSED):
            return Response(lines, headers=_heads(place, incomplete=True))
    return await _all_results(call, batch, after)


async def retry(call: Call) -> Response:
    """`POST /v1/batches/ID/retry`: a new batch of the requests without vectors."""
    batch = await _batch(call, call.request.path_params["id"])
    if batch.status == _REFUSED:
        refuse("nothing of the batch was run: mend its file, and create another batch", "invalid_value", "batch_id")
    if batch.status not in _ANSWERED:
        refuse(f"the batch is {batch.status}: retry it when it has ended", "invalid_value", "batch_id")
    if not batch.facts["error_file_id"]:
        refuse("every request of the batch has its vectors", "invalid_value", "batch_id")
    for name in ("input_file_id", "error_file_id"):
        if await _file(call, batch.facts[name]) is None:
            raise missing("file", name)
    return await _made(call, facts_of_retry(batch, int(time.time())), digest_of("retry", batch.id))


async def _all_results(call: Call, batch: StoredBatch, after: Place) -> Response:
    """The answers of a batch that has ended, from its files."""
    files = []
    for name in ("output_file_id", "error_file_id"):
        if file_id := batch.facts.get(name):
            file = await _file(call, file_id)
            if file is None:
                raise missing("file", name)
            files.append(file)
    heads = _heads(Place(sum(batch.number(name) for name in ("completed", "failed"))), incomplete=False)
    call.hold(2 * PART_BYTES * len(files))
    pieces = _pieces(in_order(call.gateway.files, files, after.line))
    first = await call.gateway.in_thread(lambda: next(pieces, b""))  # what fails now is still told

    async def stream() -> AsyncIterator[bytes]:
        piece = first
        while piece:
            yield piece
            piece = await call.gateway.in_thread(lambda: next(pieces, b""))

    return StreamingResponse(stream(), headers=heads)


def _pieces(lines: Iterator[bytes]) -> Iterator[bytes]:
    piece = bytearray()
    for line in lines:
        piece += line
        if len(piece) >= _PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece)


def _heads(place: Place, *, incomplete: bool) -> dict[str, str]:
    return {
        "content-type": "application/x-ndjson",
        "x-incomplete": str(incomplete).lower(),
        "x-last-line": str(place) if incomplete else str(place.line),
    }


async def _made(call: Call, facts: dict[str, object], request: str) -> Response:
    """Make a batch, unless this request has made it before.

    Args:
        request: names the request, if the caller does not.
    """
    name = call.idempotency_key or request
    batches = call.gateway.batches
    made = await in_shared_thread(lambda: batches.make(new_id(_KIND), facts, name, again=call.is_further_try))
    call.gateway.runner.wake()
    return JSONResponse(batch_object(await _batch(call, made)))


async def _file(call: Call, file_id: str) -> StoredFile | None:
    """A file of the caller's; None if it has no such file."""
    if not is_id(file_id, _KIND_OF_FILE):
        return None
    return await in_shared_thread(lambda: call.gateway.files.get(file_id, call.tenant))


async def _batch(call: Call, batch_id: str) -> StoredBatch:
    """A batch of the caller's.

    Raises:
        Refusal: the caller has no such batch.
    """
    batch = None
    if is_id(batch_id, _KIND):
        batch = await in_shared_thread(lambda: call.gateway.batches.get(batch_id, call.tenant))
    if batch is None:
        raise missing("batch")
    return batch
