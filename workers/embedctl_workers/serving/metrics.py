"""A worker's metrics for Prometheus. Needs the extra `metrics`."""

from __future__ import annotations

import platform
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector

from embedctl.operating.monitoring.metrics import page_of
from embedctl.store import Claim
from embedctl.store.connection import Observer
from embedctl_config import __version__
from embedctl_config.hardware import HardwareClass
from embedctl_config.wire import ErrorCode
from embedctl_workers.accuracy.report import Report
from embedctl_workers.serving.telemetry import Stage, Telemetry

if TYPE_CHECKING:
    from embedctl_workers.serving.in_hand import InHand

T = TypeVar("T", Counter, Gauge, Histogram)

STAGES: tuple[Stage, ...] = ("tokenise", "encode", "store")
#: The answers to :meth:`~embedctl.store.JobStore.complete`.
RESULT_ANSWERS = ("ok", "refused", "mismatch", "gone", "cancelled", "version")

#: Upper bounds in seconds: of a batch or a chunk's stage, from a millisecond to the default `hang_s`.
_WORK_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
#: Of the wait for a turn (seconds), up to a day.
_WAIT_S = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)
#: Of a round trip (seconds), up to redis-py's timeout.
_ROUND_TRIP_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 1, 5, 10)


class Metrics(Telemetry):
    """The metrics of one worker process, which serves these models of a hardware class, in a registry of its own.

    No label holds a job's id or a text: labels have few values, all known when the worker starts.
    """

    def __init__(self, hardware: str, entry: HardwareClass, models: Sequence[str]) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.page = partial(page_of, self.registry)
        self._hardware = hardware
        self._models = models
        in_registry: dict[str, Any] = {"namespace": "embedctl", "registry": self.registry}

        def family(kind: type[T], name: str, meaning: str, *more: str, by_model: bool = True, **bounds: Any) -> T:
            labels = ("hardware_class", *(("model",) if by_model else ()), *more)
            return kind(name, meaning, labels, **in_registry, **bounds)

        Info("build", "What runs: version, Python, hardware class, backend and precision", **in_registry).info(
            {
                "version": __version__,
                "python": platform.python_version(),
                "hardware_class": hardware,
                "backend": entry.backend,
                "precision": entry.precision,
            }
        )
        self._records = family(
            Counter, "records", "Records whose results this worker stored: done or failed", "outcome"
        )
        self._errors = family(Counter, "record_errors", "Records that failed, by their error's code", "code")
        self._tokens = family(Counter, "tokens", "Tokens of the chunks that were encoded, without padding")
        self._padding = family(Counter, "padding_tokens", "Padding that the device was given with them, in tokens")
        self._batch = family(Histogram, "batch_seconds", "Time of a batch on the device", buckets=_WORK_S)
        self._stage = family(
            Histogram,
            "stage_seconds",
            "Time of a chunk in a stage: tokenise, encode or store",
            "stage",
            buckets=_WORK_S,
        )
        self._wait = family(
            Histogram, "queue_wait_seconds", "Time since the last turn of a chunk's job", buckets=_WAIT_S
        )
        self._attempts = family(Counter, "attempts", "Chunks claimed: for the first time, or repeated", "attempt")
        self._results = family(
            Counter, "results", "Results of chunks, by Redis' answer; ok: stored and counted", "answer"
        )
        self._failures = family(Counter, "chunk_failures", "Chunks that failed as a whole and were offered again")
        self._in_hand = family(Gauge, "chunks_in_hand", "Chunks that are held now")
        self._engine = family(Gauge, "engine_info", "What runs a model, and how it was chosen", "engine", "chosen")
        self._gate = {
            "passed": family(Gauge, "gate_passed", "1: the vectors were measured, and are what the class promises"),
            "max_abs_error": family(Gauge, "gate_max_abs_error", "Largest error of a component that the gate measured"),
            "min_cosine": family(Gauge, "gate_min_cosine", "Cosine of the worst text that the gate measured"),
            "mean_cosine": family(Gauge, "gate_mean_cosine", "Mean cosine that the gate measured"),
        }
        self._progress = family(
            Gauge,
            "last_progress_timestamp_seconds",
            "When a batch was last finished, in seconds since 1970; 0 before the first",
            by_model=False,
        )
        self._round_trips = family(
            Histogram,
            "redis_round_trip_seconds",
            "Time until Redis answered, by command or script",
            "command",
            by_model=False,
            buckets=_ROUND_TRIP_S,
        )
        self._unanswered = family(
            Counter,
            "redis_unanswered",
            "Commands and scripts that Redis did not answer",
            "command",
            by_model=False,
        )
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """Create every series that can be foreseen: Prometheus takes rates only of series that existed before."""
        for model in self._models:
            for count in (self._tokens, self._padding, self._failures):
                self._of(count, model)
            for times in (self._batch, self._wait):
                self._of(times, model)
            for family, values in (
                (self._records, ("done", "failed")),
                (self._errors, ErrorCode),
                (self._results, RESULT_ANSWERS),
                (self._attempts, ("first", "repeated")),
            ):
                for value in values:
                    self._of(family, model, value)
            for stage in STAGES:
                self._of(self._stage, model, stage)

    def _of(self, family: T, model: str, *values: str) -> T:
        return family.labels(self._hardware, model, *values)

    def watch(self, in_hand: InHand) -> None:
        def held(model: str) -> int:
            return sum(each.model == model for each in in_hand.all())

        for model in self._models:
            self._of(self._in_hand, model).set_function(partial(held, model))
        self._progress.labels(self._hardware).set_function(lambda: in_hand.progressed_ms / 1000)

    @property
    def observer(self) -> Observer:
        return self._round_trip

    def _round_trip(self, command: str, seconds: float, answered: bool) -> None:
        if answered:
            self._round_trips.labels(self._hardware, command).observe(seconds)
        else:
            self._unanswered.labels(self._hardware, command).inc()

    def loaded(self, model: str, engine: str, chosen: str) -> None:
        self._of(self._engine, model, engine, chosen).set(1)

    def gated(self, model: str, report: Report) -> None:
        found = report.checks[0].measured
        self._of(self._gate["passed"], model).set(report.passed)
        for name in ("max_abs_error", "min_cosine", "mean_cosine"):
            self._of(self._gate[name], model).set(getattr(found, name))

    def claimed(self, model: str, claim: Claim) -> None:
        self._of(self._attempts, model, "first" if claim.attempt == 1 else "repeated").inc()
        self._of(self._wait, model).observe(claim.waited_s)

    def staged(self, model: str, stage: Stage, seconds: float) -> None:
        self._of(self._stage, model, stage).observe(seconds)

    def batched(self, model: str, seconds: float) -> None:
        self._of(self._batch, model).observe(seconds)

    def encoded(self, model: str, tokens: int, positions: int) -> None:
        self._of(self._tokens, model).inc(tokens)
        self._of(self._padding, model).inc(positions - tokens)

    def answered(self, model: str, answer: str, done: int, codes: Collection[ErrorCode]) -> None:
        self._of(self._results, model, answer).inc()
        if answer != "ok":
            return
        self._of(self._records, model, "done").inc(done)
        self._of(self._records, model, "failed").inc(len(codes))
        for code in codes:
            self._of(self._errors, model, code).inc()

    def failed(self, model: str) -> None:
        self._of(self._failures, model).inc()
