"""The child's side of a process that times requests; `python -m embedctl_adapters.samples REQUEST` is one of a peer.

    →  {"engine": …, "threads": …, "max_tokens": …, "model_bytes": …}   or {"error": …} at any time
    {"do": "sample", "batches": [[…], …], "seconds": 3.3, "least": 2, "most": 67, "workers": 1}
    →  {"seconds": …, "latencies": […], "steps": [[pre, predict, post], …]}
    {"do": "encode", "texts": […], "batch": 32}  →  {"vectors": base64 of float32}
    {"do": "count", "batches": [[…], …]}  →  {"tokens": …, "computed": …}
    {"do": "peak"}  →  {"bytes": …}

Needs the standard library alone, until an engine is loaded.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .serving import Vectors

#: Seconds that a request spent before the model, in it and after it; zeros if the system does not show its steps.
Steps = tuple[float, float, float]
UNSHOWN: Steps = (0.0, 0.0, 0.0)
#: A request that takes longer than this (seconds) needs one warm-up only.
_LONG = 1.0
_UNLIMITED = 1 << 30
#: The texts with which a peer chooses its options: their number, and words in each.
_TRIAL = (32, 40)


class Runner(Protocol):
    """A loaded model.

    Attributes:
        engine: what executes it, for people.
        max_tokens: of the longest text that it takes whole, special tokens included.
        model_bytes: of its weights as they are stored.
    """

    engine: str
    max_tokens: int
    model_bytes: int

    def run(self, texts: Sequence[str]) -> tuple[Vectors, Steps]:
        """Vectors of unit length, float32, texts × dim."""
        ...

    def count(self, texts: Sequence[str]) -> tuple[int, int]:
        """Tokens of these texts, and tokens computed for them, padding included. Nothing is timed."""
        ...


class Sampler:
    """Times requests, one after the other or several at once."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._warm: set[tuple[int, int]] = set()
        self._pools: dict[int, ThreadPoolExecutor] = {}

    def sample(
        self, batches: Sequence[Sequence[str]], *, seconds: float, least: int, most: int, workers: int
    ) -> dict[str, Any]:
        """Run the requests in turn until the effort is spent; one run before that warms up and does not count."""
        self._warm_up(batches[0])
        lock: AbstractContextManager[object] = nullcontext() if workers == 1 else threading.Lock()
        latencies: list[float] = []
        steps: list[list[float]] = []
        begun = 0
        started = time.perf_counter()

        def work() -> None:
            nonlocal begun
            while True:
                with lock:
                    if begun >= most or (begun >= least and time.perf_counter() - started >= seconds):
                        return
                    texts = batches[begun % len(batches)]
                    begun += 1
                began = time.perf_counter()
                _, step = self._runner.run(texts)
                latencies.append(round(time.perf_counter() - began, 7))
                steps.append([round(each, 7) for each in step])

        if workers == 1:
            work()
        else:
            # The same threads every time, because an OpenMP runtime keeps a pool for each thread that called it.
            pool = self._pools.setdefault(workers, ThreadPoolExecutor(workers))
            for done in [pool.submit(work) for _ in range(workers)]:
                done.result()
        return {"seconds": time.perf_counter() - started, "latencies": latencies, "steps": steps}

    def _warm_up(self, texts: Sequence[str]) -> None:
        shape = (len(texts), sum(map(len, texts)))
        if shape in self._warm:
            return
        began = time.perf_counter()
        self._runner.run(texts)
        if time.perf_counter() - began > _LONG:
            self._warm.add(shape)

    def encode(self, texts: Sequence[str], batch: int) -> dict[str, Any]:
        """Vectors of the texts, from requests of `batch` texts."""
        parts = [self._runner.run(texts[at : at + batch])[0] for at in range(0, len(texts), batch)]
        return {"vectors": base64.b64encode(b"".join(part.tobytes() for part in parts)).decode()}

    def count(self, batches: Sequence[Sequence[str]]) -> dict[str, Any]:
        """Tokens of the requests, without and with padding."""
        counts = [self._runner.count(texts) for texts in batches]
        return {"tokens": sum(each for each, _ in counts), "computed": sum(each for _, each in counts)}

    def peak(self) -> dict[str, Any]:
        """The most memory that this process has held."""
        return {"bytes": peak_bytes()}


def peak_bytes() -> int:
    """Peak memory of this program; 0 if unknown. `getrusage` would include the process that started it."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    line = next((line for line in lines if line.startswith("VmHWM:")), "VmHWM: 0 kB")
    return int(line.split()[1]) * 1024


def serve(load: Callable[[Mapping[str, Any]], tuple[Runner, int]]) -> None:
    """Load what the command line asks for, and answer until standard input ends.

    All other output goes to standard error, which is the parent's log.

    Args:
        load: returns the model and its number of compute threads.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        runner, threads = load(json.loads(sys.argv[1]))
    except Exception as error:  # noqa: BLE001  (the parent reports it)
        answers.write(json.dumps(_told(error)) + "\n")
        sys.exit(1)
    facts = {
        "engine": runner.engine,
        "threads": threads,
        "max_tokens": runner.max_tokens,
        "model_bytes": runner.model_bytes,
    }
    answers.write(json.dumps(facts) + "\n")
    sampler = Sampler(runner)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(sampler, request.pop("do"))(**request)
        except Exception as error:  # noqa: BLE001  (as above)
            answer = _told(error)
        answers.write(json.dumps(answer) + "\n")


def _told(error: Exception) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


class AdapterRunner:
    """A peer's adapter, with the options that were fastest on one request. It does not show its steps."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        module, _, name = request["adapter"].partition(":")
        adapter = getattr(import_module(module, __package__), name)
        self._adapter: Any = adapter(Path(request["folder"]), len(request["cpus"]), **request["load"])
        self._options: Mapping[str, Any] = self._fastest(request["options"])
        chosen = {**request["load"], **self._options}
        computes = f" in {self._adapter.computes}" if getattr(self._adapter, "computes", "") else ""
        self.engine = ", ".join([request["label"] + computes, *(f"{name} {value}" for name, value in chosen.items())])
        self.max_tokens = _UNLIMITED
        self.model_bytes = 0

    def _fastest(self, options: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        texts, words = _TRIAL
        trial = [f"request {at}: " + "stone " * (words + at % 8) for at in range(texts)]

        def seconds(each: Mapping[str, Any]) -> float:
            self._adapter.encode(trial, **each)
            began = time.perf_counter()
            self._adapter.encode(trial, **each)
            return time.perf_counter() - began

        return options[0] if len(options) == 1 else min(options, key=seconds)

    def run(self, texts: Sequence[str]) -> tuple[Vectors, Steps]:
        return self._adapter.encode(texts, **self._options), UNSHOWN

    def count(self, texts: Sequence[str]) -> tuple[int, int]:
        tokens = int(self._adapter.count(texts))
        return tokens, tokens


def _load(request: Mapping[str, Any]) -> tuple[Runner, int]:
    """The adapter, pinned before it loads anything."""
    cpus = request["cpus"]
    os.sched_setaffinity(0, cpus)
    os.environ.update({each: str(len(cpus)) for each in request["thread_variables"]})
    os.environ["GOMP_SPINCOUNT"] = "1000"  # as our worker sets it; no other system is slower for it
    return AdapterRunner(request), len(cpus)


if __name__ == "__main__":
    serve(_load)
