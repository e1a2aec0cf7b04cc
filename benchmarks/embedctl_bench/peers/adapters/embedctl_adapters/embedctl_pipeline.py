"""Our whole product on one machine: a private Redis, pinned workers, and jobs of a client."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from embedctl.broker import Broker
from embedctl.enqueue import submit
from embedctl.job_options import SubmitOptions
from embedctl.local import local_worker, private_redis
from embedctl.records import records_of
from embedctl.store import JobStatus
from embedctl_config.loading import load_settings
from embedctl_config.settings import Settings

from .serving import Answered, Requested, Timed, Vectors


class ProductAdapter:
    """A job, or several at once. The workers, the Redis and the client share this process's CPUs."""

    def __init__(
        self, model: Path, threads: int, workers: int, cache: str, chunk: int, hardware: str, entry: Mapping[str, Any]
    ) -> None:
        with ExitStack() as stack:
            self._broker = Broker.connect(product(stack, model, workers, cache, chunk, hardware, entry))
            stack.callback(self._broker.close)
            self._stack = stack.pop_all()
        self._options = SubmitOptions(model=model.name, hardware=hardware)

    def encode(self, texts: Sequence[str]) -> Timed:
        """A job, timed from its first claim to its last vector stored."""
        vectors, status = self._job(texts)
        assert status.started_at
        assert status.ended_at
        began, ended = status.started_at.timestamp(), status.ended_at.timestamp()
        return Timed(vectors, ended - began, status.tokens, began, ended)

    def requests(self, requests: Sequence[Sequence[str]], callers: int = 0) -> Requested:
        """Each request as a job, each in a thread, timed from before they submit."""
        started = time.monotonic()
        with ThreadPoolExecutor(len(requests)) as threads:
            return Requested(started, list(threads.map(self._answer, requests)))

    def close(self) -> None:
        """Stop the workers, then the Redis."""
        self._stack.close()

    def _answer(self, texts: Sequence[str]) -> Answered:
        vectors, status = self._job(texts)
        assert status.ended_at
        # The end is given by Redis' clock, which is this machine's.
        return Answered(vectors, status.ended_at.timestamp() - time.time() + time.monotonic(), status.tokens)

    def _job(self, texts: Sequence[str]) -> tuple[Vectors, JobStatus]:
        """Submit, wait, fetch."""
        records = records_of(texts, max_bytes=self._broker.settings.max_text_bytes)
        job = submit(self._broker, records, self._options, at_hand=True)
        status = job.wait()
        if status.done != len(texts):
            raise RuntimeError(f"{status.done} of {len(texts)} records were done")
        vectors = job.vectors()
        job.discard()
        return vectors, status


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
