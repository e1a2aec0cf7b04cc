"""A worker's life: load, warm up, announce, consume, stop. It is pinned already."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence

from celery import Celery, signals
from celery.concurrency.thread import TaskPool

from embedctl.broker import Broker
from embedctl.machine import machine_id, process_id
from embedctl.reaper import Reaper
from embedctl.store import ServedModel, WorkerRow
from embedctl_config import keys
from embedctl_config.celery_app import make_celery
from embedctl_config.settings import Settings
from embedctl_workers.backends.base import Host
from embedctl_workers.cache import cache_folder
from embedctl_workers.devices import Pinned
from embedctl_workers.gate import run_gate
from embedctl_workers.heartbeat import Heartbeat
from embedctl_workers.loading import load_encoder
from embedctl_workers.runner import ChunkRunner
from embedctl_workers.tasks import register

log = logging.getLogger(__name__)


def run_worker(
    settings: Settings, *, hardware: str, models: Sequence[str], pinned: Pinned, log_level: str, build: bool = True
) -> int:
    """Serve models until told to stop; the exit status.

    Raises:
        SettingsError, ModelError, MissingExtra: it can't start as it is configured.
        GateFailed: a model's vectors are not what the class promises.
        BrokerUnavailable: Redis can't be reached.
    """
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    broker = Broker.connect(settings)
    broker.connection.now_ms()  # a wrong URL or password should not wait for the models to load
    entry = settings.hardware_class(hardware)
    host = Host(pinned.threads, cache_folder(settings), build)
    encoders, accuracy = {}, {}
    if entry.overrides:
        log.warning("class %s is held to bounds of its own: %s", hardware, entry.overrides_in_words)
    for model in models:
        started = time.monotonic()
        encoder = encoders[model] = load_encoder(settings, entry, model, host)
        backend = encoder.backend
        report = run_gate(encoder, entry, host)
        accuracy[model] = report.figures if report else ""
        log.info(
            "model %s: fingerprint %s, %d dimensions, backend %s (%s), accuracy gate: %s; ready in %.1f s",
            model,
            backend.fingerprint[:12],
            backend.dim,
            entry.backend,
            backend.engine,
            accuracy[model] or "nothing to check",
            time.monotonic() - started,
        )
    Reaper(broker).end_leases_of_the_dead()  # a worker that died here may have had nobody else to tell
    name = _free_name(broker, f"{hardware}:{pinned.label}@{socket.gethostname()}")
    instance = f"{name}/{secrets.token_hex(4)}"
    runner = ChunkRunner(broker, entry, encoders, instance)

    def describe() -> WorkerRow:
        return WorkerRow(
            instance=instance,
            name=name,
            pid=os.getpid(),
            host=socket.gethostname(),
            hardware=hardware,
            backend=entry.backend,
            precision=entry.precision,
            bounds=entry.overrides_in_words,
            cpus=pinned.label,
            threads=pinned.threads,
            models={
                model: ServedModel(
                    fingerprint=encoder.backend.fingerprint,
                    dim=encoder.backend.dim,
                    tokens_per_s=round(runner.tokens_per_s[model], 1),
                    engine=encoder.backend.engine,
                    accuracy=accuracy[model],
                )
                for model, encoder in encoders.items()
            },
            holding=tuple((held.job_id, held.chunk) for held in runner.in_hand.all()),
            progressed_ms=runner.progressed_ms,
            machine=machine_id(),
            process=process_id(os.getpid()),
            quiet_s=round(quietest[1], 1) if (quietest := runner.in_hand.quietest()) else 0.0,
        )

    heartbeat = Heartbeat(broker, runner.in_hand, describe, runner.return_tickets)
    heartbeat.start()
    try:
        app = make_celery(settings)
        model_of_queue = {keys.queue(hardware, model): model for model in models}
        register(app, runner, model_of_queue)
        return _consume(app, runner, name, list(model_of_queue), entry.prefetch, log_level)
    finally:
        heartbeat.stop()
        for encoder in encoders.values():
            encoder.backend.close()
        broker.close()


def _consume(app: Celery, runner: ChunkRunner, name: str, queues: list[str], prefetch: int, log_level: str) -> int:
    def drain(**_: object) -> None:
        runner.draining.set()

    signals.worker_shutting_down.connect(drain, weak=False)
    # The threads pool, because one process holds one device: chunks share it under a lock instead of forking.
    worker = app.Worker(
        hostname=name,
        pool=_Threads,
        concurrency=prefetch,
        queues=queues,
        loglevel=log_level.upper(),
        task_events=True,
        without_gossip=True,
        without_mingle=True,
        quiet=True,
    )
    worker.start()
    return int(worker.exitcode or 0)


class _Threads(TaskPool):
    """Celery's threads pool, which fails when a second Ctrl-C tells it to end a task: it can't, and leases lapse."""

    def terminate_job(self, pid: int, signal: int | None = None) -> None:
        """Leave the task alone."""


def _free_name(broker: Broker, name: str) -> str:
    """A Celery node name that no live worker bears: two workers on the same CPUs are told apart by a number."""
    taken = {worker.name for worker in broker.workers.alive()}
    node, _, host = name.partition("@")
    candidates = (name, *(f"{node}#{number}@{host}" for number in range(2, 1000)))
    return next(candidate for candidate in candidates if candidate not in taken)
