"""Whether the gateway is alive and ready, its metrics, and what it takes."""

from __future__ import annotations

from starlette.responses import HTMLResponse, JSONResponse, Response

from embedctl_gateway import openapi
from embedctl_gateway.calls import Call
from embedctl_gateway.refusals import unavailable


async def health(call: Call) -> Response:
    """`GET /health`: this process answers."""
    return JSONResponse({"status": "ok"})


async def ready(call: Call) -> Response:
    """`GET /ready`: Redis answers, and a live worker serves a model."""
    if not await call.gateway.catalogue.served():
        raise unavailable("no live worker serves a model")
    return JSONResponse({"status": "ready"})


async def metrics(call: Call) -> Response:
    """`GET /metrics`, for Prometheus."""
    content_type, page = call.gateway.telemetry.page(call.request.headers.get("accept", ""))
    return Response(page, headers={"content-type": content_type, "cache-control": "no-store"})


async def description(call: Call) -> Response:
    """`GET /openapi.json`."""
    return JSONResponse(openapi.document())


async def page(call: Call) -> Response:
    """`GET /docs`, for people."""
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return HTMLResponse(openapi.page(), headers={"content-security-policy": policy})
