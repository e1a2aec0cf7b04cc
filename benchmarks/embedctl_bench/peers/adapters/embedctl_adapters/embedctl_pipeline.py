"""Our whole product on one machine: a private Redis, pinned workers, and jobs of several clients."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from embedctl.broker import Broker
from embedctl.enqueue import submit
from embedctl.job import Job
from embedctl.job_options import SubmitOptions
from embedctl.local import local_worker, private_redis
from embedctl.records import records_of
from embedctl.store import JobStatus
from embedctl_config.loading import load_settings
from embedctl_config.settings import Settings

from .serving import Answered, Requested, Timed, error_of

#: Processes that submit requests; each submits its share at once.
CLIENTS = 5


class ProductAdapter:
    """A job, or several at once. The workers, the Redis and the clients share this process's CPUs."""

    def __init__(
        self,
        model: Path,
        threads: int,
        workers: int,
        cache: str,
        chunk: int | None = None,
        hardware: str = "cpu",
        entry: Mapping[str, Any] | None = None,
    ) -> None:
        self._stack = ExitStack()
        self._clients: list[Connection] = []
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="embedctl-bench-")))
        config = folder / "embedctl.toml"
        config.write_text(config_text(model, cache, hardware, entry or {}), encoding="utf-8")
        _forget_settings(folder)
        os.environ["EMBEDCTL_CONFIG"] = str(config)
        try:
            settings = self._stack.enter_context(private_redis(load_settings(chunk_size=chunk), folder))
            cpus = sorted(os.sched_getaffinity(0))
            share = len(cpus) // workers
            for at in range(workers):
                worker = local_worker(
                    settings,
                    hardware=hardware,
                    model=model.name,
                    cpus=",".join(map(str, cpus[at * share : (at + 1) * share])),
                    log_file=folder / f"worker-{at}.log",
                )
                self._stack.enter_context(worker)
        except BaseException:
            self._stack.close()
            raise
        self._settings = settings
        self._broker = Broker.connect(settings)
        self._stack.callback(self._broker.close)
        self._options = SubmitOptions(model=model.name, hardware=hardware)

    def encode(self, texts: Sequence[str]) -> Timed:
        """A job, timed from its first claim to its last vector stored."""
        job, status = _ask(self._broker, self._options, texts)
        vectors = job.vectors()
        job.discard()
        assert status.started_at
        assert status.ended_at
        began, ended = status.started_at.timestamp(), status.ended_at.timestamp()
        return Timed(vectors, ended - began, status.tokens, began, ended)

    def requests(self, requests: Sequence[Sequence[str]]) -> Requested:
        """Each request as a job, from several processes at once, timed from before they submit."""
        if not self._clients:
            self._clients = [self._client() for _ in range(CLIENTS)]
        for number, client in enumerate(self._clients):
            client.send(requests[number::CLIENTS])
        for client in self._clients:
            client.recv()  # it has its texts
        started = time.monotonic()
        for client in self._clients:
            client.send("go")
        parts = [_answers(client) for client in self._clients]
        return Requested(started, [parts[at % CLIENTS][at // CLIENTS] for at in range(len(requests))])

    def close(self) -> None:
        """Stop the workers, then the Redis."""
        self._stack.close()

    def _client(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve_client, args=(theirs, self._settings, self._options))
        process.start()
        theirs.close()
        self._stack.callback(process.join)
        self._stack.callback(process.terminate)  # it uses a Redis that is about to be stopped
        return ours


def config_text(model: Path, cache: str, hardware: str, entry: Mapping[str, Any]) -> str:
    """A configuration file with one model and one hardware class, and none of the user's other settings."""
    lines = [f"cache_dir = {_toml(cache)}", f"[models.{_toml(model.name)}]", f"source = {_toml(str(model))}"]
    if entry:
        lines += [f"[classes.{hardware}]", *(f"{name} = {_toml(value)}" for name, value in entry.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """A setting's value: strings, numbers and lists look alike in JSON and in TOML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(name)} = {_toml(each)}" for name, each in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def _serve_client(connection: Connection, settings: Settings, options: SubmitOptions) -> None:
    """A client process: it gets texts, then a word to begin, and returns vectors."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the adapter ends it
    broker = Broker.connect(settings)
    with suppress(EOFError):
        while True:
            requests = connection.recv()
            connection.send("ready")
            connection.recv()
            try:
                with ThreadPoolExecutor(max(1, len(requests))) as threads:
                    connection.send(list(threads.map(partial(_request, broker, options), requests)))
            except Exception as error:  # noqa: BLE001  (the adapter reports it)
                connection.send(error_of(error))


def _request(broker: Broker, options: SubmitOptions, texts: Sequence[str]) -> Answered:
    """Submit, wait, fetch."""
    job, status = _ask(broker, options, texts)
    vectors = job.vectors()
    fetched = time.monotonic()
    assert status.ended_at
    # The end is given by Redis' clock, which is this machine's.
    stored = status.ended_at.timestamp() - time.time() + time.monotonic()
    job.discard()
    return Answered(vectors, at=stored, fetched=fetched, tokens=status.tokens)


def _ask(broker: Broker, options: SubmitOptions, texts: Sequence[str]) -> tuple[Job, JobStatus]:
    job = submit(broker, records_of(texts, max_bytes=broker.settings.max_text_bytes), options, at_hand=True)
    status = job.wait()
    if status.done != len(texts):
        raise RuntimeError(f"{status.done} of {len(texts)} records were done")
    return job, status


def _answers(client: Connection) -> list[Answered]:
    try:
        answers = client.recv()
    except EOFError:
        raise RuntimeError("a client's process died") from None
    if isinstance(answers, RuntimeError):
        raise answers
    return list(answers)


def _forget_settings(folder: Path) -> None:
    """Forget the user's settings, so that the product is measured as it comes."""
    for variable in [name for name in os.environ if name.startswith("EMBEDCTL_")]:
        del os.environ[variable]
    os.environ["XDG_CONFIG_HOME"] = str(folder)
