"""The names under which a worker serves a model: two spellings are one model only if they lead to the same files."""

from __future__ import annotations

from pathlib import Path

import pytest

from embedctl_config.hardware import ModelEntry
from embedctl_config.settings import Settings
from embedctl_workers.models.files import ModelFiles, find_folder, fingerprint_of, names_of

SHORT, LONG = "a-model", "sentence-transformers/a-model"
FINGERPRINT = "ab" * 32


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The hub's cache, which holds one revision of the model; the working directory is an empty one."""
    monkeypatch.chdir(tmp_path)
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    repository = cache / "models--sentence-transformers--a-model"
    for revision in ("1" * 40, "2" * 40):
        write_model(repository / "snapshots" / revision, revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1" * 40)
    return cache


def write_model(folder: Path, weights: str = "weights") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text(weights)
    return folder


def names(name: str, **entries: ModelEntry) -> tuple[str, ...]:
    models = {{"short": SHORT, "long": LONG}[key]: entry for key, entry in entries.items()}
    folder = find_folder(name, models.get(name, ModelEntry()))
    return names_of(ModelFiles(name, folder, fingerprint_of(folder)), Settings(models=models))


def test_the_installed_package_is_one_model_under_both_names() -> None:
    name = "all-MiniLM-L6-v2"
    files = ModelFiles(name, find_folder(name, ModelEntry()), FINGERPRINT)
    assert names_of(files, Settings()) == (name, f"sentence-transformers/{name}")


def test_a_local_folder_keeps_the_names_apart(tmp_path: Path) -> None:
    write_model(tmp_path / SHORT, "others")
    assert names(SHORT) == (SHORT,)
    assert names(LONG) == (LONG,)


@pytest.mark.parametrize(("served", "described"), [(SHORT, "short"), (SHORT, "long"), (LONG, "short"), (LONG, "long")])
def test_so_does_an_entry_with_another_source_or_revision(served: str, described: str, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", "others")
    for entry in (ModelEntry(str(other)), ModelEntry(revision="2" * 40)):
        assert names(served, **{described: entry}) == (served,)


def test_a_pin_of_the_other_name_is_kept() -> None:
    pinned = fingerprint_of(find_folder(LONG, ModelEntry()))
    assert names(LONG, short=ModelEntry(fingerprint=pinned)) == (LONG, SHORT)
    assert names(LONG, short=ModelEntry(fingerprint="cd" * 32)) == (LONG,)
