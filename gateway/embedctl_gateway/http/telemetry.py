"""What the gateway counts for Prometheus. No label holds a tenant, a key or a text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from embedctl.operating.monitoring.metrics import page_of

_PREFIX = "embedctl_gateway_"
#: From a single text on a GPU to the longest time limit (seconds).
_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)


class Telemetry:
    """The metrics of one gateway; `requests` tells those in flight, `held` the bytes of bodies and answers."""

    def __init__(self, requests: Callable[[], float], held: Callable[[], float]) -> None:
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.page = partial(page_of, registry)
        self._requests = Counter(
            f"{_PREFIX}requests",
            "Requests that were answered, by path and status",
            ("path", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            f"{_PREFIX}request_seconds",
            "Time from a request's headers to the end of its answer",
            ("path",),
            buckets=_BUCKETS,
            registry=registry,
        )
        self._texts = Counter(f"{_PREFIX}texts", "Texts whose vectors were made", ("model",), registry=registry)
        self._tokens = Counter(f"{_PREFIX}tokens", "Tokens of these texts", ("model",), registry=registry)
        self._webhooks = Counter(
            f"{_PREFIX}webhooks",
            "Tries to tell that a batch has ended, by result: delivered, failed (it is tried again) or given_up",
            ("result",),
            registry=registry,
        )
        for name, meaning, value in (
            ("in_flight", "Requests for vectors that wait for workers", requests),
            ("held_bytes", "Bytes of bodies and answers in memory", held),
        ):
            Gauge(_PREFIX + name, meaning, registry=registry).set_function(value)

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Count a request, by its path as the gateway knows it, with the names of parameters."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def embedded(self, model: str, texts: int, tokens: int) -> None:
        self._texts.labels(model).inc(texts)
        self._tokens.labels(model).inc(tokens)

    def webhook(self, result: str) -> None:
        self._webhooks.labels(result).inc()
