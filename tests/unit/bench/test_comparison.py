"""Which systems can be compared, which is ahead, and what a report says of them: of engines, requests and the grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest

from embedctl_bench import engines, grid, request
from embedctl_bench.asking import conclude, not_installed
from embedctl_bench.measuring.comparison import Load, Scene, SystemRuns
from embedctl_bench.measuring.sampling import cost_per_million, is_noisy, percentiles, spread, turn_of
from embedctl_bench.peers.models import Model
from embedctl_bench.peers.registry import GPU_FLOOR
from embedctl_bench.report import Report
from tests.support.bench import asked, runs

MODEL = Model("m", Path(), layers=6, hidden=384, inner=1536)
FLOOR = runs("floor", 1.0, 1.0, 1.0)


def scene(*systems: SystemRuns, loads: Sequence[Load] = (Load("W1", 3, 100),), **changes: Any) -> Scene:
    return replace(Scene("m", MODEL, "a model", loads, runs=list(systems)), **changes)


def rows(scene: Scene, table: str = "figures", price: float | None = None) -> list[dict[str, Any]]:
    (found,) = [each for each in scene.tables("m", price, []) if each.name == f"m-{table}"]
    return [dict(row) for row in found.rows]


def test_systems_are_ranked_by_time_unless_they_cut_texts_or_are_not_fp32(tmp_path: Path) -> None:
    made = scene(
        FLOOR,
        runs("sentence-transformers", 8.0, 9.0, 10.0),
        runs("embedctl-cpu", 3.0, 3.0, 4.0),
        runs("fastembed", 1.0, 1.0, 1.0, tokens=900),
        runs("ctranslate2", 2.0, 2.0, 2.0, error=1e-3),
        runs("st-onnx", 4.0, 4.0, 4.0),
        SystemRuns("infinity", "infinity", "fp32", ours=False, unavailable="no memory"),
    )
    found = rows(made, price=3.6)
    assert [(row["rank"], row["system"]) for row in found] == [
        (1, "embedctl-cpu"),
        (2, "st-onnx"),
        (3, "sentence-transformers"),
        (None, "fastembed"),
        (None, "ctranslate2"),
        (None, "floor"),
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
    assert found[-1]["gflops"] == pytest.approx(MODEL.flops_per_token * 1000 / 1e9)
    assert list(made.notes()) == ["m: infinity: not available: no memory"]
    (claim,) = engines.claims_of(made)
    assert claim.met
    assert "1.33 × the rate of st-onnx" in claim.ours
    with asked(tmp_path).session("engines", 1) as session:
        conclude(asked(tmp_path), session, [made], Report("Engines", "", notes=not_installed(["st-torch"])))
    page = (tmp_path / "engines.md").read_text()
    assert "Not installed, and so not measured: st-torch" in page
    assert "length" not in page, "a column without values"


def test_a_system_that_is_ahead_is_bold_and_so_is_the_claim() -> None:
    made = scene(
        runs("embedctl-engine-cpu-int8", 2.0, 2.0, 2.0, precision="int8", error=0.01),
        runs("ctranslate2-int8", 1.0, 1.0, 1.0, precision="int8", error=0.01),
        runs("st-onnx-int8", 0.5, 0.5, 0.5, precision="int8", error=nan),
    )
    found = rows(made)
    assert [(row["rank"], row["_bold"]) for row in found] == [(1, True), (2, False), (None, False)]
    assert (found[0]["remark"], found[0]["times"]) == ("ahead of ours", None)
    assert [claim.met for claim in engines.claims_of(made)] == [False]
    assert any("there are no ratios" in note for note in made.notes())


def test_each_precision_is_ranked_alone_and_has_a_floor_of_its_own() -> None:
    made = scene(
        FLOOR,
        runs("floor-bf16", 0.5, 0.5, 0.5, precision="fp16"),
        runs("embedctl-engine-cpu-bf16", 1.0, 1.0, 1.0, precision="fp16", error=1e-3, cosine=0.9999),
        runs("st-openvino-default", 2.0, 2.0, 2.0, precision="fp16", error=1e-3, cosine=0.9999),
        runs("st-torch-bf16", 0.7, 0.7, 0.7, precision="fp16", error=1e-2, cosine=0.99),
        runs("sentence-transformers", 8.0, 9.0, 10.0),
        runs("embedctl-engine-cpu", 4.0, 4.5, 5.0),
    )
    found = rows(made)
    assert [(row["rank"], row["system"]) for row in found] == [
        (1, "embedctl-engine-cpu"),
        (2, "sentence-transformers"),
        (None, "floor"),
        (1, "embedctl-engine-cpu-bf16"),
        (2, "st-openvino-default"),
        (None, "st-torch-bf16"),
        (None, "floor-bf16"),
    ]
    assert found[5]["remark"] == "not ranked: not as accurate as 16 bits: min cosine 0.990000"
    assert [found[at]["share_of_floor"] for at in (0, 3)] == pytest.approx([1 / 4.5, 0.5])
    beside = {row["system"]: row for row in rows(made, "beside")}
    assert beside["st-openvino-default"]["embedctl-engine-cpu"] == "0.44 (0.40–0.50)", "beside a lower promise"


def test_on_a_gpu_the_aims_are_claims() -> None:
    made = scene(
        replace(runs(GPU_FLOOR.name, 1.0, 1.0), precision="fp16"),
        runs("embedctl-gpu", 1.6, 1.6, precision="fp16", cosine=0.9999, idle=0.02),
        runs("sentence-transformers-bf16", 2.0, 2.0, precision="fp16", cosine=0.9999),
        model=replace(MODEL, hidden=1024),
    )
    _, *aims = engines.claims_of(made)
    assert [(claim.ours, claim.met) for claim in aims] == [("1.25", False), ("0.62", True), ("2.0%", True)]


def test_a_request_is_compared_with_what_was_published() -> None:
    tenth, whole = Load("tenth", 3, 255, 10), Load("whole", 1, 2550, 10, finals=True)
    ours = runs("embedctl-cpu", 4.0, 4.0, 4.0, load="tenth", latencies=[1.0] * 10)
    ours.loads |= runs("embedctl-cpu", 40.0, load="whole").loads
    others = {"sentence-transformers": 9.0, "ctranslate2": 5.0, "st-onnx": 6.0}
    made = scene(ours, *(runs(name, s, s, s, load="tenth") for name, s in others.items()), loads=[tenth, whole])
    assert made.finalists() == {"embedctl-cpu", "ctranslate2"}, "ours, and the fastest other system"
    published, lead = request.claims_of(made)
    assert (published.ours, published.met) == ("2.25 ×", True)
    assert "1.25 × the rate of ctranslate2" in lead.ours
    found = rows(made)
    assert (found[0]["p50_ms"], found[0]["p99_ms"]) == (1000.0, None)
    assert (found[0]["requests_per_s"], found[0]["texts_per_s"]) == (2.5, 255 / 4)
    assert (found[-1]["requests_per_s"], found[-1]["texts_per_s"]) == (0.25, 2550 / 40)


def test_over_http_a_p50_is_compared_round_by_round() -> None:
    single, many = Load("one-8", 2, 4, 4), Load("callers", 1, 8, 4)
    gateway = runs("gateway-cpu", 1.0, 1.0, load="one-8", latencies=[0.010])
    gateway.loads |= runs("gateway-cpu", 1.0, load="callers", latencies=[0.1]).loads
    direct = runs("direct-cpu", 0.5, 0.5, load="one-8", latencies=[0.006])
    infinity = runs("infinity-server", 2.0, 2.2, load="one-8", latencies=[0.02])
    made = scene(gateway, direct, infinity, loads=[single, many], base=(("infinity-server",), "infinity's server"))
    said = [claim.ours for claim in request.http_claims_of(made)]
    assert said == ["2.10 × its rate", "p50 4.0 ms behind (4.0 to 4.0 in 2 rounds)"]
    assert [row["times"] for row in rows(made)] == pytest.approx([4.2, 2.1, 1.0, None])


def test_a_lead_is_beside_the_published_one() -> None:
    loads = [Load(f"{length} tokens", 2, 1, facts={"length": length, "batch": 1}) for length in (8, 512)]
    systems = []
    for name, short, long in (("floor", 0.1, 1.0), ("embedctl-engine-cpu", 0.2, 2.0), ("transformers", 1.2, 5.0)):
        systems.append(runs(name, short, short, load="8 tokens"))
        systems[-1].loads |= runs(name, long, load="512 tokens").loads
    made = scene(*systems, loads=loads, name="m, 2 cores", base=(("transformers",), "transformers"))
    lead, table = grid.claims_of(made)
    assert (lead.ours, lead.met) == ("2.50–6.00 ×, median 4.25", False)
    assert "would take 20% of transformers' time" in lead.why
    assert (table.ours, table.why) == ("as much or more at 1 of 2 lengths", "Less at 512 tokens.")
    assert [row["times"] for row in grid.published_beside(made)] == pytest.approx([248 / 49, 1, 3, 1])
    assert list(grid.claims_of(replace(made, name="m, 4 cores"))) == []
    assert grid.published_beside(scene(loads=loads)) == []


def test_figures_of_samples() -> None:
    assert cost_per_million(966.409, 0.758) == pytest.approx(0.218, abs=0.001), "as was published at 0.758 an hour"
    found = percentiles([0.001 * n for n in range(1, 101)])
    assert found == pytest.approx({"p50_ms": 50.5, "p90_ms": 90.1, "p99_ms": 99.01})
    assert percentiles([0.1] * 99)["p99_ms"] is None
    assert set(percentiles([]).values()) == {None}
    assert [spread([10, 9, 12]), spread([10])] == pytest.approx([0.3, 0])
    assert [is_noisy(values) for values in ([100, 105, 110], [100, 105, 111], [0, 0])] == [False, True, True]
    assert [turn_of(["a", "b"], number) for number in range(2)] == [["a", "b"], ["b", "a"]]
