"""Probe of texts that kill workers: what another tenant has beside them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any

from benchmarks.ours.service import DUMMY, Figures, Service, service

from embedctl import Job, enqueue_embeddings
from embedctl.common import processes
from embedctl.queueing.broker import Broker

#: How a text kills: a signal as the kernel's without memory, one of a fault, and memory without end.
_WORDS = ("kill-encoder", "crash-encoder", "eat-memory")
_CHUNK, _TEXTS = 16, 10_000
#: How long the death, and the judgement, may take (seconds).
_PATIENCE_S = 120.0


def poison(*, seconds: float = 15.0, batch_s: float = 0.1, token_budget: int = 0, only: str = "") -> Figures:
    """The rate of a tenant's job beside another one's job of 10,000 texts, some of which kill workers, as a part of its
    rate beside the same job where none does; and how long it takes until the first such text is found.

    A host has two workers under `embedctl up`. A rate is measured for so many seconds after the first death. With a
    small `token_budget`, no chunks are encoded together, as on a GPU; with `only`, one case is measured.
    """
    backend = {"backend": "dummy", "options": {"dim": 16, "seconds_per_batch": batch_s, "poison": True}}
    classes = {DUMMY: {**backend, "token_budget": token_budget}}
    harmless, _ = _beside([_texts({})], seconds, classes)
    found: Figures = {"beside harmless texts, records/s": harmless}
    for name, jobs in {
        **{word: [_texts({40: word})] for word in _WORDS},
        "100 texts": [_texts({40 + 99 * number: _WORDS[number % len(_WORDS)] for number in range(100)})],
        "100 jobs": [*([*["a text"] * (_CHUNK - 1), f"a text {_WORDS[at % 3]}"] for at in range(100)), _texts({})],
    }.items():
        if only and name != only:
            continue
        rate, found_s = _beside(jobs, seconds, classes)
        found |= {f"{name}: rate / rate beside harmless texts": rate / harmless, f"{name}: found after, s": found_s}
    return found


def _texts(bad: dict[int, str]) -> list[str]:
    """The texts of a large job, with these words in some."""
    return [f"a text {bad.get(at, '')}" for at in range(_TEXTS)]


def _beside(bad: list[list[str]], seconds: float, classes: Mapping[str, Any]) -> tuple[float, float]:
    """Records/s of a job beside another tenant's jobs of these texts, and the seconds until a text has failed."""
    with service(classes=classes) as of, ExitStack() as stack:
        broker = stack.enter_context(closing(Broker.connect(of.settings)))
        for cpu in range(2):
            _up(of, cpu, stack)
        while sum(not each.quarantine for each in broker.workers.alive()) < 2:
            time.sleep(0.1)
        other = enqueue_embeddings(["a text"] * 100_000, tenant="b", chunk_size=_CHUNK, settings=of.settings)
        began = time.monotonic()
        jobs = [enqueue_embeddings(texts, tenant="a", chunk_size=_CHUNK, settings=of.settings) for texts in bad]
        is_harmless = not any(word in text for word in _WORDS for texts in bad for text in texts)
        while not is_harmless and not _sum(jobs, "deaths") and time.monotonic() - began < _PATIENCE_S:
            time.sleep(0.05)
        if is_harmless:
            time.sleep(2.0)
        before, since = other.status().done, time.monotonic()
        found_s, rate = 0.0, 0.0
        while not rate or (not is_harmless and not found_s and time.monotonic() - began < _PATIENCE_S):
            time.sleep(0.1)
            if not rate and time.monotonic() - since >= seconds:
                rate = (other.status().done - before) / (time.monotonic() - since)
            if not found_s and _sum(jobs, "failed"):
                found_s = time.monotonic() - began
        return rate, found_s or _PATIENCE_S


def _sum(jobs: list[Job], count: str) -> int:
    return sum(getattr(job.status(), count) for job in jobs)


def _up(of: Service, cpu: int, stack: ExitStack) -> None:
    """Run `embedctl up` on a CPU, until the stack ends."""
    command = [sys.executable, "-m", "embedctl", "up", "--class", DUMMY, "--model", DUMMY, "--cpus", str(cpu)]
    log = stack.enter_context((of.folder / f"up-{cpu}.log").open("wb"))
    environment = {**os.environ, "EMBEDCTL_REDIS_URL": of.settings.redis_url}
    stack.enter_context(processes.running(command, env=environment, stdout=log, stderr=log))
