"""The paths of the gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Match, Route

from embedctl.queueing.listening import in_shared_thread
from embedctl_gateway.calls import batches, files, jobs, openai, openapi, page, tei
from embedctl_gateway.calls.common import Call, Endpoint, Gateway, Handler
from embedctl_gateway.http.refusals import Refusal, Style, as_openai, as_tei, unavailable
from embedctl_gateway.serving.memory import keep_small


async def _health(call: Call) -> Response:
    """This process answers."""
    return JSONResponse({"status": "ok"})


async def _ready(call: Call) -> Response:
    """Redis answers, and a live worker serves a model."""
    if not await call.gateway.catalogue.served():
        raise unavailable("no live worker serves a model")
    return JSONResponse({"status": "ready"})


async def _metrics(call: Call) -> Response:
    content_type, page = call.gateway.telemetry.page(call.request.headers.get("accept", ""))
    return Response(page, headers={"content-type": content_type, "cache-control": "no-store"})


async def _description(call: Call) -> Response:
    return Response(_document(), media_type="application/json")


@cache  # it is large, and everybody may ask for it
def _document() -> bytes:
    return json.dumps(openapi.document()).encode()


async def _page(call: Call) -> Response:
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return HTMLResponse(_shown_page(), headers={"content-security-policy": policy})


_shown_page = cache(page.page)

#: Method, path, what answers and the form of its errors. The paths of OpenAI and infinity exist below /v1 too.
CALLS: tuple[tuple[str, str, Handler, Style], ...] = (
    ("POST", "/embeddings", openai.embeddings, as_openai),
    ("POST", "/pooling", openai.pooling, as_openai),
    ("GET", "/models", openai.models, as_openai),
    ("GET", "/models/{name:path}", openai.model, as_openai),
    ("POST", "/files", files.create, as_openai),
    ("GET", "/files", files.listed, as_openai),
    ("GET", "/files/{id}", files.retrieve, as_openai),
    ("DELETE", "/files/{id}", files.delete, as_openai),
    ("GET", "/files/{id}/content", files.content, as_openai),
    ("POST", "/batches", batches.create, as_openai),
    ("GET", "/batches", batches.listed, as_openai),
    ("GET", "/batches/{id}", batches.retrieve, as_openai),
    ("POST", "/batches/{id}/cancel", batches.cancel, as_openai),
    ("GET", "/batches/{id}/results", batches.results, as_openai),
    ("POST", "/batches/{id}/retry", batches.retry, as_openai),
    ("POST", "/jobs", jobs.create, as_openai),
    ("GET", "/jobs", jobs.listed, as_openai),
    ("GET", "/jobs/{id}", jobs.retrieve, as_openai),
    ("DELETE", "/jobs/{id}", jobs.discard, as_openai),
    ("GET", "/jobs/{id}/events", jobs.events, as_openai),
    ("PUT", "/jobs/{id}/chunks/{chunk}", jobs.add, as_openai),
    ("GET", "/jobs/{id}/chunks/{chunk}/{what}", jobs.chunk, as_openai),
    ("POST", "/jobs/{id}/steps/{step}", jobs.step, as_openai),
    ("POST", "/embed", tei.embed, as_tei),
    ("POST", "/embed_sparse", tei.embed_sparse, as_tei),
    ("POST", "/", tei.embed, as_tei),
    ("GET", "/info", tei.info, as_tei),
    ("POST", "/predict", tei.predict, as_tei),
    ("GET", "/health", _health, as_openai),
    ("GET", "/ready", _ready, as_openai),
    ("GET", "/metrics", _metrics, as_openai),
    ("GET", "/openapi.json", _description, as_openai),
    ("GET", "/docs", _page, as_openai),
)
_BELOW_V1 = ("/embeddings", "/models", "/files", "/batches", "/jobs", "/health")


def application(gateway: Gateway) -> Starlette:
    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        gateway.start()
        keeping = asyncio.create_task(keep_small())
        yield
        keeping.cancel()
        await in_shared_thread(gateway.stop)
        await gateway.embedder.close()

    app = Starlette(routes=list(_routes(gateway)), exception_handlers={HTTPException: _no_such_call}, lifespan=lifespan)
    app.router.redirect_slashes = False
    return app


def _routes(gateway: Gateway) -> Iterator[Route]:
    for method, path, handler, style in CALLS:
        endpoint = Endpoint(gateway, path, handler, style, openapi.MAY[method, path.replace(":path", "")])
        yield Route(path, endpoint, methods=[method])
        if path.startswith(_BELOW_V1):
            yield Route(f"/v1{path}", endpoint, methods=[method])


async def _no_such_call(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        said, code, headers = "there is no such path", "not_found", error.headers
    else:
        allowed = ", ".join(_methods_of(request))
        said, code, headers = f"this path takes {allowed} only", None, {"allow": allowed}
    style = next((style for _, path, _, style in CALLS if path == request.url.path), as_openai)
    return style(Refusal(error.status_code, said, code, None, headers))


def _methods_of(request: Request) -> list[str]:
    """The methods that the path of a request takes: each call has a route of its own, which knows no other."""
    found: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods
    return sorted(found)
