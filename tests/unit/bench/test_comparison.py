"""Which systems can be compared, which is ahead, and what a report says of them: of engines, requests and the grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest

from embedctl_bench import grid
from embedctl_bench.asking import conclude, not_installed
from embedctl_bench.measuring.comparison import Load, Scene, SystemRuns
from embedctl_bench.measuring.sampling import is_noisy, percentiles, spread, turn_of
from embedctl_bench.peers.models import Model
from embedctl_bench.report import Report
from tests.support.bench import asked, runs

MODEL = Model("m", Path(), 2 * 6 * 12 * 384.0**2)
FLOOR = runs("floor", 1.0, 1.0, 1.0)


def scene(*systems: SystemRuns, loads: Sequence[Load] = (Load("W1", 3, 100),), **changes: Any) -> Scene:
    return replace(Scene("m", MODEL, "a model", loads, runs=list(systems)), **changes)


def rows(scene: Scene, table: str = "figures") -> list[dict[str, Any]]:
    (found,) = [each for each in scene.tables("m", []) if each.name == f"m-{table}"]
    return [dict(row) for row in found.rows]


def test_systems_are_ranked_by_time_unless_they_cut_texts_or_are_not_fp32(tmp_path: Path) -> None:
    made = scene(
        FLOOR,
        runs("floor-attention", 1.5, 1.5, 1.5),
        runs("sentence-transformers", 8.0, 9.0, 10.0),
        runs("embedctl-cpu", 3.0, 3.0, 4.0),
        runs("fastembed", 1.0, 1.0, 1.0, tokens=900),
        runs("ctranslate2", 2.0, 2.0, 2.0, error=1e-3),
        runs("st-onnx", 4.0, 4.0, 4.0),
        SystemRuns("infinity", "infinity", "fp32", ours=False, unavailable="no memory"),
    )
    found = rows(made)
    assert [(row["rank"], row["system"]) for row in found] == [
        (1, "embedctl-cpu"),
        (2, "st-onnx"),
        (3, "sentence-transformers"),
        (None, "fastembed"),
        (None, "ctranslate2"),
        (None, "floor"),
        (None, "floor-attention"),
    ]
    assert "not ranked: encodes 900 tokens of 1,000: it cuts texts" in found[3]["remark"]
    assert "not fp32" in found[4]["remark"]
    first = found[0]
    assert [first[key] for key in ("times", "least_times", "most_times")] == pytest.approx([8 / 3, 2.5, 3.0])
    assert [first[f"share_{of}"] for of in ("of_floor", "with_attention")] == pytest.approx([1 / 3, 1 / 2])
    assert (first["texts_per_s"], first["tokens_per_s"]) == pytest.approx((100 / 3, 1000 / 3))
    assert first["_noisy"]
    assert not any(row["_bold"] for row in found)
    assert found[-2]["gflops"] == pytest.approx(MODEL.flops_per_token * 1000 / 1e9)
    assert list(made.notes()) == ["m: infinity: not available: no memory"]
    with asked(tmp_path).session("engines", 1) as session:
        conclude(asked(tmp_path), session, [made], Report("Engines", "", notes=not_installed(["st-torch"])))
    page = (tmp_path / "engines.md").read_text()
    assert "Not installed, and so not measured: st-torch" in page
    assert "length" not in page, "a column without values"


def test_a_system_that_is_ahead_is_bold() -> None:
    made = scene(
        runs("embedctl-engine-cpu-int8", 2.0, 2.0, 2.0, precision="int8", error=0.01),
        runs("ctranslate2-int8", 1.0, 1.0, 1.0, precision="int8", error=0.01),
        runs("st-onnx-int8", 0.5, 0.5, 0.5, precision="int8", error=nan),
    )
    found = rows(made)
    assert [(row["rank"], row["_bold"]) for row in found] == [(1, True), (2, False), (None, False)]
    assert (found[0]["remark"], found[0]["times"]) == ("ahead of ours", None)
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


def test_the_finals_are_between_ours_and_the_fastest_other_system() -> None:
    tenth, whole = Load.of("tenth", [["a"] * 25] * 10, 3), Load.of("whole", [["a"] * 255] * 10, 1, finals=True)
    ours = runs("embedctl-cpu", 4.0, 4.0, 4.0, load="tenth", latencies=[1.0] * 10)
    ours.loads |= runs("embedctl-cpu", 40.0, load="whole").loads
    others = {"sentence-transformers": 9.0, "ctranslate2": 5.0, "st-onnx": 6.0}
    made = scene(ours, *(runs(name, s, s, s, load="tenth") for name, s in others.items()), loads=[tenth, whole])
    assert made.finalists() == {"embedctl-cpu", "ctranslate2"}, "ours, and the fastest other system"
    found = rows(made)
    assert (found[0]["p50_ms"], found[0]["p99_ms"]) == (1000.0, None)
    assert (found[0]["requests_per_s"], found[0]["texts_per_s"]) == (2.5, 250 / 4)
    assert (found[-1]["requests_per_s"], found[-1]["texts_per_s"]) == (0.25, 2550 / 40)


def test_a_lead_is_beside_the_published_one() -> None:
    loads = [Load(f"{length} tokens", 2, 1, facts={"length": length, "batch": 1}) for length in (8, 512)]
    systems = []
    for name, short, long in (("floor", 0.1, 1.0), ("embedctl-engine-cpu", 0.2, 2.0), ("transformers", 1.2, 5.0)):
        systems.append(runs(name, short, short, load="8 tokens"))
        systems[-1].loads |= runs(name, long, load="512 tokens").loads
    made = scene(*systems, loads=loads, name="m, 2 cores", base=(("transformers",), "transformers"))
    ours = [row["times"] for row in rows(made) if row["system"] == "embedctl-engine-cpu"]
    assert ours == pytest.approx([6, 2.5])
    assert [row["times"] for row in grid.published_beside(made)] == pytest.approx([248 / 49, 1, 3, 1])
    assert grid.published_beside(replace(made, name="m, 4 cores")) == []


def test_figures_of_samples() -> None:
    found = percentiles([0.001 * n for n in range(1, 101)])
    assert found == pytest.approx({"p50_ms": 50.5, "p90_ms": 90.1, "p99_ms": 99.01})
    assert percentiles([0.1] * 99)["p99_ms"] is None
    assert set(percentiles([]).values()) == {None}
    assert [spread([10, 9, 12]), spread([10])] == pytest.approx([0.3, 0])
    assert [is_noisy(values) for values in ([100, 105, 110], [100, 105, 111], [0, 0])] == [False, True, True]
    assert [turn_of(["a", "b"], number) for number in range(2)] == [["a", "b"], ["b", "a"]]
