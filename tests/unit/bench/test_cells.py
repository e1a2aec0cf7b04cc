"""What `matrix`, `study` and `grid` share: turns of systems, rows made of samples, texts of an exact length, seats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from embedctl_bench.measuring import cells
from embedctl_bench.measuring.cells import Bench, Case, Found, Noise, listed, seats_on
from embedctl_bench.measuring.models import model_files, slug
from embedctl_bench.measuring.runners import _pooling
from embedctl_bench.measuring.sampled import Effort, Samples, Seat
from embedctl_bench.measuring.sampling import Rounds
from embedctl_bench.measuring.texts import ExactTexts, digest, sentences
from embedctl_bench.peers.registry import TRANSFORMERS, System, backend_of, class_entry
from embedctl_config.errors import ModelError, SettingsError
from embedctl_config.hardware import HardwareClass, ModelEntry
from embedctl_config.settings import Settings
from embedctl_workers.machine.devices import Accelerator
from embedctl_workers.machine.discovery import Machine
from embedctl_workers.models.files import ModelFiles
from tests.support.bench import asked

CPU = backend_of("cpu")
MODEL = ModelFiles("m", Path(), "f" * 64)
HERE = Seat(frozenset({0}))


class Processes:
    """Stands in for processes: each system gives its rates one after the other, an error where one is no number."""

    def __init__(self, **rates: Sequence[float | str]) -> None:
        self.order: list[str] = []
        self._rates: dict[str, Iterator[float | str]] = {name: iter(each) for name, each in rates.items()}

    def get(self, system: System, model: ModelFiles, seat: Seat) -> Processes:
        self._system = system.hardware or system.name
        self.order.append(self._system)
        return self

    def encode(self, texts: Sequence[str], batch: int) -> np.ndarray:
        tilt = 0.0 if self._system == "transformers" else 0.1
        return np.tile(np.array([1.0, tilt], np.float32), (len(texts), 1))

    def sample(self) -> Samples:
        rate = next(self._rates[self._system])
        if isinstance(rate, str):
            raise ModelError(rate)
        return Samples(rate, [2 / rate] * 3, 0.1 / rate, 0.8 / rate, 0.1 / rate)


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "sample_together", lambda processes, requests, effort: processes[0].sample())


def bench(folder: Path, processes: Any, **changes: Any) -> Bench:
    wanted = asked(folder)
    return Bench(wanted, wanted.session("grid", 10), processes, **{"rounds": 3, **changes})


def case(system: System) -> Case:
    return Case(system, [HERE], [["a", "b"]], Effort(9.0, 3, 30))


def test_systems_take_turns_and_the_median_of_the_rounds_counts(tmp_path: Path) -> None:
    processes = Processes(cpu=(100, 104, 98), transformers=(50, 51, 49))
    ours = bench(tmp_path, processes)
    with ours.session:
        found = ours.measure("cell", MODEL, {"ours": case(CPU), "theirs": case(TRANSFORMERS)})
    assert (found["ours"].rate, found["theirs"].rate) == (100, 50)
    assert len(found["ours"].samples.latencies) == 9
    assert processes.order == ["cpu", "transformers", "transformers", "cpu", "cpu", "transformers"]
    assert (ours.noise.cases, ours.noise.repeated, ours.noise.left) == (2, 0, 0)


def test_noisy_cases_are_repeated_and_counted_for_one_sentence(tmp_path: Path) -> None:
    processes = Processes(cpu=(100, 150, 98, 100, 101, 102), transformers=(50, 80, 49) * 3)
    ours = bench(tmp_path, processes)
    with ours.session:
        found = ours.measure("cell", MODEL, {"ours": case(CPU), "theirs": case(TRANSFORMERS)})
    assert list(found["ours"].rates.counted) == [100, 101, 102]
    assert (found["ours"].noisy, found["theirs"].noisy) == (False, True)
    assert ours.noise == Noise(cases=2, repeated=2, left=1)
    assert not ours.session.notes, "hundreds of cells would be hundreds of notes"
    assert "Of 2 cases 2 differed by more than 10%" in ours.noise.note(3, 2)


def test_quick_repeats_nothing(tmp_path: Path) -> None:
    ours = bench(tmp_path, Processes(cpu=(100, 150)), rounds=2, repeats=0)
    with ours.session:
        assert ours.measure("cell", MODEL, {"ours": case(CPU)})["ours"].noisy
    assert "with --quick none is repeated" in ours.noise.note(2, 0)


def test_a_system_that_fails_is_left_out_of_its_cell_and_noted(tmp_path: Path) -> None:
    ours = bench(tmp_path, Processes(cpu=("out of memory",), transformers=(50, 50, 50)))
    with ours.session:
        found = ours.measure("cell", MODEL, {"ours": case(CPU), "theirs": case(TRANSFORMERS)})
    assert list(found) == ["theirs"]
    assert any("out of memory" in note for note in ours.session.notes)


def test_a_kept_cell_asks_no_process(tmp_path: Path) -> None:
    first = bench(tmp_path, Processes(cpu=(100, 101, 102)))
    with first.session:
        before = first.measure("cell", MODEL, {"ours": case(CPU)})
    again = asked(tmp_path, fresh=False)
    later = Bench(again, again.session("grid", 3), Processes(), rounds=3)  # type: ignore[arg-type]  # it is not asked
    with later.session:
        assert later.measure("cell", MODEL, {"ours": case(CPU)}) == before


def test_accuracy_is_the_distance_from_the_reference(tmp_path: Path) -> None:
    ours = bench(tmp_path, Processes())
    with ours.session:
        found = ours.accuracy({"ours": (CPU, 2)}, TRANSFORMERS, MODEL, ["a", "b", "c"])
    assert found["ours"]["min_cosine"] == pytest.approx(1 / np.hypot(1, 0.1))
    assert found["ours"]["max_abs_error"] == pytest.approx(0.1 / np.hypot(1, 0.1), rel=1e-5)


def test_a_row_has_latencies_in_milliseconds_and_cost(tmp_path: Path) -> None:
    found = Found(Samples(1000.0, [0.002] * 99, 0.0001, 0.0018, 0.0001), Rounds([990.0, 1000.0, 1010.0]), 2)
    row = found.row(price=3.6)
    assert (row["texts_per_s"], row["requests_per_s"]) == (1000, 500)
    assert (row["p50_ms"], row["p99_ms"]) == (pytest.approx(2.0), None)
    assert [row["pre-process_ms"], row["prediction_ms"], row["post-process_ms"]] == pytest.approx([0.1, 1.8, 0.1])
    assert row["cost_per_million"] == pytest.approx(1.0)
    assert row["spread_percent"] == pytest.approx(2.0)
    assert row["_noisy"] is False
    assert found.row()["cost_per_million"] is None


def test_steps_that_are_not_shown_are_none() -> None:
    assert Found(Samples(1.0, [1.0]), Rounds([1.0]), 1).row()["prediction_ms"] is None


def test_rounds_merge_to_the_median_rate_and_all_latencies() -> None:
    rounds = ((10, 1), (30, 3), (20, 2))
    parts = [Samples(rate, [1 / rate] * count, 0.0, 1 / rate, 0.0).to_json() for rate, count in rounds]
    merged = Samples.merged(parts)
    assert merged.rate == 20
    assert sorted(merged.latencies) == pytest.approx([1 / 30] * 3 + [1 / 20] * 2 + [1 / 10])
    assert merged.predict_s == pytest.approx((0.1 + 0.1 + 0.1) / 6)


def test_an_effort_is_shared_among_rounds_and_never_to_nothing() -> None:
    assert Effort(10.0, 5, 200, workers=2).share(3) == Effort(10 / 3, 2, 67, 2)


@pytest.mark.parametrize(("count", "shares"), [(1, [{0, 1, 2, 3}]), (2, [{0, 1}, {2, 3}]), (3, [{0}, {1}, {2}])])
def test_cores_are_shared_out_evenly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, shares: list[set[int]]
) -> None:
    monkeypatch.setattr(cells, "cores_of", lambda cpus: [frozenset({cpu}) for cpu in sorted(cpus)])
    wanted = asked(tmp_path, cpus=frozenset(range(4)))
    assert [set(seat.cpus) for seat in seats_on(CPU, wanted, count)] == shares


def test_more_processes_than_cores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="2 processes need a core each, and --cpus gives 1"):
        seats_on(CPU, asked(tmp_path), 2)


def test_each_process_of_an_accelerators_class_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = backend_of("gpu")
    monkeypatch.setattr(cells, "cores_of", lambda cpus: [frozenset({cpu}) for cpu in sorted(cpus)])
    found = [Accelerator("gpu", at, f"GPU-{at}") for at in range(2)]
    monkeypatch.setattr(cells, "discover", lambda cpus: Machine([], gpus=found))
    wanted = asked(tmp_path, cpus=frozenset(range(4)))
    assert [seat.accelerator for seat in seats_on(gpu, wanted, 2)] == found
    with pytest.raises(SettingsError, match="3 processes need a gpu each, and there are 2"):
        seats_on(gpu, wanted, 3)
    monkeypatch.setattr(cells, "discover", lambda cpus: Machine([], problems={"gpu": "the driver sleeps"}))
    with pytest.raises(SettingsError, match="the driver sleeps"):
        seats_on(gpu, wanted, 1)


def test_onnx_is_a_class_even_where_none_is_configured() -> None:
    own = Settings(classes={"onnx": HardwareClass(backend="onnx", token_budget=77)})
    assert class_entry("onnx", Settings()) == HardwareClass(backend="onnx")
    assert class_entry("onnx", own).token_budget == 77
    with pytest.raises(SettingsError, match="no hardware class 'onyx'"):
        class_entry("onyx", Settings())


def test_a_model_is_found_by_its_entry(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    settings = Settings(models={"mine": ModelEntry(source=str(folder))})
    found = model_files("mine", settings)
    assert (found.name, found.folder) == ("mine", folder)
    assert model_files(str(folder), Settings()).folder == folder


def test_names_of_files_and_lists() -> None:
    assert slug("intfloat/e5 small") == "intfloat-e5-small"
    assert (listed([1]), listed([1, 2]), listed([1, 2, 4])) == ("1", "1 and 2", "1, 2 and 4")


@pytest.mark.parametrize(
    ("facts", "pooling"),
    [
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
    ],
)
def test_pooling_by_hand_is_the_models(tmp_path: Path, facts: dict[str, object], pooling: str) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(facts))
    assert _pooling(tmp_path) == pooling


@pytest.mark.parametrize(
    "facts",
    [
        {"pooling_mode": "max"},
        {"pooling_mode_max_tokens": True},
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
    ],
)
def test_a_pooling_that_is_not_done_by_hand_is_refused(tmp_path: Path, facts: dict[str, object]) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(facts))
    with pytest.raises(ModelError, match="a pooling other than mean and cls"):
        _pooling(tmp_path)


@pytest.fixture
def words(tmp_path: Path) -> ModelFiles:
    vocabulary = {word: at for at, word in enumerate(["[UNK]", "[CLS]", "[SEP]", "the", "rain", "##y", "window"])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return ModelFiles("m", tmp_path, "")


@pytest.mark.parametrize("tokens", [3, 8, 100])
def test_texts_have_exactly_the_tokens_asked_for(words: ModelFiles, tokens: int) -> None:
    tokenizer = Tokenizer.from_file(str(words.folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    requests = ExactTexts(words).requests(tokens, 2, 3)
    assert [len(request) for request in requests] == [2, 2, 2]
    assert {len(tokenizer.encode(text).ids) for request in requests for text in request} == {tokens}
    assert requests == ExactTexts(words).requests(tokens, 2, 3), "the same every time"


def test_no_text_is_shorter_than_its_special_tokens(words: ModelFiles) -> None:
    with pytest.raises(ModelError, match="no text has 2 tokens, 3 is the least"):
        ExactTexts(words).requests(2, 1, 1)


def test_a_model_without_a_fast_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        ExactTexts(ModelFiles("m", tmp_path, ""))


def test_sentences_are_distinct_english_and_always_the_same() -> None:
    found = sentences(200)
    assert len(set(found)) == 200
    assert all(5 <= len(sentence.split()) <= 60 and sentence[0].isupper() for sentence in found)
    assert found[:50] == sentences(50)
    assert digest(found) != digest(found[:50])
    with pytest.raises(ModelError, match="sentences, and 1000000 are needed"):
        sentences(1_000_000)
