"""Our whole product on one machine: a private Redis, pinned workers, and jobs of several clients."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
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
        self, model: Path, threads: int, workers: int, cache: str, chunk: int, hardware: str, entry: Mapping[str, Any]
    ) -> None:
        with ExitStack() as stack:
            self._settings = product(stack, model, workers, cache, chunk, hardware, entry)
            self._broker = Broker.connect(self._settings)
            stack.callback(self._broker.close)
            self._stack = stack.pop_all()
        self._options = SubmitOptions(model=model.name, hardware=hardware)
        self._clients: ProcessPoolExecutor | None = None

    def encode(self, texts: Sequence[str]) -> Timed:
        """A job, timed from its first claim to its last vector stored."""
        job, status = _ask(self._broker, self._options, texts)
        vectors = job.vectors()
        job.discard()
        assert status.started_at
        assert status.ended_at
        began, ended = status.started_at.timestamp(), status.ended_at.timestamp()
        return Timed(vectors, ended - began, status.tokens, began, ended)

    def requests(self, requests: Sequence[Sequence[str]], callers: int = 0) -> Requested:
        """Each request as a job, from several processes at once, timed from before they submit."""
        if not self._clients:
            self._clients = ProcessPoolExecutor(
                CLIENTS, multiprocessing.get_context("spawn"), _connect, (self._settings, self._options)
            )
            self._stack.callback(self._clients.shutdown)
            list(self._clients.map(_answers, [[]] * CLIENTS))  # they have started
        parts = list(self._clients.map(_answers, [requests[number::CLIENTS] for number in range(CLIENTS)]))
        started = min(part.started for part in parts)
        return Requested(started, [parts[at % CLIENTS].answers[at // CLIENTS] for at in range(len(requests))])

    def close(self) -> None:
        """Stop the workers, then the Redis."""
        self._stack.close()


def product(
    stack: ExitStack, model: Path, workers: int, cache: str, chunk: int, hardware: str, entry: Mapping[str, Any]
) -> Settings:
    """Start a private Redis, and workers that share this process's CPUs; everything ends with the stack.

    Returns:
        Settings with one model and one hardware class, and none of the user's own.

    Raises:
        EmbedctlError: a part does not start.
    """
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="embedctl-bench-")))
    config = folder / "embedctl.toml"
    config.write_text(_config_text(model, cache, hardware, entry), encoding="utf-8")
    # The product is measured as it comes.
    for variable in [name for name in os.environ if name.startswith("EMBEDCTL_")]:
        del os.environ[variable]
    os.environ |= {"EMBEDCTL_CONFIG": str(config), "XDG_CONFIG_HOME": str(folder)}
    settings, _ = stack.enter_context(private_redis(load_settings(chunk_size=chunk), folder))
    cpus = sorted(os.sched_getaffinity(0))
    share = len(cpus) // workers
    for at in range(workers):
        own, log = ",".join(map(str, cpus[at * share : (at + 1) * share])), folder / f"worker-{at}.log"
        stack.enter_context(local_worker(settings, hardware=hardware, model=model.name, cpus=own, log_file=log))
    return settings


def _config_text(model: Path, cache: str, hardware: str, entry: Mapping[str, Any]) -> str:
    lines = [f"cache_dir = {_toml(cache)}", f"[models.{_toml(model.name)}]", f"source = {_toml(str(model))}"]
    lines += [f"[classes.{hardware}]", *(f"{name} = {_toml(value)}" for name, value in entry.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """A setting's value: strings, numbers and lists look alike in JSON and in TOML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(name)} = {_toml(each)}" for name, each in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


#: Of a client's process.
_client: list[tuple[Broker, SubmitOptions]] = []


def _connect(settings: Settings, options: SubmitOptions) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the adapter ends it
    _client.append((Broker.connect(settings), options))


def _answers(requests: Sequence[Sequence[str]]) -> Requested:
    """A client's requests, all at once."""
    started = time.monotonic()
    try:
        with ThreadPoolExecutor(max(1, len(requests))) as threads:
            return Requested(started, list(threads.map(partial(_request, *_client[0]), requests)))
    except Exception as error:  # noqa: BLE001  (it must be one that can be pickled)
        raise error_of(error) from None


def _request(broker: Broker, options: SubmitOptions, texts: Sequence[str]) -> Answered:
    """Submit, wait, fetch."""
    job, status = _ask(broker, options, texts)
    assert status.ended_at
    # The end is given by Redis' clock, which is this machine's.
    stored = status.ended_at.timestamp() - time.time() + time.monotonic()
    vectors = job.vectors()
    job.discard()
    return Answered(vectors, at=stored, tokens=status.tokens)


def _ask(broker: Broker, options: SubmitOptions, texts: Sequence[str]) -> tuple[Job, JobStatus]:
    job = submit(broker, records_of(texts, max_bytes=broker.settings.max_text_bytes), options, at_hand=True)
    status = job.wait()
    if status.done != len(texts):
        raise RuntimeError(f"{status.done} of {len(texts)} records were done")
    return job, status
