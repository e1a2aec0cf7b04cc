"""The page of the backlog's metrics, without a Redis."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.core import Metric

from embedctl.operating.monitoring.metrics import BacklogMetrics
from embedctl.operating.monitoring.watch import Backlog, Sweep
from embedctl.store.backlog import WaitingJob
from embedctl.store.quotas import Quota

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
JOB = WaitingJob("cpu", "m", "normal", "default", chunks=7, size=420, opened_ms=1_000, progressed_ms=3_000)
QUOTA = Quota("default", "w", {"max_jobs": 5}, {"max_jobs": 2, "max_waiting_records": 3, "max_waiting_bytes": 4})


class Watch:
    """A watch that saw one sweep, four seconds ago."""

    reaches_redis = True

    def __init__(self, *jobs: WaitingJob) -> None:
        backlog = Backlog()
        backlog.add(jobs)
        self._sweep = Sweep(backlog, {("cpu", "m"): 2}, [QUOTA], (900, 1000), began=100.0, took_s=0.5, now_ms=10_000)

    def sweep(self) -> Sweep | None:
        return self._sweep

    def age_s(self, sweep: Sweep) -> float:
        return 4.0


def served(*jobs: WaitingJob) -> dict[str, Metric]:
    metrics = BacklogMetrics(Watch(*jobs))  # type: ignore[arg-type]
    return {each.name: each for each in metrics.collect()}


def test_every_metric_stands_in_the_page_with_its_labels_and_its_meaning() -> None:
    for name, metric in served(JOB).items():
        if name != "embedctl_build":
            labels = ", ".join(f"`{label}`" for label in metric.samples[0].labels)
            assert f"| `{name}` | {labels} | {metric.documentation} |" in PAGE


def test_ages_go_on_between_two_sweeps() -> None:
    found = served(JOB)
    assert found["embedctl_oldest_waiting_seconds"].samples[0].value == 10 - 1 + 4
    assert found["embedctl_longest_standstill_seconds"].samples[0].value == 10 - 3 + 4
    assert found["embedctl_backlog_age_seconds"].samples[0].value == 4


def test_a_job_whose_chunks_are_all_encoded_waits_for_nothing() -> None:
    found = served(WaitingJob("cpu", "m", "normal", "default", chunks=0, size=0, opened_ms=1, progressed_ms=1))
    values = {name: metric.samples[0].value for name, metric in found.items() if "waiting" in name}
    assert set(values.values()) == {0.0}
    assert found["embedctl_longest_standstill_seconds"].samples[0].value == 0


def test_a_tenant_s_limits_stand_beside_what_it_has_of_them() -> None:
    found = served(JOB)
    labels = {"tenant": "default", "limit": "max_jobs"}
    for name, value in (("embedctl_tenant_limit", 5), ("embedctl_tenant_limit_used", 2)):
        assert [(each.labels, each.value) for each in found[name].samples] == [(labels, value)]
