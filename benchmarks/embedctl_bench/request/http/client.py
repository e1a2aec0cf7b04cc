"""Callers of a server: each has a connection, and sends its next request when the last one is answered."""

from __future__ import annotations

import base64
import http.client
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import numpy as np
import orjson

from embedctl_bench.peers.adapters.embedctl_adapters.serving import Vectors
from embedctl_bench.peers.child import Unavailable
from embedctl_bench.request.http.loads import Load

_PATH = "/v1/embeddings"
_PATIENCE_S = 600


@dataclass(frozen=True, slots=True)
class Answered:
    """The answers to a load.

    Attributes:
        seconds: from the first request to the last answer.
        latencies: from each request to the last byte of its answer (seconds), in the order of the requests.
        bodies: the answers as they came; they are read when the time is taken.
    """

    seconds: float
    latencies: Sequence[float]
    bodies: Sequence[bytes]


def ask(url: str, model: str, load: Load) -> Answered:
    """Make the requests of a load.

    Raises:
        Unavailable: an answer is missing, or is no 200.
    """
    bodies = [
        json.dumps({"model": model, "input": texts, "encoding_format": "base64"}).encode() for texts in load.requests
    ]
    answers: list[bytes] = [b""] * len(bodies)
    latencies = [0.0] * len(bodies)
    failed: list[str] = []
    waiting = iter(range(len(bodies)))
    lock, begin = threading.Lock(), threading.Barrier(load.in_flight + 1)

    def call() -> None:
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_PATIENCE_S)
        try:
            connection.connect()
            begin.wait()
            for number in _taken(waiting, lock):
                began = time.perf_counter()
                connection.request("POST", _PATH, bodies[number], {"content-type": "application/json"})
                answer = connection.getresponse()
                answers[number] = answer.read()
                latencies[number] = time.perf_counter() - began
                if answer.status != http.client.OK:
                    failed.append(f"status {answer.status}: {answers[number][:200].decode(errors='replace')}")
                    return
        except (OSError, http.client.HTTPException, threading.BrokenBarrierError) as error:
            begin.abort()
            failed.append(f"{type(error).__name__}: {error}")
        finally:
            connection.close()

    threads = [threading.Thread(target=call) for _ in range(load.in_flight)]
    for thread in threads:
        thread.start()
    with suppress(threading.BrokenBarrierError):  # the caller that broke it says why
        begin.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    if failed:
        raise Unavailable(f"{load.words}: {failed[0]}")
    return Answered(seconds, latencies, answers)


def vectors_of(bodies: Sequence[bytes]) -> Vectors:
    """The vectors of answers: float32, texts × dimensions."""
    rows = [
        np.frombuffer(base64.b64decode(each["embedding"]), "<f4")
        for body in bodies
        for each in sorted(orjson.loads(body)["data"], key=lambda each: int(each["index"]))
    ]
    return np.stack(rows)


def _taken(waiting: Iterator[int], lock: threading.Lock) -> Iterator[int]:
    """Those that nobody else has taken."""
    while True:
        with lock:
            number = next(waiting, None)
        if number is None:
            return
        yield number
