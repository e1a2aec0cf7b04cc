"""Our whole product on one machine: a private Redis, pinned workers, and a job through them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.peers.environments import BUILD
from benchmarks.peers.serving import Timed

from embedctl.broker import Broker
from embedctl.enqueue import JobOptions, submit
from embedctl.local import local_worker, private_redis
from embedctl.records import records_of
from embedctl_config.settings import load_settings


class Engine:
    """A job, timed from its first claim to its last vector stored. The workers share this process's CPUs."""

    def __init__(self, model: Path, threads: int, chunk: int, workers: int, hardware: str = "cpu") -> None:
        self._stack = ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        config = folder / "embedctl.toml"
        cache = json.dumps(str(BUILD / "cache"))
        config.write_text(
            f"cache_dir = {cache}\n[models.{json.dumps(model.name)}]\nsource = {json.dumps(str(model))}\n"
        )
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
        self._options = JobOptions(model=model.name, hardware=hardware)

    def encode(self, texts: Sequence[str]) -> Timed:
        job = submit(self._broker, records_of(texts, max_bytes=self._settings.max_text_bytes), self._options)
        status = job.wait()
        if status.done != len(texts):
            raise RuntimeError(f"{status.done} of {len(texts)} records were done")
        vectors = job.vectors()
        job.discard()
        began, ended = status.started_at.timestamp(), status.ended_at.timestamp()
        return Timed(vectors, ended - began, status.tokens, began, ended)

    def close(self) -> None:
        self._stack.close()


def _forget_settings(folder: Path) -> None:
    """Measure the product as it comes, whatever is set for the one who measures."""
    for variable in [name for name in os.environ if name.startswith("EMBEDCTL_")]:
        del os.environ[variable]
    os.environ["XDG_CONFIG_HOME"] = str(folder)
