"""A worker's life: load, warm up, announce, consume, stop. The process is already pinned."""

from __future__ import annotations

import gc
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from celery import Celery, signals
from celery.bootsteps import StartStopStep
from celery.worker import state

from embedctl.common.machine import machine_id, process_id
from embedctl.common.notices import Reminder
from embedctl.operating.monitoring.endpoint import Endpoint
from embedctl.queueing.broker import Broker
from embedctl.queueing.reaper import Reaper
from embedctl.store import ServedModel, WorkerRow, scripts
from embedctl_config import keys
from embedctl_config.celery_app import make_celery
from embedctl_config.errors import BrokerFull, BrokerUnavailable, MissingExtra, ModelError, ModelNotFound
from embedctl_config.hardware import HardwareClass
from embedctl_config.outputs import Output
from embedctl_config.retry import REDIS, RetryLimit
from embedctl_config.settings import Settings
from embedctl_workers.accuracy.gate import run_gate
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.encoding.known_good import KnownGood, load_encoder
from embedctl_workers.machine.cgroup import bound_memory
from embedctl_workers.machine.devices import Pinned
from embedctl_workers.machine.host import Host
from embedctl_workers.machine.tally import Tally
from embedctl_workers.models.cache import cache_folder, locked, note, noted, private_folder
from embedctl_workers.models.facts import UNLIMITED, told
from embedctl_workers.models.files import names_of
from embedctl_workers.serving import logs
from embedctl_workers.serving.health import Announcement, Health
from embedctl_workers.serving.heartbeat import Heartbeat, start_sweeping
from embedctl_workers.serving.interrupts import answer_signals
from embedctl_workers.serving.messages import (
    CheckingConsumer,
    OneTryDispatcher,
    inflate_nothing,
    register,
    remove_commands,
    send_event,
)
from embedctl_workers.serving.runner import NOTHING, ChunkRunner
from embedctl_workers.serving.speed import Speed
from embedctl_workers.serving.telemetry import Telemetry
from embedctl_workers.serving.threads import warmed_threads

log = logging.getLogger(__name__)

#: A worker in quarantine ends when it was given nothing for so long, longer than a job is distrusted after a death
#: (seconds); so often it asks.
_QUARANTINE_S, _SUSPECTS_EVERY_S = 90.0, 0.5


@dataclass(frozen=True, slots=True)
class Supervised:
    """What a supervisor asks of a worker: the descriptor of the file for its :class:`Tally`; whether it takes only what
    may kill a worker."""

    tally: int | None = None
    quarantine: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """What a worker is started for: the models that it serves, and where.

    Without `build`, it refuses a model that needs an artefact which the cache lacks; with `pull`, it downloads a model
    that is not on this machine.
    """

    settings: Settings
    hardware: str
    models: Sequence[str]
    pinned: Pinned
    log_level: str
    build: bool = True
    pull: bool = False
    supervised: Supervised = Supervised()

    @property
    def quarantine(self) -> bool:
        return self.supervised.quarantine

    @property
    def entry(self) -> HardwareClass:
        return self.settings.hardware_class(self.hardware)

    @property
    def host(self) -> Host:
        pinned = self.pinned
        return Host(pinned.threads, cache_folder(self.settings), self.build, pinned.sharing, pinned.places)

    @property
    def usual_name(self) -> str:
        """The worker's name, unless another live one has it."""
        alone = ":quarantine" if self.quarantine else ""
        return f"{self.hardware}:{self.pinned.label}{alone}@{socket.gethostname()}"


def run_worker(start: Start) -> int:
    """Serve models until told to stop; the exit status.

    Raises:
        SettingsError, ModelError, MissingExtra: the worker can't start as it is configured.
        GateFailed: a model's vectors are not what the class promises.
        WorkerSick: a model can't encode the known good text.
        BrokerUnavailable: Redis can't be reached.
    """
    settings, entry = start.settings, start.entry
    logs.configure(settings.log_format, start.log_level, worker=start.usual_name)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if entry.overrides:
        log.warning("class %s is held to bounds of its own: %s", start.hardware, entry.overrides_in_words)
    health = Health()
    with ExitStack() as stack:
        telemetry, url = _telemetry(start, health, stack)
        broker = Broker.connect(settings, telemetry.observer)
        stack.callback(broker.close)
        broker.connection.now_ms()  # a wrong URL or password should not wait for the models to load
        announcement = Announcement(broker, health, start.usual_name, start.hardware, start.models)
        stack.callback(announcement.close)
        scripts.read_all()
        with announcement.telling_why_not():
            served = _load_all(start, health, telemetry, stack)
        if start.quarantine:  # only now: others die, and wait, until it is ready
            _step_back()
            bound_memory()
        health.phase, health.phase_until = "starting", None
        Reaper(broker).end_leases_of_the_dead()  # of a worker that died here, and that no other worker witnessed
        naming = stack.enter_context(_turn_to_choose_a_name(start.host.cache))
        name = _free_name(broker, start.usual_name)
        logs.set_worker(name)
        runner = _runner(start, broker, served, f"{name}/{secrets.token_hex(16)}", telemetry)
        describe = partial(_row, start, served, runner, url)
        queues = {keys.queue(start.hardware, name): model for model, each in served.items() for name in each.names}
        fingerprints = {queue: served[model].encoder.backend.fingerprint for queue, model in queues.items()}
        ring = partial(broker.jobs.ring, entry.precision, fingerprints)
        # One in quarantine may die at once, with the turn to reap, which nobody else has then for seconds.
        heartbeat = Heartbeat(broker, runner.in_hand, describe, ring, reaps=not start.quarantine)
        _once_there_is_room(heartbeat.start, health)
        announcement.close()
        naming.close()
        stack.callback(heartbeat.stop)
        start_sweeping(broker, runner.draining)
        health.attend(heartbeat, runner.in_hand, runner.draining)
        return _look_for_suspects(runner, queues) if start.quarantine else _consume(start, runner, queues, health)


def _once_there_is_room(begin: Callable[[], None], health: Health) -> None:
    """A Redis that is full takes no heartbeats: the models stay loaded until it does."""
    remind = Reminder(log.warning)

    def pausing(error: BrokerUnavailable) -> None:
        health.phase = "waiting for room in Redis"
        remind(f"waiting for room. {error}")

    REDIS.call(begin, BrokerFull, failed=RetryLimit(pausing=pausing))


def _runner(
    start: Start, broker: Broker, served: Mapping[str, _Served], instance: str, telemetry: Telemetry
) -> ChunkRunner:
    """What takes chunks for these models, and tells the supervisor how many, if there is one."""
    encoders = {model: each.encoder for model, each in served.items()}
    runner = ChunkRunner(broker, start.entry, encoders, instance, telemetry)
    runner.leave, runner.quarantine = _leave, start.quarantine
    if start.supervised.tally is not None:
        runner.in_hand.tally = Tally(start.supervised.tally)
    telemetry.watch(runner.in_hand)
    return runner


def _row(start: Start, served: Mapping[str, _Served], runner: ChunkRunner, metrics_url: str) -> WorkerRow:
    """What the registry is told of this worker, which serves these models, by name."""
    entry, pinned, in_hand = start.entry, start.pinned, runner.in_hand
    quietest = in_hand.quietest()
    return WorkerRow(
        instance=runner.instance,
        name=runner.name,
        pid=os.getpid(),
        host=socket.gethostname(),
        hardware=start.hardware,
        backend=entry.backend,
        precision=entry.precision,
        bounds=entry.overrides_in_words,
        cpus=pinned.cpu_list,
        threads=pinned.threads,
        models={
            name: each.as_served(runner.speed[model], spelling_of="" if name == model else model)
            for model, each in served.items()
            for name in each.names
        },
        holding=tuple((held.job_id, held.chunk) for held in in_hand.all()),
        progressed_ms=in_hand.progressed_ms,
        machine=machine_id(),
        process=process_id(os.getpid()),
        quiet_s=round(quietest[1], 1) if quietest else 0.0,
        device=pinned.device,
        metrics=metrics_url,
        quarantine=start.quarantine,
    )


def _telemetry(start: Start, health: Health, stack: ExitStack) -> tuple[Telemetry, str]:
    """The telemetry of this worker, and the URL of its metrics, which are served until the stack is left."""
    address = start.settings.metrics_address
    if not address:
        return Telemetry(), ""
    try:
        from embedctl_workers.serving.metrics import Metrics
    except ModuleNotFoundError as error:
        raise MissingExtra("metrics", "the setting metrics_address") from error
    metrics = Metrics(start.hardware, start.entry, start.models)
    endpoint = stack.enter_context(Endpoint(address, metrics.page, health))
    log.info("metrics and health: %s/metrics, /healthz, /readyz", endpoint.url)
    return metrics, endpoint.url


@dataclass(frozen=True, slots=True)
class _Served:
    """A model that is ready to encode, its names, and what the gate measured, in words."""

    encoder: ChunkEncoder
    names: tuple[str, ...]
    accuracy: str

    def as_served(self, speed: Speed, *, spelling_of: str) -> ServedModel:
        backend = self.encoder.backend
        return ServedModel(
            fingerprint=backend.fingerprint,
            dim=backend.dim,
            tokens_per_s=round(speed.tokens_per_s, 1),
            rows_per_s=round(speed.rows_per_s, 1),
            padding=round(speed.padding, 3),
            engine=backend.engine,
            accuracy=self.accuracy,
            spelling_of=spelling_of,
            sustained_tokens_per_s=round(speed.sustained_tokens_per_s, 1),
            max_tokens=0 if backend.max_tokens == UNLIMITED else backend.max_tokens,
            prompts=told(self.encoder.prompts) if backend.reference else None,
            matryoshka=self.encoder.matryoshka,
            pooling=self.encoder.pooling,
            outputs=list(backend.outputs),
            multi_width=backend.widths.get(Output.MULTI, 0),
        )


def _load_all(start: Start, health: Health, telemetry: Telemetry, stack: ExitStack) -> dict[str, _Served]:
    """The models by name, each loaded once whatever its names; they are closed when the stack is left."""
    served: dict[str, _Served] = {}
    for model in start.models:
        if known := next((name for name, each in served.items() if model in each.names), None):
            log.info("model %s is %s by another name, and is loaded once", model, known)
            continue
        served[model] = _load(start, model, health, telemetry)
        stack.callback(served[model].encoder.backend.close)
    gc.collect()
    gc.freeze()  # what is loaded stays: a look through it for garbage takes 0.3 s, and nothing is encoded meanwhile
    gc.enable()
    return served


def _load(start: Start, model: str, health: Health, telemetry: Telemetry) -> _Served:
    """Load a model, once it is downloaded if that is wanted, and measure its vectors."""
    settings, entry, host = start.settings, start.entry, start.host
    started = time.monotonic()
    kind = [model, entry.backend, entry.precision]
    before_s = noted(host.cache, "loads", kind)
    health.phase = f"loading {model}"
    health.phase_until = None if before_s is None else started + before_s
    try:
        encoder = load_encoder(settings, entry, model, host)
    except ModelNotFound:
        if not start.pull:
            raise
        health.phase, health.phase_until = f"downloading {model}", None
        _download(model, settings, health)
        encoder = load_encoder(settings, entry, model, host)
    backend = encoder.backend
    health.phase = f"measuring the vectors of {model}"
    report = run_gate(encoder, entry, host)
    if report is not None:
        telemetry.gated(model, report)
    accuracy = report.figures if report else ""
    encoder.known_good = KnownGood(backend, entry.thresholds(backend.reference.bounds if backend.reference else None))
    telemetry.loaded(model, backend.engine, backend.chosen)
    ready_s = time.monotonic() - started
    note(host.cache, "loads", kind, ready_s)
    log.info(
        "model %s: fingerprint %s, %d dimensions, backend %s (%s%s), accuracy gate: %s; ready in %.1f s",
        model,
        backend.fingerprint[:12],
        backend.dim,
        entry.backend,
        backend.engine,
        f"; chosen: {backend.chosen}" if backend.chosen else "",
        accuracy or "nothing to check",
        ready_s,
    )
    # A backend without files makes a vector of its own for each name.
    names = names_of(backend.reference.files, settings) if backend.reference else (model,)
    return _Served(encoder, names, accuracy)


def _download(model: str, settings: Settings, health: Health) -> None:
    from embedctl_workers.models.pulling.progress import Progress
    from embedctl_workers.models.pulling.pull import pull

    def say(line: str) -> None:
        log.info(line)
        health.phase = f"downloading {model}: {line}"

    pull(model, settings, Progress(say), if_missing=True)


def _consume(start: Start, runner: ChunkRunner, model_of_queue: dict[str, str], health: Health) -> int:
    """Hear the bells of these queues until told to stop; the exit status."""
    app = make_celery(start.settings)
    _adapt(app, runner, health)
    # Threads, because one process holds one device: chunks share it under a lock instead of forking.
    runner.warm_up()
    worker = app.Worker(
        hostname=runner.name,
        # Batches that are joined are begun by another thread.
        pool=warmed_threads([each for each in runner.backends if not each.joins]),
        consumer_cls=CheckingConsumer,
        concurrency=start.entry.prefetch,
        queues=list(model_of_queue),
        loglevel=start.log_level.upper(),
        task_events=True,
        without_gossip=True,
        without_mingle=True,
        quiet=True,
    )
    register(app, runner, model_of_queue, partial(send_event, worker))
    worker.start()
    return int(worker.exitcode or 0)


def _step_back() -> None:
    """Let this process be the last that gets a CPU, and the first that the kernel kills if memory runs out."""
    os.nice(19)
    # Only Linux has these. Where each session has its part of the CPUs, a process' own niceness counts only within it.
    for name, value in (("autogroup", "19"), ("oom_score_adj", "1000")):
        with suppress(OSError):
            Path("/proc/self", name).write_text(value, "ascii")


def _look_for_suspects(runner: ChunkRunner, model_of_queue: Mapping[str, str]) -> int:
    """Take what may kill a worker from these queues, until there was nothing for a while; the exit status."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: runner.draining.set())
    status, last = [0], time.monotonic()
    runner.leave = lambda of_sick: status.append(of_sick)
    while not runner.draining.is_set() and time.monotonic() - last < _QUARANTINE_S:
        said = [runner.run(model, queue) for queue, model in model_of_queue.items()]
        if any(words != NOTHING for words in said):
            last = time.monotonic()
        else:
            runner.draining.wait(_SUSPECTS_EVERY_S)
    return status[-1]


def _adapt(app: Celery, runner: ChunkRunner, health: Health) -> None:
    """Have Celery tell this worker of its start and its stop, and do only what the worker needs."""

    def drain(**_: object) -> None:
        runner.draining.set()

    signals.worker_shutting_down.connect(drain, weak=False)
    # A receiver of this signal sets up the logs, so Celery leaves them alone: its lines go where embedctl's do.
    signals.setup_logging.connect(lambda **_: None, weak=False)
    app.steps["worker"].add(_answering(runner))
    app.steps["consumer"].add(_told_by_celery(health))
    app.events.dispatcher_cls = OneTryDispatcher  # type: ignore[assignment]  # a class does as well as its name
    remove_commands()
    inflate_nothing()


def _leave(status: int) -> None:
    """Have Celery stop as on SIGTERM, and this process end with a status."""
    state.should_stop = status  # type: ignore[assignment]  # None until it is set


def _answering(runner: ChunkRunner) -> type[StartStopStep]:
    """A step of Celery's worker: it starts after Celery has set its handlers, and before anything is consumed."""

    class Answering(StartStopStep):
        def start(self, parent: Any) -> None:
            answer_signals(runner.draining, runner.hurrying)

    return Answering


def _told_by_celery(health: Health) -> type[StartStopStep]:
    """A step of Celery's consumer: it starts when bells are heard, and stops when the connection is lost."""

    class Consuming(StartStopStep):
        requires = ("celery.worker.consumer.tasks:Tasks",)

        def start(self, parent: Any) -> None:
            health.consuming = True

        def stop(self, parent: Any) -> None:
            health.consuming = False

    return Consuming


def _turn_to_choose_a_name(cache: Path) -> ExitStack:
    """A context in which no other worker on this machine chooses a name: close it when the name is announced.

    Workers of one GPU start at the same time. If the cache folder can't hold the lock, two may take the same name.
    """
    turn = ExitStack()
    with suppress(OSError, ModelError):
        turn.enter_context(locked(private_folder(cache) / "names", "chooses its name"))
    return turn


def _free_name(broker: Broker, name: str) -> str:
    """A Celery node name that no live worker has: a number distinguishes two workers on the same CPUs."""
    taken = {worker.name for worker in broker.workers.alive()}
    node, _, host = name.partition("@")
    candidates = (name, *(f"{node}#{number}@{host}" for number in range(2, 1000)))
    return next(candidate for candidate in candidates if candidate not in taken)
