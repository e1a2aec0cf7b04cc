"""OpenAI's calls of batches, and the answers so far of one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import TypeVar

from starlette.responses import JSONResponse, Response, StreamingResponse

from embedctl.queueing.broker import Broker
from embedctl.queueing.listening import in_shared_thread
from embedctl.store.batches import StoredBatch
from embedctl.store.stored_files import PART_BYTES, Once
from embedctl_config.errors import BrokerUnavailable, JobCancelled, JobNotFound
from embedctl_config.retry import REDIS, RetryLimit
from embedctl_gateway.batches.answers import Place, in_order, page
from embedctl_gateway.calls.common import Call
from embedctl_gateway.calls.objects import (
    ANSWERED,
    BATCH,
    ENDED,
    REFUSED,
    after_of,
    batch_object,
    facts_of_batch,
    facts_of_retry,
    limit_of,
    missing,
)
from embedctl_gateway.http.refusals import refuse, unavailable

T = TypeVar("T")

_LISTED, _MOST_LISTED = 20, 100
#: The statuses of a batch that is cancelled, or is to be.
_CANCELLED = ("cancelling", "cancelled")
#: How long a batch is tried to be made (seconds).
_SURE_S = 30.0
#: How long a batch is tried to be cancelled that may have been made in vain (seconds).
_WITHDRAW_S = 600.0
#: Lines are sent together up to this size (bytes).
_PIECE_BYTES = 256 * 1024


async def create(call: Call) -> Response:
    fields = await call.fields()
    facts = {"tenant": call.tenant, **facts_of_batch(fields)}
    file_id = str(facts["input_file_id"])
    file = await call.file(file_id, "input_file_id")
    if file.purpose != "batch":
        refuse("the purpose of this file is not batch", "invalid_value", "input_file_id")
    return await _made(call, {**facts, "input_bytes": file.size}, call.named("batch", facts))


async def listed(call: Call) -> Response:
    asked = call.request.query_params
    limit, after = limit_of(asked.get("limit"), _LISTED, _MOST_LISTED), after_of(asked.get("after"), BATCH)
    return await call.listed(call.gateway.batches.newest(call.tenant, limit + 1, after), batch_object, limit)


async def retrieve(call: Call) -> Response:
    return JSONResponse(batch_object(await call.batch(call.request.path_params["id"])))


async def cancel(call: Call) -> Response:
    batch = await call.batch(call.request.path_params["id"])
    status = await in_shared_thread(lambda: call.gateway.batches.cancel(batch.id, call.tenant))
    if status is None:
        raise missing("batch")
    if status not in _CANCELLED:
        refuse(f"the batch is {status} already, and can't be cancelled", "invalid_value", "batch_id")
    call.gateway.runner.wake()
    return JSONResponse(batch_object(await call.batch(batch.id)))


async def retry(call: Call) -> Response:
    batch = await call.batch(call.request.path_params["id"])
    if batch.status == REFUSED:
        refuse("nothing of the batch was run: mend its file, and create another batch", "invalid_value", "batch_id")
    if batch.status not in ANSWERED:
        refuse(f"the batch is {batch.status}: retry it when it has ended", "invalid_value", "batch_id")
    if "total" in batch.facts and batch.number("completed") == batch.number("total"):
        refuse("every request of the batch has its vectors", "invalid_value", "batch_id")
    facts = facts_of_retry(batch)
    if facts["retried_file_id"]:
        await call.file(str(facts["retried_file_id"]), "error_file_id")
    facts["input_bytes"] = (await call.file(str(facts["input_file_id"]), "input_file_id")).size
    return await _made(call, facts, call.named("retry", batch.id))


async def _made(call: Call, facts: dict[str, object], request: Once) -> Response:
    """Make a batch, unless this request has made it before."""
    batches = call.gateway.batches
    batch_id = await in_shared_thread(lambda: batches.new_id(BATCH))
    try:
        made = await _surely(lambda: batches.make(batch_id, facts, request))
        call.gateway.runner.wake()
        batch = await _surely(lambda: batches.get(made, call.tenant))
    except BrokerUnavailable:
        # It may have been made all the same, and the caller is told that it was not.
        call.gateway.tidy(lambda: batches.cancel(batch_id, call.tenant), _WITHDRAW_S)
        raise
    if batch is None:
        raise unavailable("the queue has lost the batch")
    return JSONResponse(batch_object(batch))


async def _surely(work: Callable[[], T]) -> T:
    """Do what may be done twice until it is known to be done: the answer of a Redis that dies may be lost. Raises
    BrokerUnavailable if Redis has not answered for some time."""
    limit = RetryLimit(longest_s=_SURE_S, while_full=False)
    return await REDIS.acall(lambda: in_shared_thread(work), BrokerUnavailable, failed=limit)


async def results(call: Call) -> Response:
    after = Place.of(call.request.query_params.get("after"))
    batch_id = call.request.path_params["id"]
    batch = await call.batch(batch_id)
    if batch.status not in ENDED:
        lines, place = b"", after
        if job_id := batch.facts.get("job"):
            call.hold(2 * PART_BYTES)
            broker = Broker.shared(call.gateway.settings)
            try:
                lines, place = await call.gateway.in_thread(lambda: page(broker, job_id, after))
            except (JobNotFound, JobCancelled):
                batch = await call.batch(batch_id)  # it may have ended since
        if batch.status not in ENDED:
            return Response(lines, headers=_heads(place, incomplete=True))
    return await _all_results(call, batch, after)


async def _all_results(call: Call, batch: StoredBatch, after: Place) -> Response:
    ids = {name: batch.facts.get(name) for name in ("output_file_id", "error_file_id")}
    files = [await call.file(file_id, name) for name, file_id in ids.items() if file_id]
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
