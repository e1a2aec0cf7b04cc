"""The child's side: one system in its own environment, told what to do by lines of JSON.

A line is a call of a method of :class:`Server`, such as `{"do": "encode", "vectors": "x.npy", "repeat": 1}`, and its
answer is the next line. Texts, requests and vectors are in files.

Loading tries every setting on a sample and keeps the fastest. A system runs in one process or several. Each is pinned
before it loads anything, and texts go to the next process that is free. Needs the standard library and numpy alone.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

#: float32, texts × dimensions.
Vectors = npt.NDArray[np.float32]

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


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


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run a system: processes that share the CPUs, and options for loading and for encoding.

    Attributes:
        fixed: options for loading that are no choice, and that the label leaves out.
    """

    processes: int = 1
    load: Mapping[str, Any] = field(default_factory=dict)
    encode: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def label(self, cpus: int) -> str:
        """Processes × threads, and the options."""
        options = [f"{name} {value}" for name, value in {**self.load, **self.encode}.items()]
        return ", ".join([f"{self.processes}×{cpus // self.processes}", *options])


class Pool:
    """A system in processes that share the CPUs evenly.

    Attributes:
        computes: the precision of its products, as its adapter read it back; empty if that is not known.
    """

    def __init__(self, adapter: str, model: str, cpus: Sequence[int], setting: Setting) -> None:
        self._workers: list[tuple[Connection, Any]] = []
        self.setting = setting
        share = len(cpus) // setting.processes
        context = multiprocessing.get_context("spawn")
        for at in range(setting.processes):
            ours, theirs = context.Pipe()
            own = cpus[at * share : (at + 1) * share]
            load = {**setting.load, **setting.fixed}
            process = context.Process(target=_work, args=(theirs, adapter, model, own, load))
            process.start()
            theirs.close()
            self._workers.append((ours, process))
        try:
            told = [_answer(connection) for connection, _ in self._workers]
        except BaseException:
            self.close()
            raise
        self._takes_requests = all(takes for takes, _ in told)
        self.computes: str = told[0][1]

    def encode(self, texts: Sequence[str], chunk: int) -> Answer:
        """Encode the texts; several processes get chunks of them in turn, at least two each."""
        processes = len(self._workers)
        size = len(texts) if processes == 1 else min(chunk, -(-len(texts) // (2 * processes)))
        parts = self._deal([texts[at : at + size] for at in range(0, len(texts), size)])
        if processes == 1:
            return parts[0]
        began = min(part.began for part in parts)
        return Answer(np.concatenate([part.vectors for part in parts]), began, time.monotonic())

    def requests(self, requests: Sequence[Sequence[str]], callers: int = 0) -> list[Answer]:
        """Answer requests that are all made now, or by callers; one after the other if the system has no queue."""
        processes = len(self._workers)
        if not self._takes_requests:
            made = time.monotonic()
            answers = self._deal(requests)
            return answers if callers else [replace(each, began=made) for each in answers]
        for number, (connection, _) in enumerate(self._workers):
            connection.send(("requests", requests[number::processes], {**self.setting.encode, "callers": callers}))
        parts: list[list[Answer]] = [_answer(connection) for connection, _ in self._workers]
        return [parts[at % processes][at // processes] for at in range(len(requests))]

    def _deal(self, chunks: Sequence[Sequence[str]]) -> list[Answer]:
        """The answer to each chunk, which goes to the next process that is free."""
        free = SimpleQueue[Connection]()
        for connection, _ in self._workers:
            free.put(connection)

        def answer(texts: Sequence[str]) -> Answer:
            connection = free.get()
            connection.send(("encode", texts, dict(self.setting.encode)))
            found: Answer = _answer(connection)
            free.put(connection)
            return found

        with ThreadPoolExecutor(len(self._workers)) as threads:
            return list(threads.map(answer, chunks))

    def count(self, texts: Sequence[str]) -> int:
        connection = self._workers[0][0]
        connection.send(("count", texts, {}))
        return int(_answer(connection))

    def close(self) -> None:
        """End the processes, each in its own time if that is not too long."""
        for connection, _ in self._workers:
            connection.close()
        for _, process in self._workers:
            process.join(30)
            if process.is_alive():
                process.kill()
                process.join()


def _work(connection: Connection, adapter: str, model: str, cpus: Sequence[int], load: Mapping[str, Any]) -> None:
    """One process of a system, until the pool closes its end of the connection."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.sched_setaffinity(0, cpus)
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(len(cpus))))
    os.environ["GOMP_SPINCOUNT"] = "1000"  # as our worker sets it; no other system is slower for it
    try:
        module, _, name = adapter.partition(":")
        loaded = getattr(import_module(module, __package__), name)(Path(model), len(cpus), **load)
    except Exception as error:  # noqa: BLE001  (the parent reports it)
        connection.send(error_of(error))
        return
    try:
        connection.send((hasattr(loaded, "requests"), getattr(loaded, "computes", "")))
        with suppress(EOFError, OSError, KeyboardInterrupt):
            while True:
                connection.send(_done(loaded, *connection.recv()))
    finally:
        if close := getattr(loaded, "close", None):
            close()


def _done(adapter: Adapter, method: str, texts: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """What a method of the adapter returns, vectors with the time that they took; or its error."""
    began = time.monotonic()
    try:
        found = getattr(adapter, method)(texts, **options)
    except Exception as error:  # noqa: BLE001  (the parent reports it)
        return error_of(error)
    return Answer(found, began, time.monotonic()) if isinstance(found, np.ndarray) else found


def error_of(error: BaseException) -> RuntimeError:
    """An error that can always be pickled, which is not so for the errors of libraries."""
    return RuntimeError(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _answer(connection: Connection) -> Any:
    try:
        answer = connection.recv()
    except EOFError:
        raise RuntimeError("the system's process died") from None
    if isinstance(answer, RuntimeError):
        raise answer
    return answer


class Server:
    """Answers the parent's requests."""

    def __init__(self) -> None:
        self._pool: Pool | None = None
        self._texts: list[str] = []
        self._chunk = 0
        self._counts: dict[str, int] = {}

    def load(
        self,
        adapter: str,
        model: str,
        cpus: Sequence[int],
        settings: Sequence[Mapping[str, Any]],
        texts: str,
        sample: int,
        at_once: int,
        chunk: int,
        packages: Sequence[str],
    ) -> dict[str, Any]:
        """Try the settings on a sample of the texts, as so many requests or one call, and keep the fastest loaded."""
        self._texts = json.loads(Path(texts).read_text(encoding="utf-8"))
        self._chunk = chunk
        some = self._texts[:: max(1, len(self._texts) // sample)][:sample]
        choices = [Setting(**each) for each in settings]
        tried: list[dict[str, Any]] = []
        for setting in choices:
            try:
                pool = self._load(adapter, model, cpus, setting)
                tried.append({"seconds": 0.0 if len(choices) == 1 else self._try(pool, some, at_once)})
            except RuntimeError as error:
                tried.append({"error": str(error)})
        if all("error" in each for each in tried):
            raise RuntimeError(tried[0]["error"])
        chosen = min(range(len(tried)), key=lambda at: tried[at].get("seconds", math.inf))
        pool = self._load(adapter, model, cpus, choices[chosen])
        versions = {package: _version(package) for package in packages}
        return {"computes": pool.computes, "chosen": chosen, "tried": tried, "versions": versions}

    def _try(self, pool: Pool, sample: Sequence[str], at_once: int) -> float:
        """Seconds for the sample, the better of two; the first run is for warming up."""

        def seconds() -> float:
            if not at_once:
                return _seconds([pool.encode(sample, self._chunk)])
            return _seconds(pool.requests([sample[at::at_once] for at in range(at_once)]))

        return min([seconds() for _ in range(3)][1:])

    def _load(self, adapter: str, model: str, cpus: Sequence[int], setting: Setting) -> Pool:
        loaded = self._pool
        if loaded and (loaded.setting.processes, loaded.setting.load) == (setting.processes, setting.load):
            loaded.setting = setting
            return loaded
        self.close()
        self._pool = Pool(adapter, model, cpus, setting)
        return self._pool

    def encode(self, vectors: str, repeat: int) -> dict[str, Any]:
        """Encode every text `repeat` times, and leave the vectors of the first time in a file."""
        assert self._pool
        done = self._pool.encode(self._texts * repeat, self._chunk)
        np.save(vectors, done.vectors[: len(self._texts)])
        tokens = done.tokens or repeat * self._count("", self._texts)
        return {"began": done.began, "ended": done.ended, "tokens": tokens}

    def requests(self, requests: str, vectors: str, callers: int) -> dict[str, Any]:
        """Answer a file's requests, and leave their vectors in a file, request after request."""
        assert self._pool
        asked: list[list[str]] = json.loads(Path(requests).read_text(encoding="utf-8"))
        done = self._pool.requests(asked, callers)
        np.save(vectors, np.concatenate([answer.vectors for answer in done]))
        told = sum(answer.tokens for answer in done)
        tokens = told or self._count(requests, [text for texts in asked for text in texts])
        latencies = [answer.ended - answer.began for answer in done]
        return {"seconds": _seconds(done), "tokens": tokens, "latencies": latencies}

    def _count(self, file: str, texts: Sequence[str]) -> int:
        """Tokens of a file's texts, which are counted once."""
        assert self._pool
        if file not in self._counts:
            self._counts[file] = self._pool.count(texts)
        return self._counts[file]

    def close(self) -> None:
        if self._pool:
            self._pool.close()
            self._pool = None


def _seconds(answers: Sequence[Answer]) -> float:
    """Until the last request was answered, from when the first was made."""
    return max(answer.ended for answer in answers) - min(answer.began for answer in answers)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def serve(answer: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Answer requests until standard input ends or Ctrl-C. All other output goes to standard error, which is the log.
    What `answer` raises as a RuntimeError is told."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with suppress(KeyboardInterrupt):
        for line in sys.stdin:
            try:
                found = answer(json.loads(line))
            except RuntimeError as error:
                found = {"error": str(error)}
            answers.write(json.dumps(found) + "\n")


def main() -> None:
    server = Server()
    try:
        serve(lambda request: getattr(server, request.pop("do"))(**request))
    finally:
        server.close()
