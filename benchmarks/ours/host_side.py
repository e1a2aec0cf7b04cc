"""How fast the host side of one worker is: texts/s and Mtok/s with a device that is never the limit.

    python -m benchmarks.ours.host_side [--all] [--other CHECKOUT] [--output FILE]

A backend stands in for a GPU (`tests/support/host_stand_in.py`): everything that the GPU backend does on the host is
done, batches cost the host as many launches as on a GPU, and the device takes a given time per token. All else is real:
a private Redis, a pinned worker process, jobs, the tokenizer of all-MiniLM-L6-v2, the texts of W1. Redis, the worker
and the producer share the CPUs, as on a small machine.

A job is queued while the worker is stopped (SIGSTOP). It is timed from the first claim to the last vector stored, by
Redis' clock; submitting and reading are not timed. Some vectors of each chunk are compared with what their texts' ids
give.

With --other, the producer, the worker and Redis of another checkout take turns with this one's, job by job, in
alternating order, and ratios are of the same turn.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from benchmarks.ours.service import ROOT, Side, machine_line, serve, sides
from tests.support.host_stand_in_vectors import Tables
from tokenizers import Tokenizer

from embedctl.broker import Broker
from embedctl.child import guarded
from embedctl.enqueue import submit
from embedctl.job import Job
from embedctl.job_options import SubmitOptions
from embedctl.local import private_redis
from embedctl.records import records_of
from embedctl_bench.measuring.machine import Usage, cpu_seconds, versions
from embedctl_bench.measuring.sampling import turn_of
from embedctl_bench.peers.models import Model, ModelShape, write_shape, written
from embedctl_bench.report import grid, replaced
from embedctl_bench.texts.workloads import describe_workload, make_workload
from embedctl_config.loading import load_settings
from embedctl_workers.models.files import resolve_model

#: The class and the model of the worker.
STAND_IN = "stand-in"
#: Operations that a batch begins on a GPU, by the dimensions of a model: 6 layers of 384, 24 of 1,024.
LAUNCHES = {384: 100, 1024: 390}
_HEADS = {384: 12, 1024: 16}
#: An H200 takes about as long for all-MiniLM-L6-v2 (nanoseconds).
NS_PER_TOKEN = 94.0
MODES = ("tokenised", "cached")
_THREADS, _CHUNKS = (1, 2, 4), (512, 2048, 4096, 8192)
_TEXTS, _QUICK_TEXTS = 8192, 1024
#: The vectors of a job fit a private Redis and its log (bytes); and a chunk's text must fit, however many texts it has.
_MOST_BYTES, _CHUNK_BYTES = 1 << 30, 32 << 20
#: A job has at least so many chunks for each thread, so that its first ones count little.
_FEWEST_CHUNKS = 3
#: Texts of each chunk whose vectors are checked, and how far a component may be off: as far as 16 bits round it.
_CHECKED, _TOLERANCE = 16, 1e-3
_START_S, _STOP_S = 300.0, 60.0


@dataclass(frozen=True, slots=True)
class Run:
    """A job.

    Attributes:
        seconds: from the first claim to the last vector stored.
        cpu: CPU seconds: `worker` and `redis` in that time, `submit` and `read` before and after it, `wait` in it.
    """

    seconds: float
    texts: int
    tokens: int
    chunks: int
    cpu: Mapping[str, float]


@dataclass(slots=True)
class Cell:
    """A way to set up the worker and the job, and the jobs of each side.

    Attributes:
        others: CPUs that processes of others took meanwhile.
    """

    mode: str
    dim: int
    threads: int
    chunk: int
    ns_per_token: float
    jobs: dict[str, list[Run]] = field(default_factory=dict)
    others: float = 0.0

    def row(self, names: Sequence[str]) -> Iterator[str]:
        """Its row of the table."""
        yield from (self.mode, str(self.dim), str(self.threads), f"{self.chunk:,}")
        rates = {name: [job.texts / job.seconds for job in self.jobs[name]] for name in names}
        for name in names:
            jobs = self.jobs[name]
            tokens_a_s = median(job.tokens / job.seconds for job in jobs)
            yield _spread(rates[name], ",.0f")
            yield f"{tokens_a_s / 1e6:.2f}"
            yield f"{tokens_a_s * self.ns_per_token / 1e9:.0%}"
            for part in ("worker", "redis", "wait", "submit", "read"):
                yield f"{median(1e6 * job.cpu[part] / job.texts for job in jobs):.1f}"
        if len(names) > 1:
            yield _spread([a / b for a, b in zip(*rates.values(), strict=True)], ".2f")
        yield f"{self.others:.1f}"


class Checkout:
    """In the process of one side: a private Redis and, once it is asked for, a worker."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="host-side-")))
        self._config = self._folder / "embedctl.toml"
        self._config.touch()
        for variable in [name for name in os.environ if name.startswith("EMBEDCTL_")]:
            del os.environ[variable]  # the user's own settings
        os.environ |= {"EMBEDCTL_CONFIG": str(self._config), "XDG_CONFIG_HOME": str(self._folder)}
        self._settings, _ = self._stack.enter_context(private_redis(load_settings(), self._folder))
        (self._redis,) = (child.pid for child in psutil.Process().children())
        self._worker: subprocess.Popen[bytes] | None = None

    def answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Start a worker, or run a job."""
        if "worker" in request:
            self._texts = json.loads(Path(request["texts"]).read_text(encoding="utf-8"))
            self._start(**request["worker"])
            return {}
        return asdict(self._run(**request["run"]))

    def close(self) -> None:
        self._stop()
        self._stack.close()

    def _start(self, model: str, cache: str, threads: int, cpus: str | None, **options: object) -> None:
        """Start a worker in place of the last one, and wait until it takes tickets."""
        self._stop()
        lines = [f"{name} = {json.dumps(value)}" for name, value in options.items()]
        config = [f"cache_dir = {json.dumps(cache)}", f"[models.{STAND_IN}]", f"source = {json.dumps(model)}"]
        config += [f"[classes.{STAND_IN}]", f'backend = "{STAND_IN}"', 'precision = "fp16"', f"prefetch = {threads}"]
        self._config.write_text("\n".join([*config, f"[classes.{STAND_IN}.options]", *lines]) + "\n")
        settings = load_settings(redis_url=self._settings.redis_url, chunk_bytes=_CHUNK_BYTES)
        command = [sys.executable, "-m", "tests.support.host_stand_in_worker", "--class", STAND_IN]
        command += ["--model", STAND_IN, *(["--cpus", cpus] if cpus else [])]
        variables = {"EMBEDCTL_REDIS_URL": settings.redis_url, "EMBEDCTL_LOG_FORMAT": "text"}
        log = self._folder / "worker.log"
        with log.open("wb") as out:
            self._worker = subprocess.Popen(guarded(command), stdout=out, stderr=out, env={**os.environ, **variables})
        self._broker = Broker.connect(settings)
        deadline = time.monotonic() + _START_S
        while not any(row.pid == self._worker.pid for row in self._broker.workers.alive()):
            self._check_worker()
            if time.monotonic() > deadline:
                raise RuntimeError(f"the worker did not start:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.1)
        facts = json.loads((Path(model) / "config.json").read_text())
        self._tables = Tables.of(facts["vocab_size"], facts["hidden_size"])
        self._tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def _run(self, chunk: int, count: int) -> Run:
        """Queue a job of so many texts while the worker stands still, then run it, then read its vectors."""
        assert self._worker
        texts, pid = list(islice(cycle(self._texts), count)), self._worker.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            begun = time.process_time()
            records = records_of(texts, max_bytes=self._broker.settings.max_text_bytes)
            job = submit(self._broker, records, SubmitOptions(model=STAND_IN, hardware=STAND_IN, chunk_size=chunk))
            submitted, before = time.process_time(), (cpu_seconds(pid), cpu_seconds(self._redis))
        finally:
            os.kill(pid, signal.SIGCONT)
        status = job.wait(progress=self._check_worker)
        waited = time.process_time()
        worker, redis = (cpu_seconds(each) - at for each, at in zip((pid, self._redis), before, strict=True))
        if status.done != count:
            raise RuntimeError(f"{status.done} of {count} texts were encoded: {job.errors()[:3]}")
        assert status.started_at
        assert status.ended_at
        cpu = {"worker": worker, "redis": redis, "submit": submitted - begun, "wait": waited - submitted}
        cpu["read"] = self._read(job, texts)
        job.discard()
        seconds = (status.ended_at - status.started_at).total_seconds()
        return Run(seconds, count, status.tokens, -(-count // chunk), cpu)

    def _read(self, job: Job, texts: list[str]) -> float:
        """The CPU seconds of reading all vectors; some of each chunk are checked."""
        worst = reading = 0.0
        began = time.process_time()
        for chunk in job.iter_results():
            reading += time.process_time() - began
            for row in {int(row) for row in np.linspace(0, len(chunk.positions) - 1, _CHECKED)}:
                ids = self._tokenizer.encode(texts[int(chunk.positions[row])]).ids
                worst = max(worst, float(np.abs(chunk.vectors[row] - self._tables.expected(ids)).max()))
            began = time.process_time()
        if not worst <= _TOLERANCE:
            raise RuntimeError(f"vectors are wrong by {worst}")
        return reading

    def _check_worker(self, _: object = None) -> None:
        if self._worker is not None and self._worker.poll() is not None:
            raise RuntimeError(f"the worker ended:\n{(self._folder / 'worker.log').read_text()[-4000:]}")

    def _stop(self) -> None:
        if self._worker is not None:
            self._broker.close()
            self._worker.terminate()
            try:
                self._worker.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._worker.kill()
                self._worker.wait()


def main() -> None:
    """Run the command line."""
    arguments = _arguments()
    if arguments.serve:
        checkout = Checkout()
        try:
            serve(checkout.answer)
        finally:
            checkout.close()
        return
    cells: list[Cell] = []
    with sides("benchmarks.ours.host_side", arguments.other) as running:
        place = arguments.place.resolve()
        models = {dim: model_of(dim, place) for dim in arguments.dims}
        count = _QUICK_TEXTS if arguments.quick else _TEXTS
        workload = make_workload("W1", count, models[arguments.dims[0]], place)
        described = describe_workload(workload, 256)
        title = f"{machine_line()}\n\n{versions()}\n\n{described}. No chunk holds a text twice.\n\n"
        for mode, dim, threads in itertools.product(arguments.modes, arguments.dims, arguments.threads):
            worker = {
                "model": str(models[dim].folder),
                "cache": str(place / "cache"),
                "threads": threads,
                "cpus": arguments.cpus,
                "ns_per_token": arguments.ns_per_token,
                "launches": arguments.launches or LAUNCHES[dim],
                "cached": mode == "cached",
            }
            for side in running.values():
                side.call(worker=worker, texts=str(workload.path))
            for chunk in arguments.chunks:
                cells.append(Cell(mode, dim, threads, chunk, arguments.ns_per_token))
                _measure(cells[-1], running, arguments, count)
                report = title + render(cells, list(running))
                if arguments.output:
                    replaced(arguments.output, report)
    print(report)


def render(cells: Sequence[Cell], names: Sequence[str]) -> str:
    """The table: rates, the share of time in which a device of this speed computes, and CPU time by process."""
    headings = ["mode", "dim", "threads", "chunk"]
    parts = ("worker", "redis", "wait", "submit", "read")
    for name in names:
        headings += [f"{name}: texts/s", "Mtok/s", "device", *(f"{part}, µs a text" for part in parts)]
    headings += ["/".join(names)] if len(names) > 1 else []
    note = "Medians of rounds, with the least and the greatest; others: CPUs that other processes took meanwhile."
    return f"{grid([*headings, 'others'], [list(cell.row(names)) for cell in cells])}\n\n{note}\n"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", help="dispatching threads, the class's prefetch (default: 4)")
    parser.add_argument("--chunks", type=int, nargs="+", help="texts of a chunk (default: 512 4096)")
    parser.add_argument("--dims", type=int, nargs="+", choices=list(LAUNCHES), help="dimensions (default: 384 1024)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="cached: tokenised beforehand")
    parser.add_argument("--all", action="store_true", help=f"threads {_THREADS}, chunks {_CHUNKS}")
    parser.add_argument("--ns-per-token", type=float, default=NS_PER_TOKEN, help=f"(default: {NS_PER_TOKEN:g})")
    parser.add_argument("--launches", type=int, help=f"a batch (default, by dimensions: {LAUNCHES})")
    parser.add_argument("--cpus", help="of the worker, such as 0-3 (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a job, about (default: 3)")
    parser.add_argument("--other", type=Path, metavar="CHECKOUT", help="another checkout to compare with, by turns")
    kept = ROOT / "build" / "peers"
    parser.add_argument("--place", type=Path, default=kept, metavar="FOLDER", help="of models and texts that are kept")
    parser.add_argument("--output", type=Path, metavar="FILE", help="Markdown, written after each cell")
    parser.add_argument("--quick", action="store_true", help="one cell of each mode, one round, to try the script")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.threads = arguments.threads or (list(_THREADS) if arguments.all else [4])
    arguments.dims = arguments.dims or ([384] if arguments.quick else list(LAUNCHES))
    usual = [128] if arguments.quick else [512, 4096]
    arguments.chunks = arguments.chunks or (list(_CHUNKS) if arguments.all else usual)
    if arguments.quick:
        arguments.rounds, arguments.seconds = 1, 0.1
    most = _QUICK_TEXTS if arguments.quick else _TEXTS
    if max(arguments.chunks) > most:
        parser.error(f"--chunks: there are {most} texts, and equal texts in a chunk are encoded once")
    return arguments


def model_of(dim: int, place: Path) -> Model:
    """A model with vectors of this size and one layer, which never runs; its tokenizer is all-MiniLM-L6-v2's.

    Raises:
        ModelNotFound: all-MiniLM-L6-v2 is not installed.
    """
    shape = ModelShape("bert", layers=1, hidden=dim, heads=_HEADS[dim], pooling="mean")
    folder = place / "models" / f"stand-in-{dim}"
    written(folder, lambda into: write_shape(shape, into, resolve_model("all-MiniLM-L6-v2").folder))
    return Model.in_folder(folder.name, folder)


def _measure(cell: Cell, running: Mapping[str, Side], arguments: argparse.Namespace, texts: int) -> None:
    """Run the cell's jobs by turns, after one on each side that encodes every text once."""
    warm = [Run(**side.call(run={"chunk": cell.chunk, "count": texts})) for side in running.values()]
    # Whole chunks, about as many texts as fill the time.
    wanted = arguments.seconds * max(job.texts / job.seconds for job in warm)
    fewest = cell.chunk * cell.threads * _FEWEST_CHUNKS
    most = max(fewest, _MOST_BYTES // (4 * cell.dim))
    count = round(min(max(wanted, fewest), most) / cell.chunk) * cell.chunk
    before = Usage.read()
    for turn in range(arguments.rounds):
        for name in turn_of(list(running), turn):
            run = Run(**running[name].call(run={"chunk": cell.chunk, "count": count}))
            cell.jobs.setdefault(name, []).append(run)
            rate = run.texts / run.seconds
            print(f"{cell.mode}, {cell.dim}, chunks of {cell.chunk}: {name} {rate:,.0f}", file=sys.stderr, flush=True)
    cell.others = Usage.read().since(before).others


def _spread(values: Sequence[float], form: str) -> str:
    return f"{median(values):{form}} ({min(values):{form}}–{max(values):{form}})"


if __name__ == "__main__":
    main()
