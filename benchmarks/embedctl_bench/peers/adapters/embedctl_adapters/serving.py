"""The child's side: one process of a system in its own environment, told what to do by lines of JSON.

A line is a call of a method of :class:`Server`, such as `{"do": "count", "texts": ["a text"]}`, and its answer is the
next line. Vectors are in files. Needs the standard library and numpy alone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

#: float32, texts × dimensions.
Vectors = npt.NDArray[np.float32]


class Adapter(Protocol):
    """The methods of an adapter's class, which is called as `Class(model_folder, threads, **load)`.

    An adapter that must stop something also has `close()`. One that accepts requests while it works on others also has
    `requests(requests, callers, **options) -> list[Answer]`: all at once, or by so many callers, each with one request
    at a time. Any other adapter gets one request after the other. One that can read back the precision of its products
    has `computes`, which begins with fp32, bf16, fp16 or int8.
    """

    def encode(self, texts: Sequence[str], **options: Any) -> Vectors | Answer:
        """Unit vectors, in the order of the texts. This alone is timed, unless it times itself."""
        ...

    def count(self, texts: Sequence[str]) -> int:
        """Tokens of these texts that the system encodes: after truncation, without padding."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """The vectors of some texts. Times are of the machine's monotonic clock, in seconds.

    Attributes:
        began: when the texts were given.
        ended: when the last vector was there, or was stored if the system stores vectors.
        tokens: 0 if the system does not count by itself.
    """

    vectors: Vectors
    began: float
    ended: float
    tokens: int = 0


class Server:
    """Answers the parent's calls with one loaded system."""

    def __init__(self) -> None:
        self._adapter: Any = None

    def load(
        self, adapter: str, model: str, cpus: Sequence[int], options: Mapping[str, Any], packages: Sequence[str]
    ) -> dict[str, Any]:
        """Pin this process, then load the system."""
        os.sched_setaffinity(0, cpus)
        module, _, name = adapter.partition(":")
        self._adapter = getattr(import_module(module, __package__), name)(Path(model), len(cpus), **options)
        return {
            "computes": getattr(self._adapter, "computes", ""),
            "takes_requests": hasattr(self._adapter, "requests"),
            "versions": {package: _version(package) for package in packages},
        }

    def encode(self, texts: Sequence[str], options: Mapping[str, Any], vectors: str, repeat: int = 1) -> dict[str, Any]:
        """Encode the texts `repeat` times, in one call; the vectors are those of the first time."""
        given = [*texts] * repeat
        began = time.monotonic()
        found = self._adapter.encode(given, **options)
        answer = found if isinstance(found, Answer) else Answer(found, began, time.monotonic())
        return _answers([replace(answer, vectors=answer.vectors[: len(texts)])], vectors)

    def requests(
        self, requests: Sequence[Sequence[str]], options: Mapping[str, Any], vectors: str, callers: int
    ) -> dict[str, Any]:
        """Answer requests that are made at once, or by callers, as a system with a queue does."""
        return _answers(self._adapter.requests(requests, callers=callers, **options), vectors)

    def count(self, texts: Sequence[str]) -> dict[str, Any]:
        """Tokens that the system encodes of these texts."""
        return {"tokens": self._adapter.count(texts)}

    def close(self) -> None:
        if close := getattr(self._adapter, "close", None):
            close()


def _answers(answers: Sequence[Answer], vectors: str) -> dict[str, Any]:
    """What the parent is told of answers; their vectors go into a file."""
    np.save(vectors, np.concatenate([each.vectors for each in answers]))
    return {"answers": [[len(each.vectors), each.began, each.ended, each.tokens] for each in answers]}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def serve(answer: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Answer requests until standard input ends or Ctrl-C. All other output goes to standard error, which is the log.
    What `answer` raises as an Exception is told, and its traceback is in the log."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with suppress(KeyboardInterrupt):
        for line in sys.stdin:
            try:
                found = answer(json.loads(line))
            except Exception as error:  # noqa: BLE001  (the parent reports it)
                traceback.print_exc()
                found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
            answers.write(json.dumps(found) + "\n")


def main() -> None:
    server = Server()
    try:
        serve(lambda request: getattr(server, request.pop("do"))(**request))
    finally:
        server.close()
