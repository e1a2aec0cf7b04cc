"""What can be used on this machine: models by where they are found, their facts, and what is built of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from embedctl_workers.commands.model import main
from embedctl_workers.models.artifacts import ArtifactStore, Wanted
from embedctl_workers.models.facts import facts_of
from embedctl_workers.models.files import fingerprint_of
from tests.support.artifacts import FACTS, Fill

TRANSFORMER = ("", "Transformer", {"hidden_size": 32, "max_position_embeddings": 512, "model_type": "bert"})
MEAN = ("1_Pooling", "Pooling", {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True})


def write_model(folder: Path, *modules: tuple[str, str, dict[str, Any]], limit: int | None = 256) -> Path:
    """A model of these modules: the folder, the kind and the configuration of each."""
    for place, _, config in modules:
        (folder / place).mkdir(parents=True, exist_ok=True)
        (folder / place / "config.json").write_text(json.dumps(config))
    named = [{"path": place, "type": f"sentence_transformers.models.{kind}"} for place, kind, _ in modules]
    (folder / "modules.json").write_text(json.dumps(named))
    (folder / "model.safetensors").write_bytes(folder.name.encode() * 100_000)
    if limit is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": limit}))
    return folder


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without models, settings or artefacts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EMBEDCTL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("embedctl_workers.models.files.find_spec", lambda _: None)
    return tmp_path


def in_hub(machine: Path, repository: str) -> Path:
    place = machine / "hub" / f"models--{repository.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("1" * 40)
    return place / "snapshots" / ("1" * 40)


def model(*arguments: str) -> Result:
    done = CliRunner().invoke(main, arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def listed(*arguments: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(model("list", *arguments, "--json").stdout)
    return answer


def test_models_of_all_places_are_listed_with_their_facts(machine: Path) -> None:
    mine = write_model(machine / "mine", TRANSFORMER, MEAN)
    (machine / "embedctl.toml").write_text('[models.house]\nsource = "mine"\n')
    write_model(in_hub(machine, "sentence-transformers/all-tiny"), TRANSFORMER, MEAN, limit=None)
    write_model(in_hub(machine, "BAAI/tiny-en"), TRANSFORMER)
    found = {each["name"]: each for each in listed(str(machine))["models"]}
    assert {name: each["found_in"] for name, each in found.items()} == {
        "house": "[models.house]",
        "all-tiny": "hub cache",
        "BAAI/tiny-en": "hub cache",
        str(mine): "folder",
    }
    assert {(each["dimensions"], each["longest_text"]) for each in found.values()} == {(32, 256), (32, 512)}
    lines = model("list").stdout.splitlines()
    assert lines[0].split() == ["MODEL", "DIMENSIONS", "LONGEST", "TEXT", "SIZE", "FOUND", "IN"]
    assert lines[1].split() == ["house", "32", "256", "tokens", "0.4", "MB", "[models.house]"]


@pytest.mark.parametrize(
    ("modules", "dimensions"),
    [
        ([TRANSFORMER], 32),
        ([TRANSFORMER, MEAN, ("2_Dense", "Dense", {"in_features": 32, "out_features": 8})], 8),
        ([TRANSFORMER, ("1_Pooling", "Pooling", {**MEAN[2], "pooling_mode_cls_token": True})], 64),
        ([("", "Transformer", {}), ("1_Pooling", "Pooling", {"pooling_mode_mean_tokens": True})], None),
    ],
)
def test_dimensions_are_those_of_the_last_module(
    tmp_path: Path, modules: Sequence[tuple[str, str, dict[str, Any]]], dimensions: int | None
) -> None:
    assert facts_of(write_model(tmp_path / "m", *modules)).dimensions == dimensions


def test_a_sparse_model_has_outputs_and_no_dimensions(machine: Path) -> None:
    splade = write_model(machine / "splade", TRANSFORMER)
    (splade / "config_sentence_transformers.json").write_text('{"model_type": "SparseEncoder"}')
    facts = json.loads(model("show", str(splade), "--json").stdout)["model"]
    assert (facts["outputs"], facts["dimensions"]) == (["sparse"], None)
    shown = dict(line.split(maxsplit=1) for line in model("show", str(splade)).stdout.splitlines())
    assert (shown["outputs"], shown["dimensions"]) == ("sparse", "–")


def spoil_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def leave_a_link_to_nowhere(folder: Path) -> None:
    remove_weights(folder)
    (folder / "model.safetensors").symlink_to("gone")


def make_modules_a_word(folder: Path) -> None:
    (folder / "modules.json").write_text('"word"')


def remove_snapshots(folder: Path) -> None:
    folder.rename(folder.parent.with_name("elsewhere"))
    folder.parent.rmdir()


@pytest.mark.parametrize(
    "spoil", [spoil_json, remove_weights, leave_a_link_to_nowhere, make_modules_a_word, remove_snapshots]
)
def test_a_broken_model_is_one_line_and_never_the_end(machine: Path, spoil: Callable[[Path], None]) -> None:
    for name in ("a/broken", "b/whole"):
        write_model(in_hub(machine, name), TRANSFORMER, MEAN)
    spoil(machine / "hub" / "models--a--broken" / "snapshots" / ("1" * 40))
    shown = model("list")
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["MODEL", "a/broken", "can't", "b/whole"]
    assert model("show", "a/broken").exit_code != 0


def test_what_is_built_stands_under_the_model_whatever_name_it_was_built_under(machine: Path) -> None:
    folder = write_model(in_hub(machine, "sentence-transformers/all-tiny"), TRANSFORMER, MEAN)
    fingerprint = fingerprint_of(folder)
    store = ArtifactStore(machine / "cache")
    benchmark = f"all-tiny-{fingerprint[:8]}"
    built = store.build(
        Wanted(fingerprint, {"kind": "onnx"}),
        lambda place: {**Fill()(place), "model": {"name": benchmark, "weights_bytes": 10}},
    )
    store.build(Wanted("cd" * 32, {"kind": "onnx"}), Fill())
    found = listed()
    assert [each["folder"] for each in found["models"][0]["built"]] == [str(built.folder)]
    assert [each["model"]["name"] for each in found["built_of_others"]] == [FACTS["model"]["name"]]
    shown = model("list").stdout
    assert benchmark not in shown
    assert "  built: an engine" in shown
    assert "not found here, or by a benchmark:\n  mine" in shown

    described = json.loads(model("show", "all-tiny", "--json").stdout)
    assert (described["model"]["fingerprint"], len(described["built"])) == (fingerprint, 1)
    assert json.loads(model("show", "sentence-transformers/all-tiny", "--json").stdout)["built"] == described["built"]
    assert json.loads(model("show", "mine", "--json").stdout)["model"] is None


def test_a_misspelt_model_hears_of_the_near_one_first(machine: Path) -> None:
    write_model(in_hub(machine, "BAAI/tiny-english"), TRANSFORMER)
    said = model("show", "tiny-englisch").output
    assert "Did you mean BAAI/tiny-english? It is on this machine. If sentence-transformers/tiny-englisch is" in said
    assert "name on the hub, get it: embedctl model pull sentence-transformers/tiny-englisch, or add --pull" in said
