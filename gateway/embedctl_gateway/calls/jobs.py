"""Jobs for callers who have no Redis: the steps that the library takes, for the jobs of the caller's tenant alone."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial, wraps
from typing import Any

import orjson
from starlette.responses import JSONResponse, Response

from embedctl.corpus.kept import check_keep
from embedctl.jobs.enqueue import job_spec
from embedctl.jobs.job import Job
from embedctl.jobs.options import Kept, SubmitOptions, is_whole
from embedctl.queueing.broker import Broker
from embedctl.queueing.listening import in_shared_thread
from embedctl.queueing.routing import with_workers
from embedctl.store import JobSpec, JobStatus
from embedctl.store.drains import BEYOND
from embedctl.store.quotas import KEPT
from embedctl.waiting.submission import add_chunk
from embedctl_config import keys, wire
from embedctl_config.errors import (
    BrokerFull,
    CorpusChanged,
    EmbedctlError,
    InputError,
    JobDamaged,
    JobError,
    JobNotFound,
    NotPermitted,
    QuotaExceeded,
    SettingsError,
    WireError,
    WireForeign,
)
from embedctl_config.settings import Settings
from embedctl_config.wire import ChunkInput, RecordKind
from embedctl_gateway.access.verbs import JOBS, READ_JOBS
from embedctl_gateway.calls import drains
from embedctl_gateway.calls.common import MAX_BODY_BYTES, Call, Handler, while_caller_waits
from embedctl_gateway.calls.schemas import check_known, check_types
from embedctl_gateway.calls.steps import READING_STEPS, STEPS
from embedctl_gateway.http.fields import digits_of
from embedctl_gateway.http.refusals import BUSY_S, Refusal, limited, refuse

#: HTTP's status of an error that is told as it is: the library raises it again where it was asked.
_STATUSES: tuple[tuple[type[EmbedctlError], int], ...] = (
    (JobNotFound, 404),
    (JobError, 409),
    (CorpusChanged, 409),
    (NotPermitted, 403),
    (SettingsError, 400),
    (InputError, 400),
    (WireError, 400),
)
#: A wait for events lasts at most so long (seconds).
_WAIT_S = 10.0
_EVENT_ID = re.compile(r"[0-9]{1,15}(-[0-9]{1,19})?")
_TOKEN = re.compile(r"[0-9a-f]{1,64}")
_PLACE = re.compile(r"[0-9]{1,15}\.[!-~]{1,255}")
#: Of a job, in JSON: each claim of a chunk reads them (bytes).
_MOST_OPTIONS = 128 * 1024
#: Most chunks in one question.
_MOST_CHUNKS = 1000
_MOST_CHUNK = 10**9
#: A job's facts that are about the operator's places and machines.
_HIDDEN: Mapping[str, Any] = {"data": None, "pinned_by": None, "hindrance": ""}


def _told(handler: Handler) -> Handler:
    """A call whose errors of the library are told by their names."""

    @wraps(handler)
    async def call(call: Call) -> Response:
        try:
            return await handler(call)
        except BrokerFull as error:
            raise Refusal(503, str(error), "broker_full", None, {"retry-after": str(BUSY_S)}) from None
        except QuotaExceeded as error:
            refusal = limited(error, _code_of(error))
            told = f"{error.tenant} {error.limit} {error.most} {error.used} {error.after_s} {error.is_final:d}"
            refusal.headers = {**refusal.headers, "x-quota": told}
            raise refusal from None
        except EmbedctlError as error:
            for kind, status in _STATUSES:
                if isinstance(error, kind):
                    raise Refusal(status, str(error), _code_of(error)) from None
            raise

    return call


def _code_of(error: EmbedctlError) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).lower()


@_told
async def create(call: Call) -> Response:
    fields = await call.fields()
    check_known(fields, "JobRequest")
    check_types(fields, "JobRequest")
    broker = call.gateway.broker
    is_dry = bool(fields.pop("dry_run", None))
    spec = await call.gateway.in_thread(lambda: _spec(broker, call.tenant, fields))
    if is_dry:
        offer = broker.workers.offers().get((spec.hardware, spec.model, spec.precision))
        key, find = spec.idempotency_key, broker.jobs.with_key
        before = None if key is None else await call.gateway.in_thread(lambda: find(key, call.tenant))
        told = {"spec": dataclasses.replace(spec, data=None), "offer": offer}
        return _json({"id": before, "created": False, **told})
    job_id, created = await call.gateway.in_thread(lambda: broker.jobs.create(spec))
    return _json({"id": job_id, "created": created})


def _spec(broker: Broker, tenant: str, fields: dict[str, Any]) -> JobSpec:
    """The specification of a job for a tenant. Raises SettingsError if an option is wrong, and NotPermitted if it is to
    be another tenant's."""
    given = {name: value for name, value in fields.items() if value is not None}
    chunk_bytes, other = given.pop("chunk_bytes", broker.settings.chunk_bytes), given.pop("tenant", tenant)
    if other != tenant:
        raise NotPermitted(f"this key is for tenant {tenant}, and the job would be one of {other}")
    given["keep"] = check_keep(given.get("keep", ()))
    spec = job_spec(broker, SubmitOptions(**given, tenant=tenant, kept=Kept(1)))
    if len(json.dumps(dict(spec.options))) > _MOST_OPTIONS:
        raise SettingsError(f"the options have more than {_MOST_OPTIONS:,} bytes: name fewer columns in column_types")
    most = min(chunk_bytes, spec.options["chunk_bytes"], MAX_BODY_BYTES // 2)
    return dataclasses.replace(spec, options={**spec.options, "chunk_bytes": most})


@_told
async def listed(call: Call) -> Response:
    """Those of the tenant that are among a slice of all jobs, and where the next slice begins."""
    asked, broker = call.request.query_params, call.gateway.broker
    after = asked.get("after")
    if after is not None and not _PLACE.fullmatch(after):
        refuse("after is the end of no part of the list", "invalid_value", "after")
    made_ms, _, last = (after or "").partition(".")

    def read() -> dict[str, Any]:
        jobs, place = broker.jobs.page(call.tenant, asked.get("fits", ""), (int(made_ms), last) if after else None)
        return {
            "jobs": [_facts(broker, job) for job in jobs],
            "after": None if place is None else f"{place[0]}.{place[1]}",
        }

    return _json(await call.gateway.in_thread(read))


@_told
async def retrieve(call: Call) -> Response:
    job = await call.job()
    return _json(await in_shared_thread(lambda: _facts(call.gateway.broker, job)))


def _facts(broker: Broker, job: JobStatus) -> JobStatus:
    job = with_workers(broker.workers, job, recent=True)
    # A producer that waits for memory may not even be able to renew its lease.
    alive = job.producer_alive or (job.stalled and broker.connection.is_full())
    place = job.drained_to and job.drained_to.removeprefix(BEYOND)
    return dataclasses.replace(job, producer_alive=alive, drained_to=place, **_HIDDEN)


@_told
async def discard(call: Call) -> Response:
    try:
        job_id = (await call.job()).id
    except JobDamaged:  # it is the tenant's, or nothing tells any more whose it is
        job_id = call.request.path_params["id"]
    job = Job(job_id, call.gateway.broker)
    await call.gateway.in_thread(job.discard)
    await call.gateway.in_thread(lambda: call.gateway.broker.quotas.note(call.tenant, [job_id]))
    return JSONResponse({"id": job.id, "deleted": True})


@_told
async def events(call: Call) -> Response:
    asked, broker = call.request.query_params, call.gateway.broker
    after, job = asked.get("after", "0"), await call.job()
    if after == "$":  # the events that are yet to come
        after = f"{await in_shared_thread(broker.connection.now_ms)}-0"
    if not _EVENT_ID.fullmatch(after):
        refuse("after is the id of no event", "invalid_value", "after")
    try:
        wait_s = float(asked.get("wait_s", "0"))
    except ValueError:
        wait_s = -1.0
    if not 0 <= wait_s <= _WAIT_S:
        refuse(f"wait_s is no number of seconds from 0 to {_WAIT_S:g}", "invalid_value", "wait_s")
    await while_caller_waits(call.request, broker.listener.next_event(job.id, after, wait_s))
    found = await in_shared_thread(lambda: broker.jobs.events(job.id, after, 0.0))
    return JSONResponse({"events": [[each.id, each.may_end] for each in found]})


@_told
async def add(call: Call) -> Response:
    job, number = await call.job(), _chunk_of(call)
    token = call.request.query_params.get("token", "")
    _check_token(token)
    body, broker = bytes(await call.body()), call.gateway.broker

    def added() -> dict[str, object]:
        chunk = wire.decode_input(body)
        _check_records(chunk, job, number, broker.settings)
        upload = broker.jobs.upload(job, "in", number, body)
        put = partial(broker.jobs.add, job.id, number, digest=wire.digest_of(body), rows=len(chunk), token=token)
        try:
            answer, waiting = add_chunk(broker.jobs, job, number, upload, put)
        except QuotaExceeded as error:
            if number == 0 or error.limit == KEPT:  # the caller asks once more, and gives a job up that is empty
                broker.quotas.correct(job.tenant)
            raise
        return {"answer": answer, "waiting": waiting, "room": broker.high_water()}

    return JSONResponse(await call.gateway.in_thread(added))


def _check_records(chunk: ChunkInput, job: JobStatus, number: int, settings: Settings) -> None:
    """Refuse a chunk that the library would not make: workers read what Redis holds as that of a trusted producer."""
    if not 1 <= len(chunk) <= job.options["chunk_size"]:
        raise WireForeign(
            f"chunk {number} has {len(chunk)} records, and the job's have up to {job.options['chunk_size']}"
        )
    if chunk.positions is not None or (number == job.chunks and chunk.first != job.records):
        raise WireForeign(f"chunk {number} does not begin at record {job.records}")
    for kind, text in zip(chunk.kinds, chunk.texts, strict=True):
        if len(text) > settings.max_text_bytes:
            raise InputError(f"a text of chunk {number} has more than {settings.max_text_bytes:,} bytes")
        if kind == RecordKind.OVERSIZE and not re.fullmatch(rb"\d{1,18}", text):
            raise WireForeign(f"chunk {number} has a record without its size")
        if kind != RecordKind.INVALID_UTF8:
            _check_utf8(text, number)
    for kept in chunk.kept or ():
        _check_utf8(kept, number)


def _check_utf8(text: bytes, number: int) -> None:
    try:
        text.decode()
    except UnicodeDecodeError:
        raise WireForeign(f"chunk {number} has a text that is not UTF-8") from None


@_told
async def chunk(call: Call) -> Response:
    job, number, what = await call.job(), _chunk_of(call), call.request.path_params["what"]
    if what not in ("result", "input"):
        raise Refusal(404, "there is no such path", "not_found")
    size = call.request.query_params.get("size")
    most = None if size is None else digits_of(size, 2**40)
    if size is not None and not most:
        refuse("size is no number of bytes", "invalid_value", "size")
    # Twice: as Redis gives it, and as it waits to be sent.
    vectors = job.options["chunk_size"] * (job.dim or 0) * 4
    whole = vectors + job.options["chunk_bytes"] if what == "result" else MAX_BODY_BYTES
    guess = min(whole, most or whole)
    call.hold(2 * guess)
    jobs = call.gateway.broker.jobs

    def read() -> bytes | None:
        if what == "input":
            return jobs.input(job.id, number)
        return jobs.result(job.id, number) if most is None else jobs.result_start(job.id, number, most)

    found = await call.gateway.in_thread(read)
    if found is None:
        return Response(status_code=204)
    call.hold(2 * max(0, len(found) - guess))  # nothing tells before how long sparse and multi-vectors are
    return Response(found, media_type="application/octet-stream")


#: What the steps do that are more than one of the store's.
_OWN: Mapping[str, Callable[[Job], object]] = {"cancel": lambda job: job.cancel().state}


@_told
async def step(call: Call) -> Response:
    name = call.request.path_params["step"]
    if name not in STEPS:
        raise Refusal(404, "there is no such path", "not_found")
    call.caller.need(READ_JOBS if name in READING_STEPS else JOBS)
    job, fields = await call.job(), await call.fields(admitted=True)
    broker, takes = call.gateway.broker, STEPS[name]
    given = {field: value for field, value in fields.items() if value is not None}
    if unknown := given.keys() - set(takes):
        refuse(f"{min(unknown)[:100]} is not a field of this step", "unsupported_parameter")
    if missing := set(takes) - given.keys() - {"lease_s"}:
        refuse(f"{min(missing)} is missing", "missing_required_parameter", min(missing))
    for field, value in given.items():
        _check_field(field, value)

    def done() -> object:
        if name in drains.STEPS:
            return drains.STEPS[name](broker, job, given)
        if name in _OWN:
            return _OWN[name](Job(job.id, broker))
        return getattr(broker.jobs, name)(job.id, **given)

    answer = await call.gateway.in_thread(done)
    return JSONResponse({"answer": sorted(answer) if isinstance(answer, set) else answer})


def _check_field(name: str, value: object) -> None:
    if name == "token":
        _check_token(value)
    elif name == "lease_s":
        if not (isinstance(value, int | float) and 0 <= value <= keys.PRODUCER_LEASE_S):
            refuse("lease_s is no lease of a producer", "invalid_value", name)
    elif name in drains.FIELDS:
        if not drains.FIELDS[name](value):
            refuse(f"{name} is no value of this field", "invalid_value", name)
    elif not (
        is_whole(value) and isinstance(value, int) and 0 <= value <= (_MOST_CHUNKS if name == "count" else _MOST_CHUNK)
    ):
        refuse(f"{name} is no number of a chunk", "invalid_value", name)


def _check_token(token: object) -> None:
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        refuse("token is none of a producer: 1 to 64 hexadecimal digits", "invalid_value", "token")


def _chunk_of(call: Call) -> int:
    number = digits_of(call.request.path_params["chunk"], _MOST_CHUNK)
    if number is None:
        raise Refusal(404, "there is no such chunk", "not_found")
    return number


def _json(told: object) -> Response:
    return Response(orjson.dumps(told, default=_plain), media_type="application/json")


def _plain(value: object) -> object:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, frozenset):
        return sorted(value)
    raise TypeError(type(value).__name__)
