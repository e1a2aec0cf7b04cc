"""The answers of a batch, while it runs and after its end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from starlette.responses import Response, StreamingResponse

from embedctl.queueing.broker import Broker
from embedctl.store.batches import StoredBatch
from embedctl.store.stored_files import PART_BYTES
from embedctl_config.errors import JobCancelled, JobNotFound
from embedctl_gateway.batches.answers import Place, in_order, page
from embedctl_gateway.calls.common import Call
from embedctl_gateway.calls.objects import ENDED

#: Lines are sent together up to this size (bytes).
_PIECE_BYTES = 256 * 1024


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
