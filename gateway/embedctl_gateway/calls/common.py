"""What all calls have in common: who asks, bounds, errors, a caller who may go away, and answers piece by piece."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from embedctl.common.daemons import DaemonThreads, doing_for, for_nobody
from embedctl.queueing.broker import Broker
from embedctl.queueing.chunk_sizes import BYTES_PER_TOKEN
from embedctl.queueing.listening import in_shared_thread
from embedctl.store import JobStatus
from embedctl.store.batches import BatchStore, EventStore, StoredBatch
from embedctl.store.ledger import Ledger, NoRoom, Room, Taking
from embedctl.store.stored_files import FileStore, Once, StoredFile, digest_of
from embedctl.waiting.shapes import MultiVectors, SparseVectors
from embedctl_config.errors import EmbedctlError
from embedctl_config.model_names import unknown_prompt
from embedctl_config.outputs import Output
from embedctl_config.redis_url import secret_url
from embedctl_config.retry import ASIDE, RetryLimit
from embedctl_config.settings import Settings
from embedctl_gateway.access.admission import BYTES, Admission, Held
from embedctl_gateway.access.callers import Access, Caller, WrongKey
from embedctl_gateway.batches.apart import Runs
from embedctl_gateway.batches.runner import Runner
from embedctl_gateway.batches.webhooks import Webhooks, receiver_of
from embedctl_gateway.calls.objects import BATCH, FILE, is_id, missing, page_of
from embedctl_gateway.embedding import catalogue
from embedctl_gateway.embedding.catalogue import Catalogue, Served
from embedctl_gateway.embedding.embedder import Asked, Embedded, Embedder
from embedctl_gateway.http.bodies import SMALL_BYTES, fields_of, is_large, paced
from embedctl_gateway.http.fields import digits_of
from embedctl_gateway.http.refusals import (
    Refusal,
    Style,
    broken,
    invalid,
    log_failure,
    refusal_of,
    refuse,
    timed_out,
    unavailable,
)
from embedctl_gateway.http.telemetry import Telemetry

T = TypeVar("T")

#: Of a request's JSON.
MAX_BODY_BYTES = 16 * 1024 * 1024
#: A body that takes longer is given up (seconds).
BODY_S = 30.0
#: Most tokens of a request, as at OpenAI; and most numbers of its multi-vectors, which have a vector for each token.
MAX_TOKENS, MAX_NUMBERS = 300_000, 16 * 1024 * 1024
#: About as many bytes of an answer a component takes as text, with its comma; and a weight of a sparse vector, with its
#: index and the names of both.
_BYTES_PER_NUMBER, _BYTES_PER_WEIGHT = 13, 40
#: Threads that move the bytes of files, and how many of them move those of one tenant at once.
_MOVERS, _FOR_EACH = 8, 2
#: The status of a request whose caller is gone, for the log of a proxy; nobody reads it.
_GONE = 499
#: Of a connection's state: what is to know the tenant of its caller, who has shown a key or needs none.
KNOWN = "known"
#: So much of an answer is written at once: a long one must not keep the gateway from others (bytes).
PART_BYTES = 128 * 1024


class Gateway:
    """What all calls share. Raises SettingsError as :class:`Access` does, and if what is set of webhooks is not valid.
    `body_s` are the seconds that a body may take, or of an upload each piece of it."""

    def __init__(self, settings: Settings, *, body_s: float = BODY_S) -> None:
        receiver = receiver_of(settings)
        secret_url(settings)  # a gateway needs Redis, and none can be in front of another one
        self.broker = broker = Broker.shared(settings)
        self.settings = settings
        self.body_s = body_s
        self.access = Access(settings)
        self.ledger = Ledger(broker.connection)
        self.admission = Admission(self.ledger, settings.limits.gateway_in_flight)
        self.catalogue = Catalogue(settings)
        self.embedder = Embedder(settings, self.ledger)
        self.telemetry = Telemetry(lambda: self.admission.requests, lambda: self.admission.held)
        self.files = FileStore(broker.connection, broker.chunk_files)
        self.batches = BatchStore(broker.connection)
        self.runner: Runs = Runner(broker, self.files, self.batches, tells=receiver is not None)
        events = EventStore(broker.connection)
        self.webhooks = None if receiver is None else Webhooks(receiver, events, self.telemetry.webhook)
        self._movers = DaemonThreads(_MOVERS, "files", _FOR_EACH)
        #: Reads large bodies, and makes large answers: so they take no more than a part of a CPU from what answers.
        self.reader = DaemonThreads(1, "bodies")
        #: Tenant → what each of these waits for, so that those of others do not wait for all of them.
        self.in_turn: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tidying: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self.ledger.lease.__enter__()
        self.runner.start()
        if self.webhooks is not None:
            self.webhooks.start()

    def stop(self) -> None:
        self.ledger.lease.end()
        with suppress(EmbedctlError):  # otherwise its lease lapses
            self.ledger.close()
        self.runner.stop()
        if self.webhooks is not None:
            self.webhooks.stop()

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Do what moves the bytes of a file, which must not keep the requests for vectors from their threads."""
        return await asyncio.get_running_loop().run_in_executor(self._movers, work)

    def tidy(self, work: Callable[[], object], retry_s: float = 0.0) -> None:
        """Free what a request has left; nobody waits for that. It is tried again for `retry_s`; what can't be freed
        goes with its time to live."""

        async def free() -> None:
            with suppress(EmbedctlError):
                limit = RetryLimit(longest_s=retry_s, while_full=False)
                await ASIDE.acall(lambda: self.in_thread(work), EmbedctlError, failed=limit)

        task = asyncio.create_task(free(), context=for_nobody())
        self._tidying.add(task)
        task.add_done_callback(self._tidying.discard)


class Call:
    """A request, its caller, and what it may take."""

    def __init__(self, gateway: Gateway, request: Request, caller: Caller, held: Held) -> None:
        self.gateway = gateway
        self.request = request
        self.caller = caller
        self.tenant = caller.tenant
        #: Counts bytes of the request or of its answer.
        self.hold = held.hold
        self.held = held
        held.client = caller.tenant
        self._is_large = self._has_place = False

    def named(self, kind: str, *facts: Any) -> Once:
        """The request as one that is to be carried out once, however often it is tried. A caller may name it by a key;
        OpenAI's clients say that a try is not the first."""
        digest = digest_of(kind, *facts)
        key = self.request.headers.get("idempotency-key", "")
        again = bool(key) or self.request.headers.get("x-stainless-retry-count", "0") != "0"
        return Once(digest_of(kind, self.tenant, key or digest), digest, again)

    async def file(self, file_id: str, param: str | None = None) -> StoredFile:
        """A file of the caller's; raises Refusal, about this parameter, if the caller has no such file."""
        file = None
        if is_id(file_id, FILE):
            file = await in_shared_thread(lambda: self.gateway.files.get(file_id, self.tenant))
        if file is None:
            raise missing("file", param)
        return file

    async def batch(self, batch_id: str) -> StoredBatch:
        """A batch of the caller's; raises Refusal if the caller has no such batch."""
        batch = None
        if is_id(batch_id, BATCH):
            batch = await in_shared_thread(lambda: self.gateway.batches.get(batch_id, self.tenant))
        if batch is None:
            raise missing("batch")
        return batch

    async def job(self) -> JobStatus:
        """The job in the path, without the workers that could take it. Raises JobNotFound alike if there is none, and
        if it is another tenant's; and JobDamaged if it is damaged, and the tenant's, or nobody's any more."""
        job_id, jobs = self.request.path_params["id"], self.gateway.broker.jobs
        return await in_shared_thread(lambda: jobs.status_for(self.tenant, job_id))

    async def fields(self, *, admitted: bool = False, embeds: bool = False) -> dict[str, Any]:
        """The body, which is a JSON object; raises Refusal if it is none, is too large, or takes too long. One that is
        `admitted` needs no place among the requests; one that `embeds` takes its place with its job, if it is small."""
        body = await self.body()
        self._is_large = is_large(body)
        if not admitted and (self._is_large or not embeds):
            await self.take({self.gateway.admission.places: 1})  # now: who sends slowly has none
            self._has_place = True
        return await self._by_size(lambda: fields_of(body, self.gateway.settings.max_text_bytes))

    async def _by_size(self, work: Callable[[], T]) -> T:
        """Do what takes as long as the body is large: aside for large ones."""
        return await self._aside(work) if self._is_large else work()

    async def _aside(self, work: Callable[[], T]) -> T:
        """Do what computes for long: a thread does it, for one call of each tenant at a time."""
        async with self.gateway.in_turn[self.tenant]:
            return await asyncio.get_running_loop().run_in_executor(self.gateway.reader, work)

    async def listed(self, found: Iterable[Sequence[T]], shown: Callable[[T], Any], limit: int) -> Response:
        """A page of a list, with as many objects as the limit says. More may be found, some at a time."""

        def made() -> bytes:
            objects = chain.from_iterable([shown(each) for each in some] for some in paced(found))
            return orjson.dumps(page_of(list(islice(objects, limit + 1)), limit))

        async with self.gateway.in_turn[self.tenant]:
            body = await self.gateway.in_thread(made)
        return Response(body, media_type="application/json")

    async def embed(self, asked: Asked) -> Embedded:
        """The vectors that a caller asks for, as long as the caller waits; else CallerGone is raised. Raises Refusal if
        there is no such model, no room, or no answer in time; or the request is wrong."""
        limit = self.gateway.settings.gateway_timeout_s
        self.gateway.admission.requests += 1
        try:
            async with asyncio.timeout(limit):
                return await while_caller_waits(self.request, self._embed(asked))
        except TimeoutError:
            raise timed_out(limit) from None
        finally:
            self.gateway.admission.requests -= 1

    async def take(self, room: Mapping[Room, int]) -> None:
        """Take room until the answer is sent; raises Refusal if there is none, or Redis does not answer."""
        taking = self.gateway.ledger.taking(self.tenant, room)
        self.held.room.append(taking)
        asking = asyncio.create_task(in_shared_thread(taking.take))
        try:
            async with asyncio.timeout(catalogue.LOOK_S):
                await asyncio.shield(asking)
        except TimeoutError:
            asking.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody awaits it any more
            raise unavailable("the queue does not answer") from None
        except NoRoom as error:
            raise self.gateway.admission.refusal(error) from None

    async def _embed(self, asked: Asked) -> Embedded:
        served = await self.gateway.catalogue.find(asked.model)
        await self._by_size(lambda: check_sizes(asked, served))
        if asked.output_of(served) is Output.DENSE:
            self.hold(len(asked.texts) * (asked.dimensions or served.dim) * _BYTES_PER_NUMBER)
        try:
            embedded = await self.gateway.embedder.embed(asked, served, self.tenant, self._taking(len(asked.texts)))
        except NoRoom as error:
            raise self.gateway.admission.refusal(error) from None
        if isinstance(embedded.vectors, SparseVectors):  # only now it is known how many there are
            self.hold(len(embedded.vectors.indices) * _BYTES_PER_WEIGHT)
        elif isinstance(embedded.vectors, MultiVectors):
            self.hold(embedded.vectors.vectors.size * _BYTES_PER_NUMBER)
        self.gateway.telemetry.embedded(served.name, len(asked.texts), embedded.tokens)
        return embedded

    def _taking(self, texts: int) -> Taking:
        """The place of a request for vectors, which is taken with its job."""
        places = {} if self._has_place else {self.gateway.admission.places: 1}
        taking = self.gateway.ledger.taking(self.tenant, places, texts)
        self.held.room.append(taking)
        return taking

    def _length(self) -> int:
        """The bytes that the body is said to have; raises Refusal if these are too many."""
        length = digits_of(self.request.headers.get("content-length", "0"), MAX_BODY_BYTES)
        if length is None:
            raise _too_large()
        return length

    async def body(self) -> bytearray:
        """The body as it is, not copied; raises Refusal if it is too large, or takes too long."""
        length = self._length()
        if length > SMALL_BYTES:
            await self.take({BYTES: length})
        body = bytearray()
        try:
            async with asyncio.timeout(self.gateway.body_s):
                async for piece in self._pieces():
                    body += piece
        except TimeoutError:
            raise invalid(f"the body took longer than {self.gateway.body_s:g} s", "timeout", None, 408) from None
        if len(body) > max(length, SMALL_BYTES):  # it did not say how long it is
            await self.take({BYTES: len(body) - length})
        return body

    async def _pieces(self) -> AsyncIterator[bytes]:
        size = 0
        async for piece in self.request.stream():
            size += len(piece)
            self.hold(len(piece))
            if size > MAX_BODY_BYTES:
                raise _too_large()
            yield piece


Handler = Callable[[Call], Awaitable[Response]]


class Endpoint:
    """A call as an ASGI application: every way in which it can end is a response. The path is for the metrics. A key
    for one of the verbs may make the call; everybody may if there are none."""

    def __init__(self, gateway: Gateway, path: str, handler: Handler, style: Style, verbs: tuple[str, ...]) -> None:
        self._gateway = gateway
        self._path = path
        self._handler = handler
        self._style = style
        self._verbs = verbs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        held = Held(self._gateway.admission)
        try:
            response = await self._response(Request(scope, receive), held)
            response.headers["x-request-id"] = f"req_{secrets.token_hex(12)}"
            response.headers["x-content-type-options"] = "nosniff"  # what a tenant has sent is no page
            await response(scope, receive, _in_parts(send))
        finally:
            held.free()
            if held.room:
                self._gateway.embedder.tidy_soon()
        self._gateway.telemetry.answered(self._path, response.status_code, time.perf_counter() - began)

    async def _response(self, request: Request, held: Held) -> Response:
        try:
            caller = self._gateway.access.caller_of(request) if self._verbs else Caller()
            doing_for.set(caller.tenant)
            if caller.tenant:
                request.scope["state"][KNOWN](caller.tenant)
            caller.need(self._verbs)
            return await self._handler(Call(self._gateway, request, caller, held))
        except WrongKey as wrong:
            if wrong.pause_s:  # otherwise nothing asks for the body
                with suppress(CallerGone):
                    await while_caller_waits(request, asyncio.sleep(wrong.pause_s))
            return self._style(wrong)
        except Refusal as refusal:
            return self._style(refusal)
        except (ClientDisconnect, CallerGone):
            return Response(status_code=_GONE)
        except EmbedctlError as error:
            told = refusal_of(error)
            if told.status == 500:
                log_failure("a request failed with", error)
            return self._style(told)
        except Exception as error:  # noqa: BLE001  (a caller is told that it was not the request)
            log_failure("a request failed with", error)
            return self._style(broken())


def _in_parts(send: Send) -> Send:
    """Sends what is long part by part, and lets others have their turn after each: the event loop would copy all of it
    at once, twice."""

    async def send_some(message: Message) -> None:
        body = memoryview(message.get("body", b""))
        parts = range(0, len(body), PART_BYTES)
        for begin in parts[:-1]:
            await send({**message, "body": body[begin : begin + PART_BYTES], "more_body": True})
            await asyncio.sleep(0)
        await send({**message, "body": body[parts[-1] :]} if len(parts) > 1 else message)

    return send_some


class CallerGone(Exception):
    """Raised when the caller of a request has closed the connection."""


async def while_caller_waits(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns. If the caller goes away, it is cancelled, and CallerGone is raised."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise CallerGone
        return await task
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def check_sizes(asked: Asked, served: Served) -> None:
    """Refuse more than a model or a request can have. A gateway has no tokenizer, so it estimates tokens from bytes, up
    to those that the model takes of a text."""
    output = asked.output_of(served)
    if output not in served.outputs:
        gives = " and ".join(served.outputs)
        refuse(f"{served.name} gives no {output} vectors, but {gives}", "output_not_given", "model")
    if output is not Output.DENSE and asked.dimensions is not None:
        refuse(f"dimensions is for dense vectors alone, and these are {output} vectors", "invalid_value", "dimensions")
    if asked.dimensions is not None and asked.dimensions > served.dim:
        refuse(f"vectors of {served.name} have {served.dim} dimensions", "invalid_value", "dimensions")
    if asked.dimensions not in (None, served.dim) and not served.matryoshka:
        refuse(f"{served.name} was not trained for shorter vectors (Matryoshka)", "invalid_value", "dimensions")
    if output is not Output.DENSE and asked.long == "mean":
        refuse(f"long mean is for dense vectors alone, and these are {output} vectors", "invalid_value", "long")
    prompt, prompts = asked.prompt_name, served.prompts
    if prompt is not None and prompts is not None and prompt not in prompts:
        refuse(f"prompt_name {prompt!r}: {unknown_prompt(served.name, prompts)}", "invalid_value", "prompt_name")
    most = 0 if asked.long == "mean" else served.max_tokens
    tokens = MAX_TOKENS if output is not Output.MULTI else min(MAX_TOKENS, MAX_NUMBERS // max(1, served.multi_width))
    if tokens_of(asked.texts, most) > tokens:
        refuse(
            f"the texts have more than {tokens:,} tokens by their length; divide them among requests",
            "max_tokens_per_request",
            "input",
        )


def tokens_of(texts: Sequence[str], most: int) -> float:
    """About as many tokens as texts have, of each up to `most`; 0 means that there is no such bound."""
    return sum(min(len(text.encode()) / BYTES_PER_TOKEN, most or math.inf) for text in texts)


def _too_large() -> Refusal:
    return invalid(f"the body has more than {MAX_BODY_BYTES:,} bytes", "request_too_large", None, 413)


def answered(pieces: Iterable[bytes], headers: Mapping[str, str] | None = None) -> Response:
    """The response with a JSON value in pieces: a short one with its length, a long one as it is made."""
    parts = _joined(pieces)
    first, second = next(parts), next(parts, None)
    if second is None:
        return Response(first, 200, headers, "application/json")
    return StreamingResponse(_in_turns(chain((first, second), parts)), 200, headers, "application/json")


def _joined(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same in parts of some length, one at least."""
    part = bytearray()
    for piece in pieces:
        part += piece
        if len(part) >= PART_BYTES:
            yield bytes(part)
            part.clear()
    yield bytes(part)


async def _in_turns(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """The same parts; other requests have their turn after each of them."""
    for part in parts:
        yield part
        await asyncio.sleep(0)
