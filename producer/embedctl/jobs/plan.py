"""How many workers, how much memory and how long a corpus takes: arithmetic over what was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: What Redis keeps of a record beside its vector, its id and its kept fields (bytes): its place in the chunk's result
#: and its share of the chunk's keys. Measured with chunks of the usual size.
RECORD_BYTES = 10


@dataclass(frozen=True, slots=True)
class Load:
    """A corpus in figures: how many records, and the mean of one (tokens, bytes of text, of its id and kept fields)."""

    records: int
    tokens: float
    text_bytes: float
    beside_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Rate:
    """What one worker encodes (tokens/s), by whose measurement, and how many such workers are live."""

    tokens_per_s: float
    source: str
    live: int = 0


@dataclass(frozen=True, slots=True)
class Room:
    """What a vector takes (bytes), and what Redis holds at most of the text that waits, and of results that are drained
    (bytes)."""

    vector_bytes: int
    text_bytes: int
    drained_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What a corpus takes. Times are in seconds, sizes in bytes.

    The formulas: `work = records × tokens / rate` of one worker; `workers = ⌈work / within⌉`; the results are
    `records × (vector + id and kept fields + 10 bytes)`; each text and each result goes into Redis once and out once.
    """

    load: Load
    rate: Rate
    room: Room
    within_s: float
    price: float | None = None

    @property
    def tokens(self) -> float:
        return self.load.records * self.load.tokens

    @property
    def work_s(self) -> float:
        """The time of one worker."""
        return self.tokens / self.rate.tokens_per_s

    @property
    def workers(self) -> int:
        """How many end within the time."""
        return max(1, math.ceil(self.work_s / self.within_s))

    @property
    def results_bytes(self) -> float:
        """What Redis holds in the end of a job whose results stay there."""
        return self.load.records * (self.room.vector_bytes + self.load.beside_bytes + RECORD_BYTES)

    @property
    def waiting_bytes(self) -> float:
        """What Redis holds at most of the text."""
        return min(self.load.records * (self.load.text_bytes + self.load.beside_bytes), self.room.text_bytes)

    @property
    def memory_bytes(self) -> float:
        """What Redis holds at most of a job whose results stay there: as many results as there are when the text begins
        to run out, beside the text that waits; or all results."""
        texts = self.load.records * (self.load.text_bytes + self.load.beside_bytes)
        return max(self.results_bytes, self.waiting_bytes + self.results_bytes * (1 - self.waiting_bytes / texts))

    @property
    def drained_memory_bytes(self) -> float:
        """What Redis holds at most of a job that is drained."""
        return min(self.results_bytes, self.room.drained_bytes) + self.waiting_bytes

    @property
    def network_bytes(self) -> float:
        """What goes into Redis and out of it."""
        texts = self.load.records * (self.load.text_bytes + self.load.beside_bytes)
        return 2 * (texts + self.results_bytes)

    @property
    def cost(self) -> float | None:
        """The price of all workers' hours, at `price` for one."""
        return None if self.price is None else self.work_s / 3600 * self.price

    def facts(self) -> dict[str, object]:
        return {
            "records": self.load.records,
            "tokens": round(self.tokens),
            "tokens_per_s": round(self.rate.tokens_per_s, 1),
            "rate": self.rate.source,
            "worker_hours": round(self.work_s / 3600, 5),
            "within_hours": round(self.within_s / 3600, 3),
            "workers": self.workers,
            "hours": round(self.work_s / self.workers / 3600, 5),
            "redis_bytes": round(self.memory_bytes),
            "redis_bytes_drained": round(self.drained_memory_bytes),
            "network_bytes": round(self.network_bytes),
            "cost": None if self.cost is None else round(self.cost, 2),
        }

    def describe(self) -> str:
        load, rate = self.load, self.rate
        network = self.network_bytes
        facts = [
            ("records", f"{load.records:,} of {load.tokens:,.0f} tokens: {self.tokens:,.0f} tokens"),
            ("rate", f"{rate.tokens_per_s:,.0f} tokens/s for one worker, {rate.source}"),
            ("workers", f"{self.workers:,}, to end within {_hours(self.within_s)}"),
            ("time", f"{_hours(self.work_s / self.workers)} with so many, {_hours(self.work_s)} with one"),
            *([("live now", f"{rate.live:,}, which take {_hours(self.work_s / rate.live)}")] if rate.live else []),
            ("in Redis", f"{_size(self.memory_bytes)} until the vectors are fetched and the job is discarded"),
            ("drained", f"{_size(self.drained_memory_bytes)} if they leave meanwhile, by -o DIR/ or a database"),
            ("network", f"{_size(network)} into Redis and out of it, {_size(network / self.work_s * self.workers)}/s"),
            *([] if self.cost is None else [("cost", f"{self.cost:,.2f} for {self.work_s / 3600:,.1f} worker hours")]),
        ]
        return "\n".join(f"{name:<10} {value}" for name, value in facts)


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} h" if seconds >= 3600 else f"{seconds / 60:,.1f} min"


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:,.0f} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"
