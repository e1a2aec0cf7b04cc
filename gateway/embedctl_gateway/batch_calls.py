"""OpenAI's calls of batches."""

from __future__ import annotations

import time

from starlette.responses import JSONResponse, Response

from embedctl.polling import in_shared_thread
from embedctl.store.batches import StoredBatch
from embedctl.store.stored_files import digest_of, new_id
from embedctl_gateway.calls import Call
from embedctl_gateway.objects import after_of, batch_object, facts_of_batch, is_id, limit_of, missing, page_of
from embedctl_gateway.refusals import refuse

_KIND, _KIND_OF_FILE = "batch_", "file-"
_LISTED, _MOST_LISTED = 20, 100
#: The statuses of a batch that is cancelled, or is to be.
_CANCELLED = ("cancelling", "cancelled")


async def create(call: Call) -> Response:
    """`POST /v1/batches`."""
    fields = await call.fields()
    facts = {"tenant": call.tenant, **facts_of_batch(fields, int(time.time()))}
    file_id = str(facts["input_file_id"])
    gateway = call.gateway
    file = None
    if is_id(file_id, _KIND_OF_FILE):
        file = await in_shared_thread(lambda: gateway.files.get(file_id, call.tenant))
    if file is None:
        raise missing("file", "input_file_id")
    if file.purpose != "batch":
        refuse("the purpose of this file is not batch", "invalid_value", "input_file_id")
    request = call.idempotency_key or digest_of(
        file_id, facts["endpoint"], facts["completion_window"], facts["metadata"], facts["output_ttl_s"]
    )
    made = await in_shared_thread(
        lambda: gateway.batches.make(new_id(_KIND), facts, request, again=call.is_further_try)
    )
    gateway.runner.wake()
    return JSONResponse(batch_object(await _batch(call, made)))


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
