"""The same engine as a worker's, called in the server's process: how fast an answer over HTTP can be.

    python -m embedctl_bench.peers.adapters.embedctl_adapters.http_direct FACTS

FACTS is JSON: the model's folder, and the options of :class:`EngineAdapter`. It says its URL on standard error.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn import Config, Server

from .embedctl import EngineAdapter


def application(engine: EngineAdapter, model: str) -> Starlette:
    """OpenAI's call, with one request in the engine at a time."""
    threads = ThreadPoolExecutor(1)

    async def embeddings(request: Request) -> Response:
        texts = orjson.loads(await request.body())["input"]
        vectors = await asyncio.get_running_loop().run_in_executor(threads, engine.encode, texts)
        data = [
            {"object": "embedding", "index": index, "embedding": base64.b64encode(row.tobytes()).decode()}
            for index, row in enumerate(vectors)
        ]
        return Response(orjson.dumps({"object": "list", "data": data, "model": model}), media_type="application/json")

    return Starlette(routes=[Route("/v1/embeddings", embeddings, methods=["POST"])])


def main() -> None:
    """Answer until SIGTERM."""
    folder, options = json.loads(sys.argv[1])
    engine = EngineAdapter(Path(folder), **options)
    engine.encode(["warm up"])
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as the gateway does
    sys.stderr.write(f"http://127.0.0.1:{listener.getsockname()[1]}\n")
    sys.stderr.flush()
    Server(Config(application(engine, Path(folder).name), log_level="warning", access_log=False)).run([listener])


if __name__ == "__main__":
    main()
