"""A server over HTTP, and its callers: each has a connection, and sends its next request when the last is answered.

Needs the standard library, numpy and tokenizers alone.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from .serving import Answer, Vectors
from .tokens import TokenCounter

_PATH = "/v1/embeddings"
_PATIENCE_S = 600
#: The longest that a server may take to begin, and to end (seconds).
_START_S, _STOP_S = 300, 30
_URL = re.compile(r"http://127\.0\.0\.1:\d+")


class HttpAdapter:
    """A server that answers OpenAI's calls, in a process that ends with this one's session."""

    def __init__(self, model: Path, command: Sequence[str], variables: Mapping[str, str], url: str = "") -> None:
        """Start it, and wait until it listens, else RuntimeError. An empty URL: it writes into its log where it is."""
        self._name, self._counter = model.name, TokenCounter(model)
        with tempfile.TemporaryFile("w+") as log:
            self._process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=log, stderr=log)
            deadline = time.monotonic() + _START_S
            while not (url and _listens(url)):
                log.seek(0)
                said = log.read()
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.close()
                    raise RuntimeError(f"the server does not listen: {' / '.join(said.splitlines()[-3:])}")
                url = url or next(iter(_URL.findall(said)), "")
                time.sleep(0.1)
        self._url = url

    def encode(self, texts: Sequence[str]) -> Answer:
        return self.requests([texts], 1)[0]

    def requests(self, requests: Sequence[Sequence[str]], callers: int = 0) -> list[Answer]:
        """Every request, by so many callers; by one for each request if 0."""
        bodies = [
            json.dumps({"model": self._name, "input": texts, "encoding_format": "base64"}).encode()
            for texts in requests
        ]
        answers = ask(self._url, bodies, callers or len(requests))
        # They are read when the time is taken.
        return [Answer(_vectors_of(body), began, ended) for body, began, ended in answers]

    def count(self, texts: Sequence[str]) -> int:
        """Without truncation."""
        return sum(self._counter.lengths(texts))

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class InfinityServerAdapter(HttpAdapter):
    """infinity's own server at its defaults, on torch; without BetterTransformer, which its transformers lack."""

    def __init__(self, model: Path, threads: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        command = [str(Path(sys.executable).with_name("infinity_emb")), "v2", "--model-id", str(model)]
        command += ["--served-model-name", model.name, "--engine", "torch", "--device", "cpu", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--no-bettertransformer", "--url-prefix", "/v1"]
        variables = {"INFINITY_ANONYMOUS_USAGE_STATS": "0", "HF_HUB_OFFLINE": "1"}
        super().__init__(model, command, variables, f"http://127.0.0.1:{port}")


def ask(url: str, bodies: Sequence[bytes], callers: int) -> list[tuple[bytes, float, float]]:
    """Make the requests with these bodies: each answer, and when its request was sent and its last byte came, by the
    monotonic clock. One that is missing or no 200 is a RuntimeError."""
    parts, own = urlsplit(url), threading.local()
    begin = threading.Barrier(callers)

    def connect(_: int) -> None:
        own.connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_PATIENCE_S)
        own.connection.connect()
        begin.wait()  # so that each thread connects once

    def call(body: bytes) -> tuple[bytes, float, float]:
        began = time.monotonic()
        own.connection.request("POST", _PATH, body, {"content-type": "application/json"})
        answer = own.connection.getresponse()
        said = answer.read()
        if answer.status != http.client.OK:
            raise RuntimeError(f"status {answer.status}: {said[:200].decode(errors='replace')}")
        return said, began, time.monotonic()

    with ThreadPoolExecutor(callers) as threads:
        try:
            list(threads.map(connect, range(callers)))
            return list(threads.map(call, bodies))
        except (OSError, http.client.HTTPException, threading.BrokenBarrierError) as error:
            begin.abort()
            raise RuntimeError(f"{type(error).__name__}: {error}") from None


def _vectors_of(body: bytes) -> Vectors:
    data = sorted(json.loads(body)["data"], key=lambda each: int(each["index"]))
    return np.stack([np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in data])


def _listens(url: str) -> bool:
    """Whether a server can be connected to: it listens when its model is loaded."""
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname, parts.port)).close()
    except OSError:
        return False
    return True
