"""Our whole product on one machine: a private Redis, pinned workers, and jobs of a client or the gateway."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from embedctl.corpus.rows import Rows, records_of
from embedctl.jobs.enqueue import submit
from embedctl.jobs.options import SubmitOptions
from embedctl.operating.local import local_worker, private_redis
from embedctl.queueing.broker import Broker
from embedctl_config.loading import load_settings
from embedctl_config.settings import Settings
from embedctl_workers.machine.devices import SPIN_VARIABLE, SPINS

from .http_client import HttpAdapter
from .serving import Answer


class ProductAdapter:
    """A job, or several at once. The workers, the Redis and the client share this process's CPUs."""

    def __init__(
        self, model: Path, threads: int, workers: int, cache: str, chunk: int, hardware: str, entry: Mapping[str, Any]
    ) -> None:
        with ExitStack() as stack:
            config = configuration(model, cache, hardware, entry)
            self._broker = Broker.connect(product(stack, config, chunk, workers))
            stack.callback(self._broker.close)
            self._stack = stack.pop_all()
        self._options = SubmitOptions(model=model.name, hardware=hardware)

    def encode(self, texts: Sequence[str]) -> Answer:
        """A job, timed from its first claim to its last vector stored."""
        records = records_of(texts, Rows(self._broker.settings.max_text_bytes))
        job = submit(self._broker, records, self._options, at_hand=True)
        status = job.wait()
        if status.done != len(texts):
            raise RuntimeError(f"{status.done} of {len(texts)} records were done")
        vectors = job.vectors()
        job.discard()
        assert status.started_at
        assert status.ended_at
        # Both are given by Redis' clock, which is this machine's.
        offset = time.monotonic() - time.time()
        began, ended = (at.timestamp() + offset for at in (status.started_at, status.ended_at))
        return Answer(vectors, began, ended, status.tokens)

    def requests(self, requests: Sequence[Sequence[str]], callers: int = 0) -> list[Answer]:
        """Each request as a job, each in a thread, timed from before they submit."""
        began = time.monotonic()
        with ThreadPoolExecutor(len(requests)) as threads:
            return [replace(each, began=began) for each in threads.map(self.encode, requests)]

    def close(self) -> None:
        """Stop the workers, then the Redis."""
        self._stack.close()


class GatewayAdapter(HttpAdapter):
    """`embedctl gateway` beside a worker, as `embedctl up --gateway` runs them, on all CPUs together."""

    def __init__(
        self, model: Path, threads: int, chunk: int, cache: str, hardware: str, entry: Mapping[str, Any]
    ) -> None:
        with ExitStack() as stack:
            settings = product(stack, configuration(model, cache, hardware, entry), chunk, workers=1)
            variables = {"EMBEDCTL_REDIS_URL": settings.redis_url, "EMBEDCTL_HARDWARE": hardware}
            variables["EMBEDCTL_GATEWAY_TIMEOUT_S"] = "600"  # on few CPUs, large requests take longer than a minute
            super().__init__(model, [sys.executable, "-m", "embedctl_gateway", "--address", "0"], variables)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """End the gateway, the worker and the Redis."""
        super().close()
        self._stack.close()


class DirectAdapter(HttpAdapter):
    """The engine behind HTTP, without a queue."""

    def __init__(self, model: Path, threads: int, **options: Any) -> None:
        facts = json.dumps([str(model), {"threads": threads, **options}])
        command = [sys.executable, "-m", f"{__package__}.http_direct", facts]
        super().__init__(model, command, {SPIN_VARIABLE: SPINS})  # as a worker has it


def configuration(model: Path, cache: str, hardware: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"cache_dir": cache, "models": {model.name: {"source": str(model)}}, "classes": {hardware: entry}}


def product(stack: ExitStack, configured: Mapping[str, Any], chunk: int, workers: int) -> Settings:
    """Start a private Redis, and workers that share this process's CPUs; everything ends with the stack. Nothing is set
    but the configuration, of one model and one hardware class."""
    # The product is measured as it comes.
    for variable in [name for name in os.environ if name.startswith("EMBEDCTL_")]:
        del os.environ[variable]
    settings, folder = stack.enter_context(configured_redis(configured, chunk_size=chunk))
    (model,), (hardware,) = configured["models"], configured["classes"]
    cpus = sorted(os.sched_getaffinity(0))
    share = len(cpus) // workers
    for at in range(workers):
        own, log = ",".join(map(str, cpus[at * share : (at + 1) * share])), folder / f"worker-{at}.log"
        stack.enter_context(
            local_worker(settings, hardware=hardware, model=model, options=["--cpus", own], log_file=log)
        )
    return settings


@contextmanager
def configured_redis(configured: Mapping[str, Any], **more: Any) -> Iterator[tuple[Settings, Path]]:
    """A private Redis, and a configuration, which is this process's and its children's: the settings, with more of
    them, and a folder that goes when the block ends."""
    with tempfile.TemporaryDirectory(prefix="ec-") as name:
        config = Path(name, "embedctl.toml")
        config.write_text(toml(configured), encoding="utf-8")
        os.environ |= {"EMBEDCTL_CONFIG": str(config), "XDG_CONFIG_HOME": name}
        with private_redis(load_settings(**more), Path(name)) as (settings, _):
            yield settings, Path(name)


def toml(config: Mapping[str, Any]) -> str:
    """A configuration as TOML, in which strings, numbers and lists look as in JSON."""

    def value_of(each: Any) -> str:
        if isinstance(each, Mapping):
            return "{" + ", ".join(f"{value_of(name)} = {value_of(value)}" for name, value in each.items()) + "}"
        return json.dumps(each, ensure_ascii=False)

    return "".join(f"{name} = {value_of(each)}\n" for name, each in config.items())
