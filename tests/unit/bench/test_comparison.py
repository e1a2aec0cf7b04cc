"""Which systems can be compared, which is ahead, and what a report says of them: of engines, requests and the grid."""

from __future__ import annotations

import json
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest

from embedctl_bench.engines.report import EnginesResult
from embedctl_bench.engines.report import report as engines_report
from embedctl_bench.grid.report import GridResult, GridScope, listed
from embedctl_bench.grid.report import report as grid_report
from embedctl_bench.measuring.comparison import SystemRuns
from embedctl_bench.peers.models import Model
from embedctl_bench.peers.registry import FLOORS, PEERS
from embedctl_bench.peers.tuned import Effort
from embedctl_bench.peers.workload import Workload
from embedctl_bench.report.forms import page
from embedctl_bench.report.report import Report
from embedctl_bench.request.http_report import HttpResult, http_report
from embedctl_bench.request.loads import Load, RequestPlan
from embedctl_bench.request.report import RequestResult
from embedctl_bench.request.report import report as request_report
from tests.support.bench import asked, more, runs


def rows(made: Report, name: str) -> list[dict[str, Any]]:
    (table,) = [table for table in made.tables if table.name == name]
    return [dict(row) for row in table.rows]


@pytest.fixture
def result(tmp_path: Path) -> EnginesResult:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    (tmp_path / "texts.json").write_text("[]")
    workload = Workload("W1", tmp_path / "texts.json", (10,) * 100, chunk=512)
    model = Model("m", tmp_path, layers=6, hidden=384, inner=1536)
    return EnginesResult("m", "a model", model, workload, 3, ["infinity"])


FLOOR = runs("floor", 1.0, 1.0, 1.0, error=nan)


def test_systems_are_ranked_by_time_unless_they_cut_texts_or_are_not_fp32(
    result: EnginesResult, tmp_path: Path
) -> None:
    result.runs = [
        FLOOR,
        runs("sentence-transformers", 8.0, 9.0, 10.0),
        runs("embedctl-cpu", 3.0, 3.0, 4.0),
        runs("fastembed", 1.0, 1.0, 1.0, tokens=900),
        runs("ctranslate2", 2.0, 2.0, 2.0, error=1e-3),
        runs("st-onnx", 4.0, 4.0, 4.0),
        SystemRuns("infinity", "infinity", "fp32", ours=False, unavailable="no memory"),
    ]
    made = engines_report([result], asked(tmp_path, price=3.6))
    found = rows(made, "m-W1-fp32")
    assert [(row["rank"], row["system"]) for row in found] == [
        (1, "embedctl-cpu"),
        (2, "st-onnx"),
        (3, "sentence-transformers"),
        (None, "fastembed"),
        (None, "ctranslate2"),
    ]
    assert "not ranked: encodes 900 tokens of 1,000: it cuts texts" in found[3]["remark"]
    assert "not fp32" in found[4]["remark"]
    first = found[0]
    assert [first[key] for key in ("times", "least_times", "most_times")] == pytest.approx([8 / 3, 2.5, 3.0])
    assert first["share_of_floor"] == pytest.approx(1 / 3)
    assert (first["texts_per_s"], first["tokens_per_s"]) == pytest.approx((100 / 3, 1000 / 3))
    assert first["cost_per_million"] == pytest.approx(30.0)
    assert first["_noisy"]
    assert not any(row["_bold"] for row in found)
    assert any("infinity: not available: no memory" in note for note in made.notes)
    assert any("not measured: infinity" in note for note in made.notes)
    (claim,) = made.claims
    assert claim.met
    assert "1.33 × the rate of st-onnx" in claim.ours
    assert page(made)


def test_a_system_that_is_ahead_is_bold_and_so_is_the_claim(result: EnginesResult, tmp_path: Path) -> None:
    result.runs = [
        runs("embedctl-engine-cpu-int8", 2.0, 2.0, 2.0, precision="int8", error=0.01),
        runs("ctranslate2-int8", 1.0, 1.0, 1.0, precision="int8", error=0.01),
        runs("st-onnx-int8", 0.5, 0.5, 0.5, precision="int8", error=nan),
    ]
    made = engines_report([result], asked(tmp_path))
    found = rows(made, "m-W1-int8")
    assert [(row["rank"], row["_bold"]) for row in found] == [(1, True), (2, False), (None, False)]
    assert found[0]["remark"] == "ahead of ours"
    assert found[0]["times"] is None
    assert [claim.met for claim in made.claims] == [False]
    assert any("no ratios to it" in note for note in made.notes)


@pytest.mark.parametrize(("seconds", "doubted"), [(2.1, False), (1.5, True)])
def test_the_product_is_compared_with_its_own_engine(
    result: EnginesResult, tmp_path: Path, seconds: float, doubted: bool
) -> None:
    result.runs = [runs("embedctl-engine-cpu", 2.0, 2.0, 2.0), runs("embedctl-cpu", *[seconds] * 3)]
    notes = engines_report([result], asked(tmp_path)).notes
    assert any(f"embedctl-cpu has {2 / seconds:.2f} (" in note for note in notes)
    assert any(note.startswith("**Not to be trusted") for note in notes) == doubted


def test_each_precision_has_a_table_and_a_floor_of_its_own(result: EnginesResult, tmp_path: Path) -> None:
    bf16 = replace(SystemRuns.of(FLOORS["fp16"]), loads=runs("floor", 0.5, 0.5, 0.5, error=nan).loads, computes="bf16")
    result.runs = [
        FLOOR,
        bf16,
        runs("embedctl-engine-cpu-bf16", 1.0, 1.0, 1.0, precision="fp16", error=1e-3, cosine=0.9999),
        runs("st-openvino-default", 2.0, 2.0, 2.0, precision="fp16", error=1e-3, cosine=0.9999),
        runs("st-torch-bf16", 0.7, 0.7, 0.7, precision="fp16", error=1e-2, cosine=0.99),
        runs("sentence-transformers", 8.0, 9.0, 10.0),
        runs("embedctl-engine-cpu", 4.0, 4.5, 5.0),
    ]
    made = engines_report([result], asked(tmp_path))
    names = [table.name for table in made.tables]
    assert names == ["m-W1-fp32", "m-W1-fp16", "m-W1-beside", "m-W1-floors", "m-W1-systems"]
    found = rows(made, "m-W1-fp16")
    assert [(row["rank"], row["system"]) for row in found] == [
        (1, "embedctl-engine-cpu-bf16"),
        (2, "st-openvino-default"),
        (None, "st-torch-bf16"),
    ]
    assert found[2]["remark"] == "not ranked: not as accurate as 16 bits: min cosine 0.990000"
    assert found[0]["share_of_floor"] == pytest.approx(0.5), "of bf16's floor"
    assert rows(made, "m-W1-fp32")[0]["share_of_floor"] == pytest.approx(1 / 4.5), "of fp32's"
    beside = {row["system"]: row for row in rows(made, "m-W1-beside")}
    assert beside["st-openvino-default"]["embedctl-engine-cpu"] == "0.44 (0.40–0.50)", "beside a lower promise"
    assert [row["times_fp32"] for row in rows(made, "m-W1-floors")] == [1.0, 2.0]


def test_on_a_gpu_the_aims_are_claims(result: EnginesResult, tmp_path: Path) -> None:
    large = replace(result, model=replace(result.model, hidden=1024))
    large.runs = [
        replace(runs("floor-gpu", 1.0, 1.0, error=nan), precision="fp16"),
        runs("embedctl-gpu", 1.6, 1.6, precision="fp16", cosine=0.9999),
        runs("sentence-transformers-bf16", 2.0, 2.0, precision="fp16", cosine=0.9999),
    ]
    large.idle = {"embedctl-gpu": [0.02, "the driver"]}
    made = engines_report([large], asked(tmp_path, device="gpu", classes=("gpu",)))
    assert [(claim.ours, claim.met) for claim in made.claims[1:]] == [("1.25", False), ("0.62", True), ("2.0%", True)]
    assert any("idle while the queue was full: 2.0% (the driver)" in note for note in made.notes)


def test_a_system_at_its_default_promises_what_it_was_read_back_to_compute_in() -> None:
    for computes, promise in (("bf16 (12 of 13 products)", "fp16"), ("fp32", "fp32"), ("", "fp32")):
        found = SystemRuns.of(PEERS["st-openvino-default"])
        found.read_back(computes)
        assert found.precision == promise


def test_nothing_measured_still_makes_a_report(result: EnginesResult, tmp_path: Path) -> None:
    assert engines_report([result], asked(tmp_path)).claims == []
    assert page(grid_report([GridResult("m", "a model", SCOPE)], [], asked(tmp_path)))


def test_a_request_is_compared_with_what_was_published(tmp_path: Path) -> None:
    requests = (("a",) * 25, ("b",) * 26) * 5
    tenth, whole = Load("tenth", "a tenth", requests), Load("whole", "the whole", requests)
    found = RequestResult("m", "a model", RequestPlan(tenth, 3, whole), 512, lengths=(450,) * 255)
    latency: dict[str, Any] = {"load": "tenth", "latencies": [1.0] * 10, "fetched": 4.1}
    found.runs = [
        more(runs("embedctl-cpu", 4.0, 4.0, 4.0, **latency), "whole", 40.0, error=3e-4),
        runs("sentence-transformers", 9.0, 9.0, 9.0, **latency),
        more(runs("ctranslate2", 5.0, 5.0, 5.0, **latency), "whole", 50.0),
        runs("st-onnx", 6.0, 6.0, 6.0, **latency),
    ]
    assert found.finalists() == ["embedctl-cpu", "ctranslate2"], "ours, and the fastest other system"
    assert [len(each) for each in found.checked] == [25, 26] * 5
    made = request_report([found], asked(tmp_path))
    claims = {claim.what.partition(" (")[0]: (claim.ours, claim.met) for claim in made.claims}
    assert claims["embedctl-cpu, against sentence-transformers on torch"] == ("2.25 ×", True)
    assert claims["embedctl-cpu: vectors are those of torch in fp32"] == ("max abs error 3.0e-04", False)
    row = rows(made, "rounds")[0]
    assert (row["p50_ms"], row["p99_ms"]) == (1000.0, None)
    assert (row["requests_per_s"], row["texts_per_s"]) == (2.5, 255 / 4)
    assert [row["system"] for row in rows(made, "whole")] == ["embedctl-cpu", "ctranslate2"]
    assert sum(bool(row.get("_published")) for row in rows(made, "published")) == 13


def test_over_http_a_p50_is_compared_round_by_round(tmp_path: Path) -> None:
    single, many = Load("one-8", "one text", (("a",),) * 4, 1), Load("callers", "callers", (("a", "b"),) * 4, 2)
    gateway = runs("gateway-cpu", 1.0, 1.0, load="one-8", latencies=[0.010])
    direct = runs("direct-cpu", 0.5, 0.5, load="one-8", latencies=[0.006])
    infinity = runs("infinity-server", 2.0, 2.2, load="one-8", latencies=[0.02])
    found = HttpResult("m", "cpu", [single, many], [more(gateway, "callers", 1.0, latencies=[0.1]), direct, infinity])
    made = http_report([found], asked(tmp_path))
    assert [claim.ours for claim in made.claims] == ["2.10 × its rate", "p50 4.0 ms behind (4.0 to 4.0 in 2 rounds)"]
    table = rows(made, "http")
    assert [(row["load"], row["system"]) for row in table] == [
        ("one text", "gateway-cpu"),
        ("one text", "direct-cpu"),
        ("one text", "infinity-server"),
        ("callers", "gateway-cpu"),
    ]
    assert [row["times"] for row in table] == pytest.approx([2.1, 4.2, None, None])


SCOPE = GridScope((2,), (1,), (8, 512), (1, 4), Effort(10, 5, 200), Effort(1, 3, 200), 3)


def test_a_lead_is_beside_the_published_one(tmp_path: Path) -> None:
    found = GridResult("m", "a model", SCOPE)
    each = {}
    for name, short, long in (("floor", 0.1, 1.0), ("embedctl-engine-cpu", 0.2, 2.0), ("transformers", 1.2, 5.0)):
        error = nan if name == "floor" else 1e-7
        each[name] = more(runs(name, short, short, load="8 tokens, batch 1", error=error), "512 tokens, batch 1", long)
    found.runs = {(2, 1): list(each.values())}
    found.skipped.append(("4 cores", "there are 2", 4))
    made = grid_report([found], ["infinity"], asked(tmp_path, price=1.0))
    lead, table = made.claims
    assert (lead.ours, lead.met) == ("2.50–6.00 ×, median 4.25", False)
    assert "would take 20% of transformers' time" in lead.why
    assert (table.ours, table.why) == ("as much or more at 1 of 2 lengths", "Less at 512 tokens.")
    beside = [(row["system"], row["times"], row.get("_bold")) for row in rows(made, "m-beside") if row["length"] == 512]
    assert beside[0] == ("embedctl-engine-cpu", pytest.approx(2.5), True)
    assert beside[2:] == [("HF Infinity, as published", 3.0, None), ("transformers, as published", 1.0, None)]
    assert len(rows(made, "m-cells")) == 4
    assert rows(made, "m-left-out")[0]["cells"] == 4


def test_a_quick_grid_has_a_few_of_the_cells_that_were_asked_for() -> None:
    scope = replace(SCOPE, cores=(1, 4), lengths=(16, 32), batches=(1, 2, 8)).quick()
    assert (list(scope.cores), list(scope.lengths), list(scope.batches)) == ([1], [16], [1, 8])
    assert (listed([1]), listed([1, 2]), listed([1, 2, 4])) == ("1", "1 and 2", "1, 2 and 4")
