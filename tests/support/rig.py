"""A runner in the test's own process, so that a test sees its counters, logs and leftovers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from embedctl import Job, enqueue_embeddings
from embedctl.queueing.broker import Broker
from embedctl_config.hardware import HardwareClass
from embedctl_config.settings import Settings
from embedctl_workers.backends.dummy import DummyBackend
from embedctl_workers.encoding.encoder import ChunkEncoder
from embedctl_workers.encoding.known_good import KnownGood
from embedctl_workers.serving.metrics import Metrics
from embedctl_workers.serving.runner import ChunkRunner
from tests.support.store import QUEUE, bring_forward
from tests.support.waiting import PATIENCE_S

ENTRY = HardwareClass(backend="dummy")
SECRET = "s3cret"
#: In chunks of 8, as :func:`encoded_job` makes them.
TEXTS_OF_13_CHUNKS = [f"text {i}" for i in range(100)]
#: Makes an ended job.
Encode = Callable[..., Job]
TEXTS = ["one", f"two {SECRET}", "three words here"]


@dataclass
class Rig:
    """A runner in this process, and its counters.

    Attributes:
        gathers: whether it encodes small chunks that wait in the queue with the one whose turn it is.
        name: of the worker that the runner is of.
    """

    broker: Broker
    settings: Settings
    backend: DummyBackend
    gathers: bool = False
    name: str = "me"

    def __post_init__(self) -> None:
        self.metrics = Metrics("dummy", ENTRY, ["dummy"])
        encoder = ChunkEncoder(self.backend, 1024)
        encoder.known_good = KnownGood(self.backend, ENTRY.thresholds())
        entry = replace(ENTRY, prefetch=1)  # else a chunk that is alone here is taken for the only one that waits
        self.runner = ChunkRunner(self.broker, entry, {"dummy": encoder}, self.name, self.metrics)
        if not self.gathers:
            self.runner._gathered = lambda claimed: []  # type: ignore[method-assign]
        self.left: list[int] = []
        self.runner.leave = self.left.append

    def submit(self, texts: Sequence[str] = TEXTS) -> Job:
        return enqueue_embeddings(list(texts), settings=self.settings)

    def run(self, job: Job | None = None, chunk: int = 0) -> str:
        """Answer one bell: encode the chunk whose turn it is. With a job, it is made the turn of that chunk."""
        if job is not None:
            bring_forward(self.broker, job.id, chunk)
        return self.runner.run("dummy", QUEUE)

    def run_all(self, job: Job, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            assert self.run(job, chunk) == f"job {job.id}, chunk {chunk}"

    @contextmanager
    def in_thread(self) -> Iterator[threading.Thread]:
        """Within the block, the chunk whose turn it is is worked on beside; it is given up at the end."""
        thread = threading.Thread(target=self.run, daemon=True)
        thread.start()
        try:
            yield thread
        finally:
            self.runner.draining.set()
            thread.join(PATIENCE_S)

    def value(self, name: str, **labels: str) -> float | None:
        own = {"hardware_class": "dummy", "model": "dummy", **labels}
        return self.metrics.registry.get_sample_value(f"embedctl_{name}", own)


def encoded_job(broker: Broker, settings: Settings, texts: Sequence[Any], **options: Any) -> Job:
    """A job in chunks of 8 whose every chunk was encoded in this process, into vectors of 16 dimensions."""
    job = enqueue_embeddings(texts, settings=settings, chunk_size=8, **options)
    Rig(broker, settings, DummyBackend(dim=16)).run_all(job, range(job.status().chunks))
    return job
