"""One checkout's Redis, worker and producer, for `host_side.py`: it reads a request a line, and answers with a line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.ours.process_times import Holders, children, cpu_seconds, thread_seconds
from benchmarks.ours.stand_in_vectors import Tables
from benchmarks.ours.stand_in_worker import PROFILE
from tokenizers import Tokenizer

import embedctl
from embedctl.broker import Broker
from embedctl.child import guarded
from embedctl.enqueue import submit
from embedctl.job import Job
from embedctl.job_options import SubmitOptions
from embedctl.local import private_redis
from embedctl.records import records_of
from embedctl_config.loading import load_settings

CLASS, MODEL = "stand-in", "stand-in"
_START_S = 300.0
#: A chunk's text must fit, however many texts it has (bytes).
_CHUNK_BYTES = 32 << 20
#: Texts of each chunk whose vectors are checked, and how far a component may be off: as far as 16 bits round it.
_CHECKED, _TOLERANCE = 16, 1e-3


@dataclass(frozen=True, slots=True)
class Worker:
    """How the worker is set up.

    Attributes:
        threads: the class's `prefetch`.
        cached: whether texts are tokenised beforehand.
    """

    model: str
    cache: str
    threads: int
    ns_per_token: float
    launches: int
    cached: bool
    cpus: str | None


@dataclass(frozen=True, slots=True)
class Run:
    """A job.

    Attributes:
        seconds: from the first claim to the last vector stored.
        cpu: CPU seconds: `worker` and `redis` in that time, `submit` and `read` before and after it, `wait` in it.
        threads: CPU seconds of the worker's threads by name; `profile` only, like the next two.
        holding: by thread, the share of the time during which it held the GIL; empty if it can't be seen here.
        samples: thread, place, number of samples; the most frequent first.
    """

    seconds: float
    texts: int
    tokens: int
    chunks: int
    worst: float
    cpu: Mapping[str, float]
    threads: Mapping[str, float]
    holding: Mapping[str, float]
    samples: list[tuple[str, str, int]]


class Checkout:
    """A private Redis and, once it is asked for, a worker."""

    def __init__(self, texts: list[str], profile: bool) -> None:
        self._texts, self._profile = texts, profile
        self._stack = ExitStack()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="host-side-")))
        self._config = self._folder / "embedctl.toml"
        self._config.touch()
        for variable in [name for name in os.environ if name.startswith("EMBEDCTL_")]:
            del os.environ[variable]  # the user's own settings
        os.environ["EMBEDCTL_CONFIG"], os.environ["XDG_CONFIG_HOME"] = str(self._config), str(self._folder)
        self._settings = self._stack.enter_context(private_redis(load_settings(), self._folder))
        (self._redis,) = children(os.getpid())
        self._worker: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        self._stop_worker()
        self._stack.close()

    def worker(self, wanted: Worker) -> None:
        """Start a worker in place of the last one, and wait until it takes tickets."""
        self._stop_worker()
        self._config.write_text(_config(wanted))
        settings = load_settings(redis_url=self._settings.redis_url, chunk_bytes=_CHUNK_BYTES)
        command = [sys.executable, "-m", "benchmarks.ours.stand_in_worker", "--class", CLASS, "--model", MODEL]
        if wanted.cpus is not None:
            command += ["--cpus", wanted.cpus]
        variables = {"EMBEDCTL_REDIS_URL": settings.redis_url, "EMBEDCTL_LOG_FORMAT": "text"}
        if self._profile:
            variables[PROFILE] = str(self._folder)
        log = self._folder / "worker.log"
        with log.open("wb") as out:
            self._worker = subprocess.Popen(
                guarded(command), stdin=subprocess.DEVNULL, stdout=out, stderr=out, env={**os.environ, **variables}
            )
        self._broker = Broker.connect(settings)
        _until(lambda: any(row.pid == self._pid for row in self._broker.workers.alive()), self._worker, log)
        folder = Path(wanted.model)
        facts = json.loads((folder / "config.json").read_text())
        self._tables = Tables.of(facts["vocab_size"], facts["hidden_size"])
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def run(self, chunk: int, count: int) -> Run:
        """Queue a job of so many texts while the worker stands still, then run it, then read its vectors."""
        texts = list(islice(cycle(self._texts), count))
        os.kill(self._pid, signal.SIGSTOP)
        try:
            submitting = time.process_time()
            records = records_of(texts, max_bytes=self._broker.settings.max_text_bytes)
            job = submit(self._broker, records, SubmitOptions(model=MODEL, hardware=CLASS, chunk_size=chunk))
            submitted = time.process_time()
            before = cpu_seconds(self._pid), cpu_seconds(self._redis)
        finally:
            os.kill(self._pid, signal.SIGCONT)
        with self._watched() as watched:
            status = job.wait(progress=self._check_worker)
        waited = time.process_time()
        after = cpu_seconds(self._pid), cpu_seconds(self._redis)
        if status.done != count:
            raise RuntimeError(f"{status.done} of {count} texts were encoded: {job.errors()[:3]}")
        assert status.started_at
        assert status.ended_at
        worst, reading = self._read(job, texts)
        cpu = {
            "worker": after[0] - before[0],
            "redis": after[1] - before[1],
            "submit": submitted - submitting,
            "wait": waited - submitted,
            "read": reading,
        }
        job.discard()
        seconds = (status.ended_at - status.started_at).total_seconds()
        return Run(seconds, count, status.tokens, -(-count // chunk), worst, cpu, *watched.found())

    @property
    def _pid(self) -> int:
        assert self._worker is not None
        return self._worker.pid

    def _check_worker(self, _: object) -> None:
        if self._worker is not None and self._worker.poll() is not None:
            raise RuntimeError(f"the worker ended:\n{(self._folder / 'worker.log').read_text()[-4000:]}")

    def _read(self, job: Job, texts: list[str]) -> tuple[float, float]:
        """The largest error of a component, of some texts of each chunk; and the CPU seconds of reading them all."""
        worst = reading = 0.0
        began = time.process_time()
        for chunk in job.iter_results():
            reading += time.process_time() - began
            rows = np.linspace(0, len(chunk.positions) - 1, _CHECKED).astype(int)
            for row in {int(row) for row in rows}:
                ids = self._tokenizer.encode(texts[int(chunk.positions[row])]).ids
                worst = max(worst, float(np.abs(chunk.vectors[row] - self._tables.expected(ids)).max()))
            began = time.process_time()
        if not worst <= _TOLERANCE:
            raise RuntimeError(f"vectors are wrong by {worst}")
        return worst, reading

    def _watched(self) -> _Watched:
        return _Watched(self._pid, self._folder if self._profile else None)

    def _stop_worker(self) -> None:
        if self._worker is not None:
            self._broker.close()
            self._worker.terminate()
            try:
                self._worker.wait(60)
            except subprocess.TimeoutExpired:
                self._worker.kill()
                self._worker.wait()


class _Watched:
    """What a worker's threads do inside the block; nothing is watched without a folder."""

    def __init__(self, pid: int, folder: Path | None) -> None:
        self._pid, self._folder = pid, folder

    def __enter__(self) -> _Watched:
        if self._folder is not None:
            (self._folder / "on").touch()
            where = _json_of(self._folder / "where.json")
            self._names = where["threads"]
            self._before = thread_seconds(self._pid)
            self._holders = Holders(self._pid, where["gil"], where["holders"])
            self._holders.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._holding = self._holders.stop()
            self._after = thread_seconds(self._pid)
            (self._folder / "on").unlink()
            self._samples = _json_of(self._folder / "samples.json")

    def found(self) -> tuple[dict[str, float], dict[str, float], list[tuple[str, str, int]]]:
        """As the last three of :class:`Run`."""
        if self._folder is None:
            return {}, {}, []
        spent: dict[str, float] = {}
        for thread, seconds in self._after.items():
            name = self._names.get(str(thread), "native (tokenizer, OpenMP)")
            spent[name] = spent.get(name, 0.0) + seconds - self._before.get(thread, 0.0)
        return spent, self._holding, [(thread, place, count) for thread, place, count in self._samples]


def main() -> None:
    """Answer requests until standard input ends."""
    first = json.loads(sys.stdin.readline())
    checkout = Checkout(json.loads(Path(first["texts"]).read_text(encoding="utf-8")), first["profile"])
    try:
        _answer({"package": embedctl.__file__})
        for line in sys.stdin:
            request = json.loads(line)
            if "worker" in request:
                checkout.worker(Worker(**request["worker"]))
                _answer({})
            else:
                _answer(asdict(checkout.run(**request["run"])))
    finally:
        checkout.close()


def _answer(answer: Mapping[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def _config(wanted: Worker) -> str:
    options = {name: getattr(wanted, name) for name in ("ns_per_token", "launches", "cached")}
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in options.items())
    return f"""
cache_dir = {json.dumps(wanted.cache)}

[models.{MODEL}]
source = {json.dumps(wanted.model)}

[classes.{CLASS}]
backend = "stand-in"
precision = "fp16"
prefetch = {wanted.threads}

[classes.{CLASS}.options]
{lines}
"""


def _json_of(path: Path) -> Any:
    """What another process is about to write, once it is there; it is removed."""
    deadline = time.monotonic() + 10
    while not path.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{path.name} was not written")
        time.sleep(0.01)
    found = json.loads(path.read_text())
    path.unlink()
    return found


def _until(done: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while not done():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the worker did not start:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
