"""The probe of the host side of one worker, with a device that is never the limit: docs/benchmarks.md has what is real.

A backend stands in for a GPU (`benchmarks/ours/host_stand_in.py`). Redis, the worker and the producer share the CPUs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.ours.host_stand_in_vectors import Tables
from benchmarks.ours.service import ROOT, Figures, Service, service

from embedctl.common.processes import running
from embedctl.corpus.rows import Rows, records_of
from embedctl.jobs.enqueue import submit
from embedctl.jobs.job import Job
from embedctl.jobs.options import SubmitOptions
from embedctl.queueing.broker import Broker
from embedctl_bench.measuring.machine import cpu_seconds
from embedctl_bench.peers.models import Model, ModelShape, write_shape, written
from embedctl_bench.texts.workloads import make_workload
from embedctl_workers.models.files import resolve_model

#: The class and the model of the worker.
STAND_IN = "stand-in"
#: Operations that a batch begins on a GPU, and heads, by the dimensions of a model: 6 layers of 384, 24 of 1,024.
LAUNCHES, _HEADS = {384: 100, 1024: 390}, {384: 12, 1024: 16}
#: The vectors of a job fit a private Redis and its log (bytes); and a chunk's text must fit, however many texts it has.
_MOST_BYTES, _CHUNK_BYTES = 1 << 30, 32 << 20
#: A job has at least so many chunks for each thread, so that its first ones count little.
_FEWEST_CHUNKS = 3
#: Texts of each chunk whose vectors are checked, and how far a component may be off: as far as 16 bits round it.
_CHECKED, _TOLERANCE = 16, 1e-3


def host_side(
    *,
    dim: int = 384,
    threads: int = 4,
    chunk: int = 512,
    cached: bool = False,
    texts: int = 8192,
    seconds: float = 3.0,
    ns_per_token: float = 94.0,
    launches: int = 0,
    place: str = "",
) -> Figures:
    """How fast the host side of one GPU worker is, with a device that takes so many ns for a token of a batch.

    A job is queued while the worker is stopped (SIGSTOP). It is timed from the first claim to the last vector stored,
    by Redis' clock; submitting and reading are not timed. Some vectors of each chunk are compared with what their
    texts' ids give. With cached, the texts are tokenised beforehand. Threads are those that dispatch, the class's
    prefetch; 0 launches are as many as a model of these dimensions has. No chunk holds a text twice.
    """
    if chunk > texts:
        raise ValueError("equal texts in a chunk are encoded once, so it has no more than there are texts")
    folder = Path(place) if place else ROOT / "build" / "peers"
    model = model_of(dim, folder)
    given = json.loads(make_workload("W1", texts, model, folder).path.read_text(encoding="utf-8"))
    options = {"ns_per_token": ns_per_token, "launches": launches or LAUNCHES[dim], "cached": cached}
    models = {STAND_IN: {"source": str(model.folder)}}
    classes = {STAND_IN: {"backend": STAND_IN, "precision": "fp16", "prefetch": threads, "options": options}}
    config: dict[str, Any] = {"cache_dir": str(folder / "cache"), "chunk_bytes": _CHUNK_BYTES, "models": models}
    with service(classes=classes, **config) as of, _worker(of) as pid:
        warm = _run(of, pid, given, chunk, model)
        # Whole chunks, about as many texts as fill the time.
        fewest = chunk * threads * _FEWEST_CHUNKS
        wanted = min(max(seconds * warm["texts/s"], fewest), max(fewest, _MOST_BYTES // (4 * dim)))
        found = _run(of, pid, list(islice(cycle(given), round(wanted / chunk) * chunk)), chunk, model)
    return {**found, "share of the time that the device takes": found["tokens/s"] * ns_per_token / 1e9}


def model_of(dim: int, place: Path) -> Model:
    """A model with vectors of this size and one layer, which never runs; its tokenizer is all-MiniLM-L6-v2's."""
    shape = ModelShape("bert", layers=1, hidden=dim, heads=_HEADS[dim], pooling="mean")
    folder = place / "models" / f"stand-in-{dim}"
    written(folder, lambda into: write_shape(shape, into, resolve_model("all-MiniLM-L6-v2").folder))
    return Model.in_folder(folder.name, folder)


@contextmanager
def _worker(of: Service) -> Iterator[int]:
    """A worker that takes chunks; its process id."""
    command = [sys.executable, "-m", "benchmarks.ours.host_stand_in_worker", "--class", STAND_IN, "--model", STAND_IN]
    variables = {**os.environ, "EMBEDCTL_REDIS_URL": of.settings.redis_url, "EMBEDCTL_LOG_FORMAT": "text"}
    log, broker = of.folder / "worker.log", Broker.connect(of.settings)
    with log.open("wb") as out, running(command, stdout=out, stderr=out, env=variables) as process:
        while not any(row.pid == process.pid for row in broker.workers.alive()):
            assert process.poll() is None, log.read_text(errors="replace")[-4000:]
            time.sleep(0.1)
        yield process.pid


def _check(model: Model, job: Job, texts: list[str]) -> None:
    """Compare some vectors of each chunk with what their texts' ids give."""
    config = json.loads((model.folder / "config.json").read_text())
    tables, tokenizer, worst = Tables.of(config["vocab_size"], config["hidden_size"]), model.tokenizer(), 0.0
    for chunk in job.iter_results():
        for row in {int(row) for row in np.linspace(0, len(chunk.positions) - 1, _CHECKED)}:
            ids = tokenizer.encode(texts[int(chunk.positions[row])]).ids
            worst = max(worst, float(np.abs(chunk.vectors[row] - tables.expected(ids)).max()))
    assert worst <= _TOLERANCE, f"vectors are wrong by {worst}"


def _run(of: Service, worker: int, texts: list[str], chunk: int, model: Model) -> Figures:
    """Queue a job while the worker stands still, then run it, then check its vectors."""
    broker = Broker.connect(of.settings)
    with broker.connection.client() as client:
        redis = int(client.info("server")["process_id"])
    os.kill(worker, signal.SIGSTOP)
    try:
        records = records_of(texts, Rows(of.settings.max_text_bytes))
        job = submit(broker, records, SubmitOptions(model=STAND_IN, hardware=STAND_IN, chunk_size=chunk))
        before = [cpu_seconds(pid) for pid in (worker, redis)]
    finally:
        os.kill(worker, signal.SIGCONT)
    status = job.wait(progress=lambda _: os.kill(worker, 0))  # which fails if it has ended
    after = [cpu_seconds(pid) for pid in (worker, redis)]
    assert status.done == len(texts), job.errors()[:3]
    assert status.started_at
    assert status.ended_at
    seconds = (status.ended_at - status.started_at).total_seconds()
    cpu = {name: then - now for name, now, then in zip(("worker", "Redis"), before, after, strict=True)}
    _check(model, job, texts)
    job.discard()
    broker.close()
    return {
        "texts/s": len(texts) / seconds,
        "tokens/s": status.tokens / seconds,
        **{f"CPU µs a text, {part}": 1e6 * spent / len(texts) for part, spent in cpu.items()},
    }
