"""What a worker counts, the page and the heartbeat that say so, and what is seen from outside after it was killed."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from embedctl_config.errors import MissingExtra
from embedctl_config.hardware import HardwareClass, Thresholds
from embedctl_config.settings import Settings
from embedctl_config.wire import ErrorCode
from embedctl_workers.accuracy.report import Check, Report
from embedctl_workers.arrays.distance import Measured
from embedctl_workers.machine.devices import Pinned
from embedctl_workers.machine.tally import Tally, make_file, read
from embedctl_workers.serving import lifecycle
from embedctl_workers.serving.health import Health
from embedctl_workers.serving.in_hand import Held, InHand
from embedctl_workers.serving.metrics import Metrics
from embedctl_workers.serving.speed import Speed, SpeedMeter, Work
from embedctl_workers.serving.telemetry import Telemetry

ROOT = Path(__file__).parents[3]
#: What the page says of workers.
PAGE = re.sub(
    r"^## The backlog$.*?^## ",
    "## ",
    (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"),
    flags=re.DOTALL | re.MULTILINE,
)
MODEL = "org/model"
ENTRY = HardwareClass(backend="dummy", precision="int8")


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("tiny", ENTRY, [MODEL, "other"])


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"embedctl_{name}", {"hardware_class": "tiny", "model": MODEL, **labels})


def report() -> Report:
    measured = Measured(0.25, 0.75, 0.875, 0.0, 0)
    check = Check("in batches", 27, measured, Thresholds(), 1.0, normalized=True, worst="", failures={})
    return Report("title", Thresholds(), "", [check])


def everything(metrics: Metrics) -> None:
    """Let all that can happen happen once."""
    metrics.watch(InHand())
    metrics.loaded(MODEL, "an engine", "")
    metrics.gated(MODEL, report())
    metrics.observer("next", 0.001, True)
    metrics.observer("next", 10.0, False)


def test_what_happens_is_counted_under_its_own_name(metrics: Metrics) -> None:
    metrics.batched(MODEL, 0.2)
    metrics.staged(MODEL, "store", 2.0)
    assert value(metrics, "batch_seconds_sum") == 0.2
    assert value(metrics, "stage_seconds_sum", stage="store") == 2.0
    metrics.observer("SET", 0.25, True)
    metrics.observer("SET", 40.0, False)
    labels = {"hardware_class": "tiny", "command": "SET"}
    assert metrics.registry.get_sample_value("embedctl_redis_round_trip_seconds_sum", labels) == 0.25
    assert metrics.registry.get_sample_value("embedctl_redis_unanswered_total", labels) == 1


def test_records_count_once_redis_has_their_result(metrics: Metrics) -> None:
    metrics.answered(MODEL, "refused", 5, [ErrorCode.EMPTY])
    assert value(metrics, "records_total", outcome="done") == 0
    metrics.answered(MODEL, "ok", 5, [ErrorCode.EMPTY, ErrorCode.TOO_LONG, ErrorCode.EMPTY])
    assert value(metrics, "records_total", outcome="done") == 5
    assert value(metrics, "records_total", outcome="failed") == 3
    assert value(metrics, "record_errors_total", code="empty") == 2
    assert value(metrics, "record_errors_total", code="too_long") == 1
    assert value(metrics, "results_total", answer="ok") == value(metrics, "results_total", answer="refused") == 1
    assert value(metrics, "records_total", outcome="done", model="other") == 0


def test_what_a_worker_holds_is_read_when_it_is_asked_for(metrics: Metrics) -> None:
    in_hand = InHand()
    metrics.watch(in_hand)
    name, labels = "embedctl_last_progress_timestamp_seconds", {"hardware_class": "tiny"}
    assert value(metrics, "chunks_in_hand") == metrics.registry.get_sample_value(name, labels) == 0
    held = [Held("job", chunk, f"token {chunk}", MODEL) for chunk in range(2)]
    for each in held:
        in_hand.take(each)
    in_hand.progressed(held[0], 1_700_000_000_500)
    assert value(metrics, "chunks_in_hand") == 2
    assert value(metrics, "chunks_in_hand", model="other") == 0
    assert metrics.registry.get_sample_value(name, labels) == 1_700_000_000.5
    in_hand.drop(held[0])
    assert value(metrics, "chunks_in_hand") == 1


def test_the_page_is_in_the_form_that_its_reader_knows(metrics: Metrics) -> None:
    everything(metrics)
    kind, page = metrics.page("")
    assert kind.startswith("text/plain")
    names = {family.name for family in parse(page.decode())}
    assert {"embedctl_tokens", "embedctl_batch_seconds", "process_resident_memory_bytes"} <= names
    kind, page = metrics.page("application/openmetrics-text;version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    parsed = parse_openmetrics(page.decode())  # type: ignore[no-untyped-call]  # it has no types
    assert "embedctl_tokens" in {family.name for family in parsed}
    (build,) = [family for family in parse(metrics.page("")[1].decode()) if family.name == "embedctl_build_info"]
    (sample,) = build.samples
    assert (sample.labels["backend"], sample.labels["precision"], sample.value) == ("dummy", "int8", 1)


def test_no_label_can_have_ever_more_values(metrics: Metrics) -> None:
    everything(metrics)
    labels = {label for family in metrics.registry.collect() for sample in family.samples for label in sample.labels}
    bounded = {"hardware_class", "model", "outcome", "code", "stage", "answer", "attempt", "command", "le"}
    assert labels - bounded == {"version", "python", "backend", "precision", "engine", "chosen"}  # of what runs


# The page in docs/


def families(metrics: Metrics) -> dict[str, tuple[str, str, str]]:
    """Name → type, labels and meaning, as Prometheus sees them."""
    everything(metrics)
    suffixes = {"counter": "_total", "info": "_info"}
    found = {}
    for family in metrics.registry.collect():
        if family.name.startswith("embedctl_"):
            labels = [name for name in family.samples[0].labels if name != "le"]
            kind = "gauge" if family.type == "info" else family.type
            listed = ", ".join(f"`{name}`" for name in labels)
            found[family.name + suffixes.get(family.type, "")] = (kind, listed, family.documentation)
    return found


def test_the_docs_table_is_the_registry(metrics: Metrics) -> None:
    rows = re.findall(r"^\| `(embedctl_\w+)` \| (\w+) \| (.+?) \| (.+) \|$", PAGE, re.MULTILINE)
    assert {name: tuple(rest) for name, *rest in rows} == families(metrics)


def test_the_alerts_of_workers_ask_for_labels_that_exist(metrics: Metrics) -> None:
    (block,) = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
    assert block["scrape_configs"][0]["job_name"] == "embedctl"
    groups = yaml.safe_load((ROOT / "deploy" / "prometheus" / "embedctl.rules.yml").read_text(encoding="utf-8"))[
        "groups"
    ]
    (rules,) = [group["rules"] for group in groups if group["name"] == "embedctl-workers"]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 5
    everything(metrics)
    samples = [(sample.name, sample.labels) for family in metrics.registry.collect() for sample in family.samples]
    for rule in rules:
        for name, label, wanted in re.findall(r'(embedctl_\w+)\{(\w+)="(\w+)"', rule["expr"]):
            assert any(name == found and labels.get(label) == wanted for found, labels in samples), rule


# Where it is asked for


def served(settings: Settings) -> tuple[Telemetry, str]:
    pinned = Pinned(frozenset({0}), 1)
    with ExitStack() as stack:
        return lifecycle._telemetry(lifecycle.Start(settings, "cpu", [MODEL], pinned, "info"), Health(), stack)


def test_an_address_without_the_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "embedctl_workers.serving.metrics")
    with pytest.raises(MissingExtra, match=r"metrics_address needs .* pip install 'embedctl\[metrics\]'"):
        served(Settings(metrics_address=str(free_port)))


def test_the_first_chunk_counts_whole_and_later_ones_a_fifth() -> None:
    speed = Speed().after(Work(10, 300, 400), 2.0)
    assert speed == Speed(tokens_per_s=150.0, rows_per_s=5.0, padding=0.25)
    speed = Speed(tokens_per_s=100.0, rows_per_s=10.0, padding=0.5).after(Work(30, 200, 200), 1.0)
    assert (speed.tokens_per_s, speed.rows_per_s, speed.padding) == pytest.approx((120, 14, 0.4))


def test_chunks_of_one_batch_count_together() -> None:
    meter = SpeedMeter(["m"])
    work = Work(rows=10, tokens=100, positions=100)
    for batch in range(1, 40):  # four a second, begun early
        for chunk in range(4):
            meter.encoded("m", work, began=batch - 1.5, ended=batch + chunk * 1e-5)
    assert meter.speed["m"].tokens_per_s == pytest.approx(400, rel=0.05)
    assert meter.speed["m"].rows_per_s == pytest.approx(40, rel=0.05)


def test_the_first_chunk_is_not_taken_for_the_moment_after_another_models_chunk() -> None:
    meter = SpeedMeter(["m", "other"])
    meter.encoded("other", Work(10, 100, 100), began=1.0, ended=2.0)
    meter.encoded("m", Work(rows=1000), began=0.0, ended=2.0)  # all its records had failed
    assert meter.speed["m"] == Speed()
    meter.encoded("m", Work(10, 100, 100), began=1.5, ended=2.00001)
    assert meter.speed["m"].tokens_per_s == pytest.approx(200, rel=0.01)


def test_a_chunk_that_never_used_the_device_takes_no_time() -> None:
    meter = SpeedMeter(["m"])
    meter.encoded("m", Work(10, 100, 100), began=1.0, ended=2.0)
    meter.encoded("m", Work(rows=10), began=0.0, ended=50.0)
    meter.encoded("m", Work(10, 100, 100), began=60.0, ended=61.0)
    assert meter.speed["m"].tokens_per_s == pytest.approx(100)


def test_only_large_chunks_tell_what_a_worker_sustains() -> None:
    small = Speed().after(Work(1, 8, 8), 0.01)
    assert small.sustained_tokens_per_s == 0
    large = small.after(Work(100, 8000, 8000), 1.0)
    assert large.sustained_tokens_per_s == 8000
    assert large.after(Work(1, 8, 8), 0.01).sustained_tokens_per_s == 8000
    assert large.after(Work(100, 5000, 5000), 1.0).sustained_tokens_per_s == pytest.approx(7400)


WORKER = """
import os, signal, sys
from embedctl_workers.machine.tally import Tally
from embedctl_workers.serving.in_hand import Held, InHand

in_hand = InHand(tally=Tally(int(sys.argv[1])))
held = [Held("job", chunk, "token", "dummy") for chunk in range(3)]
for each in held:
    in_hand.take(each)
in_hand.completed()
in_hand.drop(held[0])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_numbers_survive_the_death_of_the_process_that_wrote_them() -> None:
    with make_file() as file:
        assert read(file) == (0, 0)
        command = [sys.executable, "-c", WORKER, str(file.fileno())]
        assert subprocess.run(command, pass_fds=[file.fileno()], check=False).returncode == -signal.SIGKILL
        assert read(file) == (2, 1)


def test_they_follow_what_is_taken_and_dropped() -> None:
    with make_file() as file:
        in_hand = InHand(tally=Tally(file.fileno()))
        held = Held("job", 0, "token", "dummy")
        in_hand.take(held)
        assert read(file) == (1, 0)
        in_hand.drop(held)  # given back
        assert read(file) == (0, 0)
