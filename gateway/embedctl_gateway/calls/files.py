"""OpenAI's calls of files, and the ranges of bytes that they answer."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import NamedTuple

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse

from embedctl.queueing.listening import in_shared_thread
from embedctl.store.ledger import Room
from embedctl.store.stored_files import PART_BYTES, KeepsEnough, OtherRequest, PartWriter, StoredFile
from embedctl_gateway.access.admission import UPLOADS
from embedctl_gateway.access.verbs import BATCHES
from embedctl_gateway.calls.common import Call, CallerGone
from embedctl_gateway.calls.objects import FILE as FILE_IDS
from embedctl_gateway.calls.objects import after_of, file_object, limit_of, ttl_of_form
from embedctl_gateway.http.fields import digits_of
from embedctl_gateway.http.multipart import FILE, Form
from embedctl_gateway.http.refusals import Refusal, invalid, refuse

_ONE_RANGE = re.compile(r"bytes=[ \t]*([0-9]{0,18})-([0-9]{0,18})[ \t]*", re.IGNORECASE)
#: The fields of a form, and what stands around them.
_AROUND_BYTES = 1024 * 1024
#: An upload that brings less than this in the time for a body is given up (bytes).
_LEAST_BYTES = 64 * 1024
#: An upload that takes longer is given up (seconds).
UPLOAD_S = 3600.0
_MOST_LISTED = 10_000


class Span(NamedTuple):
    """Bytes from `first` to before `end`."""

    first: int
    end: int


class Unsatisfiable(Exception):
    """Raised when nothing of a file is in the range."""


def span_of(asked: str | None, if_range: str | None, etag: str, size: int) -> Span | None:
    """What a client asks for with the headers `Range` and `If-Range`; None for the whole file, of so many bytes and
    with this ETag, in quotes. A header that is no single range of bytes counts for nothing, and so does one for another
    state of the file. Raises Unsatisfiable if the range begins after the file's end."""
    found = _ONE_RANGE.fullmatch(asked or "")
    if found is None or (if_range is not None and if_range.strip() != etag):
        return None
    first, last = found.groups()
    if not first and not last:
        return None
    if not first:
        if int(last) == 0 or size == 0:
            raise Unsatisfiable
        return Span(max(0, size - int(last)), size)
    if last and int(last) < int(first):
        return None
    if int(first) >= size:
        raise Unsatisfiable
    return Span(int(first), min(size, int(last) + 1) if last else size)


async def create(call: Call) -> Response:
    most = await in_shared_thread(call.gateway.files.most_bytes)
    if digits_of(call.request.headers.get("content-length", "0"), most + _AROUND_BYTES) is None:
        raise _too_large(most)
    await call.take({UPLOADS: 1})
    form = Form(call.request.headers.get("content-type", ""))
    writer = await call.gateway.in_thread(call.gateway.files.writer)
    kept = False
    try:
        await _receive(call, form, writer, most)
        # It may have taken an hour, and the key may have been removed meanwhile.
        call.gateway.access.caller_of(call.request).need(BATCHES)
        ttl_s = ttl_of_form(form.fields)
        if form.file_name is None:
            refuse("no file: send it as the field file", "missing_required_parameter", FILE)
        name, purpose, tenant = form.file_name, form.fields["purpose"], call.tenant
        file = await call.gateway.in_thread(
            lambda: writer.finish(tenant=tenant, name=name, purpose=purpose, ttl_s=ttl_s)
        )
        request = call.named("file", file.sha256, name, ttl_s)
        kept = True  # if Redis does not answer, it may have made the file all the same
        made = await call.gateway.in_thread(lambda: call.gateway.files.make(file, request))
        kept = made == file.id
    except (OtherRequest, KeepsEnough):
        kept = False
        raise
    finally:
        if not kept:
            call.gateway.tidy(writer.discard)
    return JSONResponse(file_object(file if made == file.id else await call.file(made)))


async def listed(call: Call) -> Response:
    asked = call.request.query_params
    limit, after = limit_of(asked.get("limit"), _MOST_LISTED, _MOST_LISTED), after_of(asked.get("after"), FILE_IDS)
    if asked.get("order", "desc") not in ("asc", "desc"):
        refuse("order is neither asc nor desc", "invalid_value", "order")
    descending, purpose = asked.get("order") != "asc", asked.get("purpose") or None
    found = call.gateway.files.newest(call.tenant, limit + 1, after, descending=descending, purpose=purpose)
    return await call.listed(found, file_object, limit)


async def retrieve(call: Call) -> Response:
    return JSONResponse(file_object(await call.file(call.request.path_params["id"])))


async def delete(call: Call) -> Response:
    file = await call.file(call.request.path_params["id"])
    await call.gateway.in_thread(lambda: call.gateway.files.remove(file))
    return JSONResponse({"id": file.id, "object": "file", "deleted": True})


async def content(call: Call) -> Response:
    file = await call.file(call.request.path_params["id"])
    etag = f'"{file.sha256}"'
    headers = {"etag": etag, "accept-ranges": "bytes", "content-type": "application/octet-stream"}
    asked = call.request.headers
    try:
        span = span_of(asked.get("range"), asked.get("if-range"), etag, file.size)
    except Unsatisfiable:
        told = {"content-range": f"bytes */{file.size}", "accept-ranges": "bytes"}
        raise Refusal(416, "the file ends before this range", "range_not_satisfiable", None, told) from None
    if span is not None:
        headers["content-range"] = f"bytes {span.first}-{span.end - 1}/{file.size}"
    part_of_it = span or Span(0, file.size)
    headers["content-length"] = str(part_of_it.end - part_of_it.first)
    status = 200 if span is None else 206
    if call.request.method == "HEAD" or part_of_it.end == part_of_it.first:
        return Response(None, status, headers)
    call.hold(2 * PART_BYTES)
    pieces = _pieces(call, file, part_of_it)
    first = await anext(pieces)  # what fails now is still told
    return StreamingResponse(_chained(first, pieces), status, headers)


async def _receive(call: Call, form: Form, writer: PartWriter, most: int) -> None:
    """Take the body, as fast as the place of the parts takes it. Raises Refusal if it is no form, has a file of more
    bytes than `most`, or takes too long, and CallerGone if the caller went away before its end."""
    deadline = time.monotonic() + UPLOAD_S
    pieces = call.request.stream()
    size = came = 0
    until = time.monotonic() + call.gateway.body_s
    try:
        while (piece := await _next_piece(call, pieces, until)) is not None:
            size += len(piece)
            came += len(piece)
            if came >= _LEAST_BYTES:
                came, until = 0, time.monotonic() + call.gateway.body_s
            form.add(piece)
            if writer.size + len(form.data) > most or size > most + _AROUND_BYTES:
                raise _too_large(most)
            if time.monotonic() > deadline:
                raise invalid(f"the upload took longer than {UPLOAD_S:g} s", "timeout", None, 408)
            _count(call, form, writer)
            if len(form.data) >= PART_BYTES:
                await _write(call, form, writer)
    except ClientDisconnect:
        raise CallerGone from None
    if not form.complete:
        refuse("the form ends before its last part does", "invalid_form")
    await _write(call, form, writer)


async def _next_piece(call: Call, pieces: AsyncIterator[bytes], until: float) -> bytes | None:
    try:
        async with asyncio.timeout(max(0.0, until - time.monotonic())):
            return await anext(pieces, None)
    except TimeoutError:
        told = f"less than {_LEAST_BYTES:,} bytes of the body came in {call.gateway.body_s:g} s"
        raise invalid(told, "timeout", None, 408) from None


def _count(call: Call, form: Form, writer: PartWriter) -> None:
    """Hold as many bytes as are in memory now."""
    call.hold(len(form.data) + writer.waiting - call.held.count)


async def _write(call: Call, form: Form, writer: PartWriter) -> None:
    data = form.taken()
    if len(data) >= PART_BYTES:  # it is no file yet, and so not what the tenant keeps
        most = await in_shared_thread(call.gateway.broker.kept_most)
        await call.take({Room("uploaded", most * 3 // 2, is_long=True): len(data)})
    await call.gateway.in_thread(lambda: writer.add(data))
    _count(call, form, writer)


async def _pieces(call: Call, file: StoredFile, span: Span) -> AsyncIterator[bytes]:
    for number in range(span.first // PART_BYTES, (span.end - 1) // PART_BYTES + 1):
        before = number * PART_BYTES
        within = max(0, span.first - before), min(PART_BYTES, span.end - before)
        yield await call.gateway.in_thread(partial(call.gateway.files.part, file, number, *within))


async def _chained(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece


def _too_large(most: int) -> Refusal:
    return invalid(f"the file has more than {most:,} bytes: divide it", "request_too_large", FILE, 413)
