"""The backlog as metrics for Prometheus. Needs the extra `metrics`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from embedctl.operating.monitoring.watch import Sweep, Total, Watch
from embedctl_config import __version__

_QUEUED = ("hardware_class", "model", "lane")


class BacklogMetrics(Collector):
    """The metrics of the last complete sweep. While Redis is silent, only `embedctl_redis_up` is there."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(self)
        self.page = partial(page_of, self.registry)

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("embedctl_build", "What runs: the version", {"version": __version__})
        yield _gauge("redis_up", "1: Redis answered the last call, within the last seconds", self._watch.reaches_redis)
        sweep = self._watch.sweep()
        if sweep is not None:
            yield from self._of(sweep)

    def _of(self, sweep: Sweep) -> Iterator[Metric]:
        age_s = self._watch.age_s(sweep)
        yield _gauge("backlog_age_seconds", "Age of these figures, from the beginning of their sweep", age_s)
        yield _gauge("backlog_sweep_seconds", "Duration of that sweep", sweep.took_s)
        used, most = sweep.memory
        yield _gauge("redis_used_bytes", "Memory that Redis uses", used)
        yield _gauge("redis_max_bytes", "Redis' maxmemory; a Redis that uses as much is full. 0: it has none", most)
        yield _gauge("jobs_unreadable", "Active jobs whose facts can't be read", sweep.backlog.unreadable)
        now_ms = sweep.now_ms + age_s * 1000
        queues = list(sweep.backlog.queues.items())
        tenants = [((name,), total) for name, total in sweep.backlog.tenants().items()]
        yield from _waiting("", _QUEUED, queues, now_ms)
        yield _table(
            "longest_standstill_seconds",
            "Time since the last progress, of the job with waiting chunks that has stood still longest",
            _QUEUED,
            ((key, _since(total.progressed_ms, now_ms)) for key, total in queues),
        )
        yield from _waiting("tenant_", ("tenant",), tenants, now_ms)
        yield from _limits(sweep)
        yield _table(
            "workers_alive",
            "Live workers that serve the model, under each of its names",
            ("hardware_class", "model"),
            sweep.alive.items(),
        )


def _limits(sweep: Sweep) -> Iterator[Metric]:
    yield _table(
        "tenant_limit",
        "What a tenant may have at most; only limits that are set",
        ("tenant", "limit"),
        (((quota.tenant, name), most) for quota in sweep.quotas for name, most in quota.limits.items()),
    )
    yield _table(
        "tenant_limit_used",
        "What a tenant has of it; not of what is limited by the second",
        ("tenant", "limit"),
        (
            ((quota.tenant, name), quota.used[name])
            for quota in sweep.quotas
            for name in quota.limits
            if name in quota.used
        ),
    )


def page_of(registry: CollectorRegistry, accept: str) -> tuple[str, bytes]:
    """The content type and the body of a page of metrics, for a request's header `Accept`."""
    encode, content_type = choose_encoder(accept)
    return content_type, encode(registry)


def _waiting(
    prefix: str, labels: tuple[str, ...], totals: Sequence[tuple[tuple[str, ...], Total]], now_ms: float
) -> Iterator[Metric]:
    def table(name: str, meaning: str, value: Callable[[Total], float]) -> Metric:
        return _table(f"{prefix}{name}", meaning, labels, ((key, value(total)) for key, total in totals))

    yield table("jobs_active", "Jobs that have not ended", lambda total: total.jobs)
    yield table("waiting_chunks", "Chunks that are not yet encoded", lambda total: total.chunks)
    yield table("waiting_bytes", "Bytes of text that are not yet encoded", lambda total: total.size)
    yield table("waiting_tokens", "Tokens in these bytes, an estimate", lambda total: total.tokens)
    yield table(
        "oldest_waiting_seconds",
        "Age of the oldest job with chunks that are not yet encoded; 0 if there is none",
        lambda total: _since(total.opened_ms, now_ms),
    )


def _since(moment_ms: float, now_ms: float) -> float:
    return 0.0 if math.isinf(moment_ms) else max(0.0, (now_ms - moment_ms) / 1000)


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(f"embedctl_{name}", meaning, value=float(value))


def _table(name: str, meaning: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = GaugeMetricFamily(f"embedctl_{name}", meaning, labels=labels)
    for key, value in values:
        family.add_metric(key, value)
    return family
