"""The models that can be used on this machine, and what is built of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from embedctl_config.errors import EmbedctlError, ModelError, ModelNotFound
from embedctl_config.hardware import ModelEntry
from embedctl_config.model_names import hub_id
from embedctl_config.settings import Settings
from embedctl_workers.models.artifacts import Artifact, ArtifactStore
from embedctl_workers.models.cache import cache_folder
from embedctl_workers.models.facts import ModelFacts, facts_of, prompts_of
from embedctl_workers.models.files import (
    cached_models,
    find_folder,
    fingerprint_of,
    installed_models,
    refuse_unpooled,
    resolve_model,
)


@dataclass(slots=True)
class FoundModel:
    name: str  #: for `--model`
    found_in: str  #: where it was found, in words
    folder: Path | None = None
    #: None if it can't be used
    facts: ModelFacts | None = None
    problem: str = ""  #: why it can't be used; empty if it can
    built: list[Artifact] = field(default_factory=list)  #: the artefacts of it, under whatever name they were built
    prompts: tuple[str, ...] = ()  #: the names of its own prompts, if they were read


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The models of this machine, the artefacts of models that are not found, and the folders that can't be used."""

    models: list[FoundModel]
    others: list[Artifact]
    unusable: dict[Path, ModelError]


def read_catalogue(settings: Settings, folder: Path | None = None) -> Catalogue:
    """Everything that can be used on this machine, with the models of `folder`: its own, or those of folders in it."""
    models = list(_models(settings, folder))
    usable, unusable = artifacts(settings)
    by_fingerprint: dict[str, list[Artifact]] = {}
    for artifact in usable:
        by_fingerprint.setdefault(artifact.manifest["fingerprint"], []).append(artifact)
    # Reading all the weights of a machine takes long: only where something is built whose model is to be found.
    left = dict(by_fingerprint)
    for model in models:
        if by_fingerprint and model.folder is not None and not model.problem:
            try:
                fingerprint = fingerprint_of(model.folder, settings.models.get(model.name, ModelEntry()).pooling)
            except ModelError as error:
                model.problem = str(error)
                continue
            model.built = by_fingerprint.get(fingerprint, [])
            left.pop(fingerprint, None)
    return Catalogue(models, [artifact for each in left.values() for artifact in each], unusable)


def artifacts(settings: Settings) -> tuple[list[Artifact], dict[Path, ModelError]]:
    """All artefacts, and why the others in their folder can't be used."""
    usable: list[Artifact] = []
    unusable: dict[Path, ModelError] = {}
    for path, found in ArtifactStore(cache_folder(settings)).all():
        if isinstance(found, ModelError):
            unusable[path] = found
        else:
            usable.append(found)
    return usable, unusable


def read_model(name: str, settings: Settings) -> tuple[FoundModel, str]:
    """One model with the names of its prompts, and its fingerprint, without what is built of it.

    Raises as :func:`~embedctl_workers.models.files.resolve_model`.
    """
    files = resolve_model(name, settings.models.get(name), plain=False)
    found = FoundModel(name, _where(name, settings), files.folder, facts_of(files.folder))
    found.prompts = tuple(sorted(prompts_of(files.folder)))
    return found, files.fingerprint


def _where(name: str, settings: Settings) -> str:
    if name in settings.models:
        return f"[models.{name}]"
    if hub_id(name) in map(hub_id, installed_models()):
        return "package"
    return "hub cache" if hub_id(name) in map(hub_id, cached_models()) else "folder"


def _models(settings: Settings, folder: Path | None) -> Iterator[FoundModel]:
    installed = installed_models()
    for name, entry in sorted(settings.models.items()):
        yield _described(name, f"[models.{name}]", entry)
    for name in sorted(installed.keys() - settings.models.keys()):
        yield _described(name, "package", ModelEntry())
    # A name that means an installed package or an entry of the settings does not lead to the cache.
    known = {hub_id(name) for name in installed} | settings.models.keys()
    for name in sorted(set(cached_models())):
        if hub_id(name) not in known and name not in known:
            yield _described(name, "hub cache", ModelEntry())
    for path in _folders(folder):
        yield _described(str(path), "folder", ModelEntry())


def _folders(folder: Path | None) -> Sequence[Path]:
    """The folders that hold a model: the given one, or those in it."""
    if folder is None:
        return ()
    if _holds_model(folder):
        return (folder,)
    return sorted(path for path in folder.iterdir() if path.is_dir() and _holds_model(path))


def _holds_model(folder: Path) -> bool:
    try:
        return (folder / "modules.json").is_file() or (folder / "config.json").is_file()
    except PermissionError:
        return False


def _described(name: str, found_in: str, entry: ModelEntry) -> FoundModel:
    """A model with its facts, or with what is wrong with it."""
    model = FoundModel(name, found_in)
    try:
        # Whether a pin is met takes all the weights to tell.
        model.folder = resolve_model(name, entry, plain=False).folder if entry.fingerprint else find_folder(name, entry)
        model.facts = facts_of(model.folder)
        refuse_unpooled(model.folder, entry.pooling)
    except ModelNotFound as error:
        of_cache = f"the commit that main was is not there, or not whole: embedctl model pull {hub_id(name)}"
        model.problem = of_cache if found_in == "hub cache" else str(error)
    except (EmbedctlError, OSError, ImportError) as error:
        model.problem = str(error)
    return model
