"""`embedctl bench engines`: its texts, who is ranked, how systems take turns, and what the report says."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from embedctl_bench.engines import command as engines
from embedctl_bench.engines import workloads
from embedctl_bench.engines.command import COUNTS, count_of, floors_for, measure, systems_for
from embedctl_bench.engines.report import report
from embedctl_bench.engines.results import EnginesResult
from embedctl_bench.measuring import contenders
from embedctl_bench.measuring.comparison import Run, SystemRuns
from embedctl_bench.measuring.contenders import Ground
from embedctl_bench.measuring.sampling import Rounds
from embedctl_bench.peers.adapters.embedctl_adapters.serving import Setting
from embedctl_bench.peers.child import Unavailable
from embedctl_bench.peers.models import Model
from embedctl_bench.peers.registry import BASELINE, FLOOR, FLOORS, PEERS, SENTENCE_TRANSFORMERS, System, engine_of
from embedctl_bench.peers.tuned import EncodedWorkload
from embedctl_bench.peers.workload import Workload
from embedctl_bench.report import markdown
from embedctl_bench.report.report import Report
from embedctl_config.hardware import HardwareClass
from embedctl_config.settings import Settings
from embedctl_workers.models.files import ModelFiles
from tests.support.bench import asked

WORDS = [f"w{number}" for number in range(500)]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """A model whose tokenizer takes words for tokens, and puts one before and one after a text."""
    vocabulary = {word: number for number, word in enumerate(["[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    folder = tmp_path / "m"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    return Model("m", folder, layers=6, hidden=384, inner=1536)


@pytest.fixture
def _passages(monkeypatch: pytest.MonkeyPatch) -> None:
    def passages() -> list[tuple[str, str]]:
        draw = np.random.default_rng(0)
        return [(f"{at}", " ".join(draw.choice(WORDS, size=5 + at % 60))) for at in range(400)]

    monkeypatch.setattr(workloads, "passages", passages)


@pytest.mark.usefixtures("_passages")
def test_w1_has_lengths_as_in_real_corpora_and_w2_long_texts(model: Model, tmp_path: Path) -> None:
    mixed, long = (workloads.make_workload(name, count, model, tmp_path) for name, count in (("W1", 200), ("W2", 24)))
    assert median(mixed.lengths) == pytest.approx(26, abs=1)
    assert max(mixed.lengths) == 256
    assert np.mean(mixed.lengths) == pytest.approx(39, abs=2)
    assert set(long.lengths) == {449}
    assert (mixed.chunk, long.chunk) == (512, 48)
    for workload in (mixed, long):
        count = len(workload.lengths)
        assert len(set(json.loads(workload.path.read_text()))) == count
        assert workloads.make_workload(workload.name, count, model, tmp_path) == workload
    assert sorted(path.suffix for path in mixed.path.parent.iterdir()) == [".json", ".json"]


@pytest.mark.usefixtures("_passages")
def test_another_tokenizer_gets_texts_of_its_own(model: Model, tmp_path: Path) -> None:
    path = workloads.make_workload("W1", 20, model, tmp_path).path
    tokenizer = json.loads((model.folder / "tokenizer.json").read_text())
    del tokenizer["model"]["vocab"]["w499"]
    (model.folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert workloads.make_workload("W1", 20, model, tmp_path).path != path


def test_a_larger_model_gets_fewer_texts_and_a_smaller_one_no_more(model: Model) -> None:
    assert count_of("W1", model, quick=False) == COUNTS["W1"][0] == 2048
    assert count_of("W2", model, quick=True) == COUNTS["W2"][1] == 24
    assert count_of("W1", Model("base", Path(), layers=12, hidden=768, inner=3072), quick=False) == 256
    assert count_of("W2", Model("base", Path(), layers=12, hidden=768, inner=3072), quick=False) == 24
    assert count_of("W1", Model("tiny", Path(), layers=1, hidden=8, inner=8), quick=False) == 2048


def test_a_class_is_measured_by_its_engine_and_by_the_product_beside_a_baseline(tmp_path: Path) -> None:
    wanted = asked(tmp_path, classes=("cpu", "cpu-int8"), cpus=frozenset(range(4)))
    ours = ["embedctl-engine-cpu", "embedctl-engine-cpu-int8", "embedctl-cpu", "embedctl-cpu-int8"]
    assert [system.name for system in systems_for(wanted, [])] == [SENTENCE_TRANSFORMERS.name, *ours]
    peers = [PEERS["fastembed"], PEERS[BASELINE]]
    assert [system.name for system in systems_for(wanted, peers)] == ["fastembed", BASELINE, *ours]
    found = {system.name: system for system in systems_for(wanted, [])}
    assert found["embedctl-engine-cpu-int8"].precision == found["embedctl-cpu-int8"].precision == "int8"
    assert [each.load for each in found["embedctl-cpu"].settings] == [{"workers": 1}, {"workers": 2}]
    assert [each.processes for each in found["embedctl-engine-cpu"].settings] == [1, 2]
    assert "chunk" not in found["embedctl-cpu"].fixed, "the workload's holds"


def runs(
    name: str,
    *seconds: float,
    tokens: int = 1000,
    error: float = 1e-7,
    precision: str = "fp32",
    cosine: float = 0.99,
) -> SystemRuns[Run]:
    each = [Run(value, tokens, error, cosine, 0.995) for value in seconds]
    rounds = Rounds(each, {str(at): run for at, run in enumerate(each)})
    return SystemRuns(name, name, precision, ours=name.startswith("embedctl"), rounds=rounds)


@pytest.fixture
def result(model: Model, tmp_path: Path) -> EnginesResult:
    (tmp_path / "texts.json").write_text("[]")
    workload = Workload("W1", tmp_path / "texts.json", (10,) * 100, chunk=512)
    floor: SystemRuns[Run] = SystemRuns.of(FLOOR)
    floor.rounds = runs("floor", 1.0, 1.0, 1.0, error=nan).rounds
    return EnginesResult("m", "a model", model, workload, 3, ["infinity"], floors=[floor])


def rows(made: Report, name: str) -> list[dict[str, Any]]:
    (table,) = [table for table in made.tables if table.name == name]
    return [dict(row) for row in table.rows]


def test_systems_are_ranked_by_time_unless_they_cut_texts_or_are_not_fp32(
    result: EnginesResult, tmp_path: Path
) -> None:
    result.systems = [
        runs("sentence-transformers", 8.0, 9.0, 10.0),
        runs("embedctl-cpu", 3.0, 3.0, 4.0),
        runs("fastembed", 1.0, 1.0, 1.0, tokens=900),
        runs("ctranslate2", 2.0, 2.0, 2.0, error=1e-3),
        runs("st-onnx", 4.0, 4.0, 4.0),
        SystemRuns("infinity", "infinity", "fp32", ours=False, unavailable="no memory"),
    ]
    made = report([result], asked(tmp_path, price=3.6))
    found = rows(made, "m-W1-fp32")
    assert [(row["rank"], row["system"]) for row in found] == [
        (1, "embedctl-cpu"),
        (2, "st-onnx"),
        (3, "sentence-transformers"),
        (None, "fastembed"),
        (None, "ctranslate2"),
    ]
    assert "cuts texts" in found[3]["remark"]
    assert "not fp32" in found[4]["remark"]
    first = found[0]
    assert [first[key] for key in ("times_sentence_transformers", "least_times", "most_times")] == pytest.approx(
        [8 / 3, 2.5, 3.0]
    )
    assert first["share_of_floor"] == pytest.approx(1 / 3)
    assert (first["sentences_per_s"], first["tokens_per_s"]) == pytest.approx((100 / 3, 1000 / 3))
    assert first["cost_per_million"] == pytest.approx(30.0)
    assert first["_noisy"]
    assert not any(row["_bold"] for row in found)
    assert any("infinity: not available: no memory" in note for note in made.notes)
    assert any("not measured: infinity" in note for note in made.notes)
    (claim,) = made.claims
    assert claim.met
    assert "1.33 × the rate of st-onnx" in claim.ours
    assert markdown.page(made)


def test_a_system_that_is_ahead_is_bold_and_so_is_the_claim(result: EnginesResult, tmp_path: Path) -> None:
    result.systems = [
        runs("embedctl-engine-cpu-int8", 2.0, 2.0, 2.0, precision="int8", error=0.01),
        runs("ctranslate2-int8", 1.0, 1.0, 1.0, precision="int8", error=0.01),
        runs("st-onnx-int8", 0.5, 0.5, 0.5, precision="int8", error=nan),
    ]
    made = report([result], asked(tmp_path))
    found = rows(made, "m-W1-int8")
    assert [(row["rank"], row["_bold"]) for row in found] == [(1, True), (2, False), (None, False)]
    assert found[0]["remark"] == "ahead of ours"
    assert found[0]["times_sentence_transformers"] is None
    assert [claim.met for claim in made.claims] == [False]
    assert any("no ratios to it" in note for note in made.notes)


@pytest.mark.parametrize(("seconds", "doubted"), [(2.1, False), (1.5, True)])
def test_the_product_is_compared_with_its_own_engine(
    result: EnginesResult, tmp_path: Path, seconds: float, doubted: bool
) -> None:
    result.systems = [runs("embedctl-engine-cpu", 2.0, 2.0, 2.0), runs("embedctl-cpu", *[seconds] * 3)]
    notes = report([result], asked(tmp_path)).notes
    assert any(f"embedctl-cpu has {2 / seconds:.2f} (" in note for note in notes)
    assert any(note.startswith("**Not to be trusted") for note in notes) == doubted


def test_each_precision_has_a_table_and_a_floor_of_its_own(result: EnginesResult, tmp_path: Path) -> None:
    floor = SystemRuns[Run].of(FLOORS["fp16"])
    floor.rounds, floor.computes = runs("floor", 0.5, 0.5, 0.5, error=nan).rounds, "bf16"
    result.floors.append(floor)
    result.systems = [
        runs("embedctl-engine-cpu-bf16", 1.0, 1.0, 1.0, precision="fp16", error=1e-3, cosine=0.9999),
        runs("st-openvino-default", 2.0, 2.0, 2.0, precision="fp16", error=1e-3, cosine=0.9999),
        runs("st-torch-bf16", 0.7, 0.7, 0.7, precision="fp16", error=1e-2, cosine=0.99),
        runs("sentence-transformers", 8.0, 9.0, 10.0),
        runs("embedctl-engine-cpu", 4.0, 4.5, 5.0),
    ]
    result.systems[1].computes = "bf16 (12 of 13 products)"
    made = report([result], asked(tmp_path))
    names = [table.name for table in made.tables]
    assert names == ["m-W1-fp32", "m-W1-fp16", "m-W1-beside", "m-W1-floors", "m-W1-systems"]
    found = rows(made, "m-W1-fp16")
    assert [(row["rank"], row["system"]) for row in found] == [
        (1, "embedctl-engine-cpu-bf16"),
        (2, "st-openvino-default"),
        (None, "st-torch-bf16"),
    ]
    assert found[1]["computes"] == "bf16 (12 of 13 products)"
    assert found[2]["remark"] == "not ranked: not as accurate as 16 bits: min cosine 0.990000"
    assert found[0]["share_of_floor"] == pytest.approx(0.5), "of bf16's floor"
    assert rows(made, "m-W1-fp32")[0]["share_of_floor"] == pytest.approx(1 / 4.5), "of fp32's"
    beside = {row["system"]: row for row in rows(made, "m-W1-beside")}
    assert beside["st-openvino-default"]["embedctl-engine-cpu"] == "0.44 (0.40–0.50)", "beside a lower promise"
    assert beside["sentence-transformers"]["embedctl-engine-cpu-bf16"] == "9.00 (8.00–10.00)"
    assert [row["times_fp32"] for row in rows(made, "m-W1-floors")] == [1.0, 2.0]
    tables = {table.name: [column.key for column in table.columns] for table in made.tables}
    for name, promised in (("m-W1-fp32", "max_abs_error"), ("m-W1-fp16", "min_cosine")):
        assert tables[name][tables[name].index("tokens_per_s") + 1] == promised, "beside the rate"


def test_a_system_at_its_default_promises_what_it_was_read_back_to_compute_in(
    result: EnginesResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result.rounds, result.floors = 1, []
    go(tmp_path, result, [SENTENCE_TRANSFORMERS, PEERS["st-openvino-default"]], monkeypatch)
    assert [each.precision for each in result.systems] == ["fp32", "fp16"]
    assert [each.precision for each in result.floors] == ["fp32", "fp16"]
    again = replace(result, systems=[], floors=[])
    assert go(tmp_path, again, [SENTENCE_TRANSFORMERS, PEERS["st-openvino-default"]], monkeypatch) == []
    assert again.systems[1].computes == "bf16 (3 of 4 products)"
    unknown = SystemRuns[Run].of(PEERS["st-openvino-default"])
    unknown.read_back("")
    assert unknown.precision == "fp32", "the stricter bound, where nothing is known"


def test_beside_a_class_of_16_bits_stands_sentence_transformers_in_bf16(tmp_path: Path) -> None:
    classes = {**Settings().classes, "cpu-bf16": HardwareClass(precision="fp16")}
    wanted = asked(tmp_path, classes=("cpu-bf16",), settings=Settings(classes=classes))
    systems = systems_for(wanted, [])
    assert [system.name for system in systems] == [
        "sentence-transformers",
        "sentence-transformers-bf16",
        "embedctl-engine-cpu-bf16",
        "embedctl-cpu-bf16",
    ]
    assert [floor.name for floor in floors_for(systems)] == ["floor", "floor-bf16"]
    assert [each.name for each in systems_for(wanted, [PEERS[BASELINE], PEERS["st-torch-bf16"]])][:2] == [
        "st-torch",
        "st-torch-bf16",
    ]


def test_nothing_measured_still_makes_a_report(result: EnginesResult, tmp_path: Path) -> None:
    assert report([result], asked(tmp_path)).claims == []


class Process:
    """Stands in for a process: one system fails in its second round, one can't be started."""

    events: list[str]

    def __init__(self, system: System, model: Model, workload: Workload, *arguments: Any, request: int) -> None:
        if system.name == "fastembed":
            raise Unavailable("no wheels")
        self.events.append(f"{system.name} loaded")
        self._name, self._calls = system.name, 0
        self.chosen, self.setting = Setting(1, {}, {"batch": 8}), "1×1"
        self.tried: list[dict[str, Any]] = [{"setting": system.settings[0].label(1), "seconds": 1.0}]
        self.versions = {"torch": "2"}
        self.computes = {"st-openvino-default": "bf16 (3 of 4 products)"}.get(system.name, "")

    def encode(self) -> EncodedWorkload:
        self.events.append(self._name)
        self._calls += 1
        if self._name == "infinity" and self._calls == 3:
            raise Unavailable("out of memory")
        shape = (2, 0) if self._name.startswith("floor") else (2, 3)
        return EncodedWorkload(2.0, 20, np.ones(shape, np.float32), 0.0, 0.0)

    def close(self) -> None:
        self.events.append(f"{self._name} closed")


def go(folder: Path, result: EnginesResult, systems: Sequence[System], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to the stand-ins."""
    monkeypatch.setattr(contenders, "TunedProcess", Process)
    Process.events = []
    with asked(folder, fresh=False).session("engines", 12) as session:
        reference = np.ones((2, 3), np.float32)
        measure(Ground("m", result.model, result.workload, reference, [0], folder, session, False), systems, result)
    return Process.events


def test_systems_take_turns_after_a_run_to_warm_up_and_a_second_command_runs_nothing(
    result: EnginesResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result.rounds = 2
    systems = [SENTENCE_TRANSFORMERS, PEERS["fastembed"], PEERS["infinity"]]
    events = go(tmp_path, result, systems, monkeypatch)
    names = ["floor", "sentence-transformers", "infinity"]
    assert events[:6] == [event for name in names for event in (f"{name} loaded", name)], "to warm up"
    assert events[6:13] == [*names, "infinity", "infinity closed", "sentence-transformers", "floor"]
    assert sorted(events[13:]) == ["floor closed", "sentence-transformers closed"]
    torch, fastembed, infinity = result.systems
    assert [len(each.runs) for each in result.systems] == [2, 0, 1]
    assert fastembed.unavailable == "no wheels"
    assert (torch.setting, torch.versions) == ("1×1, batch 8", {"torch": "2"})
    assert replace(torch.runs[0], min_cosine=1.0, mean_cosine=1.0) == Run(2.0, 20, 0.0, 1.0, 1.0)
    assert (torch.runs[0].min_cosine, torch.runs[0].mean_cosine) == pytest.approx((1.0, 1.0))
    assert infinity.ratios(torch) == [1.0]
    assert [run.seconds for floor in result.floors for run in floor.runs] == [2.0, 2.0]

    again = EnginesResult("m", "a model", result.model, result.workload, 2)
    assert go(tmp_path, again, [SENTENCE_TRANSFORMERS], monkeypatch) == []
    assert again.systems[0].runs == torch.runs


@pytest.mark.slow
@pytest.mark.usefixtures("_passages")
def test_a_quick_command_measures_both_workloads(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reference(model: Model, workload: Workload, cpus: Sequence[int], place: Path) -> Any:
        return np.ones((2, 3), np.float32)

    monkeypatch.setattr(contenders, "TunedProcess", Process)
    monkeypatch.setattr(engines, "reference_of", reference)
    monkeypatch.setattr(engines, "model_files", lambda name, settings: ModelFiles("m", model.folder, "00"))
    monkeypatch.setattr(engines, "uncut", lambda name, folder, place: model)
    monkeypatch.setenv("EMBEDCTL_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "embedctl.toml").write_text(f'[models.m]\nsource = "{model.folder}"\n')
    monkeypatch.setenv("EMBEDCTL_CONFIG", str(tmp_path / "embedctl.toml"))
    Process.events = []
    given = ["--quick", "--model", "m", "--class", "cpu", "--peers", "none", "-o", str(tmp_path / "report")]
    one_cpu = ["--cpus", str(min(os.sched_getaffinity(0)))]  # as the stand-in has
    done = CliRunner().invoke(engines.command, [*given, *one_cpu])
    assert done.exit_code == 0, done.output
    made = json.loads((tmp_path / "report" / "engines.json").read_text())
    tables = {table["name"]: table["rows"] for table in made["tables"]}
    for workload, texts in (("W1", 256), ("W2", 24)):
        ranked = tables[f"m-{workload}-fp32"]
        assert {row["system"] for row in ranked} == {
            "embedctl's engine, class cpu",
            "embedctl, class cpu",
            "sentence-transformers, torch",
        }
        assert all(row["sentences_per_s"] == pytest.approx(texts / 2.0) for row in ranked)
        assert "floor" in {row["system"] for row in tables[f"m-{workload}-systems"]}


def test_the_first_setting_is_taken_by_a_quick_run(
    result: EnginesResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered: list[int] = []

    class Counting(Process):
        def __init__(self, system: System, *arguments: Any, request: int) -> None:
            offered.append(len(system.settings))
            super().__init__(system, *arguments, request=request)

    monkeypatch.setattr(engines, "ROUNDS", 1)
    for quick in (True, False):
        monkeypatch.setattr(contenders, "TunedProcess", Counting)
        Process.events = []
        with asked(tmp_path, quick=quick).session("engines", 2) as session:
            reference = np.ones((2, 3), np.float32)
            ground = Ground("m", result.model, result.workload, reference, [0], tmp_path, session, quick)
            contender = contenders.Contender(
                engine_of("cpu", Settings()), runs("embedctl-engine-cpu"), ground, lambda process: None
            )
            contender.choose()
    assert offered == [1, 2]
