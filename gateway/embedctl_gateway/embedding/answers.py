"""Answers with vectors: JSON, piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

from starlette.responses import Response, StreamingResponse

#: Rows that are written at once: a long answer must not keep the gateway from others.
ROWS = 32


async def answered(lines: AsyncIterator[bytes], rows: int, headers: Mapping[str, str] | None = None) -> Response:
    """The response with a JSON value in several pieces: a short one with its length, a long one piece by piece."""
    if rows > ROWS:
        return StreamingResponse(_in_turns(lines), 200, headers, "application/json")
    return Response(b"".join([line async for line in lines]), 200, headers, "application/json")


async def _in_turns(lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same pieces; other requests have their turn after each of them."""
    async for line in lines:
        yield line
        await asyncio.sleep(0)
